"""CommOptimizer: what its methods conserve, their periods and leaders, and its interface as an optimizer of torch."""

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
from tests.parallel.work import comm_optimizer


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DIST_OPTIMIZERS])
def test_every_method_exchanges_by_its_period_and_trains(name: str) -> None:
    n = 3
    results = run_ranks(n, comm_optimizer.exchange_and_train, name, {"dist_pulling_strength": 0.2})
    for rank, result in enumerate(results):
        assert result["unchanged_at_start"] and result["center_is_mean"]
        if name in ("EASGD", "EAMSGD"):
            assert result["conserved"] < 1e-5
        if name.startswith("LSGD"):
            assert result["leader"] == 0
        is_pulled = name.startswith("EASGD") or name == "EAMSGD" or name == "LSGD+" or (name == "LSGD" and rank > 0)
        assert result["exchange_steps"] == ([3, 6, 9] if is_pulled else []), "every third step exactly"
    losses = [sum(result["losses"][k] for result in results) for k in (0, 1)]
    assert losses[1] < losses[0]
    for result in results:
        assert result["lr"] == pytest.approx(0.05 * 0.5**6)
    if name == "LSGD":
        parameters = [torch.tensor(result["parameter"]) for result in results]
        torch.manual_seed(2)  # as rank 2 does
        start = torch.randn(7)
        expected = parameters[0] + 0.8**3 * (start - parameters[0])  # pulled by 0.2 toward the leader, three times
        torch.testing.assert_close(parameters[2], expected)


@pytest.mark.slow
def test_lsgd_pulls_toward_the_last_leader_between_exchanges() -> None:
    results = run_ranks(2, comm_optimizer.exchange_and_train, "LSGD", {"local_pulling_strength": 0.3})
    for rank, result in enumerate(results):
        assert result["exchange_steps"] == ([3, 4, 5, 6, 7, 8, 9] if rank else [])


@pytest.mark.parametrize(("hosts", "leader", "wrapper"), [
    ("aabb", 2, 2), ("abab", 1, 1), ("aaab", 4, 1), ("aaaa", 4, 4),
])  # fmt: skip
@pytest.mark.slow
def test_ranks_per_machine_are_counted_without_torchrun(hosts: str, leader: int, wrapper: int) -> None:
    for result in run_ranks(4, comm_optimizer.count_ranks_per_machine, list(hosts)):
        assert result == (leader, wrapper, 4)


@pytest.mark.sampled(one=["environment", "arguments", "expected"])
@pytest.mark.parametrize(("environment", "arguments", "expected"), [
    (["2", None, "2", None], None, 2), ([None, None, "2", "2"], None, 2),
    (["3", "3", "3", "1"], None, None), (["4", "4", "4", "4"], None, 4),
    (["4", "4", None, "4"], None, "rank 0-1, 3 has 4, rank 2 has none, and 2 are counted"),
    (["2", "2", "2", "2"], {3: 4}, "rank 0-2 has 2, rank 3 has 4, and 2 are counted"),
    ([None, None, None, None], {0: 4}, "rank 0 has 4, rank 1-3 has none, and 2 are counted"),
    (["4", "four", None, "4"], None, "must be the number of ranks on the machine, got 'four' on rank 1"),
])  # fmt: skip
def test_ranks_agree_on_the_number_of_ranks_per_machine(
    environment: list[str | None], arguments: dict[int, int] | None, expected: int | str | None
) -> None:
    """Also where only some ranks know it from torchrun: the others count by a collective, which all must enter."""
    results = run_ranks(4, comm_optimizer.agree_on_ranks_per_machine, environment, arguments or {}, timeout_seconds=60)
    for result in results:
        assert result == expected if not isinstance(expected, str) else expected in result


def test_a_rank_whose_loss_is_nan_does_not_lead() -> None:
    assert run_ranks(3, comm_optimizer.exchange_with_nan_on_rank_0, "LSGD") == [(1, False), (1, True), (1, True)]


@pytest.mark.sampled
@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("name", ["EASGD", "EAMSGD", "EASGD+", "LSGD", "LSGD+"])
def test_overlapped_exchanges_take_effect_later_and_are_resumed_in_flight(name: str, period: int) -> None:
    delay = 2 if name.startswith("LSGD") else 1
    for rank, result in enumerate(run_ranks(3, comm_optimizer.exchange_with_overlap, name, period)):
        is_pulled = name != "LSGD" or rank > 0
        steps = [step for step in range(1 + delay, 10) if (step - delay) % period == 0]
        assert result["exchange_steps"] == (steps if is_pulled else [])
        assert result["same_after_resume"], "a resume in the middle of an exchange changes nothing"
        if name in ("EASGD", "EAMSGD"):
            assert result["conserved"] < 1e-5


