"""The sample that the default run takes of a product of parameters."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.products import sample, traits

RULES, GRAPHS, SEEDS = "abcde", (1, 2, 3), range(4)
CASES = [{"rule": rule, "graph": graph, "seed": seed} for rule, graph, seed in itertools.product(RULES, GRAPHS, SEEDS)]


def test_the_sample_is_small_and_has_every_value_of_every_parameter() -> None:
    kept = [CASES[index] for index in sample([traits(case) for case in CASES])]
    assert len(kept) == len(RULES)
    for name in ("rule", "graph", "seed"):
        assert {case[name] for case in kept} == {case[name] for case in CASES}


def test_of_parameters_named_in_one_the_sample_needs_a_single_value() -> None:
    kept = sample([traits(case, one=["seed"]) for case in CASES])
    assert len(kept) == len(RULES) and {CASES[index]["graph"] for index in kept} == set(GRAPHS)
    assert sample([traits(case, one=list(case)) for case in CASES]) == {0}
    with pytest.raises(AssertionError, match="is not among"):
        traits(CASES[0], one=["sed"])


def test_a_function_may_define_what_the_sample_must_cover() -> None:
    kept = sample([traits(case, of=lambda rule, graph, seed: {(rule < "c", graph)}) for case in CASES])
    assert {(str(CASES[index]["rule"]) < "c", CASES[index]["graph"]) for index in kept} == set(
        itertools.product([True, False], GRAPHS))  # fmt: skip


def test_the_sample_is_the_same_in_every_process() -> None:
    """Sets of text have another order in every process, on which the sample must not depend."""
    code = "from tests.test_products import *; print(sorted(sample([traits(case) for case in CASES])))"
    samples = {subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, text=True,
                              cwd=Path(__file__).parents[1], check=True, capture_output=True).stdout
               for seed in ("1", "2", "3")}  # fmt: skip
    assert samples == {f"{sorted(sample([traits(case) for case in CASES]))}\n"}
