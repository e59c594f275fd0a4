"""What is printed when a rank ends because of Ctrl-C or of another rank."""

from __future__ import annotations

import sys

import pytest
from torch.utils.data import DataLoader

from decentnode.errors import PeerLost
from decentnode.parallel.process_group.traces import shorten_traces


class Raises:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Raises:
        return self

    def __next__(self) -> None:
        raise self.error


def printed(error: BaseException, capsys: pytest.CaptureFixture[str]) -> str:
    """What the hook prints of an error that comes through torch."""
    try:
        next(iter(DataLoader([1], collate_fn=lambda _: next(Raises(error)))))  # type: ignore[arg-type]
    except BaseException as caught:
        sys.excepthook(type(caught), caught, caught.__traceback__)
    return capsys.readouterr().err


@pytest.mark.parametrize(("error", "last"), [
    (PeerLost("rank 0: rank 1 is gone", [1]), "decentnode.errors.PeerLost: rank 0: rank 1 is gone"),
    (KeyboardInterrupt(), "KeyboardInterrupt"),
])  # fmt: skip
def test_an_end_that_is_no_bug_of_the_script_shows_its_own_lines(
    error: BaseException, last: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    shorten_traces()
    told = printed(error, capsys)
    assert told.endswith(f"\n{last}\n") and "next(iter(DataLoader(" in told and "site-packages" not in told, told


def test_other_errors_and_hooks_stay_as_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    shorten_traces()
    assert "torch/utils/data" in printed(ValueError("a bug"), capsys)
    monkeypatch.setattr(sys, "excepthook", own := lambda *_: None)
    shorten_traces()
    assert sys.excepthook is own
