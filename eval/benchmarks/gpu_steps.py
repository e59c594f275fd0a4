"""Cases of gpu.py about training steps: the wrapper in a world of one, and precision, compiler and CUDA graphs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from gpu_profiles import Profile, summarize, trace_of
from gpu_rows import Row, failure, milliseconds, on_gpu

VOCABULARY, PLACES = 50257, 1024
"""GPT-2's sizes."""
PRECISIONS = ("bfloat16 autocast", "float32", "float16, GradScaler")
UNALIGNED = "ResNet-50 of 10 classes"
"""The ten biases at the start of its bucket make all weights after them start at odd multiples of eight bytes. In
float32, cuDNN and the optimizer read them at these addresses."""


def _make_models(tiny: bool, gpu: bool) -> Iterator[tuple[str, Callable[[], tuple[Any, Any, Any]]]]:
    """Yields (name, function that makes (module, inputs, loss of an output))."""
    import torch
    from torch.nn import functional

    device = torch.device("cuda" if gpu else "cpu")

    def resnet(classes: int = 1000) -> tuple[Any, Any, Any]:
        y, images = torch.randint(0, classes, (64,), device=device), torch.randn(64, 3, 224, 224, device=device)
        return resnet50(classes).to(device), images, lambda out: functional.cross_entropy(out, y)

    def gpt2() -> tuple[Any, Any, Any]:
        tokens = torch.randint(0, VOCABULARY, (8, PLACES), device=device)
        following = tokens.roll(-1, 1).flatten()
        return gpt2_small().to(device), tokens, lambda out: functional.cross_entropy(out.flatten(0, 1), following)

    def mlp() -> tuple[Any, Any, Any]:
        y = torch.randint(0, 10, (8,), device=device)
        module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)).to(device)
        return module, torch.randn(8, 64, device=device), lambda out: functional.cross_entropy(out, y)

    if tiny:
        yield "MLP of 4,810", mlp
        return
    yield from (("ResNet-50", resnet), ("GPT-2 small", gpt2), (UNALIGNED, partial(resnet, 10)))


def resnet50(classes: int = 1000) -> Any:
    """Returns a module: [N, 3, 224, 224] to [N, classes]."""
    from decentnode.models.resnet import Resnet, ResnetConfig
    from decentnode.samples import DataSpec

    return Resnet(ResnetConfig(depth=50)).make(DataSpec((3, 224, 224), num_classes=classes))


def gpt2_small() -> Any:
    """Returns a module: tokens [N, PLACES] to [N, PLACES, VOCABULARY]."""
    from decentnode.models.gpt import Gpt, GptConfig
    from decentnode.samples import DataSpec

    config = GptConfig(layers=12, width=768, heads=12, dropout=0.1)
    return Gpt(config).make(DataSpec((PLACES,), "ids", "next_token", vocabulary=VOCABULARY, target_shape=(PLACES,)))


def wrapper(tiny: bool) -> Iterator[Row]:
    """Steps of DecentralizedDataParallel in a world of one beside the same steps without it, in turn."""
    import torch.distributed as dist

    from decentnode.parallel import initialize_dist

    gpu = on_gpu()
    initialize_dist(backend="nccl" if gpu and dist.is_nccl_available() else "gloo")
    for what, make, precision in _wrapped_cases(tiny, gpu):
        try:
            yield _compare(make, precision, what, tiny, gpu)
        except Exception as error:  # the figures of the other models still count
            yield failure("wrapper", what, error)


def _wrapped_cases(tiny: bool, gpu: bool) -> Iterator[tuple[str, Callable[[], tuple[Any, Any, Any]], str]]:
    models = list(_make_models(tiny, gpu))
    for precision in PRECISIONS:  # the most common precision first, for all models
        for name, make in models:
            if name == UNALIGNED and precision != "float32":
                continue
            yield f"{name}, {precision}, world of one / alone", make, precision


def profile_wrapper(whats: Sequence[str], tiny: bool) -> Iterator[Profile]:
    """Profiles a step alone and the same step with the wrapper."""
    import torch.distributed as dist

    from decentnode.parallel import initialize_dist

    gpu = on_gpu()
    initialize_dist(backend="nccl" if gpu and dist.is_nccl_available() else "gloo")
    for what, make, precision in _wrapped_cases(tiny, gpu):
        if what in whats:
            for way, step in _step_functions(make, precision, gpu).items():
                yield summarize(trace_of(step), "wrapper", f"{what}: {way}")


