"""The traceback that is printed when a rank ends because of Ctrl-C or of another rank."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch.utils.data import DataLoader

from decentnode.errors import PeerLost
from decentnode.parallel.process_group.traces import shorten_traces


class RaisingIterator:
    """Raises an error where torch's data loader asks for data, so that torch's frames are in the traceback."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> RaisingIterator:
        return self

    def __next__(self) -> None:
        raise self.error


def printed_traceback(error: BaseException, capsys: pytest.CaptureFixture[str]) -> str:
    """Returns what sys.excepthook prints of an error that is raised through torch's frames."""
    try:
        next(iter(DataLoader([1], collate_fn=lambda _: next(RaisingIterator(error)))))  # type: ignore[arg-type]
    except BaseException as caught:
        sys.excepthook(type(caught), caught, caught.__traceback__)
    return capsys.readouterr().err


@pytest.mark.parametrize(("error", "last"), [
    (PeerLost("rank 0: rank 1 is gone", [1]), "decentnode.errors.PeerLost: rank 0: rank 1 is gone"),
    (KeyboardInterrupt(), "KeyboardInterrupt"),
])  # fmt: skip
def test_tracebacks_of_lost_peers_and_ctrl_c_show_only_the_scripts_own_frames(
    error: BaseException, last: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    shorten_traces()
    text = printed_traceback(error, capsys)
    assert text.endswith(f"\n{last}\n") and "next(iter(DataLoader(" in text and "site-packages" not in text, text


def test_other_errors_keep_their_traceback_and_the_scripts_own_excepthook_stays(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    shorten_traces()
    assert "torch/utils/data" in printed_traceback(ValueError("a bug"), capsys)
    monkeypatch.setattr(sys, "excepthook", own := lambda *_: None)
    shorten_traces()
    assert sys.excepthook is own


SECOND_GROUP = """
import torch.distributed as dist
from decentnode.parallel.process_group.traces import forget_group, shorten_traces

shorten_traces()
for _ in range(2):
    forget_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
raise KeyboardInterrupt
"""


def test_after_a_second_process_group_lines_have_one_rank_in_front() -> None:
    done = subprocess.run([sys.executable, "-c", SECOND_GROUP], stderr=subprocess.PIPE, text=True, timeout=200)
    assert {line.count("[rank0]: ") for line in done.stderr.splitlines()} == {1}, done.stderr
