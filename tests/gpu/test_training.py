"""Training on a GPU: the same results as on the CPU, how often the host waits, and states of another device."""

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
from decentnode.training import gradients, supervised
from decentnode.training.optimizers import _optimizers
from decentnode.training.source import Source
from decentnode.training.supervised import Supervised
from decentnode.training.supervised_config import SupervisedConfig
from tests.gpu.waits import count_waits
from tests.models.test_models import CHECKED, ID_DATA
from tests.models.test_models import make as model_of
from tests.simulate.test_batched import OPTIONS, compare_engines, experiment, run_batched

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.gpu
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
IMAGES, LENGTH = (3, 6, 6), 7
NESTEROV = {"name": "sgd", "lr": 0.05, "momentum": 0.9, "nesterov": True}


def images(count: int = 37) -> Samples:
    draw = np.random.default_rng(0)
    return Samples(draw.normal(size=(count, *IMAGES)).astype(np.float32), draw.integers(0, 4, count))


class LazyImages(LazySamples):
    """Samples that are made only when a batch is taken."""

    def __init__(self, indices: np.ndarray) -> None:
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def take(self, indices: np.ndarray) -> LazyImages:
        return LazyImages(self.indices[indices])

    def fetch(self, indices: np.ndarray) -> Samples:
        return images().take(self.indices[indices])


def tokens(fixed: bool = False) -> Samples:
    """Returns texts of different lengths; fixed: windows of one length."""
    lengths = LENGTH if fixed else np.array([3, LENGTH, 2, 5, 4, LENGTH, 1, 6])
    stream, starts = np.arange(60) % 9, np.arange(8) * LENGTH
    return Samples(Rows(stream, starts, lengths), Rows(np.roll(stream, -1), starts, lengths, padding=PADDING), ids=True)


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2),
                         nn.Linear(64, 4))  # fmt: skip


def training(device: torch.device, samples: Any = None, module: Callable[[], nn.Module] | None = None,
             **keys: Any) -> Supervised:  # fmt: skip
    """Returns the training of a node with images or texts. keys: of its config."""
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
    """Returns a model's gradients in memory that the next pass overwrites, as CUDA graphs do."""

    @staticmethod
    def forward(ctx: Any, memory: list[Tensor], module: nn.Module, batch: Tensor, *parameters: Tensor) -> Tensor:
        ctx.memory, ctx.parameters = memory, parameters
        with torch.enable_grad():
            ctx.inner = module(batch)
        return ctx.inner.detach()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradients = torch.autograd.grad(ctx.inner, ctx.parameters, gradient)
        for buffer, computed in zip(ctx.memory, gradients, strict=True):
            buffer.copy_(computed)
        return None, None, None, *(buffer.view(buffer.shape) for buffer in ctx.memory)


@pytest.mark.parametrize("compile", [{"mode": "reduce-overhead"}, {"mode": "max-autotune"}, {"backend": "cudagraphs"}])
def test_gradients_accumulate_over_passes_that_reuse_their_memory(
    monkeypatch: pytest.MonkeyPatch, compile: dict[str, str]
) -> None:
    """With a stand-in for CUDA graphs, which the pretended GPU lacks."""
    keys = {"accumulate": 3, "clip_norm": 0.5, "module": lambda: nn.Sequential(nn.Flatten(), nn.Linear(108, 4))}

    def compile_with_graphs(module: nn.Module, *_: Any) -> Callable[[Tensor], Tensor]:
        parameters = list(module.parameters())
        memory = [torch.empty_like(parameter) for parameter in parameters]
        return lambda batch: Overwritten.apply(memory, module, batch, *parameters)

    monkeypatch.setattr(gradients, "compiled", compile_with_graphs)
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
    "made samples": {"samples": LazyImages(np.arange(30))},
}  # fmt: skip


def check_waits(waits: int, expected: int) -> None:
    """Checks the number of waits; on a real GPU, which does not report all of them, that there are not more."""
    assert waits == expected if hasattr(torch.cuda, "host_waits") else waits <= expected


def waits_of_a_round(made: Supervised, round: int = 1) -> int:
    """Returns the waits in the local update of a round; before round 1, takes round 0."""
    if round == 1:
        made.local_update(0)
    with count_waits() as waits:
        made.local_update(round)
    return waits.total()


@pytest.mark.parametrize("case", ROUNDS)
def test_local_steps_of_a_round_wait_once(case: str) -> None:
    made = training(GPU, **ROUNDS[case])
    made.keep_sum = True
    check_waits(waits_of_a_round(made), 1)
    with count_waits() as waits:
        made.evaluate("test")
    check_waits(waits.total(), 1)


def test_fp16_waits_once_more_per_step() -> None:
    """As torch's GradScaler does: the host must know whether the gradient is finite before it makes the step."""
    made = training(GPU, amp="fp16", clip_norm=0.5)
    waits_of_a_round(made)
    check_waits(waits_of_a_round(made, 2), 1 + 3 + made._gradients._repeated_steps)


