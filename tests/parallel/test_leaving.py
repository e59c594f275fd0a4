"""Ranks that cannot start, differ from the others or leave are named, on all others."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

import pytest

from decentnode.communication.shared_memory.segment import FOLDER, PAGE
from tests.parallel.ranks import outcomes_of_ranks, run_ranks
from tests.parallel.work import leaving, training


@pytest.mark.sampled(one=["what", "says"])
@pytest.mark.parametrize(("what", "says"), [
    ("shape", r"rank 1 has another list of parameters than rank 0: 'weight \(5, 4\)"), ("frozen", "rank 1 .*frozen"),
    ("more", "rank 2 .*extra"), ("topology", "rank 1 has another topology"),
    ("bucket", "rank 1 has another option than rank 0: 'bucket_size_in_mb=1.5', rank 0 has 'bucket_size_in_mb=25'"),
    ("transport", "rank 1 has another option than rank 0: \"transport='collective'\", rank 0 has"),
])  # fmt: skip
def test_ranks_that_differ_are_named(what: str, says: str) -> None:
    for ok, text in outcomes_of_ranks(4, leaving.differing, what):
        assert not ok and re.search(says, text), text


@pytest.mark.sampled(one=["module", "function", "what"])
@pytest.mark.parametrize(("module", "function", "what"), [
    ("process_group.machines", "_host", "count themselves by machine"),
    ("ddp", "check_wrapper_consistency", "compare what they"), ("ddp", "broadcast_all", "take the values of rank 0"),
    ("transports.choice", "can_share_memory", "look for shared memory"),
    ("transports.shared_memory", "remove_stale", "name their shared memory"),
])  # fmt: skip
def test_a_rank_that_dies_while_it_wraps_is_told_in_words_of_ours(module: str, function: str, what: str) -> None:
    ok, text = outcomes_of_ranks(2, leaving.dies_while_it_wraps, module, function)[0]
    said = rf"rank 0: PeerLost: ranks cannot {what}.* together, for example because one has ended: [A-Z]"
    assert not ok and re.match(said, text) and "gloo" not in text.splitlines()[0], text


@pytest.mark.parametrize("transport", ["collective", "auto"])
@pytest.mark.slow
def test_a_rank_that_vanishes_is_named(transport: str, tmp_path: Path) -> None:
    results = outcomes_of_ranks(2, leaving.vanish, transport, str(tmp_path / "noticed"))
    assert not results[0][0] and re.search("PeerLost: rank 0: the exchange of step 2 with rank 1", results[0][1])


@pytest.mark.parametrize(("topology", "n", "where", "says"), [
    ("complete", 2, "device", "OutOfMemoryError: CUDA out of memory"),
    ("ring", 3, "host", "RuntimeError: .*DefaultCPUAllocator: can't allocate memory"),
])  # fmt: skip
def test_a_device_or_a_host_without_memory_is_no_lost_rank(topology: str, n: int, where: str, says: str) -> None:
    *others, last = outcomes_of_ranks(n, leaving.out_of_memory, topology, where)
    assert re.match(f"rank {n - 1}: {says}", last[1]), last
    assert all("PeerLost" in text for _, text in others), others


GONE = "the process of rank 1 is gone, after 5 steps"

ENDED = "rank 1 has ended its training after 5 steps, this one has taken [67]"


@pytest.mark.sampled(one=["how", "n", "says"])
@pytest.mark.parametrize(("how", "n", "says"), [
    ("killed", 3, GONE), ("worker left", 2, GONE), ("done", 4, ENDED),
    ("average", 3, "rank 1 waits in an average over all ranks after 5 steps, this one has taken 6:"),
])  # fmt: skip
def test_a_rank_that_leaves_early_is_named_long_before_the_time_out(how: str, n: int, says: str) -> None:
    """Also by ranks that wait for another one, which waits for it."""
    results = outcomes_of_ranks(n, leaving.leave, how, "shared_memory")
    for rank in set(range(n)) - {1}:
        ok, text = results[rank]
        assert not ok and re.search(f"PeerLost: rank {rank}: the exchange of step . with rank . failed: {says}", text)


@pytest.mark.slow
def test_over_gloo_a_rank_that_is_killed_is_named_by_its_neighbors() -> None:
    results = outcomes_of_ranks(2, leaving.leave, "killed", "collective")
    ok, text = results[0]
    said = r"rank 0: PeerLost: rank 0: the exchange of step [56] with rank 1 failed: \w[^/]*\n"
    assert not ok and re.match(said, text), text


@pytest.mark.slow
def test_a_rank_that_is_killed_before_an_average_is_named() -> None:
    for ok, text in outcomes_of_ranks(3, leaving.killed_in_average, "shared_memory")[:2]:
        assert not ok and re.search("PeerLost: rank .: global_avg failed: the process of rank 2 is gone", text)


def test_who_wraps_a_model_where_another_has_ended_is_told_in_plain_words() -> None:
    ok, text = outcomes_of_ranks(2, leaving.ended_before)[0]
    says = (r"rank 0: PeerLost: ranks cannot wrap the model together, for example because one has ended: \w[^/]*"
            r"; rank 1 had not come to it\n")  # fmt: skip
    assert not ok and re.match(says, text), text


def test_a_rank_that_is_killed_in_an_operation_of_all_is_named_and_one_that_is_slow_is_not() -> None:
    results = outcomes_of_ranks(3, leaving.killed_in_an_operation)
    gone = ["the process(es of ranks 1-| of rank )2 (is|are) gone", "the process of rank 2 is gone"]  # 1 ends by then
    for rank, says in enumerate(gone):
        ok, text = results[rank]
        failed = rf"rank {rank}: PeerLost: ranks cannot open the file together, .* one has ended: \w[^/;]*; "
        assert not ok and re.match(failed + says + "\n", text), text


@pytest.mark.slow
def test_over_gloo_an_average_with_a_rank_that_is_killed_fails_in_plain_words() -> None:
    ok, text = outcomes_of_ranks(2, leaving.killed_in_average, "collective")[0]
    assert not ok and re.match(r"rank 0: PeerLost: rank 0: global_avg failed: \w[^/]*\n", text), text


@pytest.mark.slow
@pytest.mark.parametrize(("what", "says"), [
    ("os.posix_fallocate", "could not make shared memory: DiskFull: .*No space left"),
    ("os.open", "could not map shared memory: DiskFull: .*No space left"),
    ("mmap.mmap", "could not make shared memory: DiskFull: .*No space left"),
    ("model", "could not wrap the model: ValueError: model must have parameters"),
    ("optimizer", "could not make the optimizer: DiskFull: .*No space left"),
])  # fmt: skip
def test_a_rank_that_cannot_start_is_named_on_all_at_once(what: str, says: str) -> None:
    """And whatever the ranks do together next meets its like."""
    results = run_ranks(3, leaving.refuses, what)
    for rank, (told, total) in enumerate(results):
        assert total == 3
        assert re.search("^DiskFull|^ValueError" if rank == 1 else f"AssemblyError: rank 1 {says}", told), told


def test_memory_that_killed_ranks_left_under_a_name_is_removed_by_the_next() -> None:
    left = FOLDER / f"decentnode-ddp-{secrets.token_hex(8)}-0"
    left.write_bytes(bytes(PAGE))
    try:
        os.utime(left, (0, 0))
        run_ranks(2, training.train, "ring", 1, {"transport": "shared_memory"})
        assert not left.exists()
    finally:
        left.unlink(missing_ok=True)


def test_a_rank_that_is_killed_before_it_took_its_memory_s_name_away_leaves_none() -> None:
    results = outcomes_of_ranks(2, leaving.killed_while_mapping)
    assert "AssertionError" not in str(results[0][1]), results[0]
