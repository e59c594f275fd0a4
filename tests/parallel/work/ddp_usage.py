"""Models, and functions of ranks, for the tests of what users of torch's DistributedDataParallel do with a model."""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint

from decentnode.errors import DecentnodeError
from decentnode.parallel import CommOptimizer, DecentralizedDataParallel
from tests.parallel.work.ddp_interface import train_step
from tests.parallel.work.models import SGD, batch, flat, model


class NeedsClosure(torch.optim.SGD):
    """An optimizer that evaluates the loss again, by a closure that it cannot do without."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError


class ReturnsParameter(nn.Module):
    """Returns a parameter beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 3), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.scale


class OpaqueOutput:
    """An output in which the wrapper cannot find the tensor."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class HidesOutput(nn.Module):
    """A model with a reentrant checkpoint inside, whose output is an OpaqueOutput."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model()

    def forward(self, x: Tensor) -> OpaqueOutput:
        assert isinstance(self.layers, nn.Sequential)
        hidden = checkpoint(self.layers[1:3], self.layers[0](x), use_reentrant=True)
        return OpaqueOutput(self.layers[3:](hidden))


class HasPartNamedModule(nn.Module):
    """A module with a submodule called "module", as the entries of a wrapped model begin."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(6, 3)


class ComplexModel(nn.Module):
    """A model with complex and real parameters."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.waves = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64, generator=draw))
        self.last = nn.Parameter(torch.randn(4, 3, generator=draw))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.waves.dtype) @ self.waves).abs().to(self.last.dtype) @ self.last


def flat_complex(module: nn.Module) -> Tensor:
    """Returns all parameters as one tensor, [P] complex128."""
    return torch.cat([p.detach().reshape(-1).to(torch.complex128) for p in module.parameters()])


def mean_over_ranks(values: Tensor, n: int) -> Tensor:
    total = torch.view_as_real(values.clone())
    dist.all_reduce(total)
    return torch.view_as_complex(total / n)


def measure_complex_distances(rank: int, n: int) -> tuple[float, float, float, float]:
    """Returns (consensus distance, its expected value, this rank's distance to the mean, its expected value)."""
    wrapped = DecentralizedDataParallel(ComplexModel(), optimizer=SGD)
    for t in range(3):
        train_step(wrapped, rank, t)
    mine = flat_complex(wrapped.module)
    mean = mean_over_ranks(mine, n)
    squares = (mine - mean).abs().square().sum()
    total = squares.clone()
    dist.all_reduce(total)
    expected = float((total / n / mean.abs().square().sum()).sqrt())
    results = wrapped.consensus_distance()
    return results, expected, wrapped.global_avg(return_d2c=True) or 0.0, float(squares) ** 0.5


BUFFER_DTYPES = [torch.bool, torch.int16, torch.uint8, torch.int64, torch.complex64, torch.float64, torch.bfloat16]


def find_wrong_buffers(rank: int, n: int, transport: Any) -> list[str]:
    """Returns the names of those buffers, of every type and layout, that differ from rank 0's after an average."""
    wrong = []
    buffers = {str(dtype): torch.tensor([1, 0, 1]).to(dtype) for dtype in BUFFER_DTYPES}
    buffers |= {"expanded": torch.eye(3).expand(2, 3, 3), "transposed": torch.arange(6).view(2, 3).t(),
                "empty": torch.ones(0)}  # fmt: skip
    for name, buffer in buffers.items():
        module = nn.Linear(6, 3)
        mine = buffer if rank == 0 else torch.zeros_like(buffer)
        module.register_buffer("kept", torch.zeros(3, 3).expand(2, 3, 3) if name == "expanded" and rank else mine)
        options = {"transport": transport, "sync_buffer_in_global_avg": True}
        DecentralizedDataParallel(module, optimizer=SGD, **options).global_avg()  # type: ignore[arg-type]
        if not torch.equal(module.kept, buffer):
            wrong.append(name)
    return wrong


def diverge(rank: int, _: int, other: str) -> None:
    """Wraps a model on rank 0, while rank 1 does `other`."""
    if rank == 0:
        DecentralizedDataParallel(nn.Linear(2, 1), optimizer=SGD, topology="complete")
    elif other == "wrap its optimizer":
        CommOptimizer(torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1), world_size=2)
    else:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(sizes, torch.tensor([3]))
        dist.all_gather([torch.zeros(int(max(sizes)), dtype=torch.uint8) for _ in range(2)],
                        torch.full((int(max(sizes)),), 1, dtype=torch.uint8))  # fmt: skip


def wrap_with_different_buffers(rank: int, n: int) -> None:
    module = model()
    module.register_buffer("kept", torch.zeros(3 + rank))
    DecentralizedDataParallel(module, optimizer=SGD)