def test_a_round_of_a_node_waits_once() -> None:
    """The check whether the model is finite comes with the loss, so that it costs no wait of its own."""
    nodes = 3
    waits = []
    for rounds in (3, 6):
        config = experiment(
            f"graph={{name: ring, nodes: {nodes}}}", f"mapping={{name: linear, nodes_per_machine: {nodes}, "
            "device: cuda}", f"node={{rounds: {rounds}, evaluate_every: 0}}", "sharing=full",
        )  # fmt: skip
        made = build_in_process(config)
        assert config.node.check_finite and all(node.training.model.device == GPU for node in made)
        with count_waits() as counts:
            step_all(made)
        waits.append(counts.total())
    check_waits(waits[1] - waits[0], 3 * nodes)


@pytest.mark.parametrize(("way", "model"), [("layers", "{name: mlp, hidden: [6]}"), ("vmap", "{name: lenet}")])
def test_a_round_of_all_nodes_at_once_waits_for_losses_and_finite_models(way: str, model: str) -> None:
    from decentnode.simulate.engines.batched import Batched
    from decentnode.simulate.engines.choice import WAYS

    images = ["data={name: synthetic, input_shape: [3, 12, 12], train_samples: 90, test_samples: 9, partition: iid}"]
    config = experiment(
        f"model={model}", *(images if way == "vmap" else []), "mapping={nodes_per_machine: 5, device: cuda}",
        "training.clip_norm=1.0", "graph={name: random_regular, nodes: 5, degree: 2}",  # another graph in every round
    )  # fmt: skip
    population = Population(config)
    engine = Batched(population, WAYS[way](population))
    engine.step()
    with count_waits() as waits:
        engine.step()
    assert population.device == GPU
    check_waits(waits.total(), 2)


# -- states of another device -------------------------------------------------------------------------------------


def through_checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a state as it is read from a checkpoint, with all tensors on the host."""
    tensors: dict[str, torch.Tensor] = {}
    tree = encode(state, "training", tensors, copy=True)
    to_host(tensors)
    assert all(tensor.is_cpu for tensor in tensors.values())
    decoded: dict[str, Any] = decode(tree, tensors)
    return decoded


def resume_on(first: torch.device, then: torch.device, keys: dict[str, Any], rounds: int = 2) -> Supervised:
    """Trains on one device and returns a training on another that has loaded the state."""
    before, after = training(first, **keys), training(then, **keys)
    for round in range(rounds):
        before.local_update(round)
    after.model.parameters.copy_(before.model.parameters)
    after.model.buffers.copy_(before.model.buffers)
    after.load_state_dict(through_checkpoint(before.state_dict()))
    return after


@pytest.mark.parametrize("name", sorted(_optimizers()))
def test_states_of_every_optimizer_are_resumed_on_another_device(name: str) -> None:
    keys = {"optimizer": name, "module": linear, "ema": 0.9}
    results = []
    for first, then in ((CPU, CPU), (CPU, GPU), (GPU, CPU), (GPU, GPU)):
        made = resume_on(first, then, keys)
        for state in made._optimizer.state.values():
            assert all(value.device == then for value in state.values()
                       if isinstance(value, torch.Tensor) and value.numel() > 1)
        made.local_update(2)
        average = made.average()
        assert average is not None
        results.append((made.model.parameters.cpu(), average.cpu()))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-3, atol=1e-4)


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 5), nn.Tanh(), nn.Linear(5, 4))


def test_a_resumed_training_waits_as_often_as_a_new_one() -> None:
    """When loading, torch would move an entry of NAdam's state to the GPU that it reads on the host in every step."""
    check_waits(waits_of_a_round(resume_on(CPU, GPU, {"optimizer": "nadam"}), 2), 1)
    check_waits(waits_of_a_round(resume_on(GPU, GPU, {"optimizer": "adam"}), 2), 1)


# -- what is computed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in ROUNDS if case not in ("bf16", "augmented")])
def test_rounds_on_a_gpu_equal_those_on_the_cpu(case: str) -> None:
    keys = {"module": linear, **ROUNDS[case]}  # without dropout, which draws other numbers on a GPU
    on_cpu, on_gpu = training(CPU, **keys), training(GPU, **keys)
    for round in range(3):
        a, b = on_cpu.local_update(round), on_gpu.local_update(round)
        assert a.loss == pytest.approx(b.loss, abs=1e-4) and (a.samples, a.units) == (b.samples, b.units)
    torch.testing.assert_close(on_gpu.model.parameters.cpu(), on_cpu.model.parameters, rtol=1e-3, atol=1e-4)
    assert on_gpu.evaluate().metrics == pytest.approx(on_cpu.evaluate().metrics, abs=1e-3)


def test_augmented_images_equal_those_on_the_cpu() -> None:
    keys = {**ROUNDS["augmented"], "channels_last": False}
    on_cpu, on_gpu = (training(device, **keys) for device in (CPU, GPU))
    for (a, _), (b, _) in zip(on_cpu.share.batches(12), on_gpu.share.batches(12), strict=True):
        assert torch.equal(a, b.cpu())


