"""Output to a reader that is slow or gone."""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path
from typing import TextIO

from decentnode.cli.output import KEPT_CHARACTERS, PROGRESS_CHARACTERS, Output, OutputKind


def full_pipe() -> tuple[int, TextIO]:
    """Returns (reading end, writing end) of a pipe that is full."""
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
    """Writes all pending output, closes both ends, and returns the lines that came out at the reading end."""
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.extend(read_all(reading)))
    reader.start()
    assert output.drain(30)
    stream.close()
    reader.join(200)
    return found


def test_output_to_a_full_pipe_is_kept_in_order_up_to_its_limits_and_progress_is_dropped() -> None:
    reading, stream = full_pipe()
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
    dropped = [int(text.split()[1]) for text in found if text.startswith("... ")]
    assert sum(dropped) == 4 * PROGRESS_CHARACTERS // len(line) + 2 * KEPT_CHARACTERS // len(line) - len(kept)
    assert found[-2:] == ["the error", "the result"] and len(found) == len(kept) + len(dropped) + 2


def test_with_a_closed_pipe_errors_go_to_the_other_stream(tmp_path: Path) -> None:
    reading, stream = full_pipe()
    os.close(reading)
    with open(tmp_path / "stderr", "w") as instead:
        output = Output(stream, instead)
        for kind in OutputKind:
            output.put(f"{kind.name}\n", kind)
        assert output.drain(30)
    assert (tmp_path / "stderr").read_text() == "ERROR\n"


def test_an_error_is_not_written_twice_into_one_closed_pipe(tmp_path: Path) -> None:
    reading, stream = full_pipe()
    os.close(reading)
    output = Output(stream, stream)
    output.put("error\n", OutputKind.ERROR)
    assert output.drain(30)


def test_a_stream_without_a_file_descriptor_gets_the_output(tmp_path: Path) -> None:
    stream = io.StringIO()
    output = Output(stream)
    with output.writing(OutputKind.RESULT):
        print("a", "b", file=output)
    assert output.drain(30) and stream.getvalue() == "a b\n"
    assert output.foreground and not output.isatty()


def test_a_non_blocking_stream_loses_nothing() -> None:
    reading, stream = full_pipe()
    os.set_blocking(stream.fileno(), False)
    output = Output(stream)
    text = "x" * 200_000 + "\n"
    output.put(text, OutputKind.RESULT)
    found = read_while_drained(output, reading, stream)
    assert found == [text.rstrip("\n")]