def load_bad_state_on_rank_1(rank: int, n: int, transport: Any) -> tuple[str, int]:
    """Loads a state that on rank 1 lacks an entry and is of another step, then takes four more steps. Returns (the
    error, steps)."""
    wrapped = DecentralizedDataParallel(model(), optimizer=SGD, transport=transport, timeout_seconds=20)
    for t in range(2):
        train_step(wrapped, rank, t)
    state = wrapped.state_dict()
    if rank == 1:
        del state["module.0.weight"]
        state["_extra_state"]["steps"] = 7
    error_text = ""
    try:
        wrapped.load_state_dict(state)
    except (DecentnodeError, RuntimeError) as error:
        error_text = str(error)
    for t in range(2, 6):
        train_step(wrapped, rank, t)
    return error_text, wrapped.steps


def resume_from_distributed_checkpoint(rank: int, n: int, folder: str) -> bool:
    """Returns whether a training that is resumed from torch.distributed.checkpoint has the same bits."""
    def make() -> DecentralizedDataParallel:
        return DecentralizedDataParallel(model(), optimizer=partial(torch.optim.Adam, lr=0.01), topology="ring")

    first, last, file = make(), make(), io.BytesIO()
    for t in range(6):
        train_step(first, rank, t)
        if t == 2:
            torch.save(first.state_dict(), file)
            torch.distributed.checkpoint.save({f"rank{rank}": file.getvalue()}, checkpoint_id=folder)
    saved: dict[str, Any] = {f"rank{rank}": b""}
    torch.distributed.checkpoint.load(saved, checkpoint_id=folder)
    last.load_state_dict(torch.load(io.BytesIO(saved[f"rank{rank}"])))
    for t in range(3, 6):
        train_step(last, rank, t)
    return torch.equal(flat(first.module), flat(last.module))


def load_as_part_of_module(rank: int, n: int) -> tuple[int, bool]:
    """Saves and loads a module of which a wrapper is a part, and repeats two steps. Returns (steps, whether the steps
    gave the same bits again)."""
    wrapped = DecentralizedDataParallel(model(), optimizer=SGD)
    whole = nn.ModuleDict({"net": wrapped, "other": nn.Linear(2, 2)})
    for t in range(3):
        train_step(wrapped, rank, t)
    state = copy.deepcopy(whole.state_dict())
    for t in range(3, 5):
        train_step(wrapped, rank, t)
    before = flat(wrapped.module)
    whole.load_state_dict(state)
    for t in range(3, 5):
        train_step(wrapped, rank, t)
    return wrapped.steps, torch.equal(before, flat(wrapped.module))


