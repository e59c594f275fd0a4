"""Reads a config file of decentralizepy by section and key, and reports everything that is unknown or misspelled."""

from __future__ import annotations

import ast
import configparser
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from decentnode.compat.decentralizepy.keys import KEYS
from decentnode.errors import ConfigError
from decentnode.similar_words import did_you_mean

SECTIONS = ("DATASET", "OPTIMIZER_PARAMS", "TRAIN_PARAMS", "COMMUNICATION", "SHARING", "NODE")


class ConfigFile:
    """The sections of one file, read value by value; errors are collected in `problems`."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file that cannot be read."""
        self.path = path
        self.problems: list[str] = []
        self.sections = _read(path)
        for name in self.sections:
            if name not in SECTIONS:
                self.problem(f"[{name}]: is not a section of decentralizepy{did_you_mean(name, SECTIONS)}")

    def problem(self, text: str) -> None:
        """Reports an error."""
        self.problems.append(text)

    def section(self, name: str, keys: tuple[str, ...] | None = None) -> dict[str, str]:
        """Returns the values of a section. Reports keys that are not in `keys`, or in KEYS if None."""
        values = self.sections.get(name, {})
        if name not in self.sections and name != "NODE":
            self.problem(f"[{name}]: is missing")
        known = keys if keys is not None else KEYS[name]
        if name != "OPTIMIZER_PARAMS":  # its further keys are arguments of the optimizer
            for key in values:
                if key not in known:
                    self.problem(f"[{name}] {key}: is not a key of this section{did_you_mean(key, known)}")
        return values

    def value(self, section: str, key: str, default: Any, kind: type) -> Any:
        """Returns a value as a whole number, float, bool or text; the default if it is missing or empty."""
        text = self.sections.get(section, {}).get(key, "").strip()
        if not text:
            return default
        try:
            if kind is bool:
                return {"true": True, "false": False}[text.lower()]
            return kind(text.strip("\"'") if kind is str else text)
        except (ValueError, KeyError):
            self.problem(f"[{section}] {key}: must be {_describe_type(kind)}, got {text!r:.60}")
            return default

    def numbers(self, section: str, key: str) -> list[float] | None:
        """Returns a list of numbers written as a Python literal, which is parsed and not evaluated."""
        text = self.sections.get(section, {}).get(key, "").strip()
        if not text:
            return None
        try:
            found = ast.literal_eval(text.strip("\"'"))
            return [float(each) for each in found]
        except (ValueError, SyntaxError, TypeError):
            self.problem(f"[{section}] {key}: must be a list of numbers, got {text!r:.60}")
            return None

    def one_of(self, section: str, key: str, known: Iterable[str]) -> str:
        """Returns a value that must be one of the names `known`; reports any other and returns ""."""
        name: str = self.value(section, key, "", str)
        names = list(known)
        if name not in names:
            self.problem(f"[{section}] {key}: must be one of {', '.join(names)}, got {name!r}"
                         + did_you_mean(name, names))  # fmt: skip
            return ""
        return name


def _read(path: Path) -> dict[str, dict[str, str]]:
    parser = configparser.RawConfigParser(inline_comment_prefixes=(";",), comment_prefixes=("#", ";"))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    try:
        parser.read_string(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        raise ConfigError([f"{path}: cannot be read as a config file: {error}"], str(path)) from error
    return {name: dict(parser.items(name)) for name in parser.sections()}


def _describe_type(kind: type) -> str:
    return {bool: "True or False", int: "a whole number", float: "a number"}.get(kind, "a text")
