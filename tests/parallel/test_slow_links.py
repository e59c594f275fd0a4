"""Exchanges that are compressed, or hide behind several steps."""

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
    # a last bit decides between two numbers of float16, which lie 5e-4 from each other
    (3, "ring", {"name": "ac", "rounds": 3, "compression": {"name": "float16"}}, {}, 4.0, 4e-4),
    (4, "one-peer-exp", choco("int8"), {}, 1.3, 2e-6),
    (3, "ring", {"name": "choco", "fraction": 0.2, "step_size": 0.3}, {}, 2 * 1.6, 2e-6),
    (4, "one-peer-exp", {**choco("int8"), "every": 2}, {}, 1.3 / 2, 2e-6),
    (3, "ring", {"name": "choco", "fraction": 0.2, "step_size": 0.3, "every": 2}, {"delayed": True}, 1.6, 2e-6),
    (4, "ring", {"name": "local_sgd", "every": 3}, {"delayed": True}, 4 / 3, 2e-6),
    (3, "complete", {"name": "local_sgd", "every": 4}, {"delayed": True, "transport": "collective"}, 4 / 3, 2e-6),
    (3, "ring", {"name": "local_sgd", "every": 2, "compression": {"name": "bfloat16"}}, {"delayed": True}, 2.0, 2e-6),
    (2, "ring", {"name": "local_sgd", "every": 2}, {"delayed": True, "param_as_bucket_view": False}, 2.0, 2e-6),
]  # fmt: skip


@pytest.mark.sampled(of=lambda n, topology, sharing, options, bytes_per_value, close: {
    sharing["name"], "every" in sharing and sharing["name"] == "choco", *options})  # fmt: skip
@pytest.mark.parametrize(("n", "topology", "sharing", "options", "bytes_per_value", "close"), CASES)
def test_ranks_do_what_the_formula_says(
    n: int, topology: Any, sharing: Any, options: dict[str, Any], bytes_per_value: float, close: float
) -> None:
    steps = 8  # later a rounding of another last bit decides between two values of a coarse codec
    for difference, metrics, values in run_ranks(n, compressing.train, topology, sharing, options, steps):
        assert difference < close
        whole = 4 * 2 * values * 2 if sharing["name"] == "choco" else 0.0  # of each phase the first exchange
        assert metrics["bytes_sent"] <= bytes_per_value * values * (steps + 1) + whole
        assert metrics["bytes_sent"] > 0.5 * bytes_per_value * values * steps


@pytest.mark.parametrize("given", [{}, {"step_size": 0.25}])
def test_ranks_take_the_step_that_one_of_them_has_searched(given: dict[str, float]) -> None:
    searched = 0 if given else 1
    step = given.get("step_size", 0.5)
    found = run_ranks(3, compressing.searched, {**choco("int8"), **given})
    assert found == [(searched, [step]), (0, [step]), (0, [step])]


def spread_cases(topologies: list[Any], transport: str) -> list[tuple[Any, Any, dict[str, Any], float]]:
    """With the largest spread that may be left after 160 steps."""
    options: dict[str, Any] = {"transport": transport}
    found: list[tuple[Any, Any, dict[str, Any], float]] = []
    for topology in topologies:
        found += [(topology, full("bfloat16"), options, 0.01), (topology, full("int8"), options, 0.03),
                  (topology, {"name": "local_sgd", "every": 4}, {**options, "delayed": True}, 0.05)]  # fmt: skip
        if topology != {"name": "random_matching"}:
            # qsgd is coarse, and 5 ranks take turns among 5 rounds with copies of their own: 32 exchanges of each leave
            # a hundredth of the spread, whatever the step (a found step promises a fiftieth after 500)
            found += [(topology, choco(codec), options, left) for codec, left in
                      (("bfloat16", 1e-3), ("int8", 1e-3), ("int4", 1e-3), ("qsgd", 0.04), ("sign", 0.3))]
            found += [(topology, "choco", options, 0.05)]
        if topology == "one-peer-exp":
            found += [(topology, {**choco("int8"), "every": 4}, {**options, "delayed": delayed}, 0.05)
                      for delayed in (False, True)]  # fmt: skip
    return found


