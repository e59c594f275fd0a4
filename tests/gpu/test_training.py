"""Training on a GPU: what it computes, where the host waits for it, and states that come from another device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from decentnode.build import build_in_process, step_all
from decentnode.checkpoint.state import decode, encode, to_host
from decentnode.experiment import load
from decentnode.models import recurrent
from decentnode.samples import PADDING, DataSpec, LazySamples, NodeSamples, Rows, Samples
from decentnode.simulate.engines.population import Population
from decentnode.tasks.base import Task
from decentnode.tasks.classification import Classification, ClassificationConfig
from decentnode.tasks.next_token import NextToken, NextTokenConfig
from decentnode.tensors import FlatModel
from decentnode.training import gradients
from decentnode.training.optimizers import _optimizers
from decentnode.training.source import Source
from decentnode.training.supervised import Supervised
from decentnode.training.supervised_config import SupervisedConfig
from tests.gpu.waits import counted
from tests.models.test_models import CHECKED, OF_IDS
from tests.models.test_models import make as model_of
from tests.simulate.test_batched import OPTIONS, batched, compare, experiment

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.gpu
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
IMAGES, LENGTH = (3, 6, 6), 7
NESTEROV = {"name": "sgd", "lr": 0.05, "momentum": 0.9, "nesterov": True}


def images(count: int = 37) -> Samples:
    draw = np.random.default_rng(0)
    return Samples(draw.normal(size=(count, *IMAGES)).astype(np.float32), draw.integers(0, 4, count))


class Made(LazySamples):
    """Samples that are made when a batch is taken."""

    def __init__(self, indices: np.ndarray) -> None:
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def take(self, indices: np.ndarray) -> Made:
        return Made(self.indices[indices])

    def fetch(self, indices: np.ndarray) -> Samples:
        return images().take(self.indices[indices])


def tokens(fixed: bool = False) -> Samples:
    lengths = LENGTH if fixed else np.array([3, LENGTH, 2, 5, 4, LENGTH, 1, 6])
    stream, starts = np.arange(60) % 9, np.arange(8) * LENGTH
    return Samples(Rows(stream, starts, lengths), Rows(np.roll(stream, -1), starts, lengths, padding=PADDING), ids=True)


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2),
                         nn.Linear(64, 4))  # fmt: skip


def training(device: torch.device, samples: Any = None, module: Callable[[], nn.Module] | None = None,
             **keys: Any) -> Supervised:  # fmt: skip
    samples = images() if samples is None else samples
    texts = isinstance(samples, Samples) and isinstance(samples.inputs, Rows)
    spec = DataSpec((LENGTH,), "ids", "next_token", vocabulary=9, target_shape=(LENGTH,)) if texts else DataSpec(
        IMAGES, num_classes=4)  # fmt: skip
    task: Task = NextToken(NextTokenConfig(), spec) if texts else Classification(ClassificationConfig(), spec)
    torch.manual_seed(5)
    made = model_of("lstm", hidden=6).make(spec) if texts else (module or convolution)()
    config = SupervisedConfig.model_validate({"batch_size": 4, "local_steps": 3, **keys})
    return Supervised(config, FlatModel(made.to(device)), task, NodeSamples(samples, samples), seed=1, uid=0)


class Overwritten(torch.autograd.Function):
    """Hands a model's gradients out in memory that the next pass overwrites, as CUDA graphs do."""

    @staticmethod
    def forward(ctx: Any, memory: list[Tensor], module: nn.Module, batch: Tensor, *parameters: Tensor) -> Tensor:
        ctx.memory, ctx.parameters = memory, parameters
        with torch.enable_grad():
            ctx.inner = module(batch)
        return ctx.inner.detach()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        found = torch.autograd.grad(ctx.inner, ctx.parameters, gradient)
        for place, each in zip(ctx.memory, found, strict=True):
            place.copy_(each)
        return None, None, None, *(place.view(place.shape) for place in ctx.memory)


