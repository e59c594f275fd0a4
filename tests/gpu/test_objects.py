"""Experiments of plain objects (models, data sets, losses), some of which lie on a GPU."""

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


class PointsOnGPU(Points):
    """Points whose samples, and their labels, lie on a GPU."""

    def __init__(self, count: int = 400) -> None:
        super().__init__(count)
        self.x = self.x.cuda()
        self.targets = (self.x.sum(1) > 1).long()

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x, target = super().__getitem__(index)
        return x.requires_grad_(), target


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_objects_train_on_the_mapped_device_wherever_they_lie(device: str) -> None:
    """The caller's model stays where it is, and the random generators of both devices keep their states."""
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0], device="cpu" if device == "cuda" else "cuda"))
    callers_model = net().cuda()
    made = experiment(model=callers_model, train=PointsOnGPU(), test=PointsOnGPU(100), loss=loss,
                      mapping={"device": device})  # fmt: skip
    torch.cuda.manual_seed(3)
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    run = made.run(progress=False)
    assert run.summary["accuracy_merged"] > 0.8
    assert next(run.models().merged.parameters()).is_cpu and next(callers_model.parameters()).is_cuda
    after = torch.get_rng_state(), torch.cuda.get_rng_state()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_an_experiment_reads_batches_that_lie_on_a_gpu() -> None:
    x = torch.rand(200, 2, device="cuda")
    streamed = iter([(part, (part.sum(1) > 1).long()) for part in x.split(20)])
    assert experiment(train=streamed, test=None, rounds=1).run(progress=False).summary["rounds"] == 1


def test_a_gpu_that_does_not_exist_is_refused_before_the_run() -> None:
    count = torch.cuda.device_count()
    message = rf"mapping.device is cuda:{count}, but only (one GPU is|{count} GPUs are) usable here; use auto or cpu"
    for device in (f"cuda:{count}", ["cuda:0", f"cuda:{count}"]):
        with pytest.raises(EnvironmentFault, match=message):
            experiment(mapping={"device": device}).run(progress=False)
    assert not list(Path().glob("runs/*/*"))  # no run has begun


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_forks_of_a_process_that_has_not_used_its_gpu_give_the_bits_of_one_process(device: str) -> None:
    """In another process, as this one may have used its GPU in an earlier test."""
    script = (
        "import torch\nfrom tests.api.small import experiment\nfrom tests.api.test_objects import model_tensors\n"
        f"made = experiment(mapping={{'device': '{device}'}})\n"
        "forked = made.run(progress=False, processes=True)\nhere = made.run(progress=False)\n"
        "same = [torch.equal(a, b) for a, b in zip(model_tensors(here), model_tensors(forked), strict=True)]\n"
        "print(forked.status, len(same), all(same))\n"
    )
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120,
                             env=os.environ | {"PYTHONPATH": path})  # fmt: skip
    assert process.stdout.split() == ["finished", "20", "True"], process.stderr


def test_forks_of_a_process_that_uses_its_gpu_are_refused() -> None:
    torch.ones(1, device="cuda")
    with pytest.raises(UsageError, match="this process uses CUDA, after which its forks cannot"):
        experiment().run(processes=True, progress=False)