def agree(n: int, cases: list[tuple[Any, Any, dict[str, Any], float]]) -> None:
    for found in run_ranks(n, compressing.settle, [case[:3] for case in cases]):
        for (before, after, moved), case in zip(found, cases, strict=True):
            assert before > 0.5 and after < case[3], (case, before, after)
            assert moved < 2e-5, (case, moved)


@pytest.mark.slow
@pytest.mark.parametrize("topology", [
    "complete", "ring", {"name": "ring"}, "one-peer-exp", {"name": "random_matching"},
])  # fmt: skip
@pytest.mark.parametrize(("n", "transport"), [(4, "collective"), (4, "auto"), (5, "collective")])
def test_without_gradients_ranks_agree_and_their_mean_stays(n: int, transport: str, topology: Any) -> None:
    agree(n, spread_cases([topology], transport))


def test_without_gradients_three_ranks_agree_and_their_mean_stays() -> None:
    cases = spread_cases([{"name": "ring"}], "auto")
    agree(3, [case for case in cases if case[1] in (full("int8"), choco("int8"), "choco") or case[2].get("delayed")])


@pytest.mark.sampled(of=lambda sharing, options, at: {*options})
@pytest.mark.parametrize(("sharing", "options", "at"), [
    (full("bfloat16"), {}, 5), ({"name": "full", "compression": {"name": "int8", "unbiased": True}}, {}, 5),
    ({"name": "local_sgd", "every": 4}, {"delayed": True}, 7),
])  # fmt: skip
def test_a_training_is_resumed_with_the_same_bits(sharing: Any, options: dict[str, Any], at: int) -> None:
    assert all(run_ranks(2, compressing.resume, sharing, options, at))


@pytest.mark.parametrize(("topology", "sharing", "options", "says"), [
    ("ring", full("int4"), {}, "int4 loses .*choco"),
    ("ring", full("zlib"), {}, "output size that is known in advance, got zlib"),
    ("ring", full("bfloat16"), {"transport": "shared_memory"}, "leave the compression out"),
    ({"name": "random_matching"}, "choco", {}, "topology must repeat after"),
    ("ring", {"name": "choco", "choose": "random"}, {}, "choose must be largest or all"),
    ("ring", "full", {"delayed": True}, "does not exchange in every step"),
    ("ring", {"name": "slowmo"}, {"delayed": True}, "does not exchange in every step"),
])  # fmt: skip
def test_what_cannot_be_is_refused(topology: Any, sharing: Any, options: dict[str, Any], says: str) -> None:
    for told in run_ranks(2, compressing.refused, topology, sharing, options):
        assert re.search(says, told), told


@pytest.mark.sampled(one=["transport", "sharing", "delayed"])
@pytest.mark.parametrize(("transport", "sharing", "delayed"), [
    ("collective", choco("int8"), False), ("sockets", choco("int8"), False), ("sockets", full("bfloat16"), False),
    ("collective", {"name": "local_sgd", "every": 3}, True), ("shared_memory", {"name": "local_sgd", "every": 3}, True),
])  # fmt: skip
def test_with_regroup_the_bits_are_the_same_and_the_mean_stays_when_one_dies(
    transport: str, sharing: Any, delayed: bool
) -> None:
    for without, with_regroup in run_ranks(
        4, training.with_and_without_regroup, "one-peer-exp", transport, sharing, delayed
    ):
        assert without == with_regroup
    with JobProcesses() as job:
        job.start_founders(3, free_ports(1), members.still, transport, {0: 4}, 40, {"name": "line"}, sharing, delayed)
        found = [job.receive(rank) for rank in (1, 2)]
    spread = [each["level"] - each["mean"] for each in found]
    assert sum(spread) == pytest.approx(0, abs=1e-4) and max(map(abs, spread)) < 0.05
    assert 1.0 < found[0]["mean"] < 2.0 and found[0]["steps"] == 40 and found[0]["world"] == 2
