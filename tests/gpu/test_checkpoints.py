"""Checkpoints of models on a GPU: what is copied to the host, and how often the host waits for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from decentnode.build import build_in_process, step_all
from decentnode.checkpoint.state import decode, encode, to_host
from decentnode.checkpoint.store import Cut
from decentnode.experiment import load
from decentnode.node.checkpoints.snapshot import capture
from tests.gpu.waits import count_waits

pytestmark = pytest.mark.gpu
CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def test_capturing_a_nodes_whole_state_waits_once() -> None:
    """The state includes that of a rule, an optimizer, a moving average and the loss scale, all on the GPU."""
    made = build_in_process(load(CONFIG, [
        "graph={name: ring, nodes: 3}", "mapping={name: linear, nodes_per_machine: 3, device: cuda}", "node.rounds=2",
        "sharing={name: choco}", "node.evaluate_every=0",
        "training={optimizer: {name: adamw, lr: 0.01}, ema: 0.9, amp: fp16}",
    ]))  # fmt: skip
    step_all(made)
    torch.cuda.synchronize()
    cut = Cut("", 2, 0, "", (0, 1, 2))
    with count_waits() as waits:
        snapshot = capture(made[0], cut, {})
    exact = hasattr(torch.cuda, "host_waits")  # on a real GPU, waits for events are not counted
    assert waits.total() == 1 if exact else waits.total() <= 1, waits
    assert len(snapshot.tensors) > 10 and all(tensor.is_cpu for tensor in snapshot.tensors.values())
    for name, parameter in made[0].training.model.module.named_parameters():
        assert torch.equal(snapshot.tensors[f"model.p/{name}"], parameter.cpu())


def test_to_host_copies_tensors_of_every_type_and_layout() -> None:
    state = {
        "a": torch.randn(3, 4, device="cuda", dtype=torch.float64), "b": torch.tensor(True, device="cuda"),
        "c": [torch.randn(7, device="cuda").bfloat16(), torch.empty(0, 3, device="cuda"), torch.arange(5)],
        "d": torch.randn(4, 6, device="cuda").t(), "e": torch.randn(3, dtype=torch.complex64, device="cuda").conj(),
        "f": nn.Conv2d(2, 3, 2).cuda().to(memory_format=torch.channels_last).weight,
    }  # fmt: skip
    tensors: dict[str, Tensor] = {}
    tree = encode(state, "s", tensors, copy=True)
    to_host(tensors)
    assert all(tensor.is_contiguous() and tensor.is_cpu for tensor in tensors.values())
    torch.testing.assert_close(decode(tree, tensors, torch.device("cuda")), state | {"c": [
        tensor.cuda() for tensor in state["c"]
    ]}, rtol=0, atol=0, check_layout=True)  # fmt: skip
    state["a"].zero_()
    assert tensors["s.a"].any(), "a copy must not share memory with the original"
