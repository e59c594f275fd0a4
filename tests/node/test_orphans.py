"""`node.orphans: adopted`: members train on the samples of absent nodes; no sample is used twice in an epoch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decentnode.build import build
from decentnode.communication.base import Communication
from decentnode.communication.inproc import Hub, Inproc, InprocConfig
from decentnode.communication.parts import Schema
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.errors import ConfigError
from decentnode.experiment import load
from decentnode.faults import Faults, Kill, Restart
from decentnode.metrics.generation_samples import GenerationSamples, epochs, packed
from decentnode.node.checkpoints.manager import Checkpoints
from decentnode.node.checkpoints.resume_agreement import ResumeFrom
from decentnode.node.node import Node
from decentnode.simulate.world.world import Setting, World
from decentnode.wire.generation import Limits
from tests.node.fleet import remove_checkpoints_after

pytestmark = pytest.mark.usefixtures("one_thread")

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
NODES, SAMPLES = 4, 1437
SETS = (
    "graph={name: complete, nodes: 4}", "mapping={machines: 1, nodes_per_machine: 4}", "node.rounds=14",
    "node.evaluate_every=0", "node.missing=regroup", "node.orphans=adopted", "model={name: logistic}",
    "training={batch_size: 64, local_steps: 4, optimizer: {name: sgd, lr: 0.1}}", "data.partition=iid",
)  # fmt: skip
Trained = tuple[tuple[int, int], int, int]
"""(generation, first round), epoch, sample."""


class RecordedRun:
    """Nodes of one run; every sample that a node trains on is recorded."""

    def __init__(self, *more: str, folder: Path | None = None, resume: Path | None = None) -> None:
        self.experiment = load(QUICKSTART, [*SETS, *more])
        self.data = self.experiment.open_data()
        self.folder, self.resume = folder, resume
        self.trained: dict[int, list[Trained]] = {uid: [] for uid in range(NODES)}
        self.rounds: dict[int, list[int]] = {uid: [] for uid in range(NODES)}
        """The round of each entry in `trained`."""
        self.nodes: dict[int, Node] = {}
        self.records: list[dict[str, Any]] = []

    def make(self, uid: int, make_communication: Callable[[tuple[Schema, ...]], Communication]) -> Node:
        node = build(self.experiment, uid, make_communication, self.records.append)
        training: Any = node.training
        gathered = training.share._gathered_batches

        def gather_and_record(indices: np.ndarray, sizes: list[int], epoch: int) -> Any:
            share = self.data.shares_among(training.members or range(NODES))[uid]
            last, sampler = training.dealt[-1], training.sampler
            first = sampler.epoch * sampler.usable + sampler.cursor - len(indices)
            self.trained[uid] += [((last.generation, last.first_round), (first + place) // sampler.usable, int(sample))
                                  for place, sample in enumerate(share[indices])]  # fmt: skip
            self.rounds[uid] += [node.round] * len(indices)
            return gathered(indices, sizes, epoch)

        training.share._gathered_batches = gather_and_record
        if self.folder is not None:
            node.checkpoints = Checkpoints(node, self.folder, {}, ResumeFrom((self.resume,)) if self.resume else None)
        self.nodes[uid] = node
        return node

    def check(self) -> None:
        """No sample was used twice in an epoch by any nodes, and the nodes' own counts equal the recorded ones."""
        all_trained = [entry for entries in self.trained.values() for entry in entries]
        assert len(set(all_trained)) == len(all_trained)
        for uid, node in self.nodes.items():
            counted = {(dealt.generation, dealt.first_round): dealt.trained for dealt in node.training.dealt}
            generations = [generation for generation, _, _ in self.trained[uid]]
            expected = {generation: count for generation, count in counted.items() if count}
            assert {generation: generations.count(generation) for generation in expected} == expected

    def whole_epochs(self, name: tuple[int, int]) -> int:
        """Returns in how many epochs of a generation all samples were used."""
        by_epoch: dict[int, set[int]] = {}
        for entries in self.trained.values():
            for generation, epoch, sample in entries:
                if generation == name:
                    by_epoch.setdefault(epoch, set()).add(sample)
        return sum(len(samples) == SAMPLES for samples in by_epoch.values())