@pytest.mark.parametrize("compile", [{"mode": "reduce-overhead"}, {"mode": "max-autotune"}, {"backend": "cudagraphs"}])
def test_gradients_add_up_over_passes_whose_memory_is_used_again(
    monkeypatch: pytest.MonkeyPatch, compile: dict[str, str]
) -> None:
    """By a stand-in for CUDA graphs, which the pretended GPU has not."""
    keys = {"accumulate": 3, "clip_norm": 0.5, "module": lambda: nn.Sequential(nn.Flatten(), nn.Linear(108, 4))}

    def graphs(module: nn.Module, *_: Any) -> Callable[[Tensor], Tensor]:
        parameters = list(module.parameters())
        memory = [torch.empty_like(each) for each in parameters]
        return lambda batch: Overwritten.apply(memory, module, batch, *parameters)

    monkeypatch.setattr(gradients, "compiled", graphs)
    plain, graphed = training(GPU, **keys), training(GPU, compile=compile, **keys)
    for round in range(2):
        plain.local_update(round), graphed.local_update(round)
    assert torch.equal(plain.model.parameters, graphed.model.parameters)


# -- waits of the host --------------------------------------------------------------------------------------------

ROUNDS: dict[str, dict[str, Any]] = {
    "plain": {}, "momentum": {"optimizer": NESTEROV}, "one step": {"local_steps": 1},
    "adam, clipped": {"optimizer": "adam", "clip_norm": 0.5, "label_smoothing": 0.1},
    "accumulated": {"accumulate": 3, "ema": {"every": "step"}, "lr_schedule": {"name": "cosine", "T_max": 9}},
    "new optimizer": {"optimizer": "adagrad", "reset_optimizer": True},
    "augmented": {"augment": {"random_crop": 1, "flip": True, "cutout": 2}, "channels_last": True},
    "bf16": {"amp": "bf16"}, "accumadam": {"optimizer": {"name": "accumadamw", "accum_iter": 2}},
    **{name: {"optimizer": name} for name in ("adadelta", "adamax", "nadam", "radam", "rmsprop", "rprop")},
    "texts": {"samples": tokens(), "clip_norm": 1.0}, "windows": {"samples": tokens(fixed=True), "accumulate": 2},
    "made samples": {"samples": Made(np.arange(30))},
}  # fmt: skip


def are(waits: int, expected: int) -> bool:
    """Whether there were so many waits. A real GPU does not tell of every one."""
    return waits == expected if hasattr(torch.cuda, "host_waits") else waits <= expected


def waits_of_a_round(made: Supervised, round: int = 1) -> int:
    if round == 1:
        made.local_update(0)
    with counted() as waits:
        made.local_update(round)
    return waits.total()


@pytest.mark.parametrize("case", ROUNDS)
def test_a_round_of_local_steps_waits_once(case: str) -> None:
    made = training(GPU, **ROUNDS[case])
    made.keep_sum = True
    assert are(waits_of_a_round(made), 1)
    with counted() as waits:
        made.evaluate("test")
    assert are(waits.total(), 1)


def test_fp16_waits_once_more_per_step() -> None:
    """As torch's GradScaler does: whether the gradient is finite decides whether the step is made."""
    made = training(GPU, amp="fp16", clip_norm=0.5)
    waits_of_a_round(made)
    assert are(waits_of_a_round(made, 2), 1 + 3 + made._gradients._repeated_steps)


def test_a_round_of_a_node_waits_once() -> None:
    """With the check whether its model is finite, which comes with the loss."""
    nodes = 3
    waits = []
    for rounds in (3, 6):
        config = experiment(
            f"graph={{name: ring, nodes: {nodes}}}", f"mapping={{name: linear, nodes_per_machine: {nodes}, "
            "device: cuda}", f"node={{rounds: {rounds}, evaluate_every: 0}}", "sharing=full",
        )  # fmt: skip
        made = build_in_process(config)
        assert config.node.check_finite and all(node.training.model.device == GPU for node in made)
        with counted() as found:
            step_all(made)
        waits.append(found.total())
    assert are(waits[1] - waits[0], 3 * nodes)


