"""Models, losses and data that a node could not train with are refused when the experiment is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from decentnode.build import build_in_process
from decentnode.errors import ConfigError
from decentnode.experiment import load

BASE = "graph: {name: ring, nodes: 3}\ndata: digits\ntraining: {local_steps: 1}\nnode: {rounds: 1}\n"


class Plain(nn.Module):
    """A valid model for the digits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x.flatten(1))


class NoParameters(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x.flatten(1)[:, :10]


class Frozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Lazy(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(10)


class LazyNorm(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LazyBatchNorm1d(affine=False)


class Mixed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))


class Complex(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layer.requires_grad_(False)
        self.phase = nn.Parameter(torch.ones(1, dtype=torch.complex64))


class Sparse(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.offsets = nn.Embedding(3, 10, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.offsets(torch.zeros(len(x), dtype=torch.int64))


class Half(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.half()


class DoubleBuffer(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, dtype=torch.float64))


class Pair(Plain):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), x


class PairWhenEvaluated(Plain):
    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x)
        return out if self.training else (out, x)


class Narrow(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(63, 10)


class NineOutputs(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 9)


class ReadsValues(Plain):
    """Reads values in its forward pass, so that it cannot run on the meta device; returns one row for the batch."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) if x.sum().item() < -1e9 else super().forward(x)[:1]


class MadeOfValues(Plain):
    """A valid model that cannot be made on the meta device, like networks with rates of stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [each.item() for each in torch.linspace(0, 1, 3)]


class NotANumber(Plain):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) / 0 * 0


class Detached(Plain):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x).detach()


class Overwrites(Plain):
    """Changes in place a tensor that the backward pass needs."""

    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x).sigmoid()
        out.mul_(2)
        return out


class Wide(Plain):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.more = nn.Linear(64, width)


class NoLoss:
    """An object that cannot be called."""


class PerSample:
    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction="none")


class FloatLoss:
    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return 1.0


class NanLoss:
    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs.mean() * torch.nan


class OneArgument:
    def __call__(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs.mean()


class NanSamples(Dataset[Any]):
    classes = tuple(range(10))

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.full((64,), torch.nan), index % 10


def load_problem(tmp_path: Path, *overrides: str) -> str:
    """Asserts that `load` refuses the experiment with exactly one problem, and returns it. In `overrides` HERE stands
    for this module."""
    (tmp_path / "a.yaml").write_text(f"{BASE}model: '{__name__}:Plain'\n")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "a.yaml", [each.replace("HERE", __name__) for each in overrides], {})
    assert len(caught.value.problems) == 1, caught.value.problems
    return caught.value.problems[0]


@pytest.mark.parametrize(("model", "text"), [
    ("NoParameters", "model: module must have trainable parameters, got none"),
    ("Frozen", "model: module must have trainable parameters, got none"),
    ("Lazy", "model: parameters must have shapes when the module is made, layer.weight has none (LazyLinear)"),
    ("LazyNorm", "model: buffers must have shapes when the module is made, norm.running_mean has none (LazyBatchNorm"),
    ("Mixed", "model: trainable parameters must share one dtype and device, got layer.weight of float32, scale of "
     "float64; convert the module (.float()), or let those of another one require no gradient"),
    ("Complex", "model: parameters must be floating point, got phase of complex64; hold real and imaginary"),
    ("Half", "model: forward raised RuntimeError: "),
    ("DoubleBuffer", "model: float buffers must be torch.float32, got mean of float64; register it in that"),
    ("Pair", "model: forward gives a tuple for a batch, which task classification cannot use; it takes a tensor"),
    ("PairWhenEvaluated", "model: forward in evaluation mode gives a tuple for a batch, which task classification"),
    ("Narrow", "mat1 and mat2 shapes cannot be multiplied (2x64 and 63x10)"),
    ("NineOutputs", "model: task classification needs outputs [batch, 10]"),
    ("ReadsValues", "model: task classification needs outputs [batch, 10]"),
    ("NotANumber", "model: the outputs of the untrained model must be finite, got nan"),
    ("Detached", "model: the loss must depend on the trainable parameters"),
    ("Overwrites", "model: the backward pass raised RuntimeError: "),
])  # fmt: skip
def test_a_model_that_cannot_be_trained_is_refused(tmp_path: Path, model: str, text: str) -> None:
    assert text in load_problem(tmp_path, f"model='HERE:{model}'")


