"""Trainings that fail on one node in one round; configs name them as in "tests.launch.faults:Raises"."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from decentnode.checkpoint import tensor_file
from decentnode.communication.zeromq.protocol.link_sender import LinkSender
from decentnode.communication.zeromq.protocol.reconfiguration import Reconfiguration
from decentnode.config.component import Config
from decentnode.graph.base import RoundView
from decentnode.payload import Payload
from decentnode.sharing.full import Full
from decentnode.training.base import Direction, Update
from decentnode.training.supervised import Supervised
from decentnode.training.supervised_config import SupervisedConfig
from decentnode.wire.messages import Message
from tests.conftest import wait_until

FAULTY_UID, FAULT_ROUND = 2, 3
"""The node on which the trainings below fail, and the round in which they do."""
FREEZE_BY_ROUND = 8
"""The round that a node with `WritesPid` does not begin until the test has frozen it. Until then the others may have
its model of this round at most."""


class Faulty(Supervised):
    """Node 2 calls `inject_fault` in round 3, before it trains."""

    def inject_fault(self) -> None:
        raise NotImplementedError

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        if self._uid == FAULTY_UID and round == FAULT_ROUND:
            self.inject_fault()
        return super().local_update(round, direction)


class Raises(Faulty):
    def inject_fault(self) -> None:
        raise RuntimeError("a bug in my model")


class Dies(Faulty):
    def inject_fault(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class PidFileConfig(SupervisedConfig):
    pid_file: str = ""
    """The file to which a node writes its process id. Some trainings only make marker files beside it."""


class Hangs(Faulty):
    """Node 2 writes its process id in round 3, and hangs."""

    Config: ClassVar[type[Config]] = PidFileConfig

    def inject_fault(self) -> None:
        if self.config.pid_file:  # type: ignore[attr-defined]
            Path(self.config.pid_file).write_text(str(os.getpid()))  # type: ignore[attr-defined]
        threading.Event().wait(600)


class Lingers(Faulty):
    """Node 2 reports that it has finished, but its process does not exit: flushing stdout at its end blocks."""

    def inject_fault(self) -> None:
        sys.stdout = BlockingStdout()


class BlockingStdout(io.StringIO):
    def flush(self) -> None:
        threading.Event().wait(600)


class SetsNaN(Supervised):
    """The model of node 2 has a NaN after the steps of round 3."""

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        update = super().local_update(round, direction)
        if self._uid == FAULTY_UID and round == FAULT_ROUND:
            self.model.parameters[0] = float("nan")
        return update


class Slow(Supervised):
    """Rounds take at least 20 ms, so that a test can act while the run goes on."""

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        time.sleep(0.02)
        return super().local_update(round, direction)


class MarkerConfig(SupervisedConfig):
    marker: Path = Path("killed")
    """Exists once the run was killed."""


class DiesWriting(Supervised):
    """All processes are killed while node 2 writes its checkpoint after round 5, unless `marker` says that they were
    killed before. The kill waits until all nodes have written their checkpoints after round 4: nodes write
    checkpoints in the background."""

    Config: ClassVar[type[Config]] = MarkerConfig

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        marker: Path = self.config.marker  # type: ignore[attr-defined]
        if self._uid == FAULTY_UID and round == 5 and not marker.exists():
            marker.write_text("")

            def write_half_and_kill_all(file: int, data: memoryview, _: object) -> None:
                earlier = "runs/*/*/checkpoints/00000004-*/*.json"
                wait_until(lambda: len({path.name for path in Path().glob(earlier)}) == 4)
                os.write(file, data[: len(data) // 2])
                os.killpg(os.getpgid(0), signal.SIGKILL)

            tensor_file._write_all = write_half_and_kill_all
        return super().local_update(round, direction)


def experiment(**sections: Any) -> dict[str, Any]:
    """Returns a small experiment, which runs in a fraction of a second. `sections` replace its own sections."""
    return {
        "name": "tiny",
        "graph": {"name": "ring", "nodes": 4},
        "data": {"name": "digits"},
        "model": {"name": "logistic"},
        "training": {"batch_size": 8, "local_steps": 1, "optimizer": {"name": "sgd", "lr": 0.05}},
        "communication": {"name": "zeromq", "timeout_seconds": 60},
        "node": {"rounds": 8, "evaluate_every": 4},
        **sections,
    }


class WritesPid(Slow):
    """Node 2 writes its process id as it begins round 3, so that a test can freeze it at any moment from then on.
    Before it trains in round FREEZE_BY_ROUND it waits until the test has made the file `frozen`: on a busy machine the
    run would be over before the freeze."""

    Config: ClassVar[type[Config]] = PidFileConfig

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        pid_file = Path(self.config.pid_file)  # type: ignore[attr-defined]
        if round == FAULT_ROUND and self._uid == FAULTY_UID:
            pid_file.with_name(f"{pid_file.name}{FAULTY_UID}").write_text(str(os.getpid()))
        elif round == FREEZE_BY_ROUND and self._uid == FAULTY_UID:
            wait_until(pid_file.with_name("frozen").exists)
        return super().local_update(round, direction)


class Freezes(Slow):
    """Node 2 writes its process id and suspends itself in round 3, until a test sends SIGCONT."""

    Config: ClassVar[type[Config]] = PidFileConfig

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        if self._uid == FAULTY_UID and round == FAULT_ROUND:
            Path(self.config.pid_file).write_text(str(os.getpid()))  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().local_update(round, direction)


class TwoNodesFreeze(Slow):
    """Nodes 3 and 4 write their process ids and suspend themselves in round 5."""

    Config: ClassVar[type[Config]] = PidFileConfig

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        if self._uid in (3, 4) and round == 5:
            pid_file = Path(self.config.pid_file)  # type: ignore[attr-defined]
            pid_file.with_name(f"{pid_file.name}{self._uid}").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().local_update(round, direction)


class FreezesAndMarks(Freezes):
    """As `Freezes`; besides, all parameters of a model that is sent are a number that tells the node and the round."""

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        update = super().local_update(round, direction)
        self.model.parameters.fill_(marked_value(self._uid, round))
        return update


def marked_value(uid: int, round: int) -> float:
    return 1.0 + uid + 100 * round


class ChecksMarks(Full):
    """With `FreezesAndMarks`: a node raises if a payload is not the model that the neighbor sent in this round."""

    def mix_into(self, out: Tensor, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        for uid, payload in received.items():
            if not bool((payload.tensors["x"] == marked_value(uid, view.round)).all()):
                raise RuntimeError(f"round {view.round}: node {uid} sent {marked_value(uid, view.round)}, got "
                                   f"{payload.tensors['x'].unique().tolist()}")  # fmt: skip
        super().mix_into(out, model, received, view)


class FaultOnMessageConfig(SupervisedConfig):
    victim: str = ""
    """Node, type of message and signal, such as "1 Commit SIGKILL"."""
    received_marker: str = ""
    """File that a node makes when it receives a message of that type."""


class FaultOnMessage(Slow):
    """Node 2 dies in round 3. A second node gets a signal, too, as soon as it sends its first message of a given type,
    of those by which nodes agree on a generation: `victim` names the node, the type and the signal."""

    Config: ClassVar[type[Config]] = FaultOnMessageConfig

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        if round == 0:
            self._patch_messages()
        if self._uid == FAULTY_UID and round == FAULT_ROUND:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().local_update(round, direction)

    def _patch_messages(self) -> None:
        node, kind, signal_name = self.config.victim.split()  # type: ignore[attr-defined]
        marker = Path(self.config.received_marker)  # type: ignore[attr-defined]
        if self._uid != int(node):
            self._touch_on_receipt(kind, marker)
            return
        send_once = LinkSender.send_once

        def send_and_signal(links: LinkSender, uid: int, message: Message) -> None:
            send_once(links, uid, message)
            if type(message).__name__ == kind:
                for _ in range(100):  # until a node received it, or half a second: the receiver may be dead
                    if marker.exists() or threading.Event().wait(0.005):
                        break
                os.kill(os.getpid(), getattr(signal, signal_name))

        LinkSender.send_once = send_and_signal  # type: ignore[method-assign]

    @staticmethod
    def _touch_on_receipt(kind: str, marker: Path) -> None:
        receive = Reconfiguration.receive

        def receive_and_touch(regroup: Reconfiguration, message: Message, now: float) -> None:
            if type(message).__name__ == kind:
                marker.touch()
            receive(regroup, message, now)

        Reconfiguration.receive = receive_and_touch  # type: ignore[method-assign]


class DiesOnce(Supervised):
    """Node 2 dies whenever it trains in round 3: once, if it rejoins in a later round. Until it has rejoined, the
    others slow down, ever more, so that they do not finish before on a busy machine."""

    Config: ClassVar[type[Config]] = PidFileConfig

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        marker = Path(self.config.pid_file + ".back")  # type: ignore[attr-defined]
        if self._uid == FAULTY_UID and round == FAULT_ROUND:
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._uid == FAULTY_UID and round > FAULT_ROUND:
            marker.touch()
        elif round > FAULT_ROUND and not marker.exists():
            time.sleep(min(2.0, 0.2 * (round - FAULT_ROUND)))
        return super().local_update(round, direction)


class ServerDiesOnce(Supervised):
    """Node 0, a server, which makes no steps, dies in round 5 of its first process."""

    Config: ClassVar[type[Config]] = PidFileConfig

    def rest(self, round: int) -> None:
        marker = Path(self.config.pid_file + ".died")  # type: ignore[attr-defined]
        if self._uid == 0 and round == 5 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        super().rest(round)


class DiesOnceInTheOriginal(DiesOnce):
    """As `DiesOnce`, but once node 2 is back nothing dies any more: neither does it when the run is replayed."""

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        if Path(self.config.pid_file + ".back").exists():  # type: ignore[attr-defined]
            return Supervised.local_update(self, round, direction)
        return super().local_update(round, direction)


class WaitsForFile(Supervised):
    """Node 2 makes the file `pid_file`.waiting in round 3, and waits until the test has made the file `pid_file`."""

    Config: ClassVar[type[Config]] = PidFileConfig

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        if self._uid == FAULTY_UID and round == FAULT_ROUND:
            file = Path(self.config.pid_file)  # type: ignore[attr-defined]
            file.with_name(f"{file.name}.waiting").touch()
            wait_until(file.exists)
        return super().local_update(round, direction)


class HangsAfterRestart(Slow):
    """Node 2 dies in round 3; its second process hangs before it asks the others to admit it."""

    Config: ClassVar[type[Config]] = PidFileConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._died = Path(self.config.pid_file + ".died")  # type: ignore[attr-defined]
        if self._uid == FAULTY_UID and self._died.exists():
            time.sleep(600)

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        if self._uid == FAULTY_UID and round == FAULT_ROUND:
            self._died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().local_update(round, direction)


class BrokenSample(Dataset[tuple[Tensor, int]]):
    """Sample `broken_index` raises when it is read. Validation does not read it, as `targets` gives the labels."""

    classes = ("one", "two")
    broken_index = 1234

    def __init__(self, split: str) -> None:
        self.count = 1600 if split == "train" else 8
        self.targets = [index % 2 for index in range(self.count)]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.read_image(index), index % 2

    def read_image(self, index: int) -> Tensor:
        if index == self.broken_index:
            raise OSError(f"image {index} is cut short")
        return torch.full((4,), index / self.count)