class InProcess(RecordedRun):
    """A run in one process, in which a test loses and restarts nodes."""

    def __init__(self, *more: str, folder: Path | None = None, resume: Path | None = None) -> None:
        super().__init__(*more, folder=folder, resume=resume)
        self.hub = Hub(NODES)
        self.hub.run_id = b"\x07" * 8
        self.runs = {}
        for uid in range(NODES):
            self.runs[uid] = self._make(uid).steps()

    def _make(self, uid: int) -> Node:
        config = InprocConfig.model_validate({"name": "inproc"})
        return self.make(uid, lambda schemas: Inproc(config, uid=uid, hub=self.hub, schemas=schemas))

    def to_round(self, round: int) -> None:
        for _ in range(2000):
            if all(self.nodes[uid].round >= round for uid in self.runs) or not self.runs:
                return
            self.step()
        pytest.fail(f"still at {[node.doing for node in self.nodes.values()]}")

    def step(self) -> None:
        for uid, steps in sorted(self.runs.items()):
            try:
                next(steps)
            except StopIteration:
                del self.runs[uid]

    def lose(self, uid: int) -> None:
        checkpoints = self.nodes[uid].checkpoints
        if checkpoints is not None:
            checkpoints.close(10)
        del self.runs[uid]
        self.hub.lose(uid)

    def restart(self, uid: int) -> None:
        node = self._make(uid)
        node.communication.join()
        self.runs[uid] = node.steps()

    def end(self) -> None:
        while self.runs:
            self.step()


SEQUENCES = {
    "one lost": [("lose", 2, 3)],
    "one lost and restarted": [("lose", 2, 3), ("restart", 2, 8)],
    "node 0, then another": [("lose", 0, 2), ("lose", 3, 5), ("restart", 0, 7), ("restart", 3, 10)],
    "two in one round": [("lose", 1, 4), ("restart", 1, 4), ("lose", 2, 4)],
    "one twice, then another": [("lose", 3, 2), ("restart", 3, 4), ("lose", 3, 6), ("restart", 3, 8), ("lose", 1, 10)],
}


@pytest.mark.sampled
@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("partition", ["iid", "{name: dirichlet, alpha: 0.5}"])
def test_members_train_on_the_samples_of_absent_nodes(sequence: str, partition: str) -> None:
    run = InProcess(f"data.partition={partition}")
    for what, uid, round in SEQUENCES[sequence]:
        run.to_round(round)
        getattr(run, what)(uid)
    run.end()
    run.check()
    members = run.nodes[run.hub.generation.members[0]].generation.members
    assert all(run.nodes[uid].training.members == members and run.nodes[uid].round == 14 for uid in members)
    assert sum(run.nodes[uid].training.num_samples for uid in members) == SAMPLES
    if len(members) == NODES:  # every node has its own samples again
        shares = run.data.shares()
        assert all(run.nodes[uid].training.num_samples == len(shares[uid]) for uid in members)


def test_all_samples_are_used_in_every_whole_epoch_only_if_orphans_are_adopted() -> None:
    run = InProcess()
    run.to_round(3)
    run.lose(2)
    run.end()
    (_, last) = run.nodes[0].training.dealt
    assert last.generation == 1 and last.adopted in (119, 120)
    assert run.whole_epochs((1, last.first_round)) >= 4
    lost = InProcess("node.orphans=lost")
    lost.to_round(3)
    lost.lose(2)
    lost.end()
    assert lost.nodes[0].training.num_samples == len(lost.data.shares()[0])
    (figures,) = [figures for figures in epochs(run.nodes[0].figures()["dealt"]) if figures["generation"] == 1]
    assert figures["trained"] == last.trained
    assert figures["trained"] == figures["epochs"] * figures["samples"] + figures["of_last_epoch"]
    assert "dealt" not in lost.nodes[0].figures()


def test_a_run_that_loses_no_node_has_the_same_models_with_and_without_adoption() -> None:
    one, other = InProcess(), InProcess("node.orphans=lost")
    for run in (one, other):
        run.end()
    for uid in range(NODES):
        models = [run.nodes[uid].training.model.parameters for run in (one, other)]
        assert torch.equal(*models)