@pytest.mark.parametrize(("loss", "text"), [
    ("NoLoss", "training.loss must be callable with outputs and targets, got test_model_check:NoLoss"),
    ("PerSample", "training.loss must give one number for a batch, got [2] float32"),
    ("FloatLoss", "training.loss must give one number for a batch, got float"),
    ("NanLoss", "training.loss must be finite for the untrained model, got nan"),
    ("OneArgument", "training.loss: the loss of outputs [2, 10] float32 and targets [2] int64 raised TypeError: "),
])  # fmt: skip
def test_a_loss_that_cannot_be_minimized_is_refused(tmp_path: Path, loss: str, text: str) -> None:
    assert text.replace("test_model_check", __name__) in load_problem(tmp_path, f"training.loss='HERE:{loss}'")


def test_sparse_gradients_are_refused_with_optimizers_that_do_not_take_them(tmp_path: Path) -> None:
    model = f"model='{__name__}:Sparse'"
    for optimizer in ("sgd", "adam"):
        text = load_problem(tmp_path, model, f"training.optimizer={{name: {optimizer}, lr: .1}}")
        assert f"optimizer {optimizer} does not take sparse gradients, as offsets.weight has" in text
        assert "without sparse=True; sgd and adagrad take them with foreach: false" in text
    for optimizer in ("sgd", "adagrad"):
        load(tmp_path / "a.yaml", [model, f"training.optimizer={{name: {optimizer}, lr: .1, foreach: false}}"], {})


def test_inputs_that_are_nan_are_reported_as_a_problem_of_the_data_not_of_the_model(tmp_path: Path) -> None:
    problem = load_problem(tmp_path, "data='HERE:NanSamples'")
    assert "data: the inputs of the first samples must be finite, got nan" in problem


@pytest.mark.parametrize("model", [
    "{name: mlp, hidden: [1000000000000]}", "{name: mlp, hidden: [10000000000, 10000000000]}",
    "{name: mlp, hidden: [1000000000000000000]}", "{name: 'HERE:Wide', width: 1000000000000}",
])  # fmt: skip
def test_a_model_of_terabytes_is_refused_before_memory_is_allocated(tmp_path: Path, model: str) -> None:
    text = load_problem(tmp_path, f"model={model}")
    assert ": model: " in text and (" TB of memory" in text or "making " in text)


def test_the_error_names_the_line_of_the_users_own_code(tmp_path: Path) -> None:
    assert f"({__file__}:" in load_problem(tmp_path, "model='HERE:Narrow'")


@pytest.mark.parametrize("model", ["Plain", "MadeOfValues"])
def test_a_valid_model_is_accepted_and_the_random_state_kept(tmp_path: Path, model: str) -> None:
    (tmp_path / "a.yaml").write_text(f"{BASE}model: '{__name__}:{model}'\ncommunication: inproc\n")
    before = torch.random.get_rng_state()
    experiment = load(tmp_path / "a.yaml", (), {})
    assert torch.equal(torch.random.get_rng_state(), before)
    assert build_in_process(experiment)[0].training.model.num_parameters == 650


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("hidden", [8, 5_000_000], ids=["tried", "on the meta device"])
def test_the_loss_is_tried_on_a_batch_whose_size_is_not_the_number_of_classes(tmp_path: Path, hidden: int) -> None:
    data = "data={name: synthetic, input_shape: [5], num_classes: 2, train_samples: 30, test_samples: 5}"
    model = f"model={{name: mlp, hidden: [{hidden}]}}"
    problem = load_problem(tmp_path, data, model, "training.loss='torch.nn:L1Loss'")
    assert "training.loss: the loss of outputs [3, 2] float32 and targets [3] int64 raised RuntimeError: " in problem
