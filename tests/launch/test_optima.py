"""The processes of a run's nodes take over the optimizations of its graph from the process that loaded the run."""

from __future__ import annotations

from pathlib import Path

from tests import commands

OWN_GRAPH = """\
import os

from decentnode.graph.matcha import Matcha


class Counted(Matcha):
    def _optimize(self):
        with open("optimized.txt", "a") as file:
            file.write(f"{os.getpid()}\\n")
        return super()._optimize()
"""
CONFIG = """\
graph: {name: "counted_matcha:Counted", nodes: 4, base: {name: complete, nodes: 4}}
data: digits
model: logistic
training: {batch_size: 8, local_steps: 1, optimizer: {name: sgd, lr: 0.1}}
node: {rounds: 2}
"""


def test_a_graph_is_optimized_once_for_all_processes_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "counted_matcha.py").write_text(OWN_GRAPH)
    (tmp_path / "a.yaml").write_text(CONFIG)
    code, output, errors = commands.run(tmp_path, "run", "a.yaml")
    assert code == 0, output + errors
    assert len((tmp_path / "optimized.txt").read_text().split()) == 1