@pytest.mark.parametrize(("way", "model"), [("layers", "{name: mlp, hidden: [6]}"), ("vmap", "{name: lenet}")])
def test_a_round_of_all_nodes_at_once_waits_for_losses_and_finite_models(way: str, model: str) -> None:
    from decentnode.simulate.engines.batched import Batched
    from decentnode.simulate.engines.choice import WAYS

    images = ["data={name: synthetic, input_shape: [3, 12, 12], train_samples: 90, test_samples: 9, partition: iid}"]
    config = experiment(
        f"model={model}", *(images if way == "vmap" else []), "mapping={nodes_per_machine: 5, device: cuda}",
        "training.clip_norm=1.0", "graph={name: random_regular, nodes: 5, degree: 2}",  # drawn anew in every round
    )  # fmt: skip
    population = Population(config)
    engine = Batched(population, WAYS[way](population))
    engine.step()
    with counted() as waits:
        engine.step()
    assert population.device == GPU and are(waits.total(), 2)


# -- states of another device -------------------------------------------------------------------------------------


def moved_by_a_file(state: dict[str, Any]) -> dict[str, Any]:
    tensors: dict[str, torch.Tensor] = {}
    tree = encode(state, "training", tensors, copy=True)
    to_host(tensors)
    assert all(each.is_cpu for each in tensors.values())
    found: dict[str, Any] = decode(tree, tensors)
    return found


def went_on(first: torch.device, then: torch.device, keys: dict[str, Any], rounds: int = 2) -> Supervised:
    """A training on one device, whose state goes on on another."""
    before, after = training(first, **keys), training(then, **keys)
    for round in range(rounds):
        before.local_update(round)
    after.model.parameters.copy_(before.model.parameters)
    after.model.buffers.copy_(before.model.buffers)
    after.load_state_dict(moved_by_a_file(before.state_dict()))
    return after


@pytest.mark.parametrize("name", sorted(_optimizers()))
def test_states_of_every_optimizer_go_from_device_to_device(name: str) -> None:
    keys = {"optimizer": name, "module": linear, "ema": 0.9}
    found = []
    for first, then in ((CPU, CPU), (CPU, GPU), (GPU, CPU), (GPU, GPU)):
        made = went_on(first, then, keys)
        for state in made._optimizer.state.values():
            assert all(value.device == then for value in state.values()
                       if isinstance(value, torch.Tensor) and value.numel() > 1)
        made.local_update(2)
        average = made.average()
        assert average is not None
        found.append((made.model.parameters.cpu(), average.cpu()))
    for each in found[1:]:
        torch.testing.assert_close(each, found[0], rtol=1e-3, atol=1e-4)


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 5), nn.Tanh(), nn.Linear(5, 4))


def test_a_training_that_went_on_waits_no_more_often() -> None:
    """torch loads an entry of NAdam's state to the GPU that it makes, and reads in every step, on the host."""
    assert are(waits_of_a_round(went_on(CPU, GPU, {"optimizer": "nadam"}), 2), 1)
    assert are(waits_of_a_round(went_on(GPU, GPU, {"optimizer": "adam"}), 2), 1)


# -- what is computed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in ROUNDS if case not in ("bf16", "augmented")])
def test_rounds_are_those_of_the_cpu(case: str) -> None:
    keys = {"module": linear, **ROUNDS[case]}  # dropout draws other numbers on a GPU
    here, there = training(CPU, **keys), training(GPU, **keys)
    for round in range(3):
        a, b = here.local_update(round), there.local_update(round)
        assert a.loss == pytest.approx(b.loss, abs=1e-4) and (a.samples, a.units) == (b.samples, b.units)
    torch.testing.assert_close(there.model.parameters.cpu(), here.model.parameters, rtol=1e-3, atol=1e-4)
    assert there.evaluate().metrics == pytest.approx(here.evaluate().metrics, abs=1e-3)


def test_augmented_images_are_those_of_the_cpu() -> None:
    keys = {**ROUNDS["augmented"], "channels_last": False}
    here, there = (training(device, **keys) for device in (CPU, GPU))
    for (a, _), (b, _) in zip(here.share.batches(12), there.share.batches(12), strict=True):
        assert torch.equal(a, b.cpu())


def test_dropout_on_a_gpu_follows_from_the_seed_of_the_round() -> None:
    runs = []
    for drawn in (1, 2):
        made = training(GPU, module=convolution)
        torch.manual_seed(drawn)
        torch.rand(drawn, device=GPU)
        runs.append([made.local_update(round).loss for round in range(3)])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("samples", [images(), tokens(), tokens(fixed=True), Made(np.arange(9))],
                         ids=["array", "texts", "windows", "made"])  # fmt: skip
