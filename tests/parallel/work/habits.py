"""Models and ranks of the tests of users' habits."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint

from decentnode.errors import DecentnodeError
from decentnode.parallel import CommOptimizer, DecentralizedDataParallel
from tests.parallel.work.face import step
from tests.parallel.work.models import SGD, batch, flat, model


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Sharpness(torch.optim.SGD):
    """An optimizer that asks for the loss twice."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError


class Scaled(nn.Module):
    """Returns a parameter beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 3), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.scale


class Box:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Boxed(nn.Module):
    """A reentrant checkpoint inside, the output in an object that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model()

    def forward(self, x: Tensor) -> Box:
        assert isinstance(self.layers, nn.Sequential)
        hidden = checkpoint(self.layers[1:3], self.layers[0](x), use_reentrant=True)
        return Box(self.layers[3:](hidden))


class Named(nn.Module):
    """A module whose part is called module."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(6, 3)


class Waves(nn.Module):
    """Complex and real parameters."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.waves = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64, generator=draw))
        self.last = nn.Parameter(torch.randn(4, 3, generator=draw))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.waves.dtype) @ self.waves).abs().to(self.last.dtype) @ self.last


def numbers(module: nn.Module) -> Tensor:
    """[P] all parameters, complex128."""
    return torch.cat([p.detach().reshape(-1).to(torch.complex128) for p in module.parameters()])


def mean_of(values: Tensor, n: int) -> Tensor:
    total = torch.view_as_real(values.clone())
    dist.all_reduce(total)
    return torch.view_as_complex(total / n)


def complex_distances(rank: int, n: int) -> tuple[float, float, float, float]:
    """(consensus distance, as expected; this rank's distance to the mean, as expected)."""
    wrapped = DecentralizedDataParallel(Waves(), optimizer=SGD)
    for t in range(3):
        step(wrapped, rank, t)
    mine = numbers(wrapped.module)
    mean = mean_of(mine, n)
    squares = (mine - mean).abs().square().sum()
    total = squares.clone()
    dist.all_reduce(total)
    expected = float((total / n / mean.abs().square().sum()).sqrt())
    found = wrapped.consensus_distance()
    return found, expected, wrapped.global_avg(return_d2c=True) or 0.0, float(squares) ** 0.5


KINDS = [torch.bool, torch.int16, torch.uint8, torch.int64, torch.complex64, torch.float64, torch.bfloat16]


def buffers(rank: int, n: int, transport: Any) -> list[str]:
    """The kinds of buffers that differ from rank 0's after wrapping."""
    wrong = []
    made = {str(kind): torch.tensor([1, 0, 1]).to(kind) for kind in KINDS}
    made |= {"expanded": torch.eye(3).expand(2, 3, 3), "turned": torch.arange(6).view(2, 3).t(), "empty": torch.ones(0)}
    for name, buffer in made.items():
        module = nn.Linear(6, 3)
        mine = buffer if rank == 0 else torch.zeros_like(buffer)
        module.register_buffer("kept", torch.zeros(3, 3).expand(2, 3, 3) if name == "expanded" and rank else mine)
        options = {"transport": transport, "sync_buffer_in_global_avg": True}
        DecentralizedDataParallel(module, optimizer=SGD, **options).global_avg()  # type: ignore[arg-type]
        if not torch.equal(module.kept, buffer):
            wrong.append(name)
    return wrong


def other_buffers(rank: int, n: int) -> None:
    module = model()
    module.register_buffer("kept", torch.zeros(3 + rank))
    DecentralizedDataParallel(module, optimizer=SGD)


def refused_state(rank: int, n: int, transport: Any) -> tuple[str, int]:
    """Rank 1's state lacks an entry and is of another step; all ranks go on: (what was raised, steps)."""
    wrapped = DecentralizedDataParallel(model(), optimizer=SGD, transport=transport, timeout_seconds=20)
    for t in range(2):
        step(wrapped, rank, t)
    state = wrapped.state_dict()
    if rank == 1:
        del state["module.0.weight"]
        state["_extra_state"]["steps"] = 7
    told = ""
    try:
        wrapped.load_state_dict(state)
    except (DecentnodeError, RuntimeError) as error:
        told = str(error)
    for t in range(2, 6):
        step(wrapped, rank, t)
    return told, wrapped.steps


def distributed_checkpoint(rank: int, n: int, folder: str) -> bool:
    """Whether a training that goes on from a state in torch.distributed.checkpoint has the same bits."""
    def make() -> DecentralizedDataParallel:
        return DecentralizedDataParallel(model(), optimizer=partial(torch.optim.Adam, lr=0.01), topology="ring")

    first, last, file = make(), make(), io.BytesIO()
    for t in range(6):
        step(first, rank, t)
        if t == 2:
            torch.save(first.state_dict(), file)
            torch.distributed.checkpoint.save({f"rank{rank}": file.getvalue()}, checkpoint_id=folder)
    saved: dict[str, Any] = {f"rank{rank}": b""}
    torch.distributed.checkpoint.load(saved, checkpoint_id=folder)
    last.load_state_dict(torch.load(io.BytesIO(saved[f"rank{rank}"])))
    for t in range(3, 6):
        step(last, rank, t)
    return torch.equal(flat(first.module), flat(last.module))


