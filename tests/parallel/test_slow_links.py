"""Exchanges for slow links: compressed, or delayed so that they overlap several steps."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.conftest import free_ports
from tests.parallel.job_processes import JobProcesses
from tests.parallel.ranks import run_ranks
from tests.parallel.work import compressing, members, training


def full(codec: Any) -> dict[str, Any]:
    return {"name": "full", "compression": {"name": codec} if isinstance(codec, str) else codec}


def choco(codec: Any) -> dict[str, Any]:
    return {**full(codec), "name": "choco", "choose": "all"}


CASES: list[tuple[int, Any, Any, dict[str, Any], float, float]] = [
    (4, "one-peer-exp", full("bfloat16"), {}, 2.0, 2e-6),
    (3, "complete", full("int8"), {"param_as_bucket_view": False}, 2 * 1.3, 2e-6),
    # another last bit of float32 may round to the next number of float16, 5e-4 away
    (3, "ring", {"name": "ac", "rounds": 3, "compression": {"name": "float16"}}, {}, 4.0, 4e-4),
    (4, "one-peer-exp", choco("int8"), {}, 1.3, 2e-6),
    (3, "ring", {"name": "choco", "fraction": 0.2, "step_size": 0.3}, {}, 2 * 0.93, 2e-6),
    (4, "one-peer-exp", {**choco("int8"), "every": 2}, {}, 1.3 / 2, 2e-6),
    (3, "ring", {"name": "choco", "fraction": 0.2, "step_size": 0.3, "every": 2}, {"delayed": True}, 0.93, 2e-6),
    (4, "ring", {"name": "local_sgd", "every": 3}, {"delayed": True}, 4 / 3, 2e-6),
    (3, "complete", {"name": "local_sgd", "every": 4}, {"delayed": True, "transport": "collective"}, 4 / 3, 2e-6),
    (3, "ring", {"name": "local_sgd", "every": 2, "compression": {"name": "bfloat16"}}, {"delayed": True}, 2.0, 2e-6),
    (2, "ring", {"name": "local_sgd", "every": 2}, {"delayed": True, "param_as_bucket_view": False}, 2.0, 2e-6),
]  # fmt: skip


@pytest.mark.sampled(of=lambda n, topology, sharing, options, bytes_per_value, tolerance: {
    sharing["name"], "every" in sharing and sharing["name"] == "choco", *options})  # fmt: skip
@pytest.mark.parametrize(("n", "topology", "sharing", "options", "bytes_per_value", "tolerance"), CASES)
def test_training_equals_the_simulation_and_sends_the_expected_bytes(
    n: int, topology: Any, sharing: Any, options: dict[str, Any], bytes_per_value: float, tolerance: float
) -> None:
    steps = 8  # in later steps, another last bit may round to the next value of a coarse codec
    for difference, metrics, values in run_ranks(n, compressing.train, topology, sharing, options, steps):
        assert difference < tolerance
        whole = 4 * 2 * values * 2 if sharing["name"] == "choco" else 0.0  # the first exchange of each phase
        assert metrics["bytes_sent"] <= bytes_per_value * values * (steps + 1) + whole
        assert metrics["bytes_sent"] > 0.5 * bytes_per_value * values * steps


@pytest.mark.parametrize("given", [{}, {"step_size": 0.25}])
def test_one_rank_searches_the_step_size_for_all_ranks(given: dict[str, float]) -> None:
    searched = 0 if given else 1
    step = given.get("step_size", 0.5)
    results = run_ranks(3, compressing.count_step_searches, {**choco("int8"), **given})
    assert results == [(searched, [step]), (0, [step]), (0, [step])]


def consensus_cases(topologies: list[Any], transport: str) -> list[tuple[Any, Any, dict[str, Any], float]]:
    """Returns (topology, rule, options, largest distance between the ranks that may be left after 160 steps)."""
    options: dict[str, Any] = {"transport": transport}
    cases: list[tuple[Any, Any, dict[str, Any], float]] = []
    for topology in topologies:
        cases += [(topology, full("bfloat16"), options, 0.01), (topology, full("int8"), options, 0.03),
                  (topology, {"name": "local_sgd", "every": 4}, {**options, "delayed": True}, 0.05)]  # fmt: skip
        if topology != {"name": "random_matching"}:
            # qsgd is coarse, and with 5 ranks a topology of 5 rounds has its own copies for each round: 32 exchanges of
            # each leave a hundredth of the distance, whatever the step size (the search promises a fiftieth after 500)
            cases += [(topology, choco(codec), options, left) for codec, left in
                      (("bfloat16", 1e-3), ("int8", 1e-3), ("int4", 1e-3), ("qsgd", 0.04), ("sign", 0.3))]
            cases += [(topology, "choco", options, 0.05)]
        if topology == "one-peer-exp":
            cases += [(topology, {**choco("int8"), "every": 4}, {**options, "delayed": delayed}, 0.05)
                      for delayed in (False, True)]  # fmt: skip
    return cases


def check_consensus(n: int, cases: list[tuple[Any, Any, dict[str, Any], float]]) -> None:
    for results in run_ranks(n, compressing.mix_without_gradients, [case[:3] for case in cases]):
        for (before, after, moved), case in zip(results, cases, strict=True):
            assert before > 0.5 and after < case[3], (case, before, after)
            assert moved < 2e-5, (case, moved)


@pytest.mark.slow
@pytest.mark.parametrize("topology", [
    "complete", "ring", {"name": "ring"}, "one-peer-exp", {"name": "random_matching"},
])  # fmt: skip
@pytest.mark.parametrize(("n", "transport"), [(4, "collective"), (4, "auto"), (5, "collective")])
def test_ranks_reach_consensus_and_keep_their_mean_without_gradients(n: int, transport: str, topology: Any) -> None:
    check_consensus(n, consensus_cases([topology], transport))


def test_three_ranks_reach_consensus_and_keep_their_mean_without_gradients() -> None:
    cases = consensus_cases([{"name": "ring"}], "auto")
    rules = (full("int8"), choco("int8"), "choco")
    check_consensus(3, [case for case in cases if case[1] in rules or case[2].get("delayed")])


@pytest.mark.sampled(of=lambda sharing, options, at: {*options})
@pytest.mark.parametrize(("sharing", "options", "at"), [
    (full("bfloat16"), {}, 5), ({"name": "full", "compression": {"name": "int8", "unbiased": True}}, {}, 5),
    ({"name": "local_sgd", "every": 4}, {"delayed": True}, 7),
])  # fmt: skip
def test_a_training_is_resumed_with_the_same_bits(sharing: Any, options: dict[str, Any], at: int) -> None:
    assert all(run_ranks(2, compressing.resume_and_compare, sharing, options, at))


def test_survivors_keep_their_outer_momentum() -> None:
    with JobProcesses() as job:
        job.start_founders(3, free_ports(1), members.keep_outer_momentum)
        results = [job.receive(rank) for rank in (1, 2)]
    for each in results:
        assert each["world"] == 2 and each["after"] == each["before"] > 0, each


@pytest.mark.sampled(one=["rule", "how"])
@pytest.mark.parametrize("how", ["wrapper", "module", "later"])
@pytest.mark.parametrize("rule", ["diloco", "slowmo"])
def test_a_loaded_model_is_no_outer_gradient(rule: str, how: str) -> None:
    """diloco took the difference from the initial model for a change by local steps, and went three times as far."""
    assert max(run_ranks(2, compressing.load_and_coast, rule, how)) < 1e-3


@pytest.mark.parametrize(("topology", "sharing", "options", "message"), [
    ("ring", full("int4"), {}, "int4 loses .*choco"),
    ("ring", full("zlib"), {}, "output size that is known in advance, got zlib"),
    ("ring", full("bfloat16"), {"transport": "shared_memory"}, "leave the compression out"),
    ({"name": "random_matching"}, "choco", {}, "topology must repeat after"),
    ("ring", {"name": "choco", "choose": "random"}, {}, "choose must be largest or all"),
    ("ring", "full", {"delayed": True}, "does not exchange in every step"),
    ("ring", {"name": "diloco"}, {"delayed": True}, "DiLoCo, which needs the mixed model before the next step"),
])  # fmt: skip
def test_combinations_that_cannot_work_are_refused(
    topology: Any, sharing: Any, options: dict[str, Any], message: str
) -> None:
    for error in run_ranks(2, compressing.reason_of_refusal, topology, sharing, options):
        assert re.search(message, error), error


@pytest.mark.sampled(one=["transport", "sharing", "delayed"])
@pytest.mark.parametrize(("transport", "sharing", "delayed"), [
    ("collective", choco("int8"), False), ("sockets", choco("int8"), False), ("sockets", full("bfloat16"), False),
    ("collective", {"name": "local_sgd", "every": 3}, True), ("shared_memory", {"name": "local_sgd", "every": 3}, True),
])  # fmt: skip
def test_regroup_changes_no_bit_and_survivors_keep_their_mean_when_a_rank_is_killed(
    transport: str, sharing: Any, delayed: bool
) -> None:
    for without, with_regroup in run_ranks(
        4, training.train_with_and_without_regroup, "one-peer-exp", transport, sharing, delayed
    ):
        assert without == with_regroup
    with JobProcesses() as job:
        job.start_founders(3, free_ports(1), members.mix_while_ranks_die, transport, {0: 4}, 40, {"name": "line"},
                           sharing, delayed)  # fmt: skip
        results = [job.receive(rank) for rank in (1, 2)]
    differences = [result["bias"] - result["mean"] for result in results]
    assert sum(differences) == pytest.approx(0, abs=1e-4) and max(map(abs, differences)) < 0.05
    assert 1.0 < results[0]["mean"] < 2.0 and results[0]["steps"] == 40 and results[0]["world"] == 2
