"""States of other runs, as this one can load them: entries by its names, and what sharing rules keep, cut anew."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from decentnode.errors import AssemblyError
from decentnode.optim.saved import check_saved, kind_of
from decentnode.parallel.buckets.bucket import Bucket
from decentnode.parallel.process_group import check_alike, device_of_group, together

if TYPE_CHECKING:
    from decentnode.parallel.ddp import DecentralizedDataParallel
    from decentnode.parallel.steps.gossip_steps import GossipSteps

T = TypeVar("T")

EXTRA = "_extra_state"
"""The entry of `state_dict` that holds everything but the module."""

PREFIX = "module."
"""What the wrapper's names of its module's entries begin with, as those of torch's DistributedDataParallel."""

COMPILED = "_orig_mod."
"""What torch.compile adds to the names of the entries of the module that it is given."""

Layout = list[list[tuple[str, int]]]
"""[bucket]: its parameters in order, each with its number of elements."""


def kept_of(steps: GossipSteps, named: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
    """What a wrapper's state has beside its module's. named: the exchanged parameters, with their names."""
    local = steps.local
    return {
        "optimizer": local.optimizer.state_dict(), "optimizer_kind": kind_of(local.optimizer),
        "steps": steps.taken, "factor": steps.factor, "learning_rate": steps.learning_rate,
        "lr_scheduler": None if local.lr_scheduler is None else local.lr_scheduler.state_dict(),
        "lr_scheduler_kind": kind_of(local.lr_scheduler),
        "scaler": None if local.scaler is None else local.scaler.state_dict(),
        "sharing": [bucket.rule.state_dict() for bucket in steps.buckets],
        "layout": layout(steps.buckets, named),
    }  # fmt: skip


def take_up(steps: GossipSteps, named: Sequence[tuple[str, Tensor]], state: Mapping[str, Any]) -> None:
    """Loads what `kept_of` returned. Raises ValueError, having loaded nothing, for a sharing rule's state that does not
    fit the buckets, and for that of another optimizer or scheduler."""
    kept, local = recut(state["sharing"], state.get("layout"), layout(steps.buckets, named)), steps.local
    check_saved(local.optimizer, state["optimizer"], state.get("optimizer_kind"))
    if local.lr_scheduler is not None and state["lr_scheduler"] is not None:
        load_scheduler(local.lr_scheduler, state["lr_scheduler"], state.get("lr_scheduler_kind"))
    local.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # torch would keep the tensors of `state`
    if local.scaler is not None and state["scaler"] is not None:
        local.scaler.load_state_dict(state["scaler"])
    steps.taken, steps.factor = int(state["steps"]), float(state["factor"])
    steps.learning_rate = float(state.get("learning_rate", steps.rate()))
    for bucket, each in zip(steps.buckets, kept, strict=True):
        bucket.rule.load_state_dict(_on(bucket.flat.device, each))


def _on(device: torch.device, value: Any) -> Any:
    """The state of a rule, whose tensors lie where its bucket does: files and other machines have them on the CPU."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _on(device, each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on(device, each) for each in value)
    return value


def accumulated(wrapper: DecentralizedDataParallel) -> dict[str, Any]:
    """The gradients that backward passes have added up and no step has used yet, and whether the next pass adds its own
    to them. They are no part of a wrapper's state: who loads that elsewhere begins a step with none, as in torch."""
    gradients = {name: _parts(p.grad) for name, p in wrapper._named if p.grad is not None}
    return {"gradients": gradients, "goes_on": wrapper._watch.accumulating}


def take_up_accumulated(wrapper: DecentralizedDataParallel, state: Mapping[str, Any]) -> None:
    """Puts back what `accumulated` returned; {}: nothing was added up."""
    gradients = state.get("gradients", {})
    for name, p in wrapper._named:
        found = gradients.get(name)
        if isinstance(found, Mapping):
            found = torch.sparse_coo_tensor(found["indices"], found["values"], p.shape, check_invariants=True)
        p.grad = None if found is None else found.to(p.device)
    wrapper._watch.accumulating = bool(state.get("goes_on", wrapper._watch.accumulating))


def _parts(gradient: Tensor) -> Tensor | dict[str, Tensor]:
    """A gradient as checkpoints keep it: a sparse one, as of an Embedding, in its parts, in the order of their sums."""
    if gradient.layout is torch.strided:
        return gradient
    return {"indices": gradient._indices(), "values": gradient._values()}


def load_scheduler(scheduler: Any, state: Mapping[str, Any], kind: str | None = None) -> None:
    """Raises ValueError for a state that lacks what this class of schedulers keeps. kind: the class that it was saved
    of, where it is known."""
    try:
        scheduler.load_state_dict(copy.deepcopy(state))  # torch takes entries out of it
    except KeyError as error:
        raise ValueError(f"lr_scheduler must be {kind or 'the one'}, which was saved, got {kind_of(scheduler)}: the "
                         f"state has no {error}") from error  # fmt: skip


def load_together(wrapper: DecentralizedDataParallel, load: Callable[[], T]) -> T:
    """What `load` returns, which loads a state into the wrapper. Blocking: all ranks do it, or all raise and may go on
    training from what they have loaded by then. Raises what `load` raised here, else AssemblyError, PeerLost."""
    gossip, own = wrapper._gossip, None
    before = gossip.taken, gossip.factor
    gossip.exchange.drain()
    if wrapper._average.local is not None:  # else Decent-DP's face refuses
        wrapper.revert_global_avg()
    try:
        with gossip.exchange.average("load_state_dict"):
            with together("load the state"):
                try:
                    result = load()
                except Exception as error:
                    own = error
                    raise ValueError(error) from error  # a RuntimeError would be taken for a sign of a lost rank
            check_alike("loaded state", [f"step {wrapper.steps}"], device_of_group())
    except (AssemblyError, ValueError):
        gossip.taken, gossip.factor = before
        _launch_anew(wrapper)
        if own is not None:
            raise own from None
        raise
    _launch_anew(wrapper)
    return result


def restart(wrapper: DecentralizedDataParallel) -> None:
    """Begins anew after a state that was loaded as a part of another module's. Blocking, on all ranks."""
    wrapper._gossip.exchange.drain()
    with wrapper._gossip.exchange.average("load_state_dict"):
        check_alike("loaded state", [f"step {wrapper.steps}"], device_of_group())
    _launch_anew(wrapper)


def _launch_anew(wrapper: DecentralizedDataParallel) -> None:
    wrapper._must_restart = False
    wrapper._gossip.launch(wrapper.steps)


def layout(buckets: Sequence[Bucket], named: Sequence[tuple[str, Tensor]]) -> Layout:
    """Which parameters are in which bucket; named: all of them, with their names."""
    names = {p: name for name, p in named}
    return [[(names[p], p.numel()) for p in bucket.params] for bucket in buckets]


def renamed_entries(
    state_dict: Mapping[str, Any], own: Iterable[str], extra: Callable[[], Any]
) -> dict[str, Any]:
    """The entries of a state by the names that the wrapper gives them.

    own: those names. extra: makes the entry EXTRA, where the state has none. The names may lack the `module.` of the
    wrapper, and the parts that torch.compile adds; of these readings that which fits most names is taken.
    """
    found, wanted = dict(state_dict), list(own)
    theirs = [name for name in found if name != EXTRA]
    readings = [{f"{start}{name}": name for name in theirs} for start in ("", PREFIX)]
    plain = {plain_name(name): name for name in wanted}
    readings += [{plain.get(plain_name(name), name): old for name, old in reading.items()} for reading in readings]
    best = max(readings, key=lambda reading: sum(name in reading for name in wanted))
    entries = OrderedDict({name: found[old] for name, old in best.items()})
    entries[EXTRA] = found[EXTRA] if EXTRA in found else extra()  # files of torch's class have none
    versions = getattr(state_dict, "_metadata", None)
    if versions is not None:  # by modules' names, which modules ask for the format of their entries
        under = {PREFIX.rstrip(".") + f".{name}" * bool(name): version for name, version in versions.items()}
        entries._metadata = {**under, **versions}  # type: ignore[attr-defined]
    return entries


def plain_name(name: str) -> str:
    """The name of an entry without the parts that torch.compile adds."""
    return name.replace(COMPILED, "")


def recut(states: Sequence[Any], saved: Layout | None, wanted: Layout) -> list[Any]:
    """The states of the rules of the buckets of `wanted`, from those of the buckets of `saved`.

    saved: None in files that do not tell it. Tensors with one value per element of a bucket are cut at the parameters;
    all else must be the same in every bucket. Raises ValueError where that is not so, or a parameter is missing.
    """
    if saved is None and len(states) == len(wanted):
        return list(states)
    if not any(states):
        return [{} for _ in wanted]
    if saved is None:
        raise ValueError(f"the state of the sharing rule must be of {len(wanted)} buckets, got {len(states)}")
    told = [[(name, int(size)) for name, size in bucket] for bucket in saved]
    if told == wanted:
        return list(states)
    return [_rebuilt(list(states), told, bucket, "sharing") for bucket in wanted]


def _rebuilt(values: list[Any], saved: Layout, bucket: list[tuple[str, int]], where: str) -> Any:
    first = values[0]
    sizes = [sum(size for _, size in each) for each in saved]
    if all(isinstance(value, dict) and value.keys() == first.keys() for value in values):
        return {key: _rebuilt([value[key] for value in values], saved, bucket, f"{where}.{key}") for key in first}
    if all(isinstance(value, list) and len(value) == len(first) for value in values):
        return [_rebuilt(list(each), saved, bucket, f"{where}[{number}]")
                for number, each in enumerate(zip(*values, strict=True))]  # fmt: skip
    if all(isinstance(value, Tensor) and value.shape == (size,) for value, size in zip(values, sizes, strict=True)):
        pieces: dict[str, Tensor] = {}
        for value, names in zip(values, saved, strict=True):
            parts = value.split([size for _, size in names])
            pieces |= {name: part for (name, _), part in zip(names, parts, strict=True)}
        wrong = [name for name, size in bucket if name not in pieces or pieces[name].numel() != size]
        if wrong:
            raise ValueError(f"{where} must have the elements of parameter {wrong[0]}, which is another in the file")
        return torch.cat([pieces[name] for name, _ in bucket])
    if all(type(value) is type(first) and not isinstance(value, Tensor) and value == first for value in values):
        return first
    raise ValueError(f"{where} differs from bucket to bucket: resume with the bucket_size_in_mb of the saved run")
