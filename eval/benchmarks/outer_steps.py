"""Loss of a small GPT by bytes sent: rules that exchange every few steps, beside SparseLoCo.

With every rule the same transformer is trained on the characters of this project's pages for the same number of AdamW
steps, in a simulation (decentnode simulate). SparseLoCo (arXiv 2508.15706) is implemented here: on a complete graph,
nodes exchange the largest entries of their outer gradients with error feedback, and apply the mean of all to a common
model. Printed are the bytes that a node sends per step, and the loss of the mean of all models on text that no node has
trained on, both as means over the seeds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import yaml
from common import machine
from pydantic import Field
from torch import Tensor

from decentnode.api import open_run
from decentnode.compression.base import make_codec
from decentnode.config import component
from decentnode.graph.base import RoundView
from decentnode.payload import Payload, TensorSpec
from decentnode.sharing.base import Sharing, SharingConfig
from decentnode.sharing.operator import Operator, add_at
from decentnode.sharing.requirements import Requirements
from decentnode.sharing.state import Tensors

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY, WINDOW = 128, 32
BLOCK = 4096
"""Characters per block; of every twenty blocks, one is for the test."""
SIGN = {"name": "sign"}
ARMS: list[tuple[str, str, dict[str, Any]]] = [
    ("full, int8", "one_peer_exponential", {"name": "full", "compression": {"name": "int8"}}),
    ("choco, sign", "ring", {"name": "choco", "choose": "all", "compression": SIGN}),
    ("SparseLoCo, 6 %, sign", "complete", {"name": "outer_steps:SparseLoCo", "fraction": 0.06, "compression": SIGN}),
    ("SparseLoCo, 2 %, sign", "complete", {"name": "outer_steps:SparseLoCo", "fraction": 0.02, "compression": SIGN}),
    ("choco, largest 6 %, sign", "ring", {"name": "choco", "fraction": 0.06, "compression": SIGN}),
    ("choco, int4", "ring", {"name": "choco", "choose": "all", "compression": {"name": "int4"}}),
    ("diloco, int8", "one_peer_exponential", {"name": "diloco", "every": 1, "compression": {"name": "int8"}}),
]  # fmt: skip


class SparseLoCoConfig(SharingConfig):
    fraction: float = Field(0.02, gt=0, le=1)
    """Fraction of the entries that a node sends."""
    decay: float = Field(0.95, ge=0, lt=1)
    """What is left of the error in the next exchange."""
    outer_lr: float = Field(1.0, gt=0)
    """Learning rate of the outer step."""


class SparseLoCo(Tensors, Sharing):
    """e <- b e + x0 - x, q = C(e), e <- e - q; x0 <- x0 - a mean(q), from which all continue; on a complete graph."""

    Config: ClassVar[type[component.Config]] = SparseLoCoConfig
    config: SparseLoCoConfig
    requirements = Requirements(doubly_stochastic=True, sequential=True, compresses=True, tolerates_missing=False)
    TENSORS: ClassVar[tuple[str, ...]] = ("start", "error")

    def __init__(self, config: SparseLoCoConfig) -> None:
        super().__init__(config)
        codec = None if config.compression is None else make_codec(config.compression)
        self.operator = Operator(config.fraction, "largest", codec)
        self.start: Tensor | None = None
        self.error: Tensor | None = None
        self._sent: tuple[Tensor, Tensor] | None = None

    def begin(self, model: Tensor, view: RoundView) -> None:  # noqa: ARG002
        if self.start is None:
            self.start, self.error = model.clone(), torch.zeros_like(model)

    def set_parameter_shapes(self, shapes: Any) -> None:
        self.operator.set_parameter_shapes(shapes)

    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        self.begin(model, view)
        assert self.start is not None and self.error is not None
        self.error.mul_(self.config.decay).add_(self.start).sub_(model)
        coded, *self._sent = self.operator.encode(self.error, view)
        add_at(self.error, *self._sent, -1.0)
        return dict.fromkeys(view.neighbors, Payload(coded, {}, self.operator.metadata))

    def unpack(self, payload: Payload, uid: int, view: RoundView) -> Payload:  # noqa: ARG002
        assert self.start is not None
        at, values = self.operator.decode(payload.tensors, self.start.numel(), self.start.dtype)
        return Payload({"at": at, "values": values})

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        assert self.start is not None and self._sent is not None
        changes = {uid: (each.tensors["at"], each.tensors["values"]) for uid, each in received.items()}
        for uid, change in sorted({**changes, view.uid: self._sent}.items()):
            add_at(self.start, *change, -self.config.outer_lr * view.weights[uid])
        model.copy_(self.start)

    def payload_schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        return {name: replace(spec, exact=False) for name, spec in self.operator.schema(elements, dtype).items()}


def write_tokens(folder: Path) -> None:
    """Writes the characters of the documentation as train.bin and val.bin."""
    pages = sorted((ROOT / "docs").rglob("*.rst"))
    text = "".join(page.read_text() for page in pages).encode("ascii", "replace")
    blocks = np.frombuffer(text, np.uint8)[: len(text) // BLOCK * BLOCK].astype(np.uint16).reshape(-1, BLOCK)
    is_test = np.arange(len(blocks)) % 20 == 0
    blocks[~is_test].tofile(folder / "train.bin")
    blocks[is_test].tofile(folder / "val.bin")


def experiment(folder: Path, arm: tuple[str, str, dict[str, Any]], every: int, options: argparse.Namespace) -> Any:
    """Returns the sections of the file of a run."""
    _, graph, sharing = arm
    rounds = options.steps // every
    return {
        "name": "outer", "graph": {"name": graph, "nodes": options.nodes},
        "data": {"name": "token_file", "file": str(folder / "train.bin"), "test_file": str(folder / "val.bin"),
                 "vocabulary": VOCABULARY, "window": WINDOW, "sample_test": 300},
        "model": {"name": "gpt", "layers": 1, "width": 48, "heads": 4},
        "training": {"batch_size": 8, "local_steps": every, "clip_norm": 1,
                     "optimizer": {"name": "adamw", "lr": 0.006, "betas": [0.9, 0.95]},
                     "lr_schedule": {"name": "cosine", "T_max": rounds, "warmup": max(1, rounds // 10)}},
        "simulate": {"engine": "batched", "steps": "vmap"},
        "sharing": sharing, "node": {"rounds": rounds, "evaluate_every": rounds},
    }  # fmt: skip


def result_of(sections: Any, seed: int, folder: Path) -> tuple[float, float]:
    """Returns (bytes that a node sent, loss of the mean model at the end)."""
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({**sections, "seed": seed}))
    command = [sys.executable, "-m", "decentnode", "simulate", str(file), "--run-dir", str(folder / "runs")]
    path = os.pathsep.join([str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    summary = open_run("outer", run_dir=folder / "runs").summary
    return summary["bytes_sent_total"] / summary["num_nodes"], float(summary["loss_merged"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=480)
    parser.add_argument("--steps-per-exchange", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--seeds", type=int, default=1)
    names = [arm[0] for arm in ARMS]
    parser.add_argument("--rules", nargs="+", choices=names, default=names, metavar="RULE")
    options = parser.parse_args()
    print(machine())
    print(f"{'rule':26} {'graph':22} {'steps per exchange':>18} {'bytes':>9} {'loss':>7}")
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        write_tokens(folder)
        for every in options.steps_per_exchange:
            for arm in (each for each in ARMS if each[0] in options.rules):
                sections = experiment(folder, arm, every, options)
                done = [result_of(sections, seed, folder) for seed in range(options.seeds)]
                sent = statistics.mean(each[0] for each in done)
                loss = statistics.mean(each[1] for each in done)
                print(f"{arm[0]:26} {arm[1]:22} {every:18} {sent / options.steps:9.0f} {loss:7.3f}", flush=True)


if __name__ == "__main__":
    main()
