"""What a node did with models, record by record: the vocabulary that real and simulated runs share, and that the replay
and the checks of a run read (simulate/world/).

A record is a JSON object with its `kind`, a key of `HISTORY` (history_kinds.py). Nothing between two
records depends on time: the records of all nodes, with the config, say which bits every model had.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor

from decentnode.payload import Payload

NUMPY = frozenset({torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.uint8})
"""Types of which NumPy gives the bytes at once: five payloads of a small model take 25 us less than by way of uint8."""

Tell = Callable[[str, dict[str, Any]], None]
"""tell(kind, fields) keeps one record. Its caller is the training thread."""


class Digest:
    """64 bits (XXH3) of the bytes of tensors, which are added one after the other."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def add(self, tensor: Tensor) -> None:
        """tensor: of one dimension, or contiguous. Blocking where it lies on a GPU."""
        if tensor.requires_grad or not tensor.is_cpu or tensor.dtype not in NUMPY or not tensor.is_contiguous():
            tensor = tensor.detach().cpu().contiguous().view(torch.uint8)
        self._hash.update(tensor.numpy().data)

    def note(self, text: str) -> None:
        """Add what is no tensor."""
        self._hash.update(text.encode())

    @property
    def value(self) -> str:
        """Of all that was added so far: 16 hexadecimal digits."""
        return self._hash.hexdigest()


def digest_of(payload: Payload) -> str:
    """Returns the digest of a payload; of a single tensor, the one that its slices add up to."""
    digest = Digest()
    _add(digest, payload)
    return digest.value


def _digests(outgoing: Mapping[int, Payload]) -> dict[str, str]:
    """Returns the digests of payloads by neighbor."""
    known: dict[int, str] = {}
    for payload in outgoing.values():
        if id(payload) not in known:  # one payload for all, as a rule
            known[id(payload)] = digest_of(payload)
    return {str(uid): known[id(payload)] for uid, payload in outgoing.items()}


def _add(digest: Digest, payload: Payload) -> None:
    if len(payload.tensors) == 1 and not payload.scalars:
        digest.add(next(iter(payload.tensors.values())))
        return
    for name, tensor in sorted(payload.tensors.items()):
        digest.note(f"{name} {tensor.dtype} {tensor.numel()};")
        digest.add(tensor)
    for name, value in sorted(payload.scalars.items()):
        digest.note(f"{name} {value!r};")


class ExchangeRecord:
    """What of one exchange was mixed so far."""

    def __init__(self, tell: Tell, round: int, channel: int) -> None:
        """channel: tells the exchanges of one round apart."""
        self._tell, self.round, self.channel = tell, round, channel
        self.stop = 0
        """So many elements are in the model already, where slices are mixed into it one after the other."""
        self._digests: dict[int, Digest] = {}
        self._stops: dict[int, int] = {}
        self._total: Digest | None = None

    def take(self, stop: int, received: Mapping[int, Payload], total: Tensor | None = None) -> None:
        """Payloads, or the sum of a group's, of the next slice, up to element `stop`, are about to be mixed."""
        if total is not None:
            self._total = self._total or Digest()
            self._total.add(total)
        for uid, payload in received.items():
            digest = self._digests.get(uid)
            if digest is None:
                digest = self._digests[uid] = Digest()
            _add(digest, payload)
            self._stops[uid] = stop

    def spoiled(self, uids: Collection[int], stop: int) -> None:
        """Payloads of these sources changed while they were read: they were mixed up to element `stop` alone."""
        for uid in self._digests.keys() & uids:
            del self._digests[uid]
            self._stops[uid] = stop

    def fields(self, without: Collection[int] = ()) -> dict[str, Any]:
        """Returns what a record says of it. without: sources of which not all was mixed, or nothing."""
        found: dict[str, Any] = {"round": self.round, "channel": self.channel}
        digests = {uid: digest.value for uid, digest in sorted(self._digests.items())}
        found["from"] = {str(uid): digest for uid, digest in digests.items() if uid not in without}
        partly = {str(uid): [stop, digests.get(uid)] for uid, stop in sorted(self._stops.items())
                  if uid in without and stop}  # fmt: skip
        if partly:
            found["partly"] = partly
        if self._total is not None:
            found["total"] = self._total.value
        return found

    def over(
        self, missing: Collection[int], departed: Collection[int], undelivered: Collection[int],
        refused: Collection[int] = (),
    ) -> None:
        """The exchange is over. missing: sources of which nothing came, or not all; departed: those among them that
        were not waited for; undelivered: neighbors that certainly got nothing; refused: sources whose payload could not
        be read."""
        found = self.fields({*missing, *refused})
        if refused:
            found["partly"] = {uid: each for uid, each in found.get("partly", {}).items() if int(uid) not in refused}
        lists = {"missing": {*missing, *refused}, "departed": {*departed, *refused}, "undelivered": undelivered}
        self._tell("mixed", {**found, **{name: sorted(uids) for name, uids in lists.items() if uids}})

    def broken_off(self) -> None:
        """The generation ended while the exchange was under way."""
        if self.stop:
            self._tell("broken_off", {**self.fields(), "stop": self.stop})