def _step_functions(
    make: Callable[[], tuple[Any, Any, Any]], precision: str, gpu: bool
) -> dict[str, Callable[[], None]]:
    """Returns functions that make a step alone, and the same step with the wrapper."""
    import torch

    from decentnode.parallel import DecentralizedDataParallel

    kind = "cuda" if gpu else "cpu"
    scalers = [torch.amp.GradScaler(kind) if "GradScaler" in precision else None for _ in range(2)]
    dtype = torch.float16 if "float16," in precision else torch.bfloat16
    alone, x, loss_of = make()
    own = torch.optim.AdamW(alone.parameters(), lr=1e-4, fused=gpu)
    wrapped = DecentralizedDataParallel(
        make()[0], optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-4, fused=gpu), topology="complete",
        transport="collective", scaler=scalers[1],
    )  # fmt: skip

    def step(module: Any, optimizer: Any, scaler: Any) -> None:
        with torch.autocast(kind, dtype, enabled=precision != "float32"):
            loss = loss_of(module(x))
        (loss if scaler is None else scaler.scale(loss)).backward()
        if optimizer is not None and scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        elif optimizer is not None:
            optimizer.step()
        if optimizer is not None:
            optimizer.zero_grad()

    return {"alone": partial(step, alone, own, scalers[0]), "wrapped": partial(step, wrapped, None, scalers[1])}


def _compare(make: Callable[[], tuple[Any, Any, Any]], precision: str, what: str, tiny: bool, gpu: bool) -> Row:
    import torch

    steps, turns = (2, 2) if tiny else (5, 7)
    ways = _step_functions(make, precision, gpu)
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(turns + 1):  # the first turn is not counted
        for way, step in ways.items():

            def several(step: Callable[[], None] = step) -> None:
                for _ in range(steps):
                    step()

            times[way].append(milliseconds(several, gpu, 1, warm=0 if turn else 1) / steps)
    ratios = [b / a for a, b in zip(times["alone"][1:], times["wrapped"][1:], strict=True)]
    memory = f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB of both" if gpu else ""
    note = f"step alone {statistics.median(times['alone'][1:]):.2f} ms, least {min(ratios):.3f}, most {max(ratios):.3f}"
    del ways, step, several
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return Row("wrapper", what, statistics.median(ratios), "", asked="<= 1.02", note=note + memory)


VARIANTS = {
    "float32": [],
    "amp: bf16": ["training.amp=bf16"],
    "amp: fp16": ["training.amp=fp16"],
    "bf16, channels_last": ["training.amp=bf16", "training.channels_last=true"],
    "compile: {backend: cudagraphs}": ["training.compile={backend: cudagraphs}"],
    "compile: true": ["training.compile=true"],
    "compile: {mode: reduce-overhead}": ["training.compile={mode: reduce-overhead}"],
}
"""Overrides of a config. CUDA graphs: cudagraphs, which needs no compiler, and reduce-overhead."""
COMPILED = "gn_lenet"
"""The model that is also compiled. Its small kernels are launched together by CUDA graphs. ResNet-18 would take a
minute more."""


def training(tiny: bool) -> Iterator[Row]:
    """Local steps of one node beside bare steps of plain SGD with the same model and batch in float32."""
    gpu = on_gpu()
    models = ((COMPILED, 8),) if tiny else ((COMPILED, 8), ("resnet, depth: 18", 128))
    variants = {"float32": [], "amp: bf16": VARIANTS["amp: bf16"]} if tiny else VARIANTS
    for name, extra in variants.items():
        for model, batch in models:
            what = f"{model}, batch {batch}, {name}: local step"
            if "compile" in name and model != COMPILED:
                continue
            try:
                yield _local_steps(model, batch, extra, what, tiny, gpu)
            except Exception as error:  # the next one may still run
                yield failure("training", what, error)


def _local_steps(model: str, batch: int, extra: list[str], what: str, tiny: bool, gpu: bool) -> Row:
    from common import CONFIG
    from floor import prepare

    from decentnode.experiment import load
    from decentnode.experiment.initial_model import make_model

    steps, device = (2 if tiny else 20), "cuda" if gpu else "cpu"
    overrides = [f"model={{name: {model}}}", f"training.batch_size={batch}", f"training.local_steps={steps}",
                 "training.drop_last=true", f"mapping.device={device}", *extra]  # fmt: skip
    (node,) = prepare(str(CONFIG), overrides, range(1))
    rounds = iter(range(1, 1000))
    # a round of local steps ends with its loss on the host
    own_milliseconds = milliseconds(lambda: node.local_update(next(rounds)), False, 2 if tiny else 7, warm=1) / steps
    experiment = load(str(CONFIG), overrides)
    bare = bare_milliseconds(make_model(experiment, experiment.open_data().spec).to(device), batch, tiny, gpu)
    return Row("training", what, own_milliseconds, "ms", bare, note="beside it: bare steps of SGD in float32")


def bare_milliseconds(model: Any, batch: int, tiny: bool, gpu: bool) -> float:
    """Returns the time of one step of plain SGD on 32 x 32 color images, on the model's device. Steps follow each
    other, so that the host queues the next ones while the GPU computes."""
    import torch

    device = next(model.parameters()).device
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    inputs, targets = torch.randn(batch, 3, 32, 32, device=device), torch.randint(10, (batch,), device=device)
    steps = 2 if tiny else 20

    def several() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    return milliseconds(several, gpu, 2 if tiny else 7, warm=1) / steps
