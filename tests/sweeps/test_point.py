"""A point is its settings; the digest identifies a run of it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from decentnode.errors import ConfigError
from decentnode.launch.children.messages import Request
from decentnode.sweeps.point import Point, label_of, prepare
from tests.launch.faults import experiment


@pytest.fixture
def base(tmp_path: Path) -> Request:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(experiment()))
    return Request(str(tmp_path / "tiny.yaml"))


def digest(base: Request, *settings: tuple[str, str], seed: int | None = None, by: str = "simulate") -> str:
    return prepare(base, Point(settings, seed), by).digest


def test_the_digest_covers_everything_that_decides_a_run_and_nothing_else(base: Request) -> None:
    lr = ("training.optimizer.lr", ".05")
    same = digest(base)
    assert same == digest(base, lr) == digest(base, ("training.optimizer.lr", "0.05"), seed=1)
    assert same == prepare(replace(base, overrides=["run.dir=elsewhere", "run.log_level=debug"]), Point(()), "simulate"
                           ).digest  # fmt: skip
    others = [digest(base, ("training.optimizer.lr", "0.1")), digest(base, seed=2), digest(base, by="processes"),
              digest(base, ("mapping", "{machines: 1, nodes_per_machine: 4, threads: 2}")),
              digest(base, ("graph.name", "star")), digest(base, ("node.rounds", "9"))]  # fmt: skip
    assert len({same, *others}) == 7


def test_a_changed_module_of_the_user_changes_the_digest(
    base: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    rule = tmp_path / "my_rule.py"
    rule.write_text("from decentnode.sharing.full import Full\n\n\nclass Mine(Full):\n    pass\n")
    mine = ("sharing", "{name: my_rule:Mine}")
    before = digest(base, mine)
    assert digest(base, mine) == before
    rule.write_text(rule.read_text() + "\n# changed\n")
    monkeypatch.delitem(sys.modules, "my_rule")
    assert digest(base, mine) != before


def test_a_point_with_a_wrong_key_raises_the_problems_of_its_experiment(base: Request) -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'ring'"):
        prepare(base, Point((("graph.name", "rng"),)), "simulate")


def test_a_point_of_a_rung_sets_its_rounds_and_a_checkpoint(base: Request) -> None:
    found = prepare(base, Point((), 3, rounds=2), "simulate", ["node.checkpoint={every: 100}"])
    assert found.rounds == 2 and found.request.overrides == ["seed=3", "node.rounds=2", "node.checkpoint={every: 100}"]
    assert prepare(base, Point(()), "simulate", ["node.checkpoint={every: 100}"]).request.overrides == []


def test_a_point_is_labelled_by_its_settings_and_its_seed() -> None:
    assert label_of((("training.optimizer.lr", ".1"), ("graph.name", "ring"))) == "lr=.1 graph=ring"
    assert label_of((("graph.name", "ring"),), 2) == "graph=ring seed=2" and label_of(()) == "the experiment as it is"


def test_the_step_size_that_preparing_found_is_passed_on_to_the_point(base: Request) -> None:
    found = prepare(base, Point((("sharing", "{name: stc, fraction: 0.3}"),)), "simulate")
    assert 0 < found.request.found["sharing.step_size"] < 1
