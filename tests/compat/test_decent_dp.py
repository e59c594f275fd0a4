"""Scripts written for Decent-DP, after a change of the import: names, attributes, files, and what is done otherwise."""

from __future__ import annotations

import copy
import importlib
import logging
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from decentnode import parallel
from decentnode.compat import decent_dp
from decentnode.compat.decent_dp import Edge, Topology, TopologyReg, wrapper
from decentnode.compat.decent_dp.topologies import EdgeGraph, edges_of, graph_for
from decentnode.parallel.planning.topologies import make_topology
from tests.compat import work_decent_dp as work
from tests.parallel.ranks import run_ranks
from tests.parallel.work.models import batch, flat, model

Wrapper = decent_dp.DecentralizedDataParallel
ADAM = partial(decent_dp.optim_fn_adam, lr=1e-2)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process alone, whose models stay on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def step(wrapped: Wrapper, t: int) -> float:
    x, y = batch(0, t)
    loss = (wrapped(x) - y).square().mean()
    loss.backward()
    return float(loss.detach())


def test_every_way_of_importing_reaches_the_same_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "decent_dp", decent_dp)
    for name in ("ddp", "optim", "utils", "topo"):
        monkeypatch.delitem(sys.modules, f"decent_dp.{name}", raising=False)
        found = importlib.import_module(f"decent_dp.{name}")
        for word in found.__all__:
            assert getattr(found, word) is getattr(getattr(decent_dp, name), word)
        monkeypatch.delitem(sys.modules, f"decent_dp.{name}")
    public = {"ddp": ["DecentralizedDataParallel", "OPTIM_FN_TYPE", "LR_SCHEDULER_FN_TYPE"],
              "topo": ["Topology", "TopologyReg", "Edge"], "utils": ["initialize_dist"],
              "optim": ["optim_fn_adam", "optim_fn_adamw", "optim_fn_accum_adam", "optim_fn_accum_adamw", "AccumAdam",
                        "AccumAdamW", "lr_scheduler_fn_cosine_with_warmup"]}  # fmt: skip
    for module, words in public.items():
        assert set(words) <= set(getattr(decent_dp, module).__all__)


def test_attributes_that_scripts_read(alone: None) -> None:
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    wrapped = Wrapper(model(), ADAM, schedule, "ring", None, 1.0, True, True, 0.5, 1)
    step(wrapped, 0)
    assert wrapped._model is wrapped.module and len(wrapped._params) == len(wrapped._param_names) == 6
    assert wrapped._optims[0].param_groups[0]["lr"] == wrapped._lr_schedulers[0].get_last_lr()[0] == 5e-3
    assert wrapped._local_world_size == 1 and wrapped.get_lr() == 5e-3
    assert [name for name, _ in wrapped.named_parameters()] == [f"_model.{name}" for name in wrapped._param_names]
    nested = torch.nn.ModuleDict({"inner": wrapped})
    assert [name for name, _ in nested.named_parameters()] == [f"inner._model.{name}" for name in wrapped._param_names]
    assert len(list(wrapped.parameters())) == 6
    Wrapper(model(), optim_fn=ADAM, _local_world_size=1, bucket_size_in_mb=0.001)


def test_modules_and_buffers_have_their_names(alone: None) -> None:
    wrapped = Wrapper(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)), ADAM)
    assert [name for name, _ in wrapped.named_modules()] == ["", "_model", "_model.0", "_model.1"]
    assert [name for name, _ in wrapped.named_children()] == ["_model"]
    assert [name for name, _ in wrapped.named_buffers()] == list(wrapped.state_dict())[-3:]
    assert wrapped.get_parameter("_model.0.weight") is wrapped._params[0]
    assert wrapped.get_submodule("_model.1") is wrapped._model[1]  # type: ignore[index]