def inside_another(rank: int, n: int) -> tuple[int, bool]:
    """A wrapper that is a part of a module is loaded with it: (steps, the same bits as before)."""
    wrapped = DecentralizedDataParallel(model(), optimizer=SGD)
    whole = nn.ModuleDict({"net": wrapped, "other": nn.Linear(2, 2)})
    for t in range(3):
        step(wrapped, rank, t)
    state = copy.deepcopy(whole.state_dict())
    for t in range(3, 5):
        step(wrapped, rank, t)
    before = flat(wrapped.module)
    whole.load_state_dict(state)
    for t in range(3, 5):
        step(wrapped, rank, t)
    return wrapped.steps, torch.equal(before, flat(wrapped.module))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.heads = nn.Linear(6, 4), nn.ModuleList(nn.Linear(4, 3) for _ in range(3))
        self.which = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[self.which](self.body(x))


def other_heads(rank: int, n: int) -> float:
    """Gradient averaging where ranks use heads of their own; the difference from one process with the mean loss."""
    module, whole = Heads(), Heads()
    comm = CommOptimizer(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), "DDP", world_size=n)
    plain = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    for t in range(4):
        module.which = (rank + t) % 2
        x, y = batch(rank, t)
        (module(x) - y).square().mean().backward()
        comm.step()
        comm.zero_grad()
        for each in range(n):
            whole.which = (each + t) % 2
            x, y = batch(each, t)
            ((whole(x) - y).square().mean() / n).backward()
        plain.step()
        plain.zero_grad()
    return float((flat(module) - flat(whole)).abs().max())


def comm_steps(module: nn.Module, comm: CommOptimizer, rank: int, first: int, last: int) -> None:
    for t in range(first, last):
        x, y = batch(rank, t)
        loss = (module(x) - y).square().mean()
        loss.backward()
        comm.step(loss=loss.item())
        comm.zero_grad()


def comm_of(name: str, n: int, module: nn.Module, **options: Any) -> CommOptimizer:
    return CommOptimizer(torch.optim.SGD(module.parameters(), lr=0.05), name, world_size=n, **options)


def comm_loads_alone(rank: int, n: int, name: str) -> str:
    """Rank 0 alone loads a state of step 6: what is raised."""
    module = model()
    comm = comm_of(name, n, module)
    comm_steps(module, comm, rank, 0, 6)
    state = comm.state_dict()
    again = comm_of(name, n, module)
    if rank == 0:
        again.load_state_dict(state)
    try:
        comm_steps(module, again, rank, 0, 8)
    except (DecentnodeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def losses_of_one(rank: int, n: int) -> str:
    """LSGD where rank 0 alone tells its loss: what is raised."""
    module = model()
    comm = comm_of("LSGD", n, module)
    for t in range(4):
        x, y = batch(rank, t)
        loss = (module(x) - y).square().mean()
        loss.backward()
        try:
            comm.step(loss=None if rank else loss.item())
        except DecentnodeError as error:
            return str(error)
    return "nothing"


def comm_saves(rank: int, n: int, name: str, overlap: bool, folder: str) -> None:
    module = model()
    comm = comm_of(name, n, module, overlap=overlap, comm_period=2)
    comm_steps(module, comm, rank, 0, 6)
    torch.save((module.state_dict(), comm.state_dict()), f"{folder}/{rank}.pt")


def comm_takes_up(rank: int, n: int, name: str, overlap: bool, folder: str) -> tuple[float, int]:
    """(Largest change of a parameter in six more steps, steps)."""
    module = model()
    comm = comm_of(name, n, module, overlap=overlap, comm_period=2)
    parameters, state = torch.load(f"{folder}/{rank % 2}.pt", weights_only=True)
    module.load_state_dict(parameters)
    comm.load_state_dict(state)
    before = flat(module)
    comm_steps(module, comm, rank, 6, 12)
    return float((flat(module) - before).abs().max()), comm.steps


def elastic_of(rank: int, n: int, kind: Any) -> float:
    """EASGD beside the same in one process; the greatest difference of parameters and centers."""
    def make() -> nn.Module:
        if kind == torch.complex64:
            return Waves()
        made = model()
        assert isinstance(made, nn.Sequential)
        (made[4] if kind == "mixed" else made).double()
        return made

    def loss(module: Any, r: int, t: int) -> Tensor:
        x, y = batch(r, t)
        if kind == "mixed":
            return (module[4](module[:4](x).double()) - y).square().mean()
        x = x.double() if kind == torch.float64 else x
        return (module(x) - y).square().mean()

    mine = make()
    comm = comm_of("EASGD", n, mine, comm_period=2)
    others = [make() for _ in range(n)]
    plain = [torch.optim.SGD(each.parameters(), lr=0.05) for each in others]
    center = sum(numbers(each) for each in others) / n
    for t in range(6):
        loss(mine, rank, t).backward()
        comm.step()
        comm.zero_grad()
        before = [numbers(each) for each in others]
        for r, (module, optimizer) in enumerate(zip(others, plain, strict=True)):
            loss(module, r, t).backward()
            optimizer.step()
            optimizer.zero_grad()
            pulls = (before[r] - center).split([p.numel() for p in module.parameters()])
            for p, pull in zip(module.parameters(), pulls, strict=True):
                if t % 2:
                    p.data.sub_(0.1 * (pull if p.is_complex() else pull.real).view(p.shape).to(p.dtype))
        if t % 2:
            center = center + 0.1 * sum(each - center for each in before)
    (*_, found), (*_, expected) = mine.parameters(), others[rank].parameters()
    return max(float((found - expected).abs().max()), float((comm.center[-3:] - center[-3:]).abs().max()))


def idle_after_average(rank: int, n: int) -> tuple[int, bool]:
    """Rank 0 has no inputs and the average in place: (steps, its own model came back)."""
    wrapped = DecentralizedDataParallel(model(), optimizer=SGD)
    wrapped.global_avg()
    with Join([wrapped]):
        for t in range(3 * rank):
            step(wrapped, rank, t)
    return wrapped.steps, wrapped._average.local is None
