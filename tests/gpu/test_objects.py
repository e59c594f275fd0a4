"""Experiments of plain objects that lie on a GPU, or beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from decentnode.errors import EnvironmentFault, UsageError
from tests.api.small import Points, experiment, net

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class OnTheGPU(Points):
    """Points whose samples, and their labels, lie on a GPU."""

    def __init__(self, count: int = 400) -> None:
        super().__init__(count)
        self.x = self.x.cuda()
        self.targets = (self.x.sum(1) > 1).long()

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x, target = super().__getitem__(index)
        return x.requires_grad_(), target


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_objects_train_wherever_they_lie(device: str) -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0], device="cpu" if device == "cuda" else "cuda"))
    given = net().cuda()
    made = experiment(model=given, train=OnTheGPU(), test=OnTheGPU(100), loss=loss, mapping={"device": device})
    torch.cuda.manual_seed(3)
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    run = made.run(progress=False)
    assert run.summary["accuracy_merged"] > 0.8
    assert next(run.models().merged.parameters()).is_cpu and next(given.parameters()).is_cuda
    after = torch.get_rng_state(), torch.cuda.get_rng_state()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_batches_on_a_gpu_are_read() -> None:
    x = torch.rand(200, 2, device="cuda")
    streamed = iter([(part, (part.sum(1) > 1).long()) for part in x.split(20)])
    assert experiment(train=streamed, test=None, rounds=1).run(progress=False).summary["rounds"] == 1


def test_a_gpu_that_is_not_there_is_told_before_the_run() -> None:
    count = torch.cuda.device_count()
    words = rf"mapping.device is cuda:{count}, but only (one GPU is|{count} GPUs are) usable here; use auto or cpu"
    for device in (f"cuda:{count}", ["cuda:0", f"cuda:{count}"]):
        with pytest.raises(EnvironmentFault, match=words):
            experiment(mapping={"device": device}).run(progress=False)
    assert not list(Path().glob("runs/*/*"))  # no run has begun


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_forks_of_a_process_that_has_not_used_its_gpu_give_the_bits_of_this_one(device: str) -> None:
    """Of another process: this one may have, in a test before."""
    script = (
        "import torch\nfrom tests.api.small import experiment\nfrom tests.api.test_objects import states\n"
        f"made = experiment(mapping={{'device': '{device}'}})\n"
        "forked = made.run(progress=False, processes=True)\nhere = made.run(progress=False)\n"
        "same = [torch.equal(a, b) for a, b in zip(states(here), states(forked), strict=True)]\n"
        "print(forked.status, len(same), all(same))\n"
    )
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120,
                          env=os.environ | {"PYTHONPATH": path})  # fmt: skip
    assert done.stdout.split() == ["finished", "20", "True"], done.stderr


def test_forks_of_a_process_that_uses_its_gpu_are_refused() -> None:
    torch.ones(1, device="cuda")
    with pytest.raises(UsageError, match="this process uses CUDA, after which its forks cannot"):
        experiment().run(processes=True, progress=False)