@pytest.mark.slow
@pytest.mark.parametrize("until", [4, 8, 12])
def test_a_run_with_adopted_samples_is_resumed_from_checkpoints(tmp_path: Path, until: int) -> None:
    """From checkpoints of all nodes, taken before or after one was absent, the run continues as if uninterrupted. From
    those of some nodes, all begin an epoch with their own samples. Both runs together use no sample twice per epoch."""
    keys = "node.checkpoint={every: 2, keep: 99, recent: 0}"
    run = InProcess(keys, folder=tmp_path / "a")
    run.to_round(5)
    run.lose(2)
    run.to_round(9)
    run.restart(2)
    run.end()
    remove_checkpoints_after(tmp_path / "a", until)
    again = InProcess(keys, folder=tmp_path / "b", resume=tmp_path / "a")
    again.end()
    for node in again.nodes.values():
        assert node.checkpoints is not None and node.round == 14
    if until == 8:
        assert {node.training.dealt[-1].first_round for node in again.nodes.values()} == {8}
        assert all(node.training.num_samples == len(again.data.shares()[uid]) for uid, node in again.nodes.items())
    elif until == 12:
        for uid, node in run.nodes.items():
            assert torch.equal(node.training.model.parameters, again.nodes[uid].training.model.parameters)
            assert node.training.dealt[-1] == again.nodes[uid].training.dealt[-1]
    for uid in range(NODES):
        assert {*again.rounds[uid]} == {*range(until, 14)}
    kept = [entry for uid in range(NODES) for entry, round in zip(run.trained[uid], run.rounds[uid], strict=True)
            if round < until]  # fmt: skip
    all_trained = kept + [entry for entries in again.trained.values() for entry in entries]
    assert kept and len(set(all_trained)) == len(all_trained)


@pytest.mark.sampled(one=["seed"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_samples_of_a_killed_node_are_adopted_in_a_simulated_world(seed: int) -> None:
    config = ZeroMQConfig.model_validate({"name": "zeromq", "checksum": "none", "suspect_seconds": 2,
                                          "timeout_seconds": 20})  # fmt: skip
    gone = seed % NODES
    faults = Faults(plan=(Kill(nodes=(gone,), at_round=2), Restart(nodes=(gone,), at_seconds=9.0 + seed)))
    run = RecordedRun("graph={name: ring, nodes: 4}", "node.rounds=20", "mapping.device=cpu")
    setting = Setting(NODES, config, Limits(2.0, 20.0, 3, 20), faults, seed, lambda _uid, _round: 0.5)
    world = World(setting, run.make)  # type: ignore[arg-type]
    assert world.run(1000) and not any(process.error for process in world.lives)
    run.check()
    assert world.happened == {"kill": 1, "restart": 1}
    assert {node.generation.number for node in run.nodes.values()} == {2}
    while_absent = [dealt for dealt in run.nodes[(gone + 1) % NODES].training.dealt if dealt.generation == 1]
    assert while_absent and while_absent[0].adopted > 0
    assert all(node.training.num_samples == len(run.data.shares()[uid]) for uid, node in run.nodes.items())


def test_shares_are_a_pure_function_of_the_members() -> None:
    data, other = (load(QUICKSTART, SETS).open_data() for _ in range(2))
    for members in ((0, 1, 3), (1,), (0, 3), (0, 1, 2, 3)):
        shares = data.shares_among(members)
        assert np.array_equal(np.sort(np.concatenate(list(shares.values()))), np.arange(SAMPLES))
        assert shares.keys() == {*members}
        for uid in members:
            assert {*data.shares()[uid]} <= {*shares[uid]}
    again = other.shares_among((0, 1, 3))
    assert all(np.array_equal(again[uid], mine) for uid, mine in data.shares_among((0, 1, 3)).items())


@pytest.mark.parametrize(("sets", "text"), [
    (["node.missing=fail"], "orphans needs missing: regroup"),
    (["training.sampling=resample"], "resample"),
    (["training.validation={fraction: 0.1}"], "validation set of each node's own samples"),
    (["data.partition={name: only_local}"], "nodes of several machines have the same samples"),
], ids=["missing", "resample", "validation", "only_local"])  # fmt: skip
def test_options_that_adoption_does_not_support_are_refused(sets: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load(QUICKSTART, [*SETS, *sets])


def test_the_packed_figure_of_many_generations_is_short_and_keeps_the_newest() -> None:
    many = [GenerationSamples(number, 10 * number, 500, 120, 1750) for number in range(1000)]
    unpacked = epochs(packed(many))
    assert unpacked[-1] == {"generation": 999, "from_round": 9990, "samples": 500, "adopted": 120, "trained": 1750,
                        "epochs": 3, "of_last_epoch": 250}  # fmt: skip
    assert len(packed(many)) <= 240 and [entry["generation"] for entry in unpacked] == sorted(
        entry["generation"] for entry in unpacked)  # fmt: skip
