"""Reads from a run's folder which machines it had, and what software and code they ran. Imports no torch.

The files of this machine are in the folder itself, and those of other machines, which `decentnode collect` fetched, in
machines/<number>. Their contents are not trusted.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from decentnode.formatting import names

FOLDER = "machines"
FILES = ("env.json", "pip-freeze.txt", "git.txt", "git.diff", "command.txt")
"""The files that every machine writes about itself."""
MAX_BYTES = 1 << 22
"""How many bytes of a file are read at most."""
COMMIT = re.compile(r"^\S.* ([0-9a-f]{40,64})( \(changed\))?$", re.MULTILINE)
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Machine:
    """The software and code of one machine."""

    number: int
    environment: Mapping[str, Any] = field(default_factory=dict)
    """The contents of env.json; empty if there is none."""
    commit: str = ""
    """The commits of its code, shortened, with a digest of local changes; "" without git."""

    @property
    def versions(self) -> Mapping[str, Any]:
        found = self.environment.get("versions")
        return found if isinstance(found, dict) else {}


def mapping_of(run: Path) -> dict[int, int]:
    """Returns uid -> machine of the run's mapping; empty if it cannot be read."""
    try:
        places = yaml.safe_load((run / "mapping.yaml").read_text(encoding="utf-8"))
        return {int(place["uid"]): int(place["machine"]) for place in places}
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return {}


def machines_of(run: Path) -> list[Machine]:
    """Returns the machines whose files are in a run's folder, ascending."""
    found = {}
    own = _machine(run, None)
    if own is not None:
        found[own.number] = own
    for folder in (run / FOLDER).glob("*"):
        if re.fullmatch(r"\d{1,7}", folder.name) and int(folder.name) not in found:
            other = _machine(folder, int(folder.name))
            if other is not None:
                found[other.number] = other
    return [found[number] for number in sorted(found)]


def _machine(folder: Path, number: int | None) -> Machine | None:
    """Returns the machine that a folder describes, or None. number: None if env.json has it."""
    try:
        environment = json.loads(_text(folder / "env.json") or "{}")
    except (ValueError, RecursionError):
        environment = {}
    environment = environment if isinstance(environment, dict) else {}
    commits = COMMIT.findall(_text(folder / "git.txt"))
    if not environment and not commits:
        return None
    changes = hashlib.sha256(_text(folder / "git.diff").encode()).hexdigest()[:8]
    shown = ", ".join(f"{commit[:12]}{f' with changes {changes}' if changed else ''}" for commit, changed in commits)
    own = environment.get("machine")
    return Machine(own if number is None and isinstance(own, int) else number or 0, environment, shown)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""


MAX_LINES = 100
"""How many differences are listed; texts from other machines are not trusted to be short."""


def differences(found: list[Machine]) -> list[str]:
    """Returns the differences between machines that may explain different results, one line each: versions, code,
    commits."""
    if len(found) < 2:
        return []
    packages = dict.fromkeys(str(name) for each in found for name in each.versions)
    compared: dict[str, Callable[[Machine], str]] = {
        **{name: lambda each, name=name: str(each.versions.get(name, "")) for name in packages},  # type: ignore[misc]
        "decentnode's code": lambda each: str(each.environment.get("source", ""))[:12],
        "git commit": lambda each: each.commit,
        "own modules": _modules,
    }
    lines: list[str] = []
    for what, value in compared.items():
        numbers_by_text: dict[str, list[int]] = {}
        for each in found:
            text = _printable(value(each)[:200])
            if text or value is not _modules:  # modules are known only after a run; those of a newcomer never are
                numbers_by_text.setdefault(text or UNKNOWN, []).append(each.number)
        if len(numbers_by_text) > 1 and len(lines) < MAX_LINES:
            values = "; ".join(f"{text} on machine {names(numbers)}" for text, numbers in numbers_by_text.items())
            lines.append(f"{_printable(what[:80])}: {values}")
    return lines


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _modules(machine: Machine) -> str:
    """Returns a digest of the user's own modules, of which each machine keeps copies."""
    modules = machine.environment.get("modules")
    if not isinstance(modules, dict) or not modules:
        return ""
    content = {name: each.get("sha256") if isinstance(each, dict) else None for name, each in modules.items()}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:12]
