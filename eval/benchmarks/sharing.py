"""bash eval/bench.sh sharing [PARAMETERS [RULE...]]: costs of rules and codecs in multiples of a memory copy of the
model.

Per line: making the payload for all neighbors (encode), unpacking one neighbor's (decode), mixing it, and bytes per
parameter on the wire. One thread; the copy is measured again for every line, so that other load affects both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from common import machine
from torch import Tensor

from decentnode.compression import indices, select
from decentnode.config.component import load_class, section
from decentnode.graph import GRAPHS, WEIGHTS, build
from decentnode.graph.base import view
from decentnode.mixing import mix_into, passes
from decentnode.payload import Payload
from decentnode.sharing import SHARINGS
from decentnode.sharing.compressed import make_sharing
from decentnode.tensors import keep_freed_memory

REPEATS = 5
RULES: list[dict[str, object]] = [
    {"name": "full"},
    {"name": "topk", "fraction": 0.1},
    {"name": "topk", "fraction": 0.01},
    {"name": "subsample", "fraction": 0.1},
    {"name": "wavelet", "fraction": 0.1},
    {"name": "jwins"},
    {"name": "fft", "fraction": 0.1},
    {"name": "choco", "fraction": 0.1},
    {"name": "choco", "fraction": 0.01},
    {"name": "qsgd"},
    {"name": "sign"},
    {"name": "stc", "fraction": 0.01},
    {"name": "deepsqueeze", "fraction": 0.1},
    {"name": "powergossip", "rank": 1},
    {"name": "gradient_tracking"},
    *({"name": "full", "compression": {"name": codec}}
      for codec in ("float16", "bfloat16", "truncate", "int8", "int4", "qsgd", "sign", "zstd", "lz4")),
]  # fmt: skip


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class Ceiling:
    """Measures the seconds of one copy of the model, again for every line."""

    def __init__(self, parameters: int) -> None:
        self.source, self.target = torch.ones(parameters), torch.ones(parameters)

    def seconds(self) -> float:
        return min(timed(lambda: self.target.copy_(self.source)) for _ in range(5))


def selection(model: Tensor, ceiling: Ceiling) -> None:
    scores = model.abs()
    for fraction in (0.001, 0.01, 0.1, 0.3):
        count = select.count_of(fraction, model.numel())
        at = select.largest(scores, count)
        stream = indices.encode(at, model.numel())
        copy = ceiling.seconds()
        chosen, coded, decoded = (
            statistics.median(timed(work) for _ in range(REPEATS)) / copy
            for work in (lambda: select.largest(model.abs(), count),  # noqa: B023
                         lambda: indices.encode(at, model.numel()),  # noqa: B023
                         lambda: indices.decode(stream, model.numel()))  # noqa: B023
        )  # fmt: skip
        print(f"top {100 * fraction:5.1f} %: choosing {chosen:5.1f}, coding indices {coded:5.1f}, together "
              f"{chosen + coded:5.1f} (asked: 15), decoding {decoded:5.1f} copies; "
              f"{8 * stream.numel() / count:.2f} bits per index", flush=True)  # fmt: skip


def rule(options: dict[str, object], shapes: list[tuple[int, ...]], model: Tensor, ceiling: Ceiling) -> None:
    found = load_class(str(options["name"]), SHARINGS, "sharing")
    graph = build(section(GRAPHS, "graph").validate({"name": "ring", "nodes": 2}),
                  section(WEIGHTS, "weights").validate({"name": "metropolis_hastings"}), 1)  # fmt: skip
    nodes = [make_sharing(found.Config.model_validate(options)) for _ in range(2)]
    models = [model.clone(), model + 0.01 * torch.randn(model.shape, generator=torch.Generator().manual_seed(2))]
    encode, decode, mix, size = [], [], [], 0
    for each in nodes:
        each.set_parameter_shapes(shapes)
        each.payload_schema(model.numel(), model.dtype)
    for r in range(REPEATS + 1):
        seen = [view(graph, uid, r, 1) for uid in range(2)]
        for each, x, now in zip(nodes, models, seen, strict=True):
            each.begin(x, now)
            x.add_(torch.randn(x.shape, generator=torch.Generator().manual_seed(10 + r + now.uid)), alpha=1e-3)
            each.adjust(x, now, 0.0)
        sent: list[dict[int, Payload]] = []
        seconds = timed(lambda: sent.append(nodes[0].outgoing(models[0], seen[0])))  # noqa: B023
        theirs = nodes[1].outgoing(models[1], seen[1])[0]
        payload = Payload({k: t.clone() for k, t in theirs.tensors.items()}, theirs.scalars, theirs.metadata)
        size = sum(t.numel() * t.element_size() for t in sent[0][1].tensors.values())
        got: list[Payload] = []
        slices = nodes[0].requirements.elementwise
        take = nodes[0].unpack if not slices else lambda p, *_: p
        received = timed(lambda: got.append(take(payload, 1, seen[0])))  # noqa: B023
        mixed = timed(lambda: nodes[0].mix(models[0], {1: got[0]}, seen[0]))  # noqa: B023
        theirs = sent[0][1]
        nodes[1].mix(models[1], {0: theirs if slices else nodes[1].unpack(theirs, 0, seen[1])}, seen[1])
        if r:  # the first round creates copies and replicas
            encode.append(seconds)
            decode.append(received)
            mix.append(mixed)
    copy = ceiling.seconds()
    parts = [statistics.median(times) / copy for times in (encode, decode, mix)]
    keys = [value["name"] if isinstance(value, dict) else value for key, value in options.items() if key != "name"]
    name = " ".join(map(str, [options["name"], *keys]))
    print(f"{name:22} {parts[0]:7.1f} {parts[1]:7.1f} {parts[2]:7.1f} {sum(parts):7.1f}   {size / model.numel():6.3f}",
          flush=True)  # fmt: skip


def mixing(model: Tensor, ceiling: Ceiling) -> None:
    """Prints the passes over memory, as counted and as timed: a copy makes two."""
    for arrivals in (1, 2, 4):
        received = [(torch.ones_like(model), 0.5 / arrivals) for _ in range(arrivals)]
        out, lines = torch.empty_like(model), []

        def chained(out: Tensor = out, received: list[tuple[Tensor, float]] = received) -> None:
            torch.mul(model, 0.5, out=out)
            for tensor, weight in received:
                out.add_(tensor, alpha=weight)

        def blocked(out: Tensor = out, received: list[tuple[Tensor, float]] = received) -> None:
            mix_into(out, model, 0.5, received)

        for name, fused, work in (("by blocks", True, blocked), ("chained", False, chained)):
            seconds = min(timed(work) for _ in range(REPEATS))
            lines.append(f"{name} {passes(arrivals, fused)} passes, took {2 * seconds / ceiling.seconds():.1f}")
        print(f"mixing {arrivals} arrivals: {', '.join(lines)}", flush=True)


def main() -> None:
    names = list(dict.fromkeys(str(each["name"]) for each in RULES))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parameters", nargs="?", type=float, default=25e6, help="of the model; by default 25e6")
    parser.add_argument("rules", nargs="*", metavar="RULE", help=", ".join(names))
    options = parser.parse_args()
    if unknown := [rule for rule in options.rules if rule not in names]:
        parser.error(f"rules must be of {', '.join(names)}, got {', '.join(unknown)}")
    keep_freed_memory()
    torch.set_num_threads(1)
    parameters = int(options.parameters)
    side = int(parameters**0.5)
    shapes = [(side, side), (parameters - side * side,)]
    model = torch.randn(parameters, generator=torch.Generator().manual_seed(1))
    ceiling = Ceiling(parameters)
    print(f"{machine()}; {parameters:,} parameters, one copy of them {1e3 * ceiling.seconds():.1f} ms")
    selection(model, ceiling)
    mixing(model, ceiling)
    print(f"{'rule':22} {'encode':>7} {'decode':>7} {'mix':>7} {'all':>7}   bytes per parameter   (in copies)")
    for keys in [each for each in RULES if not options.rules or each["name"] in options.rules]:
        rule(keys, shapes, model, ceiling)


if __name__ == "__main__":
    main()
