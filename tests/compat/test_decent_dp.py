"""Scripts written for Decent-DP work after a change of the import: names, attributes, files, steps, differences.

With faithful=True, steps are those of Decent-DP 0.2.3.
"""

from __future__ import annotations

import copy
import importlib
import logging
import os
import sys
from functools import partial
from typing import Any, ClassVar

import pytest
import torch

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
def single_rank_on_cpu(single_rank_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default process group of this process alone; wrappers leave models on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def step(wrapped: Wrapper, t: int) -> float:
    """Takes a step with batch `t` of rank 0. Returns the loss."""
    x, y = batch(0, t)
    loss = (wrapped(x) - y).square().mean()
    loss.backward()
    return float(loss.detach())


def test_every_way_of_importing_reaches_the_same_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "decent_dp", decent_dp)
    for name in ("ddp", "optim", "utils", "topo"):
        monkeypatch.delitem(sys.modules, f"decent_dp.{name}", raising=False)
        imported = importlib.import_module(f"decent_dp.{name}")
        for public_name in imported.__all__:
            assert getattr(imported, public_name) is getattr(getattr(decent_dp, name), public_name)
        monkeypatch.delitem(sys.modules, f"decent_dp.{name}")
    public = {"ddp": ["DecentralizedDataParallel", "OPTIM_FN_TYPE", "LR_SCHEDULER_FN_TYPE"],
              "topo": ["Topology", "TopologyReg", "Edge"], "utils": ["initialize_dist"],
              "optim": ["optim_fn_adam", "optim_fn_adamw", "optim_fn_accum_adam", "optim_fn_accum_adamw", "AccumAdam",
                        "AccumAdamW", "lr_scheduler_fn_cosine_with_warmup"]}  # fmt: skip
    for module, names in public.items():
        assert set(names) <= set(getattr(decent_dp, module).__all__)


def test_the_wrapper_has_the_attributes_that_scripts_read(single_rank_on_cpu: None) -> None:
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


def test_modules_and_buffers_have_decent_dps_names(single_rank_on_cpu: None) -> None:
    wrapped = Wrapper(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)), ADAM)
    assert [name for name, _ in wrapped.named_modules()] == ["", "_model", "_model.0", "_model.1"]
    assert [name for name, _ in wrapped.named_children()] == ["_model"]
    assert [name for name, _ in wrapped.named_buffers()] == list(wrapped.state_dict())[-3:]
    assert wrapped.get_parameter("_model.0.weight") is wrapped._params[0]
    assert wrapped.get_submodule("_model.1") is wrapped._model[1]  # type: ignore[index]


