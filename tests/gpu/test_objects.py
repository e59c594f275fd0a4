"""Experiments of plain objects that lie on a GPU, or beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from decentnode.errors import EnvironmentFault, UsageError
from tests.api.small import Points, experiment, net

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


def test_forks_of_a_process_that_uses_its_gpu_are_refused() -> None:
    torch.ones(1, device="cuda")
    with pytest.raises(UsageError, match="this one uses CUDA already and forks of it cannot"):
        experiment().run(processes=True, progress=False)
