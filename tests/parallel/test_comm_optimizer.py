"""CommOptimizer: conservation, period, leaders, and that it is an ordinary optimizer to everybody else."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

from decentnode.parallel import CommOptimizer
from decentnode.parallel.comm_optimizer import DIST_OPTIMIZERS
from tests.parallel.ranks import outcomes_of_ranks, run_ranks
from tests.parallel.work import meeting


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DIST_OPTIMIZERS])
def test_every_method(name: str) -> None:
    n = 3
    results = run_ranks(n, meeting.elastic, name, {"dist_pulling_strength": 0.2})
    for rank, found in enumerate(results):
        assert found["unchanged"] and found["center"]
        if name in ("EASGD", "EAMSGD"):
            assert found["conserved"] < 1e-5
        if name.startswith("LSGD"):
            assert found["leader"] == 0
        follows = name.startswith("EASGD") or name == "EAMSGD" or name == "LSGD+" or (name == "LSGD" and rank > 0)
        assert found["met"] == ([3, 6, 9] if follows else []), "every third step exactly"
    losses = [sum(found["losses"][k] for found in results) for k in (0, 1)]
    assert losses[1] < losses[0]
    for found in results:
        assert found["lr"] == pytest.approx(0.05 * 0.5**6)
    if name == "LSGD":
        spread = [torch.tensor(found["at"]) for found in results]
        torch.manual_seed(2)
        start = torch.randn(7)
        expected = spread[0] + 0.8**3 * (start - spread[0])
        torch.testing.assert_close(spread[2], expected)


@pytest.mark.slow
def test_pulls_in_between_go_to_the_last_leader() -> None:
    for rank, found in enumerate(run_ranks(2, meeting.elastic, "LSGD", {"local_pulling_strength": 0.3})):
        assert found["met"] == ([3, 4, 5, 6, 7, 8, 9] if rank else [])


@pytest.mark.parametrize(("hosts", "leader", "wrapper"), [
    ("aabb", 2, 2), ("abab", 1, 1), ("aaab", 4, 1), ("aaaa", 4, 4),
])  # fmt: skip
@pytest.mark.slow
def test_without_torchrun_machines_are_counted(hosts: str, leader: int, wrapper: int) -> None:
    for found in run_ranks(4, meeting.machines, list(hosts)):
        assert found == (leader, wrapper, 4)


@pytest.mark.sampled(one=["told", "given", "found"])
@pytest.mark.parametrize(("told", "given", "found"), [
    (["2", None, "2", None], None, 2), ([None, None, "2", "2"], None, 2),
    (["3", "3", "3", "1"], None, None), (["4", "4", "4", "4"], None, 4),
    (["4", "4", None, "4"], None, "rank 0-1, 3 has 4, rank 2 has none, and 2 are counted"),
    (["2", "2", "2", "2"], {3: 4}, "rank 0-2 has 2, rank 3 has 4, and 2 are counted"),
    ([None, None, None, None], {0: 4}, "rank 0 has 4, rank 1-3 has none, and 2 are counted"),
    (["4", "four", None, "4"], None, "must be the number of ranks on the machine, got 'four' on rank 1"),
])  # fmt: skip
def test_ranks_agree_on_how_many_a_machine_has(
    told: list[str | None], given: dict[int, int] | None, found: int | str | None
) -> None:
    """Also where only some are told: else these would wait in vain for the others, which count."""
    for result in run_ranks(4, meeting.agreed, told, given or {}, timeout_seconds=60):
        assert result == found if not isinstance(found, str) else found in result


def test_a_rank_whose_loss_is_no_number_does_not_lead() -> None:
    assert run_ranks(3, meeting.diverged, "LSGD") == [(1, False), (1, True), (1, True)]


@pytest.mark.sampled
@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("name", ["EASGD", "EAMSGD", "EASGD+", "LSGD", "LSGD+"])
def test_exchanges_behind_the_next_steps(name: str, period: int) -> None:
    late = 2 if name.startswith("LSGD") else 1
    for rank, found in enumerate(run_ranks(3, meeting.overlapped, name, period)):
        follows = name != "LSGD" or rank > 0
        steps = [step for step in range(1 + late, 10) if (step - late) % period == 0]
        assert found["met"] == (steps if follows else [])
        assert found["same"], "a resume in the middle of an exchange changes nothing"
        if name in ("EASGD", "EAMSGD"):
            assert found["conserved"] < 1e-5


@pytest.mark.parametrize(("options", "says"), [
    ({"dist_optim_name": "DDP", "overlap": True}, "needs its gradients"),
    ({"dist_optim_name": "SGD"}, "one of EASGD"), ({"comm_period": 0}, "comm_period"),
    ({"world_size": 2}, "world_size"),
    ({"dist_optim_name": "easgd", "dist_pulling_strength": 1.0}, "below 2"),
    ({"dist_optim_name": "EAMSGD"}, "momentum"), ({"local_pulling_strength": 2.0}, "local_pulling_strength"),
])  # fmt: skip
def test_wrong_arguments(options: dict[str, object], says: str) -> None:
    local = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
    with pytest.raises(ValueError, match=says):
        CommOptimizer(local, **{"world_size": 1, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(("options", "own"), [
    ({"comm_period": 0}, "ValueError: comm_period must be"), ({"dist_optim_name": "SGD"}, "ValueError: .*one of EASGD"),
    ({"dist_optim_name": "EAMSGD"}, "ValueError: EAMSGD needs"), ({"world_size": 3}, "ValueError: world_size must be"),
    ({"local_world_size": 3}, "ValueError: local_world_size must divide"), ({"periods": 4}, "TypeError: .*'periods'"),
], ids=str)  # fmt: skip
def test_a_rank_with_wrong_arguments_is_named_on_all_at_once(options: dict[str, Any], own: str) -> None:
    """And whatever the ranks do together next meets its like."""
    results = run_ranks(2, meeting.refused, options, 3, timeout_seconds=60)
    assert [total for _, total in results] == [2, 2]
    (other, _), (told, _) = results
    assert re.search(f"^{own}", told) and other == f"AssemblyError: rank 1 could not make the optimizer: {told}"


@pytest.mark.parametrize(("options", "elements", "says"), [
    ({"dist_optim_name": "EASGD"}, 3, "'EASGD with comm_period 4 and overlap False', rank 0 has 'LSGD with"),
    ({"comm_period": 3}, 3, "comm_period 3"), ({"overlap": True}, 3, "overlap True"),
    ({}, 4, r"'parameter 0: \(4,\) torch.float32', rank 0 has 'parameter 0: \(3,\)"),
], ids=str)  # fmt: skip
def test_a_rank_whose_exchanges_would_not_fit_is_named(options: dict[str, Any], elements: int, says: str) -> None:
    for told, total in run_ranks(2, meeting.refused, options, elements, timeout_seconds=60):
        assert total == 2 and re.search(f"AssemblyError: rank 1 has another method than rank 0: .*{says}", told), told


def test_a_rank_that_has_ended_is_told_of_in_plain_words() -> None:
    ok, text = outcomes_of_ranks(2, meeting.ends_early)[0]
    says = r"rank 0: PeerLost: rank 0: the exchange of step 0 with the other ranks failed, for example as .*: \w[^/]*\n"
    assert not ok and re.match(says, text), text


def test_a_model_that_was_given_the_center_trains_on_apart_from_it() -> None:
    p = nn.Parameter(torch.ones(3))
    comm = CommOptimizer(torch.optim.SGD([p], lr=0.1), "EASGD", world_size=1, comm_period=10)
    nn.utils.vector_to_parameters(comm.center, [p])
    p.grad = torch.ones(3)
    comm.step()
    assert comm.center.tolist() == [1.0] * 3 and p.tolist() == pytest.approx([0.9] * 3)


def test_the_center_is_evaluated_in_place_and_the_own_model_comes_back() -> None:
    layer = nn.Linear(2, 1)
    frozen = layer.bias.requires_grad_(False)
    half = nn.Parameter(torch.tensor([0.1, 3.0], dtype=torch.bfloat16))
    with torch.no_grad():
        layer.weight.fill_(0.3)
    comm = CommOptimizer(torch.optim.SGD([layer.weight, half], lr=0.1), "EASGD", world_size=1, comm_period=10)
    layer.weight.grad = torch.ones_like(layer.weight)
    comm.step()
    own = [p.detach().clone() for p in (layer.weight, frozen, half)]
    with pytest.raises(KeyError), comm.at_center():
        with comm.at_center():
            assert layer.weight.tolist() == [[pytest.approx(0.3)] * 2] and torch.equal(half, own[2])
        with pytest.raises(RuntimeError, match="must not begin inside at_center"):
            comm.step()
        raise KeyError
    assert all(torch.equal(p, value) for p, value in zip((layer.weight, frozen, half), own, strict=True))
    comm.step()


def test_what_would_be_pulled_twice_or_rounded_is_refused() -> None:
    weight = nn.Parameter(torch.randn(3, 3))
    tied, one = nn.Parameter(weight.data.t()), nn.Parameter(torch.ones(1).expand(3))
    with pytest.raises(ValueError, match=r"parameter . of the optimizer shares memory with parameter .* pulled twice"):
        CommOptimizer(torch.optim.SGD([weight, tied], lr=0.1), "EASGD")
    with pytest.raises(ValueError, match=r"parameter 0 of the optimizer must have memory for each of its elements"):
        CommOptimizer(torch.optim.SGD([one], lr=0.1), "LSGD")
    assert CommOptimizer(torch.optim.SGD([weight, tied], lr=0.1), "DDP").steps == 0, "it pulls nothing"
    module = nn.Linear(2, 1)
    comm = CommOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), "EASGD")
    module.double()
    with pytest.raises(RuntimeError, match=r"must stay torch.float32 on cpu, .* got torch.float64 on cpu: make it"):
        comm.step()


@pytest.mark.parametrize("name", ["EASGD", "LSGD"])
def test_a_loss_is_a_number_and_closures_return_what_they_like(name: str) -> None:
    module = nn.Linear(2, 1)
    comm = CommOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), name)
    for loss, words in ((torch.ones(2), r"a tensor of shape \(2,\)"), ({"loss": 1.0}, "dict")):
        with pytest.raises(ValueError, match=f"loss must be one number, got {words}"):
            comm.step(loss=loss)
    assert comm.steps == 0 and comm.step(lambda: (1.0, "output")) == (1.0, "output") and comm.steps == 1


def test_a_state_may_be_loaded_again() -> None:
    p = nn.Parameter(torch.ones(2))
    comm = CommOptimizer(torch.optim.SGD([p], lr=0.1, momentum=0.9), "EASGD")
    p.grad = torch.ones(2)
    comm.step()
    state, ends = copy.deepcopy(comm.state_dict()), []
    for _ in range(2):
        comm.load_state_dict(state)
        p.data.fill_(1.0)
        comm.step()
        ends.append(p.detach().clone())
    assert torch.equal(*ends)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["EASGD", "LSGD"])
def test_a_compiled_step_is_called_whole(name: str) -> None:
    for same, steps in run_ranks(2, meeting.compiled, name):
        assert same and steps == 5


def test_alone_and_without_a_loss(caplog: pytest.LogCaptureFixture) -> None:
    p = torch.ones(3, requires_grad=True)
    comm = CommOptimizer(torch.optim.SGD([p], lr=0.1), "LSGD", world_size=1, comm_period=2)
    for _ in range(6):
        def closure() -> torch.Tensor:
            comm.zero_grad()
            loss = p.square().sum()
            loss.backward()
            return loss

        comm.step(closure)
    assert float(p[0].detach()) == pytest.approx(0.8**6) and not caplog.messages
    other = CommOptimizer(torch.optim.SGD([p], lr=0.1), "LSGD", world_size=1, comm_period=2)
    for _ in range(4):
        p.grad = p.detach().clone()
        other.step()
    assert len(caplog.messages) == 1 and "without step(loss" in caplog.text
    with pytest.raises(ValueError, match="center covers"):
        comm.add_param_group({"params": []})
