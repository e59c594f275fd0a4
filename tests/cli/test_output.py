"""Text on its way to somebody who may not take it."""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path
from typing import TextIO

from decentnode.cli.output import KEPT_CHARACTERS, PROGRESS_CHARACTERS, Output, OutputKind


def pipe() -> tuple[int, TextIO]:
    """(reading end, writing end); the writing end has no room left."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"." * 4096)
    except BlockingIOError:
        os.set_blocking(writing, True)
    return reading, os.fdopen(writing, "w")


def read_all(reading: int) -> list[str]:
    with os.fdopen(reading, "r") as file:
        return file.read().lstrip(".").splitlines()


def read_while_drained(output: Output, reading: int, stream: TextIO) -> list[str]:
    """The lines that came out at the reading end; everything that waited is written then, and both ends are closed."""
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.extend(read_all(reading)))
    reader.start()
    assert output.drain(30)
    stream.close()
    reader.join(200)
    return found


def test_what_a_full_pipe_does_not_take_waits_in_order_and_progress_is_dropped() -> None:
    reading, stream = pipe()
    output = Output(stream)
    line = "p" * 1023 + "\n"
    for _ in range(4 * PROGRESS_CHARACTERS // len(line)):
        output.put(line, OutputKind.PROGRESS)
    for _ in range(2 * KEPT_CHARACTERS // len(line)):
        output.put(line.replace("p", "l"), OutputKind.LINE)
    output.put("the error\n", OutputKind.ERROR)
    output.put("the result\n", OutputKind.RESULT)
    assert output.behind and not output.drain(0.0)
    found = read_while_drained(output, reading, stream)
    kept = [text for text in found if text[0] in "pl"]
    assert sum(text[0] == "p" for text in kept) * len(line) <= PROGRESS_CHARACTERS + 2 * len(line)
    assert sum(text[0] == "l" for text in kept) * len(line) <= KEPT_CHARACTERS + 2 * len(line)
    assert kept == sorted(kept, reverse=True)
    said = [int(text.split()[1]) for text in found if text.startswith("... ")]
    assert sum(said) == 4 * PROGRESS_CHARACTERS // len(line) + 2 * KEPT_CHARACTERS // len(line) - len(kept)
    assert found[-2:] == ["the error", "the result"] and len(found) == len(kept) + len(said) + 2


def test_a_closed_pipe_gets_nothing_and_errors_go_to_the_other_stream(tmp_path: Path) -> None:
    reading, stream = pipe()
    os.close(reading)
    with open(tmp_path / "stderr", "w") as instead:
        output = Output(stream, instead)
        for kind in OutputKind:
            output.put(f"{kind.name}\n", kind)
        assert output.drain(30)
    assert (tmp_path / "stderr").read_text() == "ERROR\n"


def test_an_error_is_not_written_twice_into_one_closed_pipe(tmp_path: Path) -> None:
    reading, stream = pipe()
    os.close(reading)
    output = Output(stream, stream)
    output.put("error\n", OutputKind.ERROR)
    assert output.drain(30)


def test_a_stream_without_a_descriptor_is_written_to(tmp_path: Path) -> None:
    stream = io.StringIO()
    output = Output(stream)
    with output.writing(OutputKind.RESULT):
        print("a", "b", file=output)
    assert output.drain(30) and stream.getvalue() == "a b\n"
    assert output.foreground and not output.isatty()


def test_a_stream_made_non_blocking_by_somebody_loses_nothing() -> None:
    reading, stream = pipe()
    os.set_blocking(stream.fileno(), False)
    output = Output(stream)
    text = "x" * 200_000 + "\n"
    output.put(text, OutputKind.RESULT)
    found = read_while_drained(output, reading, stream)
    assert found == [text.rstrip("\n")]
