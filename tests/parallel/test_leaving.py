"""All ranks name a rank that cannot start, that differs from the others, or that leaves."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

import pytest

from decentnode.communication.shared_memory.segment import FOLDER, PAGE
from tests.parallel.ranks import outcomes_of_ranks, run_ranks
from tests.parallel.work import leaving, training


@pytest.mark.sampled(one=["what", "message"])
@pytest.mark.parametrize(("what", "message"), [
    ("shape", r"rank 1 has another list of parameters than rank 0: 'weight \(5, 4\)"), ("frozen", "rank 1 .*frozen"),
    ("more", "rank 2 .*extra"), ("topology", "rank 1 has another topology"),
    ("bucket", "rank 1 has another option than rank 0: 'bucket_size_in_mb=1.5', rank 0 has 'bucket_size_in_mb=25'"),
    ("transport", "rank 1 has another option than rank 0: \"transport='collective'\", rank 0 has"),
])  # fmt: skip
def test_a_rank_with_another_model_or_option_is_named(what: str, message: str) -> None:
    for succeeded, text in outcomes_of_ranks(4, leaving.wrap_with_difference, what):
        assert not succeeded and re.search(message, text), text


@pytest.mark.sampled(one=["module", "function", "operation"])
@pytest.mark.parametrize(("module", "function", "operation"), [
    ("process_group.machines", "_host", "count themselves by machine"),
    ("ddp", "check_wrapper_consistency", "compare what they"), ("ddp", "broadcast_all", "take the values of rank 0"),
    ("transports.choice", "can_share_memory", "look for shared memory"),
    ("transports.shared_memory", "remove_stale", "name their shared memory"),
])  # fmt: skip
def test_the_death_of_a_rank_while_wrapping_is_reported_without_gloos_words(
    module: str, function: str, operation: str
) -> None:
    succeeded, text = outcomes_of_ranks(2, leaving.exit_while_wrapping, module, function)[0]
    expected = rf"rank 0: PeerLost: ranks cannot {operation}.* together, for example because one has ended: [A-Z]"
    assert not succeeded and re.match(expected, text) and "gloo" not in text.splitlines()[0], text


@pytest.mark.parametrize("transport", ["collective", "auto"])
@pytest.mark.slow
def test_a_rank_that_stops_taking_part_is_named_at_the_time_out(transport: str, tmp_path: Path) -> None:
    results = outcomes_of_ranks(2, leaving.stop_taking_part, transport, str(tmp_path / "noticed"))
    assert not results[0][0] and re.search("PeerLost: rank 0: the exchange of step 2 with rank 1", results[0][1])


@pytest.mark.parametrize(("topology", "n", "where", "message"), [
    ("complete", 2, "device", "OutOfMemoryError: CUDA out of memory"),
    ("ring", 3, "host", "RuntimeError: .*DefaultCPUAllocator: can't allocate memory"),
])  # fmt: skip
def test_a_rank_that_runs_out_of_memory_raises_that_error_and_not_peer_lost(
    topology: str, n: int, where: str, message: str
) -> None:
    *others, last = outcomes_of_ranks(n, leaving.run_out_of_memory, topology, where)
    assert re.match(f"rank {n - 1}: {message}", last[1]), last
    assert all("PeerLost" in text for _, text in others), others


GONE = "the process of rank 1 is gone, after 5 steps"

ENDED = "rank 1 has ended its training after 5 steps, this one has taken [67]"


@pytest.mark.sampled(one=["how", "n", "message"])
@pytest.mark.parametrize(("how", "n", "message"), [
    ("killed", 3, GONE), ("worker left", 2, GONE), ("done", 4, ENDED),
    ("average", 3, "rank 1 waits in an average over all ranks after 5 steps, this one has taken 6:"),
])  # fmt: skip
def test_a_rank_that_leaves_early_is_named_long_before_the_time_out(how: str, n: int, message: str) -> None:
    """Also by ranks that wait for another rank, which in turn waits for the one that left."""
    results = outcomes_of_ranks(n, leaving.leave_early, how, "shared_memory")
    for rank in set(range(n)) - {1}:
        succeeded, text = results[rank]
        expected = f"PeerLost: rank {rank}: the exchange of step . with rank . failed: {message}"
        assert not succeeded and re.search(expected, text), text


@pytest.mark.slow
def test_a_killed_rank_is_named_by_its_neighbors_over_gloo() -> None:
    results = outcomes_of_ranks(2, leaving.leave_early, "killed", "collective")
    succeeded, text = results[0]
    expected = r"rank 0: PeerLost: rank 0: the exchange of step [56] with rank 1 failed: \w[^/]*\n"
    assert not succeeded and re.match(expected, text), text


@pytest.mark.slow
def test_global_avg_names_a_rank_that_was_killed() -> None:
    for succeeded, text in outcomes_of_ranks(3, leaving.kill_before_average, "shared_memory")[:2]:
        assert not succeeded and re.search("PeerLost: rank .: global_avg failed: the process of rank 2 is gone", text)


def test_wrapping_fails_and_names_a_rank_that_exited_before() -> None:
    succeeded, text = outcomes_of_ranks(2, leaving.exit_before_wrapping)[0]
    message = (r"rank 0: PeerLost: ranks cannot wrap the model together, for example because one has ended: \w[^/]*"
            r"; rank 1 had not come to it\n")  # fmt: skip
    assert not succeeded and re.match(message, text), text


def test_a_collective_operation_names_a_rank_that_was_killed_but_not_one_that_is_slow() -> None:
    results = outcomes_of_ranks(3, leaving.kill_in_collective_operation)
    # rank 1's process may have ended by the time when rank 0, which is late, looks
    expected = ["the process(es of ranks 1-| of rank )2 (is|are) gone", "the process of rank 2 is gone"]
    for rank, message in enumerate(expected):
        succeeded, text = results[rank]
        failed = rf"rank {rank}: PeerLost: ranks cannot open the file together, .* one has ended: \w[^/;]*; "
        assert not succeeded and re.match(failed + message + "\n", text), text


@pytest.mark.slow
def test_global_avg_with_a_killed_rank_raises_peer_lost_over_gloo() -> None:
    succeeded, text = outcomes_of_ranks(2, leaving.kill_before_average, "collective")[0]
    assert not succeeded and re.match(r"rank 0: PeerLost: rank 0: global_avg failed: \w[^/]*\n", text), text


@pytest.mark.slow
@pytest.mark.parametrize(("what", "message"), [
    ("os.posix_fallocate", "could not make shared memory: DiskFull: .*No space left"),
    ("os.open", "could not map shared memory: DiskFull: .*No space left"),
    ("mmap.mmap", "could not make shared memory: DiskFull: .*No space left"),
    ("model", "could not wrap the model: ValueError: model must have parameters"),
    ("optimizer", "could not make the optimizer: DiskFull: .*No space left"),
])  # fmt: skip
def test_a_rank_that_cannot_start_is_named_on_all_ranks(what: str, message: str) -> None:
    """The next collective of all ranks still works."""
    results = run_ranks(3, leaving.fail_to_start_on_rank_1, what)
    for rank, (error, total) in enumerate(results):
        assert total == 3
        assert re.search("^DiskFull|^ValueError" if rank == 1 else f"AssemblyError: rank 1 {message}", error), error


def test_files_of_shared_memory_that_killed_ranks_left_are_removed_by_the_next_job() -> None:
    left = FOLDER / f"decentnode-ddp-{secrets.token_hex(8)}-0"
    left.write_bytes(bytes(PAGE))
    try:
        os.utime(left, (0, 0))
        run_ranks(2, training.train, "ring", 1, {"transport": "shared_memory"})
        assert not left.exists()
    finally:
        left.unlink(missing_ok=True)


def test_a_rank_killed_while_mapping_leaves_no_file_of_shared_memory() -> None:
    results = outcomes_of_ranks(2, leaving.kill_while_mapping_memory)
    assert "AssertionError" not in str(results[0][1]), results[0]