class MultiHead(nn.Module):
    """A model of which each forward pass uses one of three heads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.heads = nn.Linear(6, 4), nn.ModuleList(nn.Linear(4, 3) for _ in range(3))
        self.which = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[self.which](self.body(x))


def average_gradients_of_different_heads(rank: int, n: int) -> float:
    """Averages gradients while each rank uses another head. Returns the greatest difference from one process that
    minimizes the mean loss."""
    module, whole = MultiHead(), MultiHead()
    comm = CommOptimizer(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), "DDP", world_size=n)
    plain = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    for t in range(4):
        module.which = (rank + t) % 2
        x, y = batch(rank, t)
        (module(x) - y).square().mean().backward()
        comm.step()
        comm.zero_grad()
        for other in range(n):
            whole.which = (other + t) % 2
            x, y = batch(other, t)
            ((whole(x) - y).square().mean() / n).backward()
        plain.step()
        plain.zero_grad()
    return float((flat(module) - flat(whole)).abs().max())


def average_large_half_gradients(rank: int, n: int) -> list[float]:
    """Returns a float16 parameter after a step along the mean of the gradients 57344 and 49152."""
    weight = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    comm = CommOptimizer(torch.optim.SGD([weight], lr=1.0), "DDP", world_size=n)
    (weight * (57344.0 - 8192.0 * rank)).sum().backward()
    comm.step()
    return weight.tolist()


def train_comm_optimizer(module: nn.Module, comm: CommOptimizer, rank: int, first: int, last: int) -> None:
    for t in range(first, last):
        x, y = batch(rank, t)
        loss = (module(x) - y).square().mean()
        loss.backward()
        comm.step(loss=loss.item())
        comm.zero_grad()


def make_comm_optimizer(name: str, n: int, module: nn.Module, **options: Any) -> CommOptimizer:
    return CommOptimizer(torch.optim.SGD(module.parameters(), lr=0.05), name, world_size=n, **options)


def load_comm_state_on_rank_0_only(rank: int, n: int, name: str) -> str:
    """Rank 0 alone loads a state, of step 6. Returns the error."""
    module = model()
    comm = make_comm_optimizer(name, n, module)
    train_comm_optimizer(module, comm, rank, 0, 6)
    state = comm.state_dict()
    again = make_comm_optimizer(name, n, module)
    if rank == 0:
        again.load_state_dict(state)
    try:
        train_comm_optimizer(module, again, rank, 0, 8)
    except (DecentnodeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def pass_loss_on_rank_0_only(rank: int, n: int) -> str:
    """Trains with LSGD, where rank 0 alone passes its loss. Returns the error."""
    module = model()
    comm = make_comm_optimizer("LSGD", n, module)
    for t in range(4):
        x, y = batch(rank, t)
        loss = (module(x) - y).square().mean()
        loss.backward()
        try:
            comm.step(loss=None if rank else loss.item())
        except DecentnodeError as error:
            return str(error)
    return "nothing"


def save_comm_states(rank: int, n: int, name: str, overlap: bool, folder: str) -> None:
    module = model()
    comm = make_comm_optimizer(name, n, module, overlap=overlap, comm_period=2)
    train_comm_optimizer(module, comm, rank, 0, 6)
    torch.save((module.state_dict(), comm.state_dict()), f"{folder}/{rank}.pt")


def resume_comm_with_other_world_size(rank: int, n: int, name: str, overlap: bool, folder: str) -> tuple[float, int]:
    """Resumes from a state of `save_comm_states`. Returns (largest change of a parameter in six more steps, steps)."""
    module = model()
    comm = make_comm_optimizer(name, n, module, overlap=overlap, comm_period=2)
    parameters, state = torch.load(f"{folder}/{rank % 2}.pt", weights_only=True)
    module.load_state_dict(parameters)
    comm.load_state_dict(state)
    before = flat(module)
    train_comm_optimizer(module, comm, rank, 6, 12)
    return float((flat(module) - before).abs().max()), comm.steps


def compare_easgd_with_one_process(rank: int, n: int, kind: Any) -> float:
    """Returns the greatest difference between EASGD and the same in one process, of the last layer and its center.
    kind: the type of the parameters; "mixed" is float32 with a last layer of float64."""
    def make() -> nn.Module:
        if kind == torch.complex64:
            return ComplexModel()
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
    comm = make_comm_optimizer("EASGD", n, mine, comm_period=2)
    others = [make() for _ in range(n)]
    plain = [torch.optim.SGD(module.parameters(), lr=0.05) for module in others]
    center = sum(flat_complex(module) for module in others) / n
    for t in range(6):
        loss(mine, rank, t).backward()
        comm.step()
        comm.zero_grad()
        before = [flat_complex(module) for module in others]
        for r, (module, optimizer) in enumerate(zip(others, plain, strict=True)):
            loss(module, r, t).backward()
            optimizer.step()
            optimizer.zero_grad()
            pulls = (before[r] - center).split([p.numel() for p in module.parameters()])
            for p, pull in zip(module.parameters(), pulls, strict=True):
                if t % 2:
                    p.data.sub_(0.1 * (pull if p.is_complex() else pull.real).view(p.shape).to(p.dtype))
        if t % 2:
            center = center + 0.1 * sum(model_before - center for model_before in before)
    (*_, results), (*_, expected) = mine.parameters(), others[rank].parameters()
    return max(float((results - expected).abs().max()), float((comm.center[-3:] - center[-3:]).abs().max()))


def join_without_inputs_after_average(rank: int, n: int) -> tuple[int, bool]:
    """Joins while rank 0 has no inputs and still the averaged model. Returns (steps, whether its own model is back)."""
    wrapped = DecentralizedDataParallel(model(), optimizer=SGD)
    wrapped.global_avg()
    with Join([wrapped]):
        for t in range(3 * rank):
            train_step(wrapped, rank, t)
    return wrapped.steps, wrapped._average.local is None


def exchange_beside_own_messages(rank: int, n: int, missing: Any) -> float:
    """Receives a message of the script's own from any rank, while that rank is a step ahead. Returns its value."""
    wrapped = DecentralizedDataParallel(model(), optimizer=SGD, topology="ring", transport="collective",
                                        missing=missing)  # fmt: skip
    store = dist.distributed_c10d._get_default_store()
    own = torch.full((1,), 7.0 * rank)
    train_step(wrapped, rank, 0)
    if rank:
        train_step(wrapped, rank, 1)
        work = dist.isend(own, 0)
        store.set("sent", "")
        work.wait()
    else:
        store.wait(["sent"])
        dist.recv(own)
        train_step(wrapped, rank, 1)
    return float(own)


def step_two_wrappers_in_another_order(rank: int, n: int) -> list[float]:
    """Returns how far the parameters of each of two wrappers move without gradients, where they should stay."""
    both = [DecentralizedDataParallel(model(seed), optimizer=partial(torch.optim.SGD, lr=0.0), topology="ring",
                                      transport="collective") for seed in range(2)]  # fmt: skip
    start = [flat(wrapped.module) for wrapped in both]
    for t in range(4):
        for wrapped in both if rank else both[::-1]:
            train_step(wrapped, rank, t)
    return [float((flat(wrapped.module) - before).abs().max()) for wrapped, before in zip(both, start, strict=True)]
