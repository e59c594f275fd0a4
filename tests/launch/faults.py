"""Training that goes wrong on one node in one round; named in configs as "tests.launch.faults:Raises"."""

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

UID, ROUND = 2, 3
LAST_WITH = 8
"""The last round of which a node that `WritesPid` holds up may have sent its model."""


class Faulty(Supervised):
    def go_wrong(self) -> None:
        raise NotImplementedError

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        if self._uid == UID and round == ROUND:
            self.go_wrong()
        return super().local_update(round, direction)


class Raises(Faulty):
    def go_wrong(self) -> None:
        raise RuntimeError("a bug in my model")


class Dies(Faulty):
    def go_wrong(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class StopsConfig(SupervisedConfig):
    pid_file: str = ""


class Hangs(Faulty):
    """Node 2 hangs in round 3, and leaves its process id."""

    Config: ClassVar[type[Config]] = StopsConfig

    def go_wrong(self) -> None:
        if self.config.pid_file:  # type: ignore[attr-defined]
            Path(self.config.pid_file).write_text(str(os.getpid()))  # type: ignore[attr-defined]
        threading.Event().wait(600)


class Lingers(Faulty):
    """Node 2 says its last word, and its process does not end."""

    def go_wrong(self) -> None:
        sys.stdout = NeverFlushed()


class NeverFlushed(io.StringIO):
    def flush(self) -> None:
        threading.Event().wait(600)


class Poisons(Supervised):
    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        update = super().local_update(round, direction)
        if self._uid == UID and round == ROUND:
            self.model.parameters[0] = float("nan")
        return update


class Slow(Supervised):
    """Rounds of 20 ms, so that a test can do something meanwhile."""

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        time.sleep(0.02)
        return super().local_update(round, direction)


class MarkerConfig(SupervisedConfig):
    marker: Path = Path("killed")


class DiesWriting(Supervised):
    """Everything is killed in the middle of node 2's writing a checkpoint, after round 5, the first time. By then all
    nodes have written those of round 4, which they do beside their rounds."""

    Config: ClassVar[type[Config]] = MarkerConfig

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        marker: Path = self.config.marker  # type: ignore[attr-defined]
        if self._uid == UID and round == 5 and not marker.exists():
            marker.write_text("")

            def half(file: int, data: memoryview, _: object) -> None:
                before = "runs/*/*/checkpoints/00000004-*/*.json"
                wait_until(lambda: len({each.name for each in Path().glob(before)}) == 4)
                os.write(file, data[: len(data) // 2])
                os.killpg(os.getpgid(0), signal.SIGKILL)

            tensor_file._write_all = half
        return super().local_update(round, direction)


def experiment(**sections: Any) -> dict[str, Any]:
    """A small experiment that takes a fraction of a second; `sections` replace its own."""
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
    """Node 2 leaves its process id as it begins round 3, so that a test can freeze it at any moment from then on. It
    does not go on with round LAST_WITH before it was frozen: on a busy machine the run would be over by then."""

    Config: ClassVar[type[Config]] = StopsConfig

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        pid_file = Path(self.config.pid_file)  # type: ignore[attr-defined]
        if round == ROUND and self._uid == UID:
            pid_file.with_name(f"{pid_file.name}{UID}").write_text(str(os.getpid()))
        elif round == LAST_WITH and self._uid == UID:
            wait_until(pid_file.with_name("frozen").exists)
        return super().local_update(round, direction)


class Stops(Slow):
    """Node 2 freezes in round 3, until somebody says SIGCONT."""

    Config: ClassVar[type[Config]] = StopsConfig

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        if self._uid == UID and round == ROUND:
            Path(self.config.pid_file).write_text(str(os.getpid()))  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().local_update(round, direction)


class StopsSide(Slow):
    """Nodes 3 and 4 freeze in round 5, and leave their process ids."""

    Config: ClassVar[type[Config]] = StopsConfig

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        if self._uid in (3, 4) and round == 5:
            pid_file = Path(self.config.pid_file)  # type: ignore[attr-defined]
            pid_file.with_name(f"{pid_file.name}{self._uid}").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().local_update(round, direction)


class Marks(Stops):
    """As Stops; and what leaves in a round says whose it is and of which round."""

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        update = super().local_update(round, direction)
        self.model.parameters.fill_(mark(self._uid, round))
        return update


def mark(uid: int, round: int) -> float:
    return 1.0 + uid + 100 * round


class ChecksMarks(Full):
    """With Marks: a node that is given anything but its neighbors' models of the round fails."""

    def mix_into(self, out: Tensor, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        for uid, payload in received.items():
            if not bool((payload.tensors["x"] == mark(uid, view.round)).all()):
                raise RuntimeError(f"round {view.round}: node {uid} sent {mark(uid, view.round)}, here is "
                                   f"{payload.tensors['x'].unique().tolist()}")  # fmt: skip
        super().mix_into(out, model, received, view)


class MortalConfig(SupervisedConfig):
    victim: str = ""
    heard: str = ""
    """File that a node makes which has heard the victim's word."""


class Mortal(Slow):
    """Node 2 dies in round 3, and as soon as another one says a certain word about the next generation, a signal hits
    it, too: `victim` has all three ("1 Commit SIGKILL")."""

    Config: ClassVar[type[Config]] = MortalConfig

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        if round == 0:
            self._wait_for_word()
        if self._uid == UID and round == ROUND:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().local_update(round, direction)

    def _wait_for_word(self) -> None:
        node, word, fault = self.config.victim.split()  # type: ignore[attr-defined]
        marker = Path(self.config.heard)  # type: ignore[attr-defined]
        if self._uid != int(node):
            self._tell_when_heard(word, marker)
            return
        say = LinkSender.send_once

        def say_and_die(links: LinkSender, uid: int, message: Message) -> None:
            say(links, uid, message)
            if type(message).__name__ == word:
                for _ in range(100):  # until somebody has it; half a second, as it may be for a node that is gone
                    if marker.exists() or threading.Event().wait(0.005):
                        break
                os.kill(os.getpid(), getattr(signal, fault))

        LinkSender.send_once = say_and_die  # type: ignore[method-assign]

    @staticmethod
    def _tell_when_heard(word: str, marker: Path) -> None:
        hear = Reconfiguration.receive

        def hear_and_tell(regroup: Reconfiguration, message: Message, now: float) -> None:
            if type(message).__name__ == word:
                marker.touch()
            hear(regroup, message, now)

        Reconfiguration.receive = hear_and_tell  # type: ignore[method-assign]


class DiesOnce(Supervised):
    """Node 2 dies in round 3, but not when it has been started again; until then the others take their time."""

    Config: ClassVar[type[Config]] = StopsConfig

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        marker = Path(self.config.pid_file + ".back")  # type: ignore[attr-defined]
        if self._uid == UID and round == ROUND:
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._uid == UID and round > ROUND:
            marker.touch()
        elif round > ROUND and not marker.exists():
            time.sleep(0.2)
        return super().local_update(round, direction)


class ServerDiesOnce(Supervised):
    """Node 0, which makes no steps, dies in round 5, but not when it has been started again."""

    Config: ClassVar[type[Config]] = StopsConfig

    def rest(self, round: int) -> None:
        marker = Path(self.config.pid_file + ".died")  # type: ignore[attr-defined]
        if self._uid == 0 and round == 5 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        super().rest(round)


class DiesInTheRun(DiesOnce):
    """As `DiesOnce`, but not when the run is repeated."""

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        if Path(self.config.pid_file + ".back").exists():  # type: ignore[attr-defined]
            return Supervised.local_update(self, round, direction)
        return super().local_update(round, direction)


class WaitsForFile(Supervised):
    """Node 2 makes no steps of round 3 before there is a file."""

    Config: ClassVar[type[Config]] = StopsConfig

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        if self._uid == UID and round == ROUND:
            wait_until(Path(self.config.pid_file).exists)  # type: ignore[attr-defined]
        return super().local_update(round, direction)


class NeverBack(Slow):
    """Node 2 dies in round 3; started again, it hangs before it has asked anybody to let it in."""

    Config: ClassVar[type[Config]] = StopsConfig

    def __init__(self, *parts: Any, **named: Any) -> None:
        super().__init__(*parts, **named)
        self._died = Path(self.config.pid_file + ".died")  # type: ignore[attr-defined]
        if self._uid == UID and self._died.exists():
            time.sleep(600)

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        if self._uid == UID and round == ROUND:
            self._died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().local_update(round, direction)


class CutShort(Dataset[tuple[Tensor, int]]):
    """A sample that validation does not read, because it knows the labels, cannot be made."""

    classes = ("one", "two")
    bad = 1234

    def __init__(self, split: str) -> None:
        self.count = 1600 if split == "train" else 8
        self.targets = [index % 2 for index in range(self.count)]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.read_image(index), index % 2

    def read_image(self, index: int) -> Tensor:
        if index == self.bad:
            raise OSError(f"image {index} is cut short")
        return torch.full((4,), index / self.count)