class History:
    """Makes the records of one node. Used by its training thread."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def steps(self, round: int, left_out: bool = False) -> None:
        """The local steps of a round are made. left_out: they are not, as nobody waits for them any more."""
        self._tell("steps", {"round": round, **({"left_out": True} if left_out else {})})

    def sent(self, round: int, channel: int, outgoing: Mapping[int, Payload]) -> ExchangeRecord:
        """Payloads are about to be handed to the transport. Returns the record of what comes in exchange."""
        self._tell("sent", {"round": round, "channel": channel, "to": _digests(outgoing)})
        return ExchangeRecord(self._tell, round, channel)

    def published(self, number: int, channel: int, outgoing: Mapping[int, Payload]) -> None:
        """Payloads that nobody waits for by their rounds are about to be handed to the transport. number: tells those
        of this node in this channel and generation apart (`Communication.publish`)."""
        self._tell("published", {"round": number, "channel": channel, "to": _digests(outgoing)})

    def mixed_copies(
        self, round: int, channel: int, copies: Iterable[tuple[int, int, int, Payload]]
    ) -> None:
        """What came into the mailbox of a channel is about to be mixed in this node's `round`. copies: (source, number
        under which it published, own rounds since it came, payload as it came) of each; without any nothing is told."""
        found = [[source, number, age, digest_of(payload)] for source, number, age, payload in copies]
        if found:
            self._tell("mixed_copies", {"round": round, "channel": channel, "from": found})

    def averaging(self, key: str) -> None:
        """The node is about to give its part to a mean over all nodes."""
        self._tell("averaging", {"key": key})

    def averaged(self, key: str) -> None:
        """That mean is there."""
        self._tell("averaged", {"key": key})

    def left(self, round: int, reason: str) -> None:
        """The node begins no further round of its generation, and `round` is not over."""
        self._tell("left", {"round": round, "reason": reason[:300]})

    def entered(
        self, name: tuple[int, bytes], members: Collection[int], first_round: int, fresh: Collection[int],
        stopping: bool, merging: bool = False,
    ) -> None:
        """The node is a member of a generation in force."""
        number, origin = name
        self._tell("entered", {
            "generation": number, "origin": origin.hex(), "round": first_round, "members": sorted(members),
            "fresh": sorted(fresh), **({"stopping": True} if stopping else {}),
            **({"merging": True} if merging else {}),
        })  # fmt: skip

    def restored(self, round: int = -1, name: tuple[int, bytes] = (0, b""), digest: str = "") -> None:
        """The node came back, and has the model and the training's state of the checkpoint that it made in generation
        `name` before `round`. Without digest: it has none that is recent enough."""
        number, origin = name
        which = {"round": round, "generation": number, "origin": origin.hex(), "digest": digest}
        self._tell("restored", which if digest else {})

    def resumed(
        self, round: int, evaluated: int, without: Collection[int], cut: str = "", digest: str = ""
    ) -> None:
        """The node is about to go on before `round` from its checkpoint in the folder `cut` of checkpoints/. evaluated:
        after how many rounds the last evaluation was. without: members that have no checkpoint; this one has none
        without digest."""
        which = {"cut": cut, "digest": digest} if digest else {}
        self._tell("resumed", {"round": round, "evaluated": evaluated, "without": sorted(without), **which})

    def leaving(self, round: int) -> None:
        """This node alone was asked to leave: it begins neither `round` nor a later one, and ends."""
        self._tell("leaving", {"round": round})

    def ordered(self, round: int) -> None:
        """The node is about to evaluate before this round, because people ordered it."""
        self._tell("ordered", {"round": round})

    def stopping(self, round: int) -> None:
        """The run is asked to stop: the node begins neither `round` nor a later one."""
        self._tell("stopping", {"round": round})
