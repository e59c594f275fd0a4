"""Parametrized tests over products (rule x graph x transport x setting): the default run takes a sample of the cases,
--all takes all.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

import pytest

Traits = Callable[..., Iterable[Hashable]]


def mark_omitted(items: Sequence[pytest.Item]) -> None:
    """Marks as slow those cases of tests marked `sampled(one=(), of=None)` that the default run omits.

    Of every such test a few cases remain, in which every value of every parameter occurs; the choice is the same in
    every run. one: parameters of which any single value is enough, such as seeds. of: a function that is called with a
    case's parameters by name and returns what the sample must cover instead. Cases that are slow anyway do not count as
    covered.
    """
    tests = collections.defaultdict[Hashable, list[pytest.Function]](list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sampled") and hasattr(item, "callspec") \
                and not item.get_closest_marker("slow"):  # fmt: skip
            tests[item.path, item.cls, item.originalname].append(item)
    for cases in tests.values():
        mark = cases[0].get_closest_marker("sampled")
        assert mark is not None and not mark.args, "sampled takes one= and of="
        kept = sample([traits(case.callspec.params, **mark.kwargs) for case in cases])
        for index, case in enumerate(cases):
            if index not in kept:
                case.add_marker(pytest.mark.slow)


def traits(params: Mapping[str, object], one: Collection[str] = (), of: Traits | None = None) -> set[Hashable]:
    """Returns what a case covers: by default the value of each of its parameters."""
    if of is not None:
        return set(of(**params))
    assert not isinstance(one, str) and set(one) <= params.keys(), f"one: {one} is not among {list(params)}"
    return {(name, repr(value)) for name, value in params.items() if name not in one}


def sample(cases: Sequence[set[Hashable]]) -> set[int]:
    """Returns the indices of a few cases, at least one, that cover everything that all cases cover. Greedy: each step
    takes the case that adds most; among several the one whose traits have occurred least, then the first."""
    uncovered, occurrences = set[Hashable]().union(*cases), collections.Counter[Hashable]()
    kept = set[int]()
    while uncovered or not kept:
        gains = [len(case & uncovered) for case in cases]
        most = max(gains)
        candidates = [k for k, add in enumerate(gains) if add == most]
        best = min(candidates, key=lambda k: sum(occurrences[each] for each in cases[k]))
        kept.add(best)
        uncovered -= cases[best]
        occurrences.update(cases[best])
    return kept
