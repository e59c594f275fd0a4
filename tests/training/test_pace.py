"""local_seconds: the number of local steps follows from a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from decentnode import clock
from decentnode.build import build_in_process, step_all
from decentnode.communication.inproc import Inproc
from decentnode.communication.run_state import Wait
from decentnode.errors import ConfigError
from decentnode.experiment import load
from decentnode.node.node import Node
from decentnode.training.pace import Pace

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def test_the_pace_adapts_the_number_of_steps_to_their_duration() -> None:
    pace, made = Pace(1.0), []
    for round in range(12):
        steps, each = pace.steps(), 5.0 if round == 0 else 0.05 if round < 8 else 0.1
        made.append(steps)
        pace.record(steps, each * steps)
    assert made[:3] == [1, 1, 2] and made[6:8] == [20, 20], "the first step, slow for other reasons, must not count"
    assert made[-1] in (10, 11) and min(made) == 1
    slow = Pace(1.0)
    slow.record(1, 30.0)
    assert slow.steps() == 1


class VirtualTimeTransport(Inproc):
    """Advances the virtual clock after local steps: 10 ms for each step of node 0, 100 ms for each of node 1."""

    of: Node

    def computed(self, round: int) -> Wait | None:
        VIRTUAL.advance_to(VIRTUAL.now() + (0.01, 0.1)[self.uid] * self.of.schedule.update.steps)
        return None


VIRTUAL = clock.VirtualClock()


def test_a_node_ten_times_slower_makes_a_tenth_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = ["training={name: supervised, batch_size: 4, local_seconds: 1.0}", "graph={name: ring, nodes: 2}",
            "mapping.nodes_per_machine=2", "data.partition=iid", "node={rounds: 10, evaluate_every: 0}"]  # fmt: skip
    monkeypatch.setattr("decentnode.build.Inproc", VirtualTimeTransport)
    records: list[tuple[int, dict[str, Any]]] = []
    nodes = build_in_process(load(QUICKSTART, sets), lambda uid, record: records.append((uid, record)))
    for node in nodes:
        assert isinstance(node.communication, VirtualTimeTransport)
        node.communication.of = node
    with clock.use(VIRTUAL):
        step_all(nodes)
    last = {uid: record["steps"] for uid, record in records if record["kind"] == "round"}
    assert 95 <= last[0] <= 100 and 9 <= last[1] <= 10


@pytest.mark.parametrize("key", ["local_steps", "local_epochs"])
def test_local_seconds_beside_a_number_of_steps_is_refused_with_the_override_to_use(key: str) -> None:
    sets = [f"training={{name: supervised, batch_size: 4, {key}: 1}}", "training.local_seconds=1"]
    with pytest.raises(ConfigError, match=f"{key}: null overrides"):
        load(QUICKSTART, sets)
    load(QUICKSTART, [*sets, f"training.{key}=null"])


@pytest.mark.parametrize("sets", [
    "local_steps: 3, local_seconds: 1", "local_epochs: 1, local_seconds: 1",
    "local_seconds: 1, lr_schedule: {name: exponential, gamma: 0.9, every: step}",
])  # fmt: skip
def test_local_seconds_excludes_numbers_of_steps_and_schedules_by_step(sets: str) -> None:
    with pytest.raises(ConfigError, match="local_seconds"):
        load(QUICKSTART, [f"training={{name: supervised, batch_size: 4, {sets}}}"])
