"""The values that the keys of a sweep take: lists of them, or distributions to draw from."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from decentnode.errors import UsageError
from decentnode.experiment.tree import flow
from decentnode.rng import GLOBAL, stream
from decentnode.similar_words import did_you_mean

Settings = tuple[tuple[str, str], ...]
"""(dotted key, value as YAML text) of one combination, in the order of the axes."""
DISTRIBUTIONS = ("uniform", "log", "int", "logint")
_DISTRIBUTION = re.compile(r"\s*([a-z_]\w*)\s*\(([^()]*)\)\s*")


@dataclass(frozen=True)
class Distribution:
    """A distribution over an interval, both ends included: uniform, log-uniform (log), or the same over integers (int,
    logint)."""

    kind: str
    low: float
    high: float

    def draw(self, rng: np.random.Generator) -> str:
        return self.text(float(rng.random()))

    def text(self, share: float) -> str:
        """Returns the quantile of `share`, in [0, 1), as YAML text."""
        low, high = self.low, self.high
        if self.kind.endswith("int"):  # each integer stands for the interval up to the next one
            high += 1
        if self.kind.startswith("log"):
            value = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
        else:
            value = low + share * (high - low)
        if self.kind.endswith("int"):
            return str(min(int(self.high), max(int(self.low), math.floor(value))))
        return flow(float(f"{min(self.high, max(self.low, value)):.6g}"))


@dataclass(frozen=True)
class Axis:
    """One key, or several that change together, and what they take: `values`, or draws from `distribution`."""

    key: str
    """Several keys are separated by commas."""
    values: tuple[str, ...] = ()
    """For several keys, each value is "[V1, V2]", one entry for every key."""
    distribution: Distribution | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.key.split(","))

    def draw(self, rng: np.random.Generator) -> str:
        if self.distribution is not None:
            return self.distribution.draw(rng)
        return self.values[int(rng.integers(len(self.values)))]

    def settings(self, value: str) -> Settings:
        """Returns the (key, value) pairs that one of the values stands for."""
        if len(self.keys) == 1:
            return ((self.key, value),)
        return tuple(zip(self.keys, (each.strip() for each in _split_at_commas(value[1:-1], value)), strict=True))


def parse_axis(text: str) -> Axis:
    """Returns the axis of "key=v1,v2,...", "key=log(1e-4,1)" or "key,key=[v1,v2],...". Commas inside brackets and
    quotes do not separate values. Raises UsageError."""
    keys_text, equals, values_text = text.partition("=")
    keys = [each.strip() for each in keys_text.split(",")]
    key = ",".join(keys)
    if not equals or not all(part.strip() for each in keys for part in each.split(".")):
        raise UsageError("-g must be KEY=VALUE,VALUE,..., KEY=uniform(LOW,HIGH) or KEY,KEY=[VALUE,VALUE],..., got "
                         f"{text!r}")  # fmt: skip
    match = _DISTRIBUTION.fullmatch(values_text)
    if match and len(keys) == 1:
        return Axis(key, distribution=_parse_distribution(key, match[1], match[2]))
    values = tuple(each.strip() for each in _split_at_commas(values_text, text))
    if len(keys) > 1:
        values = tuple(_joint_value(f"-g {key}", len(keys), each) for each in values)
    if not all(values):
        raise UsageError(f"-g {key}: a value must not be empty, got {values_text!r}; write null or '' for such values")
    if len(set(values)) < len(values):
        raise UsageError(f"-g {key}: each value must be given once, got {values_text!r}")
    return Axis(key, values)


def _joint_value(option: str, count: int, value: str) -> str:
    """Returns the normalized value of `count` keys that change together. Raises UsageError unless it is a list of
    `count` values."""
    listed = value.startswith("[") and value.endswith("]")
    parts = [each.strip() for each in _split_at_commas(value[1:-1], value)] if listed else []
    if len(parts) != count:
        raise UsageError(f"{option}: each value must be a list of {count}, one for every key, got "
                         + (f"{value}, which has {len(parts)}" if listed else repr(value)))  # fmt: skip
    if not all(parts):
        raise UsageError(f"{option}: a value must not be empty, got {value}; write null or '' for such values")
    return f"[{', '.join(parts)}]"


def axes(given: Iterable[str] | Mapping[Any, Any]) -> tuple[Axis, ...]:
    """Returns the axes given as texts for `parse_axis`, or as a mapping from keys (tuples for keys that change
    together) to lists of plain values or to such texts. Raises UsageError, also if a key is given twice or lies inside
    another one."""
    if isinstance(given, Mapping):
        parsed = tuple(_axis_of_values(",".join(key) if isinstance(key, tuple) else str(key), values)
                       for key, values in given.items())  # fmt: skip
    else:
        parsed = tuple(parse_axis(each) for each in given)
    keys = [key for axis in parsed for key in axis.keys]
    for one, other in itertools.permutations(keys, 2):
        if one == other or other.startswith(f"{one}."):
            raise UsageError(f"-g {other} sets what -g {one} sets" if one != other else f"-g {one} is given twice")
    return parsed


def _axis_of_values(key: str, values: Any) -> Axis:
    if isinstance(values, str):
        return parse_axis(f"{key}={values}")
    if not isinstance(values, Iterable) or isinstance(values, Mapping):
        raise UsageError(f"grid[{key!r}] must be a list of values or text such as 'log(1e-4, 1)', got {values!r:.80}")
    texts = tuple(flow(_plain_value(key, value)) for value in values)
    if (count := key.count(",") + 1) > 1:
        texts = tuple(_joint_value(f"grid[{key!r}]", count, value) for value in texts)
    if not texts:
        raise UsageError(f"grid[{key!r}] must have a value, got an empty list")
    if len(set(texts)) < len(texts):
        raise UsageError(f"grid[{key!r}]: each value must be given once, got {', '.join(texts)}")
    return Axis(key, texts)


def _plain_value(key: str, value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _plain_value(key, each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_value(key, each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UsageError(f"grid[{key!r}] must hold plain values, got {value!r:.80}; of a class give its name, "
                     "'package.module:Class'")  # fmt: skip


def _parse_distribution(key: str, kind: str, arguments: str) -> Distribution:
    if kind not in DISTRIBUTIONS:
        raise UsageError(f"-g {key}: a distribution must be one of {', '.join(DISTRIBUTIONS)}, got {kind!r}"
                         + did_you_mean(kind, DISTRIBUTIONS))  # fmt: skip
    try:
        low, high = (float(each) for each in arguments.split(","))
    except ValueError:
        raise UsageError(f"-g {key}: {kind} must have two numbers, as {kind}(1,10), got ({arguments})") from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UsageError(f"-g {key}: {kind} must go from a lower number to a higher one, got ({arguments})")
    if kind.startswith("log") and low <= 0:
        raise UsageError(f"-g {key}: {kind} must begin above 0, got {low:g}")
    if kind.endswith("int") and not (low.is_integer() and high.is_integer()):
        raise UsageError(f"-g {key}: {kind} must have whole numbers, got ({arguments})")
    return Distribution(kind, low, high)


def _split_at_commas(text: str, argument: str) -> list[str]:
    """Returns the text split at the commas outside all brackets and quotes."""
    parts, depth, quote, start = [], 0, "", 0
    for index, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "[{(":
            depth += 1
        elif character in ")}]":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    if depth or quote:
        raise UsageError(f"-g {argument}: a bracket or a quote is left open")
    return [*parts, text[start:]]


def grid(axes: Sequence[Axis]) -> list[Settings]:
    """Returns all combinations; the last axis varies fastest. Raises UsageError if an axis is a distribution."""
    for axis in axes:
        if axis.distribution is not None:
            raise UsageError(f"-g {axis.key} is a distribution: give the number of points to draw (--random N), or "
                             "list its values")  # fmt: skip
    return [_settings(axes, values) for values in itertools.product(*(axis.values for axis in axes))]


def _settings(axes: Sequence[Axis], values: Iterable[str]) -> Settings:
    return tuple(pair for axis, value in zip(axes, values, strict=True) for pair in axis.settings(value))


def draws(axes: Sequence[Axis], count: int, seed: int) -> list[Settings]:
    """Returns the distinct combinations among `count` draws. A larger count begins with the same draws."""
    drawn: dict[Settings, None] = {}
    for index in range(count):
        rng = stream(seed, GLOBAL, "sweep", index)
        drawn[_settings(axes, [axis.draw(rng) for axis in axes])] = None
    return [*drawn]


def value_at(settings: Settings, key: str) -> str:
    """Returns the value that a combination gives to a key, also inside a section that it sets; "" if it sets none."""
    for name, text in settings:
        if name == key:
            return text
        if key.startswith(f"{name}."):
            found = yaml.safe_load(text)
            if not isinstance(found, dict):  # only the name of a component
                found = {"name": found}
            for part in key[len(name) + 1 :].split("."):
                found = found.get(part) if isinstance(found, dict) else None
            return "" if found is None else flow(found)
    return ""


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Returns for each key its shortest suffix that no other key has; "graph.name" counts as "graph"."""
    full = {key: key.removesuffix(".name") for key in keys}
    short = {}
    for key, text in full.items():
        parts = text.split(".")
        others = [other.split(".") for name, other in full.items() if name != key]
        length = next((n for n in range(1, len(parts) + 1) if all(o[-n:] != parts[-n:] for o in others)), None)
        short[key] = key if length is None else ".".join(parts[-length:])
    return short


def short_values(values: Iterable[str]) -> dict[str, str]:
    """Returns for each value of one key a short text that distinguishes it from the others: for sections the
    component's name and the keys in which sections of the same name differ; every other value as it is."""
    given = [*dict.fromkeys(values)]
    sections = {text: section for text in given if isinstance(section := yaml.safe_load(text), dict)}
    by_name: dict[Any, list[str]] = {}
    for text, section in sections.items():
        by_name.setdefault(section.get("name"), []).append(text)
    short = {text: text for text in given}
    for name, texts in by_name.items():
        by_key = {key: {flow(sections[text].get(key)) for text in texts} for text in texts for key in sections[text]}
        differing = [key for key, each in by_key.items() if len(each) > 1 or (name is None and key != "name")]
        for text in texts:
            section = sections[text]
            parts = [f"{key}={flow(section[key])}" for key in differing if key in section]
            short[text] = " ".join([*([str(name)] if name is not None else []), *parts])
    return short if len({*short.values()}) == len(short) else {text: text for text in given}