@pytest.mark.parametrize(("options", "message"), [
    ({"dist_optim_name": "DDP", "overlap": True}, "needs its gradients"),
    ({"dist_optim_name": "SGD"}, "one of EASGD"), ({"comm_period": 0}, "comm_period"),
    ({"world_size": 2}, "world_size"),
    ({"dist_optim_name": "easgd", "dist_pulling_strength": 1.0}, "below 2"),
    ({"dist_optim_name": "EAMSGD"}, "momentum"), ({"local_pulling_strength": 2.0}, "local_pulling_strength"),
])  # fmt: skip
def test_invalid_arguments_are_refused(options: dict[str, object], message: str) -> None:
    local = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
    with pytest.raises(ValueError, match=message):
        CommOptimizer(local, **{"world_size": 1, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(("options", "own_error"), [
    ({"comm_period": 0}, "ValueError: comm_period must be"), ({"dist_optim_name": "SGD"}, "ValueError: .*one of EASGD"),
    ({"dist_optim_name": "EAMSGD"}, "ValueError: EAMSGD needs"), ({"world_size": 3}, "ValueError: world_size must be"),
    ({"local_world_size": 3}, "ValueError: local_world_size must divide"), ({"periods": 4}, "TypeError: .*'periods'"),
], ids=str)  # fmt: skip
def test_a_rank_with_invalid_arguments_is_named_on_all_ranks(options: dict[str, Any], own_error: str) -> None:
    """The next collective of all ranks still works."""
    results = run_ranks(2, comm_optimizer.construct_with_options_on_rank_1, options, 3, timeout_seconds=60)
    assert [total for _, total in results] == [2, 2]
    (error_0, _), (error_1, _) = results
    assert re.search(f"^{own_error}", error_1)
    assert error_0 == f"AssemblyError: rank 1 could not make the optimizer: {error_1}"


@pytest.mark.parametrize(("options", "elements", "message"), [
    ({"dist_optim_name": "EASGD"}, 3, "'EASGD with comm_period 4 and overlap False', rank 0 has 'LSGD with"),
    ({"comm_period": 3}, 3, "comm_period 3"), ({"overlap": True}, 3, "overlap True"),
    ({}, 4, r"'parameter 0: \(4,\) torch.float32', rank 0 has 'parameter 0: \(3,\)"),
], ids=str)  # fmt: skip
def test_a_rank_with_another_method_or_other_parameters_is_named(
    options: dict[str, Any], elements: int, message: str
) -> None:
    work = comm_optimizer.construct_with_options_on_rank_1
    for error, total in run_ranks(2, work, options, elements, timeout_seconds=60):
        assert total == 2
        assert re.search(f"AssemblyError: rank 1 has another method than rank 0: .*{message}", error), error


def test_the_exit_of_a_rank_is_reported_as_a_lost_peer() -> None:
    succeeded, error = outcomes_of_ranks(2, comm_optimizer.exit_before_exchange)[0]
    message = (r"rank 0: PeerLost: rank 0: the exchange of step 0 with the other ranks failed, for example as .*: "
               r"\w[^/]*\n")  # fmt: skip
    assert not succeeded and re.match(message, error), error


def test_parameters_set_to_the_center_do_not_share_its_memory() -> None:
    p = nn.Parameter(torch.ones(3))
    comm = CommOptimizer(torch.optim.SGD([p], lr=0.1), "EASGD", world_size=1, comm_period=10)
    nn.utils.vector_to_parameters(comm.center, [p])
    p.grad = torch.ones(3)
    comm.step()
    assert comm.center.tolist() == [1.0] * 3 and p.tolist() == pytest.approx([0.9] * 3)


def test_at_center_puts_the_center_into_the_model_and_restores_the_model_afterwards() -> None:
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


def test_parameters_that_share_memory_or_change_their_dtype_are_refused() -> None:
    weight = nn.Parameter(torch.randn(3, 3))
    tied, one = nn.Parameter(weight.data.t()), nn.Parameter(torch.ones(1).expand(3))
    with pytest.raises(ValueError, match=r"parameter . of the optimizer shares memory with parameter .* pulled twice"):
        CommOptimizer(torch.optim.SGD([weight, tied], lr=0.1), "EASGD")
    with pytest.raises(ValueError, match=r"parameter 0 of the optimizer must have memory for each of its elements"):
        CommOptimizer(torch.optim.SGD([one], lr=0.1), "LSGD")
    assert CommOptimizer(torch.optim.SGD([weight, tied], lr=0.1), "DDP").steps == 0, "DDP pulls no parameters"
    module = nn.Linear(2, 1)
    comm = CommOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), "EASGD")
    module.double()
    with pytest.raises(RuntimeError, match=r"must stay torch.float32 on cpu, .* got torch.float64 on cpu: make it"):
        comm.step()


@pytest.mark.parametrize("name", ["EASGD", "LSGD"])
def test_a_loss_must_be_a_number_but_a_closure_may_return_anything(name: str) -> None:
    module = nn.Linear(2, 1)
    comm = CommOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), name)
    for loss, words in ((torch.ones(2), r"a tensor of shape \(2,\)"), ({"loss": 1.0}, "dict")):
        with pytest.raises(ValueError, match=f"loss must be one number, got {words}"):
            comm.step(loss=loss)
    assert comm.steps == 0 and comm.step(lambda: (1.0, "output")) == (1.0, "output") and comm.steps == 1


def test_a_state_can_be_loaded_twice() -> None:
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
def test_a_compiled_training_step_has_the_bits_of_a_plain_one(name: str) -> None:
    for same, steps in run_ranks(2, comm_optimizer.compare_compiled_step, name):
        assert same and steps == 5


def test_a_single_rank_trains_and_lsgd_without_a_loss_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
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