@pytest.mark.parametrize(("visible", "ranks", "expected"), [
    ("4,6", "2", "6"), ("4,6,7", "2", "6"), ("3", "2", "3"), ("4,6", "4", "4,6"), ("", "2", ""),
])  # fmt: skip
def test_initialize_dist_leaves_a_process_only_its_own_gpu_visible(
    visible: str, ranks: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("LOCAL_WORLD_SIZE", ranks), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(parallel, "initialize_dist", lambda *args: (1, *args))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert decent_dp.initialize_dist("gloo") == (1, "gloo") and os.environ["CUDA_VISIBLE_DEVICES"] == expected


@pytest.mark.parametrize(("current", "device"), [(0, 1), (2, 2)])
def test_a_model_on_the_cpu_is_moved_to_the_ranks_gpu(
    current: int, device: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is moved to the GPU that torch.cuda.set_device chose, if any. A model that is on a GPU already stays there."""
    inner = model()
    monkeypatch.setenv("LOCAL_RANK", "1")
    for name, value in (("is_available", True), ("current_device", current), ("device_count", 4)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    moved = []
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, to: moved.append(to) or self)
    assert wrapper._move_to_gpu(inner) is inner and moved == [torch.device("cuda", device)]
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert wrapper._move_to_gpu(inner) is inner and len(moved) == 1


def test_accum_adam_takes_accum_iter_by_position() -> None:
    kind = decent_dp.AccumAdam([torch.zeros(2, requires_grad=True)], 1e-3, (0.9, 0.99), 1e-8, 0.0, 7)
    assert kind.param_groups[0]["accum_iter"] == 7


def test_revert_global_avg_without_an_average_is_refused(single_rank_on_cpu: None) -> None:
    wrapped = Wrapper(model(), ADAM)
    with pytest.raises(RuntimeError, match="needs a global_avg"):
        wrapped.revert_global_avg()
    wrapped.global_avg()
    wrapped.revert_global_avg()
    with wrapped.averaged():
        wrapped.eval()


def test_state_dict_has_only_the_modules_entries_and_full_state_dict_resumes_with_the_same_bits(
    single_rank_on_cpu: None
) -> None:
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


def states_by_buckets(**options: Any) -> tuple[Wrapper, list[dict[str, Any]], list[dict[str, Any]]]:
    """Trains with faithful=True. Returns (wrapper, states of its optimizers, of its schedules), one for each bucket."""
    wrapped = Wrapper(model(), faithful=True, bucket_size_in_mb=0.0003, **options)
    for t in range(3):
        step(wrapped, t)
    assert len(wrapped._optims) == 3
    return (wrapped, [optimizer.state_dict() for optimizer in wrapped._optims],
            [schedule.state_dict() for schedule in wrapped._lr_schedulers])  # fmt: skip


class OtherGradientOrder(torch.nn.Module):
    """A model whose gradients do not come in the reverse order of its definition, with parameters of equal shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.norm, self.first = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


def step_other_order(wrapped: Wrapper, t: int) -> None:
    wrapped(torch.randn(4, 8, generator=torch.Generator().manual_seed(t))).square().mean().backward()


@pytest.mark.parametrize("after_a_step", [True, False])
def test_optimizers_of_several_buckets_are_loaded_into_one(after_a_step: bool, single_rank_on_cpu: None) -> None:
    """Every moment must go to its own parameter, whether the wrapper took a step before the load or not."""
    def adam_with_two_rates(named: list[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        slow = [p for name, p in named if "norm" in name]
        return torch.optim.Adam([{"params": slow, "lr": 1e-3},
                                 {"params": [p for name, p in named if "norm" not in name], "lr": 1e-2}])  # fmt: skip

    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    torch.manual_seed(0)
    source = Wrapper(OtherGradientOrder(), adam_with_two_rates, schedule, faithful=True, bucket_size_in_mb=0.0003)
    for t in range(4):
        step_other_order(source, t)
    saved = [[copy.deepcopy(part.state_dict()) for part in parts] for parts in (source._optims, source._lr_schedulers)]
    assert len(saved[0]) > 1
    target = Wrapper(OtherGradientOrder(), adam_with_two_rates, schedule, bucket_size_in_mb=25)
    if after_a_step:
        step_other_order(target, 9)
    target.load_state_dict(source.state_dict())
    target.load_optimizers(*saved, bucket_size_in_mb=0.0003, steps=4)
    assert target.steps == 4 and target._lr_schedulers[0].last_epoch == 4
    if not after_a_step:
        with pytest.raises(ValueError, match="has not filled in the moments yet"):
            target.full_state_dict()
    step_other_order(source, 5)
    step_other_order(target, 5)
    expected = {name: optimizer.state[p] for optimizer in source._optims for p in optimizer.state
                for name, q in source._named if q is p}  # fmt: skip
    for name, p in target._named:
        state = target.optimizer.state[p]
        assert state["step"] == 5 and torch.allclose(state["exp_avg"], expected[name]["exp_avg"], atol=1e-7), name
        assert torch.allclose(p, dict(source._named)[name], atol=1e-7), name
    assert [group["lr"] for group in target.optimizer.param_groups] == [1e-3 / 32, 1e-2 / 32]


@pytest.mark.parametrize("after_a_step", [True, False])
def test_optimizer_states_that_do_not_fit_are_refused_and_nothing_is_loaded(
    after_a_step: bool, single_rank_on_cpu: None
) -> None:
    _, optimizers, schedules = states_by_buckets(optim_fn=ADAM, lr_scheduler_fn=partial(
        torch.optim.lr_scheduler.StepLR, step_size=1))  # fmt: skip
    last = optimizers[-1]["state"][0]
    last["exp_avg"] = last["exp_avg"].t().contiguous()
    for size, message in ((0.0003, r"exp_avg of .* must have the shape"), (25, "must be those of 1 buckets")):
        wrapped = Wrapper(model(), ADAM)
        if after_a_step:
            step(wrapped, 0)
        before = copy.deepcopy(wrapped.optimizer.state_dict())
        with pytest.raises(ValueError, match=message):
            wrapped.load_optimizers(optimizers, schedules, bucket_size_in_mb=size)
            step(wrapped, 1)
        after = wrapped.optimizer.state_dict()
        assert str(after["state"]) == str(before["state"]) and (not after_a_step or str(after) == str(before))
        wrapped.close()


def test_loaded_moments_of_accum_adam_are_divided_by_their_betas(single_rank_on_cpu: None) -> None:
    """Decent-DP stores a committed moment multiplied by its beta; here it is stored as in the paper."""
    fn = partial(decent_dp.optim_fn_accum_adam, beta1=0.5, beta2=0.25)
    wrapped = Wrapper(torch.nn.Linear(2, 1, bias=False), fn)
    group = {"params": [0], "lr": 0.3, "betas": (0.5, 0.25)}
    state = {"step": torch.tensor(4), "exp_avg": torch.ones(1, 2), "exp_avg_sq": torch.ones(1, 2),
             "accum_grad": torch.zeros(1, 2)}  # fmt: skip
    wrapped(torch.zeros(1, 2)).sum().backward()
    wrapped.load_optimizers([{"state": {0: state}, "param_groups": [group, {**group, "params": []}]}])
    (loaded,) = wrapped.optimizer.state.values()
    assert loaded["step"] == 4 and loaded["exp_avg"].tolist() == [[2, 2]] and loaded["exp_avg_sq"].tolist() == [[4, 4]]
    assert wrapped.get_lr() == 0.3


def test_accum_adam_loads_the_state_of_decent_dps_accum_adam() -> None:
    """Scripts load what they saved of `_optims` directly; its groups lack the options that only decentnode has."""
    p = torch.ones(2, requires_grad=True)
    state = {"step": torch.tensor(4), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2),
             "accum_grad": torch.zeros(2)}  # fmt: skip
    group = {"params": [0], "lr": 0.3, "betas": (0.5, 0.25), "eps": 1e-8, "weight_decay": 0.0, "accum_iter": 4}
    optimizer = decent_dp.AccumAdam([p])
    optimizer.load_state_dict({"state": {0: state}, "param_groups": [group]})
    loaded = optimizer.state[p]
    assert loaded["exp_avg"].tolist() == [2, 2] and loaded["exp_avg_sq"].tolist() == [4, 4] and loaded["step"] == 4
    assert state["exp_avg"].tolist() == [1, 1], "the saved state must not change"
    other = decent_dp.AccumAdam([p])
    other.load_state_dict(optimizer.state_dict())
    assert torch.equal(other.state[p]["exp_avg"], loaded["exp_avg"])
    p.grad = torch.ones(2)
    other.step()
    assert other.state[p]["step"] == 5


def test_differences_from_decent_dp_are_logged_once(
    single_rank_on_cpu: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wrapper, "_logged", False)
    cosine = partial(decent_dp.lr_scheduler_fn_cosine_with_warmup, t_max=10, t_warmup=2)
    with caplog.at_level(logging.WARNING):
        Wrapper(model(), ADAM, cosine, scaler=torch.amp.GradScaler("cpu"), grad_clip_norm=1.0)
        Wrapper(model(), ADAM)
    (text,) = [message for message in caplog.messages if "Decent-DP" in message]
    for word in ("no round is skipped", "weight decay", "clipping", "cosine", "scaler", "global_avg", "faithful=True"):
        assert word in text
    caplog.clear()
    monkeypatch.setattr(wrapper, "_logged", False)
    Wrapper(model(), lambda named: torch.optim.SGD([p for _, p in named], lr=0.1), faithful=True)
    assert not caplog.messages


def test_parameter_groups_and_schedules_differ_under_as_there() -> None:
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


def test_faithful_training_takes_no_step_at_the_first_gradient(single_rank_on_cpu: None) -> None:
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    wrapped = Wrapper(model(), ADAM, schedule, faithful=True)
    before = flat(wrapped._model)
    step(wrapped, 0)
    assert wrapped.get_lr() == 0.0 and wrapped._optims == [] and torch.equal(before, flat(wrapped._model))
    step(wrapped, 1)
    assert wrapped.get_lr() == 2.5e-3 and wrapped.steps == 2


@pytest.mark.parametrize(("options", "disabled", "steps"), [({}, 2, 0), ({}, 1, 3), ({"faithful": True}, 1, 3)])
def test_a_loop_that_never_takes_a_step_is_warned(
    options: dict[str, Any], disabled: int, steps: int, single_rank_on_cpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The tutorial's loop disables accumulation only after the last of two passes, so that no step is taken
    (disabled=2)."""
    wrapped = Wrapper(model(), ADAM, **options)
    caplog.clear()
    for t in range(3):
        wrapped.set_accumulate_grad(True)
        for number in range(2):
            if number == disabled:
                wrapped.set_accumulate_grad(False)
            step(wrapped, 2 * t + number)
        wrapped.set_accumulate_grad(False)
    warnings = [message for message in caplog.messages if "no step was taken" in message]
    assert len(warnings) == (steps == 0)
    step(wrapped, 9)
    assert wrapped.steps == steps + 1


class GivenEdges(Topology):
    """A topology whose subclasses set `edges`."""

    def _get_topo_edges(self) -> list[list[Edge]]:
        return self.edges  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize(("edges", "message"), [
    ([], "at least one round"), ([[]], "rank 0 is in no edge"), ([[Edge([0], 1.0), Edge([0], 1.0)]], "rank 0 twice"),
    ([[Edge([0, 1], 0.5)]], "ranks below 1, got 1"), ([[Edge([0], 0.5)]], "must be 1 for a rank that is alone"),
], ids=["none", "missing", "twice", "outside", "alone"])  # fmt: skip
def test_invalid_edges_are_refused(edges: list[list[Edge]], message: str, single_rank_on_cpu: None) -> None:
    kind = type("Kind", (GivenEdges,), {"edges": edges})
    with pytest.raises(ValueError, match=message):
        Wrapper(model(), ADAM, topology=kind)


def test_a_topology_without_the_edges_of_all_ranks_is_refused(single_rank_on_cpu: None) -> None:
    class OwnEdgeOnly(GivenEdges):
        edges: ClassVar = [[Edge([0], 1.0)]]

        def get_edge(self, step: int) -> Edge:
            return self.edges[0][0]

    with pytest.raises(ValueError, match="must say its edges in _get_topo_edges"):
        Wrapper(model(), ADAM, topology=OwnEdgeOnly)


def test_subclasses_of_a_named_topology_have_their_own_edges(single_rank_on_cpu: None) -> None:
    class Own(TopologyReg.registry["ring"]):  # type: ignore[misc]
        def _get_topo_edges(self) -> list[list[Edge]]:
            return [[Edge([0], 1.0)]] * 3

    class Subclass(Own):
        pass

    assert graph_for(Subclass, 1, 1).period == 3


def test_topologies_are_registered_by_name(single_rank_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TopologyReg, "registry", dict(TopologyReg.registry))
    assert set(TopologyReg.registry) == {"complete", "ring", "one-peer-exp", "alternating-exp-ring"}
    kind = TopologyReg.register("mine")(type("Kind", (GivenEdges,), {"edges": [[Edge([0], 1.0)]]}))
    Wrapper(model(), ADAM, topology="mine")
    with pytest.raises(ValueError, match="mine is registered already"):
        TopologyReg.register("mine")(kind)
    with pytest.raises(ValueError, match="must be a subclass of Topology"):
        TopologyReg.register("other")(int)  # type: ignore[arg-type]
    assert TopologyReg.registry["complete"](1).get_edge(7) == Edge([0], 1.0)


@pytest.mark.parametrize(("name", "n", "local"), [
    ("complete", 3, 1), ("ring", 6, 1), ("one-peer-exp", 8, 1), ("alternating-exp-ring", 8, 2),
])  # fmt: skip
def test_a_graph_converted_to_edges_and_back_has_the_same_matrices(name: str, n: int, local: int) -> None:
    graph = make_topology(name, n, local)
    edges = [edges_of(graph, round) for round in range(graph.period or 1)]
    again = EdgeGraph(edges, n)
    for round in range(2 * len(edges)):
        assert (abs(again.matrix(round) - graph.matrix(round)) < 1e-12).all()


def test_a_graph_that_cannot_be_written_as_edges_is_refused() -> None:
    with pytest.raises(ValueError, match="is no list of edges for 5 ranks"):
        edges_of(make_topology("ring", 5, 1), 0)


def test_a_disconnected_topology_is_refused() -> None:
    from decentnode.parallel.planning.plan import Plan
    from decentnode.parallel.planning.rules import make_sharing

    disconnected = EdgeGraph([[Edge([0, 1], 0.5), Edge([2, 3], 0.5)]], 4)
    with pytest.raises(ValueError, match="never hears of rank"):
        Plan(disconnected, make_sharing("full"), 0)


@pytest.mark.sampled(one=["options", "average", "hooked"])
@pytest.mark.parametrize(("options", "average", "hooked"), [
    ({}, 3, False), ({"faithful": True}, 3, False), ({"faithful": True, "transport": "collective"}, 2, True),
    ({"faithful": True, "grad_clip_norm": work.CLIP, "bucket_size_in_mb": 0}, 0, False), ({}, 3, True),
], ids=["default", "faithful", "faithful, hooked", "faithful, clipped", "default, hooked"])  # fmt: skip
def test_steps_equal_the_simulation(options: dict[str, Any], average: int, hooked: bool) -> None:
    """Over the tutorial's topology. Training continues from an average; with faithful=True, the next mixing still uses
    what was sent before it."""
    faithful = "faithful" in options
    expected = work.simulate(8, average, faithful, clipped="grad_clip_norm" in options)
    for rank, (parameters, hook_calls, optimizers) in enumerate(run_ranks(4, work.train, options, 8, average, hooked)):
        assert parameters == pytest.approx(expected[rank], abs=2e-6)
        assert optimizers == (6 if "grad_clip_norm" in options else 1)
        if hooked:
            rounds = range(1, 9) if faithful else range(8)
            partners = [[1, 2, 3], [0, 3, 2], [3, 0, 1], [2, 1, 0]][rank]
            assert [ranks for ranks, _, _ in hook_calls] == [sorted([rank, partners[r % 3]]) for r in rounds]
            assert {weight for _, weight, _ in hook_calls} == {0.5}


@pytest.mark.sampled(one=["options", "average", "passes", "evaluates"])
@pytest.mark.parametrize(("options", "average", "passes", "evaluates"), [
    ({}, 0, 1, False), ({"faithful": True}, 3, 1, False), ({"faithful": True}, 0, 3, False), ({}, 0, 3, True),
    ({"faithful": True, "param_as_bucket_view": False}, 0, 1, True),
], ids=["default", "faithful", "faithful, accumulating", "default, accumulating", "faithful, evaluating"])  # fmt: skip
def test_steps_over_edges_with_uneven_weights_equal_the_simulation(
    options: dict[str, Any], average: int, passes: int, evaluates: bool
) -> None:
    """Decent-DP takes the first step in the second forward pass, even in evaluation or between accumulated passes."""
    expected = work.simulate(7, average, "faithful" in options, topology=work.UnevenWeights, passes=passes)
    results = run_ranks(4, work.train, options, 7, average, False, work.UnevenWeights, passes, evaluates)
    for rank, (parameters, _, _) in enumerate(results):
        assert parameters == pytest.approx(expected[rank], abs=2e-6)


@pytest.mark.sampled(one=["average", "at"])
@pytest.mark.parametrize(("average", "at"), [(0, 1), (0, 2), (0, 5), (3, 3), (3, 5), (3, 6)])
def test_a_faithful_run_is_resumed_with_the_same_bits(average: int, at: int) -> None:
    """From the full state, also after an average while what was sent before it is in flight; and from the lists that
    Decent-DP's scripts save, where `steps` gives the round of the topology."""
    for differences in run_ranks(4, work.resume_and_compare, average, at):
        assert len(differences) == (2 if average or at == 1 else 4)
        assert differences == {name: [0.0] * 5 for name in differences}


@pytest.mark.parametrize(("options", "message"), [
    ({"sharing": {"name": "local_sgd", "every": 3}, "delayed": True}, "has no delayed=True"),
    ({"sharing": {"name": "full", "compression": {"name": "bfloat16"}}}, "has no compression"),
])  # fmt: skip
def test_options_that_decent_dp_lacks_are_refused_with_faithful_true(
    options: dict[str, Any], message: str, single_rank_on_cpu: None
) -> None:
    with pytest.raises(ValueError, match=message):
        Wrapper(model(), ADAM, faithful=True, **options)
    Wrapper(model(), ADAM, **options)


def test_states_of_another_kind_are_refused_by_name(single_rank_on_cpu: None) -> None:
    faithful_one, default_one = Wrapper(model(), ADAM, faithful=True), Wrapper(model(), ADAM)
    for t in range(3):
        step(faithful_one, t)
        step(default_one, t)
    for wrapped, saved, message in ((default_one, faithful_one, "must be True, as in the saved run, got False"),
                                    (faithful_one, default_one, "must be False, as in the saved run, got True")):
        with pytest.raises(ValueError, match=f"faithful {message}"):
            wrapped.load_state_dict(saved.full_state_dict())
    optimizers = [optimizer.state_dict() for optimizer in faithful_one._optims]
    for faithful in (True, False):
        other = Wrapper(model(), partial(make_sgd, rate=0.1), faithful=faithful)
        step(other, 0)
        with pytest.raises(ValueError, match=r"bucket 0, optimizer must be the saved one, with .*betas.*, got SGD"):
            other.load_optimizers(optimizers, steps=3)
        other.close()
    with pytest.raises(ValueError, match="steps must be those taken when the optimizers were saved"):
        faithful_one.load_optimizers(optimizers)


def make_sgd(named: list[tuple[str, torch.Tensor]], rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=rate)


def test_loading_a_plain_state_dict_keeps_the_optimizers_and_replaces_what_is_sent(single_rank_on_cpu: None) -> None:
    wrapped = Wrapper(model(), ADAM, faithful=True)
    for t in range(3):
        step(wrapped, t)
    before = str([optimizer.state_dict() for optimizer in wrapped._optims])
    wrapped.global_avg(will_revert=False)
    wrapped.load_state_dict({f"_model.{name}": value for name, value in model(5).state_dict().items()})
    assert str([optimizer.state_dict() for optimizer in wrapped._optims]) == before and wrapped.steps == 3
    assert torch.equal(flat(wrapped._model), flat(model(5))) and wrapped._gossip.to_send is None
