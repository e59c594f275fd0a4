"""The report of gpu.py: rows as they arrive, profiles, and at the end a table that is as short as its reader needs."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from gpu_profiles import Profile
from gpu_rows import Row

TABLE_CHARACTERS = 11_000
"""A reader who gets only the end of the output sees 12,000 characters."""
NOTES = (200, 120, 80, 50, 30, 0)
"""Longest note; the first value that fits is used. Main results of profiles may take twice as much and 160 more."""


class Report:
    """Rows and profiles as they become known: rows are printed, and written to a file that is valid JSON at any moment;
    profiles go to profiles.txt beside it."""

    def __init__(self, out: Path | None, about: list[str]) -> None:
        self.rows: list[Row] = []
        self.profiles: list[Profile] = []
        self._out, self._about, self._began = out, about, time.monotonic()
        if out is not None:
            out.with_name("profiles.txt").unlink(missing_ok=True)
        self._lock = threading.RLock()  # a signal handler may ask for the table while a row is added
        self._write()

    def add(self, row: Row) -> None:
        if row.value is not None and not math.isfinite(row.value):  # JSON has no NaN or infinity
            row = replace(row, value=None, note=f"failed: {row.value}")
        with self._lock:
            self.rows.append(row)
            print(row.text(), flush=True)
            self._write()

    def add_profile(self, profile: Profile) -> None:
        with self._lock:
            self.profiles.append(profile)
            if self._out is not None:
                with self._out.with_name("profiles.txt").open("a") as file:
                    file.write("\n".join([f"== {profile.case}: {profile.what}", *profile.lines, ""]) + "\n")

    def _write(self) -> None:
        if self._out is None:
            return
        found = {"environment": self._about, "seconds": round(time.monotonic() - self._began, 1),
                 "rows": [asdict(row) for row in self.rows]}  # fmt: skip
        new = self._out.with_name(self._out.name + ".new")
        new.write_text(json.dumps(found, indent=1) + "\n")
        new.replace(self._out)

    def table(self) -> str:
        """Returns the whole report in at most TABLE_CHARACTERS: first notes are cut, then rows that neither failed nor
        missed their target are left out, then the last of those that missed it."""
        with self._lock:
            rows, profiles = list(self.rows), list(self.profiles)
        for longest in NOTES:
            text = _table(self._about, rows, profiles, longest)
            if len(text) <= TABLE_CHARACTERS:
                return text
        most_important = sorted((row for row in rows if row.failed or row.missed), key=lambda row: not row.failed)
        lines = _table(self._about, most_important, profiles, 30).splitlines()
        while sum(map(len, lines)) + len(lines) > TABLE_CHARACTERS:
            del lines[-2]
        return "\n".join([*lines[:-1], f"and more: {len(rows)} rows in all, of which {lines[-1].partition(': ')[2]}"])


def _table(about: Sequence[str], rows: Sequence[Row], profiles: Sequence[Profile], longest: int) -> str:
    lines = ["== in short", *(line[:160] for line in about)]
    lines += [f"{each.case}: {each.what}: {' | '.join(each.main_results)}"[: 160 + 2 * longest] for each in profiles]
    case = ""
    for row in rows:
        if row.case == "tests" and row.value is not None and not row.missed:
            continue  # summed up in one line below
        if row.case == "tests" and row.note.startswith("absent"):
            continue
        if row.case != case:
            case = row.case
            lines.append(case)
        lines.append(f"  {_short(row, longest)}")
    passed = [row for row in rows if row.case == "tests" and row.value is not None]
    if passed:
        asked = sum(float(row.asked.strip("= ")) for row in passed)
        count = sum(row.value or 0 for row in passed)
        lines.append(f"tests: {count:g} of {asked:g} passed, by {len(passed)} process{'es' * (len(passed) > 1)}")
    missed, failed = sum(row.missed for row in rows), sum(row.failed for row in rows)
    lines.append(f"{len(rows)} rows: {missed} missed what is asked, {failed} failed")
    return "\n".join(lines)


def _short(row: Row, longest: int) -> str:
    note = row.note[:longest]
    if row.value is None:
        return f"{row.what}: {row.note[: max(longest, 40)]}"
    ratio = f" = {row.value / row.ceiling:.2f} of {row.ceiling:.4g}" if row.ceiling else ""
    mark = "" if not row.asked else f", asked {row.asked}: {'MISSED' if row.missed else 'yes'}"
    return f"{row.what}: {row.value:.4g} {row.unit}".rstrip() + f"{ratio}{mark}{f'; {note}' if note else ''}"