def test_batches_are_those_of_the_cpu(samples: Any) -> None:
    at = torch.tensor([3, 0, 7, 7])
    here, there = (Source(samples, device).take(at) for device in (CPU, GPU))
    for a, b in zip(here, there, strict=True):
        assert b.device == GPU and a.dtype == b.dtype and torch.equal(a, b.cpu())


SMALL = {name: DataSpec((3, 8, 8) if name in ("gn_lenet", "mlp", "logistic") else (3, 32, 32), num_classes=7)
         for name, _ in CHECKED} | OF_IDS  # fmt: skip


@pytest.mark.parametrize("name, keys", [*CHECKED, *((name, {}) for name in OF_IDS)], ids=str)
def test_models(name: str, keys: dict[str, Any]) -> None:
    data, found = SMALL[name], []
    inputs = torch.randn(3, *data.input_shape)
    if data.inputs == "ids":
        inputs = torch.randint(0, 5, (3, *data.input_shape))
    for device in (CPU, GPU):
        torch.manual_seed(1)
        model = FlatModel(model_of(name, **keys).make(data).to(device))
        model.module.eval()  # dropout draws other numbers on a GPU
        for part in model.module.modules():
            if isinstance(part, nn.RNNBase):  # of which cuDNN computes gradients in training mode alone
                part.train().dropout = 0.0
        outputs = model.module(inputs.to(device))
        outputs.float().square().mean().backward()
        found.append([outputs.detach().cpu(), model.gradients().cpu()])
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-2, atol=1e-4)
    # Not each entry: where rounding takes a ReLU's input to the other side of zero, a few of millions are others.
    assert torch.dist(found[1][1], found[0][1]) < 1e-2 * found[0][1].norm()


# -- all nodes at once --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["clipping", "compressed", "own test samples", "undirected graph drawn anew"])
def test_all_nodes_at_once(option: str) -> None:
    overrides = OPTIONS.get(option, ["training.clip_norm=0.5"])
    if option == "compressed":
        # Products of matrices of all nodes at once add in another order than those of one. Where that takes a value
        # past the number from which its draw rounds it up, it moves by a seventh of its block's norm, and models part.
        overrides = [*overrides, "training.local_steps=0"]
    engine = compare(experiment(*overrides, "mapping.device=cuda"), "layers")
    assert engine.population.device == GPU


def test_each_node_on_its_row() -> None:
    engine, _ = batched(experiment("model={name: gn_lenet, norm: batch}", "node.rounds=2", "mapping.device=cuda",
                                   "data={name: synthetic, input_shape: [3, 8, 8], train_samples: 90, "
                                   "test_samples: 9, partition: iid}"), "rows")  # fmt: skip
    assert engine.population.rows.device == engine.population.buffers.device == GPU
    assert bool(engine.population.rows.isfinite().all())


def test_what_cudnn_says_of_recurrent_layers_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The pretended GPU has no cuDNN: the test says it in its place."""
    monkeypatch.setattr(recurrent, "_logged_kinds", set())
    (tmp_path / "play.txt").write_text("ANNA:\nWho is there? It is only the wind.\n\nBERT:\nIt is me again.\n\n" * 20)
    config = "configs/tasks/next_character.yaml"
    texts = [f"data={{name: text, file: {tmp_path}/play.txt, window: 8, partition: iid}}", "node.rounds=1"]
    with warnings.catch_warnings(record=True) as heard, caplog.at_level("INFO"):
        warnings.simplefilter("always")
        for device in ("cpu", "cuda", "cuda"):
            made = build_in_process(load(ROOT / config, [*texts, f"mapping.device={device}"]))[0]
            made.training.local_update(0)
            assert caplog.text.count("cuDNN needs them") == (device == "cuda")
        warnings.warn(f"{recurrent.WARNING}. This means they need to be compacted at every call", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert [str(each.message) for each in heard if "RNN" in str(each.message) or "else" in str(each.message)] == [
        "something else"
    ]