@pytest.mark.parametrize("samples", [images(), LazyImages(np.arange(37))], ids=["array", "made"])
def test_evaluations_take_as_many_samples_at_a_time_as_training_steps(
    samples: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised, "EVALUATION_ELEMENTS", 1)
    made, sizes = training(GPU, samples, batch_size=16), list[int]()
    made.model.module.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    made.evaluate("test")
    assert sizes == [16, 16, 5]


def test_dropout_on_a_gpu_depends_only_on_the_seed_of_the_round() -> None:
    runs = []
    for drawn in (1, 2):
        made = training(GPU, module=convolution)
        torch.manual_seed(drawn)
        torch.rand(drawn, device=GPU)
        runs.append([made.local_update(round).loss for round in range(3)])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("samples", [images(), tokens(), tokens(fixed=True), LazyImages(np.arange(9))],
                         ids=["array", "texts", "windows", "made"])  # fmt: skip
def test_batches_equal_those_on_the_cpu(samples: Any) -> None:
    at = torch.tensor([3, 0, 7, 7])
    on_cpu, on_gpu = (Source(samples, device).take(at) for device in (CPU, GPU))
    for a, b in zip(on_cpu, on_gpu, strict=True):
        assert b.device == GPU and a.dtype == b.dtype and torch.equal(a, b.cpu())


SMALL = {name: DataSpec((3, 8, 8) if name in ("gn_lenet", "mlp", "logistic") else (3, 32, 32), num_classes=7)
         for name, _ in CHECKED} | ID_DATA  # fmt: skip


@pytest.mark.parametrize("name, keys", [*CHECKED, *((name, {}) for name in ID_DATA)], ids=str)
def test_outputs_and_gradients_of_every_model_equal_those_on_the_cpu(name: str, keys: dict[str, Any]) -> None:
    data, results = SMALL[name], []
    inputs = torch.randn(3, *data.input_shape)
    if data.inputs == "ids":
        inputs = torch.randint(0, 5, (3, *data.input_shape))
    for device in (CPU, GPU):
        torch.manual_seed(1)
        model = FlatModel(model_of(name, **keys).make(data).to(device))
        model.module.eval()  # without dropout, which draws other numbers on a GPU
        for part in model.module.modules():
            if isinstance(part, nn.RNNBase):  # cuDNN computes their gradients only in training mode
                part.train().dropout = 0.0
        outputs = model.module(inputs.to(device))
        outputs.float().square().mean().backward()
        results.append([outputs.detach().cpu(), model.gradients().cpu()])
    (cpu_outputs, cpu_gradients), (gpu_outputs, gpu_gradients) = results
    torch.testing.assert_close(gpu_outputs, cpu_outputs, rtol=1e-2, atol=1e-4)
    # Not entry by entry: where rounding moves a ReLU's input across zero, a few entries of millions differ.
    assert torch.dist(gpu_gradients, cpu_gradients) < 1e-2 * cpu_gradients.norm()


# -- all nodes at once --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["clipping", "compressed", "own test samples", "undirected graph drawn anew"])
def test_the_batched_engine_equals_single_nodes_on_a_gpu(option: str) -> None:
    overrides = OPTIONS.get(option, ["training.clip_norm=0.5"])
    if option == "compressed":
        # Matrix products of all nodes at once add in another order than those of one node. Where the difference makes
        # stochastic rounding go the other way, a value moves by a seventh of its block's norm, and the models diverge.
        overrides = [*overrides, "training.local_steps=0"]
    engine = compare_engines(experiment(*overrides, "mapping.device=cuda"), "layers")
    assert engine.population.device == GPU


def test_the_engine_of_rows_trains_on_a_gpu() -> None:
    engine, _ = run_batched(experiment("model={name: gn_lenet, norm: batch}", "node.rounds=2", "mapping.device=cuda",
                                   "data={name: synthetic, input_shape: [3, 8, 8], train_samples: 90, "
                                   "test_samples: 9, partition: iid}"), "rows")  # fmt: skip
    assert engine.population.rows.device == engine.population.buffers.device == GPU
    assert bool(engine.population.rows.isfinite().all())


def test_cudnns_warning_about_recurrent_layers_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The pretended GPU has no cuDNN, so the test issues the warning itself."""
    monkeypatch.setattr(recurrent, "_logged_kinds", set())
    (tmp_path / "play.txt").write_text("ANNA:\nWho is there? It is only the wind.\n\nBERT:\nIt is me again.\n\n" * 20)
    config = "configs/tasks/next_character.yaml"
    texts = [f"data={{name: text, file: {tmp_path}/play.txt, window: 8, partition: iid}}", "node.rounds=1"]
    with warnings.catch_warnings(record=True) as caught, caplog.at_level("INFO"):
        warnings.simplefilter("always")
        for device in ("cpu", "cuda", "cuda"):
            made = build_in_process(load(ROOT / config, [*texts, f"mapping.device={device}"]))[0]
            made.training.local_update(0)
            assert caplog.text.count("cuDNN needs them") == (device == "cuda")
        warnings.warn(f"{recurrent.WARNING}. This means they need to be compacted at every call", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    messages = [str(warning.message) for warning in caught]
    assert [text for text in messages if "RNN" in text or "else" in text] == ["something else"]