@pytest.mark.parametrize(("shown", "ranks", "left"), [
    ("4,6", "2", "6"), ("4,6,7", "2", "6"), ("3", "2", "3"), ("4,6", "4", "4,6"), ("", "2", ""),
])  # fmt: skip
def test_a_process_sees_its_own_gpu_alone(
    shown: str, ranks: str, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("CUDA_VISIBLE_DEVICES", shown), ("LOCAL_WORLD_SIZE", ranks), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(parallel, "initialize_dist", lambda *given: (1, *given))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert decent_dp.initialize_dist("gloo") == (1, "gloo") and os.environ["CUDA_VISIBLE_DEVICES"] == left


@pytest.mark.parametrize(("current", "device"), [(0, 1), (2, 2)])
def test_the_model_is_moved_to_the_rank_s_gpu(current: int, device: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To that which torch.cuda.set_device has chosen; a model that is on one stays."""
    inner = model()
    monkeypatch.setenv("LOCAL_RANK", "1")
    for name, value in (("is_available", True), ("current_device", current), ("device_count", 4)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    moved = []
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, to: moved.append(to) or self)
    assert wrapper._move_to_gpu(inner) is inner and moved == [torch.device("cuda", device)]
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert wrapper._move_to_gpu(inner) is inner and len(moved) == 1


def test_accum_adam_takes_the_window_by_position() -> None:
    kind = decent_dp.AccumAdam([torch.zeros(2, requires_grad=True)], 1e-3, (0.9, 0.99), 1e-8, 0.0, 7)
    assert kind.param_groups[0]["accum_iter"] == 7


def test_reverting_needs_an_average(alone: None) -> None:
    wrapped = Wrapper(model(), ADAM)
    with pytest.raises(RuntimeError, match="needs a global_avg"):
        wrapped.revert_global_avg()
    wrapped.global_avg()
    wrapped.revert_global_avg()
    with wrapped.averaged():
        wrapped.eval()


def test_files_have_the_module_s_entries_alone_and_runs_go_on_with_the_same_bits(alone: None) -> None:
    first, other = Wrapper(model(), ADAM), Wrapper(model(1), ADAM)
    for t in range(3):
        step(first, t)
    saved = first.state_dict()
    assert list(saved) == [f"_model.{name}" for name in model().state_dict()]
    plain = model(2)
    plain.load_state_dict({name.removeprefix("_model."): value for name, value in saved.items()})
    assert torch.equal(flat(plain), flat(first._model))
    other.load_state_dict(saved)
    assert torch.equal(flat(other._model), flat(first._model)) and other.steps == 0
    other.load_state_dict(first.full_state_dict())
    losses = [(step(first, t), step(other, t)) for t in range(3, 6)]
    assert all(a == b for a, b in losses) and torch.equal(flat(other._model), flat(first._model))
    nested = torch.nn.ModuleDict({"inner": first})
    assert set(nested.state_dict()) == {f"inner.{name}" for name in saved}


def saved_by_buckets(**options: Any) -> tuple[Wrapper, list[dict[str, Any]], list[dict[str, Any]]]:
    wrapped = Wrapper(model(), faithful=True, bucket_size_in_mb=0.0003, **options)
    for t in range(3):
        step(wrapped, t)
    assert len(wrapped._optims) == 3
    return wrapped, [each.state_dict() for each in wrapped._optims], [each.state_dict() for each in
                                                                       wrapped._lr_schedulers]  # fmt: skip


class Normed(torch.nn.Module):
    """Whose gradients come in another order than the reverse of its definition, with equal shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.norm, self.first = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


def normed_step(wrapped: Wrapper, t: int) -> None:
    wrapped(torch.randn(4, 8, generator=torch.Generator().manual_seed(t))).square().mean().backward()


@pytest.mark.parametrize("before", [True, False])
def test_optimizers_of_buckets_are_loaded_into_one(before: bool, alone: None) -> None:
    """Every moment is that of its parameter, whether a step was taken before or not."""
    def rates(named: list[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        slow = [p for name, p in named if "norm" in name]
        return torch.optim.Adam([{"params": slow, "lr": 1e-3},
                                 {"params": [p for name, p in named if "norm" not in name], "lr": 1e-2}])  # fmt: skip

    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    torch.manual_seed(0)
    there = Wrapper(Normed(), rates, schedule, faithful=True, bucket_size_in_mb=0.0003)
    for t in range(4):
        normed_step(there, t)
    saved = [[copy.deepcopy(each.state_dict()) for each in kind] for kind in (there._optims, there._lr_schedulers)]
    assert len(saved[0]) > 1
    here = Wrapper(Normed(), rates, schedule, bucket_size_in_mb=25)
    if before:
        normed_step(here, 9)
    here.load_state_dict(there.state_dict())
    here.load_optimizers(*saved, bucket_size_in_mb=0.0003, steps=4)
    assert here.steps == 4 and here._lr_schedulers[0].last_epoch == 4
    if not before:
        with pytest.raises(ValueError, match="has not filled in the moments yet"):
            here.full_state_dict()
    normed_step(there, 5)
    normed_step(here, 5)
    theirs = {name: each.state[p] for each in there._optims for p in each.state
              for name, q in there._named if q is p}  # fmt: skip
    for name, p in here._named:
        state = here.optimizer.state[p]
        assert state["step"] == 5 and torch.allclose(state["exp_avg"], theirs[name]["exp_avg"], atol=1e-7), name
        assert torch.allclose(p, dict(there._named)[name], atol=1e-7), name
    assert [group["lr"] for group in here.optimizer.param_groups] == [1e-3 / 32, 1e-2 / 32]


@pytest.mark.parametrize("before", [True, False])
def test_optimizers_of_others_are_refused_whole(before: bool, alone: None) -> None:
    _, optimizers, schedules = saved_by_buckets(optim_fn=ADAM, lr_scheduler_fn=partial(
        torch.optim.lr_scheduler.StepLR, step_size=1))  # fmt: skip
    last = optimizers[-1]["state"][0]
    last["exp_avg"] = last["exp_avg"].t().contiguous()
    for size, says in ((0.0003, r"exp_avg of .* must have the shape"), (25, "must be those of 1 buckets")):
        here = Wrapper(model(), ADAM)
        if before:
            step(here, 0)
        held = copy.deepcopy(here.optimizer.state_dict())
        with pytest.raises(ValueError, match=says):
            here.load_optimizers(optimizers, schedules, bucket_size_in_mb=size)
            step(here, 1)
        found = here.optimizer.state_dict()
        assert str(found["state"]) == str(held["state"]) and (not before or str(found) == str(held))
        here.close()


def test_moments_of_accum_adam_are_kept_as_the_paper_has_them(alone: None) -> None:
    """There a committed moment is stored multiplied by its beta."""
    fn = partial(decent_dp.optim_fn_accum_adam, beta1=0.5, beta2=0.25)
    here = Wrapper(torch.nn.Linear(2, 1, bias=False), fn)
    group = {"params": [0], "lr": 0.3, "betas": (0.5, 0.25)}
    state = {"step": torch.tensor(4), "exp_avg": torch.ones(1, 2), "exp_avg_sq": torch.ones(1, 2),
             "accum_grad": torch.zeros(1, 2)}  # fmt: skip
    here(torch.zeros(1, 2)).sum().backward()
    here.load_optimizers([{"state": {0: state}, "param_groups": [group, {**group, "params": []}]}])
    (found,) = here.optimizer.state.values()
    assert found["step"] == 4 and found["exp_avg"].tolist() == [[2, 2]] and found["exp_avg_sq"].tolist() == [[4, 4]]
    assert here.get_lr() == 0.3


def test_accum_adam_takes_the_state_of_theirs_itself() -> None:
    """As scripts load what they have saved of `_optims`, where the groups have no options of ours."""
    p = torch.ones(2, requires_grad=True)
    state = {"step": torch.tensor(4), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2),
             "accum_grad": torch.zeros(2)}  # fmt: skip
    group = {"params": [0], "lr": 0.3, "betas": (0.5, 0.25), "eps": 1e-8, "weight_decay": 0.0, "accum_iter": 4}
    there = {"state": {0: state}, "param_groups": [group]}
    optimizer = decent_dp.AccumAdam([p])
    optimizer.load_state_dict(there)
    found = optimizer.state[p]
    assert found["exp_avg"].tolist() == [2, 2] and found["exp_avg_sq"].tolist() == [4, 4] and found["step"] == 4
    assert state["exp_avg"].tolist() == [1, 1], "the file's own"
    other = decent_dp.AccumAdam([p])
    other.load_state_dict(optimizer.state_dict())
    assert torch.equal(other.state[p]["exp_avg"], found["exp_avg"])
    p.grad = torch.ones(2)
    other.step()
    assert other.state[p]["step"] == 5


def test_what_is_done_otherwise_is_said_once(
    alone: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wrapper, "_logged", False)
    cosine = partial(decent_dp.lr_scheduler_fn_cosine_with_warmup, t_max=10, t_warmup=2)
    with caplog.at_level(logging.WARNING):
        Wrapper(model(), ADAM, cosine, scaler=torch.amp.GradScaler("cpu"), grad_clip_norm=1.0)
        Wrapper(model(), ADAM)
    (said,) = [message for message in caplog.messages if "Decent-DP" in message]
    for word in ("no round is skipped", "weight decay", "clipping", "cosine", "scaler", "global_avg", "faithful=True"):
        assert word in said
    caplog.clear()
    monkeypatch.setattr(wrapper, "_logged", False)
    Wrapper(model(), lambda named: torch.optim.SGD([p for _, p in named], lr=0.1), faithful=True)
    assert not caplog.messages


def test_groups_and_schedule_as_there() -> None:
    named = [("a.weight", torch.zeros(2, 2)), ("bn.weight", torch.zeros(2)), ("a.bias", torch.zeros(2))]
    groups = decent_dp.optim_fn_adamw(named, weight_decay=0.5).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(1, 0.5), (2, 0.0)]
    with decent_dp.as_there():
        optimizer = decent_dp.optim_fn_adamw(named, lr=1.0, weight_decay=0.5)
        schedule = decent_dp.lr_scheduler_fn_cosine_with_warmup(optimizer, t_max=6, t_warmup=4, cosine_eta_min=0.0)
    groups = optimizer.param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(1, 0.0), (2, 0.5)]
    rates = []
    for _ in range(10):
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[3] == 1.0 and rates[5] > 0.5 and rates[9] == pytest.approx(0.0, abs=1e-9), "at t_warmup + t_max"


def test_first_and_faithful_learning_rate(alone: None) -> None:
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    wrapped = Wrapper(model(), ADAM, schedule, faithful=True)
    before = flat(wrapped._model)
    step(wrapped, 0)
    assert wrapped.get_lr() == 0.0 and wrapped._optims == [] and torch.equal(before, flat(wrapped._model))
    step(wrapped, 1)
    assert wrapped.get_lr() == 2.5e-3 and wrapped.steps == 2


@pytest.mark.parametrize(("options", "disabled", "steps"), [({}, 2, 0), ({}, 1, 3), ({"faithful": True}, 1, 3)])
def test_a_loop_that_never_takes_a_step_says_so(
    options: dict[str, Any], disabled: int, steps: int, alone: None, caplog: pytest.LogCaptureFixture
) -> None:
    """That of the tutorial, which disables accumulation after the last of two passes, where no step is taken."""
    wrapped = Wrapper(model(), ADAM, **options)
    caplog.clear()
    for t in range(3):
        wrapped.set_accumulate_grad(True)
        for number in range(2):
            if number == disabled:
                wrapped.set_accumulate_grad(False)
            step(wrapped, 2 * t + number)
        wrapped.set_accumulate_grad(False)
    said = [message for message in caplog.messages if "no step was taken" in message]
    assert len(said) == (steps == 0)
    step(wrapped, 9)
    assert wrapped.steps == steps + 1


class OneSided(Topology):
    def _get_topo_edges(self) -> list[list[Edge]]:
        return self.edges  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize(("edges", "says"), [
    ([], "at least one round"), ([[]], "rank 0 is in no edge"), ([[Edge([0], 1.0), Edge([0], 1.0)]], "rank 0 twice"),
    ([[Edge([0, 1], 0.5)]], "ranks below 1, got 1"), ([[Edge([0], 0.5)]], "must be 1 for a rank that is alone"),
], ids=["none", "missing", "twice", "outside", "alone"])  # fmt: skip
def test_edges_that_are_none_are_refused(edges: list[list[Edge]], says: str, alone: None) -> None:
    kind = type("Kind", (OneSided,), {"edges": edges})
    with pytest.raises(ValueError, match=says):
        Wrapper(model(), ADAM, topology=kind)


def test_edges_of_one_rank_alone_are_refused(alone: None) -> None:
    class Drawn(OneSided):
        edges: ClassVar = [[Edge([0], 1.0)]]

        def get_edge(self, step: int) -> Edge:
            return self.edges[0][0]

    with pytest.raises(ValueError, match="must say its edges in _get_topo_edges"):
        Wrapper(model(), ADAM, topology=Drawn)


def test_heirs_of_a_named_topology_have_their_own_edges(alone: None) -> None:
    class Own(TopologyReg.registry["ring"]):  # type: ignore[misc]
        def _get_topo_edges(self) -> list[list[Edge]]:
            return [[Edge([0], 1.0)]] * 3

    class Heir(Own):
        pass

    assert graph_for(Heir, 1, 1).period == 3


def test_topologies_have_names(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TopologyReg, "registry", dict(TopologyReg.registry))
    assert set(TopologyReg.registry) == {"complete", "ring", "one-peer-exp", "alternating-exp-ring"}
    kind = TopologyReg.register("mine")(type("Kind", (OneSided,), {"edges": [[Edge([0], 1.0)]]}))
    Wrapper(model(), ADAM, topology="mine")
    with pytest.raises(ValueError, match="mine is registered already"):
        TopologyReg.register("mine")(kind)
    with pytest.raises(ValueError, match="must be a subclass of Topology"):
        TopologyReg.register("other")(int)  # type: ignore[arg-type]
    assert TopologyReg.registry["complete"](1).get_edge(7) == Edge([0], 1.0)


@pytest.mark.parametrize(("name", "n", "local"), [
    ("complete", 3, 1), ("ring", 6, 1), ("one-peer-exp", 8, 1), ("alternating-exp-ring", 8, 2),
])  # fmt: skip
def test_graphs_are_edges_and_edges_are_graphs(name: str, n: int, local: int) -> None:
    graph = make_topology(name, n, local)
    edges = [edges_of(graph, round) for round in range(graph.period or 1)]
    again = EdgeGraph(edges, n)
    for round in range(2 * len(edges)):
        assert (abs(again.matrix(round) - graph.matrix(round)) < 1e-12).all()


def test_a_graph_that_is_no_list_of_edges_says_so() -> None:
    with pytest.raises(ValueError, match="is no list of edges for 5 ranks"):
        edges_of(make_topology("ring", 5, 1), 0)


def test_a_topology_that_leaves_ranks_apart_is_refused() -> None:
    from decentnode.parallel.planning.plan import Plan
    from decentnode.parallel.planning.rules import make_sharing

    apart = EdgeGraph([[Edge([0, 1], 0.5), Edge([2, 3], 0.5)]], 4)
    with pytest.raises(ValueError, match="never hears of rank"):
        Plan(apart, make_sharing("full"), 0)


@pytest.mark.sampled(one=["options", "average", "hooked"])
@pytest.mark.parametrize(("options", "average", "hooked"), [
    ({}, 3, False), ({"faithful": True}, 3, False), ({"faithful": True, "transport": "collective"}, 2, True),
    ({"faithful": True, "grad_clip_norm": work.CLIP, "bucket_size_in_mb": 0}, 0, False), ({}, 3, True),
], ids=["ours", "there", "there, told", "there, clipped", "ours, told"])  # fmt: skip
def test_steps(options: dict[str, Any], average: int, hooked: bool) -> None:
    """Over the tutorial's topology, with averages that training goes on from, or does not get to (there)."""
    there = "faithful" in options
    expected = work.simulated(8, average, there, clipped="grad_clip_norm" in options)
    for rank, (found, told, optimizers) in enumerate(run_ranks(4, work.train, options, 8, average, hooked)):
        assert found == pytest.approx(expected[rank], abs=2e-6)
        assert optimizers == (6 if "grad_clip_norm" in options else 1)
        if hooked:
            rounds = range(1, 9) if there else range(8)
            same_rank_nodes = [[1, 2, 3], [0, 3, 2], [3, 0, 1], [2, 1, 0]][rank]
            assert [ranks for ranks, _, _ in told] == [sorted([rank, same_rank_nodes[r % 3]]) for r in rounds]
            assert {weight for _, weight, _ in told} == {0.5}


@pytest.mark.sampled(one=["options", "average", "passes", "evaluates"])
@pytest.mark.parametrize(("options", "average", "passes", "evaluates"), [
    ({}, 0, 1, False), ({"faithful": True}, 3, 1, False), ({"faithful": True}, 0, 3, False), ({}, 0, 3, True),
    ({"faithful": True, "param_as_bucket_view": False}, 0, 1, True),
], ids=["ours", "there", "there, accumulating", "ours, accumulating", "there, evaluating"])  # fmt: skip
def test_steps_over_edges_of_many_weights(
    options: dict[str, Any], average: int, passes: int, evaluates: bool
) -> None:
    """There the first step is taken in whatever forward pass comes second: of evaluation, or while gradients add up."""
    expected = work.simulated(7, average, "faithful" in options, topology=work.Uneven, passes=passes)
    results = run_ranks(4, work.train, options, 7, average, False, work.Uneven, passes, evaluates)
    for rank, (found, _, _) in enumerate(results):
        assert found == pytest.approx(expected[rank], abs=2e-6)


@pytest.mark.sampled(one=["average", "at"])
@pytest.mark.parametrize(("average", "at"), [(0, 1), (0, 2), (0, 5), (3, 3), (3, 5), (3, 6)])
def test_a_run_as_there_goes_on_with_the_same_bits(average: int, at: int) -> None:
    """From all that there is, also where an average is trained on and what was sent before it is in flight; and from
    the lists that Decent-DP's scripts save, whose round of the topology is told by `steps`."""
    for found in run_ranks(4, work.resumed, average, at):
        assert len(found) == (2 if average or at == 1 else 4)
        assert found == {name: [0.0] * 5 for name in found}


@pytest.mark.parametrize(("options", "says"), [
    ({"sharing": {"name": "local_sgd", "every": 3}, "delayed": True}, "has no delayed=True"),
    ({"sharing": {"name": "full", "compression": {"name": "bfloat16"}}}, "has no compression"),
])  # fmt: skip
def test_what_decent_dp_does_not_have_is_refused_where_steps_are_as_there(
    options: dict[str, Any], says: str, alone: None
) -> None:
    with pytest.raises(ValueError, match=says):
        Wrapper(model(), ADAM, faithful=True, **options)
    Wrapper(model(), ADAM, **options)


def test_states_of_another_kind_are_named(alone: None) -> None:
    there, here = Wrapper(model(), ADAM, faithful=True), Wrapper(model(), ADAM)
    for t in range(3):
        step(there, t)
        step(here, t)
    for wrapped, saved, says in ((here, there, "must be True, as in the saved run, got False"),
                                 (there, here, "must be False, as in the saved run, got True")):  # fmt: skip
        with pytest.raises(ValueError, match=f"faithful {says}"):
            wrapped.load_state_dict(saved.full_state_dict())
    optimizers = [each.state_dict() for each in there._optims]
    for faithful in (True, False):
        other = Wrapper(model(), partial(sgd_of, rate=0.1), faithful=faithful)
        step(other, 0)
        with pytest.raises(ValueError, match=r"bucket 0, optimizer must be the saved one, with .*betas.*, got SGD"):
            other.load_optimizers(optimizers, steps=3)
        other.close()
    with pytest.raises(ValueError, match="steps must be those taken when the optimizers were saved"):
        there.load_optimizers(optimizers)


def sgd_of(named: list[tuple[str, torch.Tensor]], rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=rate)


def test_a_plain_file_leaves_the_optimizers_and_is_what_is_sent(alone: None) -> None:
    wrapped = Wrapper(model(), ADAM, faithful=True)
    for t in range(3):
        step(wrapped, t)
    before = str([each.state_dict() for each in wrapped._optims])
    wrapped.global_avg(will_revert=False)
    wrapped.load_state_dict({f"_model.{name}": value for name, value in model(5).state_dict().items()})
    assert str([each.state_dict() for each in wrapped._optims]) == before and wrapped.steps == 3
    assert torch.equal(flat(wrapped._model), flat(model(5))) and wrapped._gossip.to_send is None
