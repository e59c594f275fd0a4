"""Records what a node did with models. Real and simulated runs share these records, and the replay and the checks of
runs read them (simulate/world/).

A record is a JSON object with a `kind`, a key of `HISTORY` (history_kinds.py). The records do not depend on time:
together with the config, those of all nodes determine every bit of every model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor

from decentnode.payload import Payload

NUMPY = frozenset({torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.uint8})
"""The dtypes whose bytes NumPy can give directly. For five payloads of a small model, this takes 25 us less than a view
as uint8."""

Tell = Callable[[str, dict[str, Any]], None]
"""tell(kind, fields) keeps one record. It is called on the training thread."""


class Digest:
    """Computes a 64-bit digest (XXH3) of the bytes of tensors that are added one after the other."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def add(self, tensor: Tensor) -> None:
        """Adds a tensor. tensor: one-dimensional or contiguous. Blocks if it is on a GPU."""
        if tensor.requires_grad or not tensor.is_cpu or tensor.dtype not in NUMPY or not tensor.is_contiguous():
            tensor = tensor.detach().cpu().contiguous().view(torch.uint8)
        self._hash.update(tensor.numpy().data)

    def note(self, text: str) -> None:
        """Adds a text, such as a tensor's name or a scalar."""
        self._hash.update(text.encode())

    @property
    def value(self) -> str:
        """The digest of everything added so far, as 16 hexadecimal digits."""
        return self._hash.hexdigest()


def digest_of(payload: Payload) -> str:
    """Returns the digest of a payload; for a single tensor, it equals the digest of its slices added in order."""
    digest = Digest()
    _add(digest, payload)
    return digest.value


def _digests(outgoing: Mapping[int, Payload]) -> dict[str, str]:
    """Returns the digests of payloads by neighbor."""
    known: dict[int, str] = {}
    for payload in outgoing.values():
        if id(payload) not in known:  # usually all neighbors get the same payload
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
    """Collects what has been mixed in one exchange, and makes its record."""

    def __init__(self, tell: Tell, round: int, channel: int) -> None:
        """channel: distinguishes the exchanges of one round."""
        self._tell, self.round, self.channel = tell, round, channel
        self.stop = 0
        """The number of elements mixed so far, if slices are mixed into the model one after the other."""
        self._digests: dict[int, Digest] = {}
        self._stops: dict[int, int] = {}
        self._total: Digest | None = None

    def take(self, stop: int, received: Mapping[int, Payload], total: Tensor | None = None) -> None:
        """Notes that the next slice, up to element `stop`, is about to be mixed.

        received: its payloads by source. total: the sum over a group instead.
        """
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
        """Notes that payloads of these sources changed while they were read: only elements up to `stop` were mixed."""
        for uid in self._digests.keys() & uids:
            del self._digests[uid]
            self._stops[uid] = stop

    def fields(self, without: Collection[int] = ()) -> dict[str, Any]:
        """Returns the fields of the record. without: sources of which nothing, or only a part, was mixed."""
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
        """Records that the exchange is over.

        missing: sources whose payload did not arrive, or only in part. departed: the missing sources that were not
        waited for. undelivered: neighbors that certainly received nothing. refused: sources whose payload could not be
        decoded.
        """
        found = self.fields({*missing, *refused})
        if refused:
            found["partly"] = {uid: each for uid, each in found.get("partly", {}).items() if int(uid) not in refused}
        lists = {"missing": {*missing, *refused}, "departed": {*departed, *refused}, "undelivered": undelivered}
        self._tell("mixed", {**found, **{name: sorted(uids) for name, uids in lists.items() if uids}})

    def broken_off(self) -> None:
        """Records that the generation ended during the exchange, if anything was mixed so far."""
        if self.stop:
            self._tell("broken_off", {**self.fields(), "stop": self.stop})


class History:
    """Makes the records of one node. Used on its training thread."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def steps(self, round: int, left_out: bool = False) -> None:
        """Records that the local steps of a round were made. left_out: they were skipped, because it was too late for
        anyone to wait for them."""
        self._tell("steps", {"round": round, **({"left_out": True} if left_out else {})})

    def sent(self, round: int, channel: int, outgoing: Mapping[int, Payload]) -> ExchangeRecord:
        """Records that payloads are about to be sent. Returns the record of what is received in the same exchange."""
        self._tell("sent", {"round": round, "channel": channel, "to": _digests(outgoing)})
        return ExchangeRecord(self._tell, round, channel)

    def published(self, number: int, channel: int, outgoing: Mapping[int, Payload]) -> None:
        """Records that payloads of an asynchronous schedule are about to be sent to mailboxes.

        number: distinguishes the payloads of this node in this channel and generation (`Communication.publish`).
        """
        self._tell("published", {"round": number, "channel": channel, "to": _digests(outgoing)})

    def mixed_copies(
        self, round: int, channel: int, copies: Iterable[tuple[int, int, int, Payload]]
    ) -> None:
        """Records that payloads from the mailbox of a channel are about to be mixed in this node's `round`.

        copies: (source, number under which the source published it, own rounds since it arrived, the payload as it
        arrived) of each. Without any, nothing is recorded.
        """
        found = [[source, number, age, digest_of(payload)] for source, number, age, payload in copies]
        if found:
            self._tell("mixed_copies", {"round": round, "channel": channel, "from": found})

    def averaging(self, key: str) -> None:
        """Records that the node is about to contribute to a mean over all nodes."""
        self._tell("averaging", {"key": key})

    def averaged(self, key: str) -> None:
        """Records that the mean over all nodes has arrived."""
        self._tell("averaged", {"key": key})

    def left(self, round: int, reason: str) -> None:
        """Records that the node begins no further round of its generation; `round` was not completed."""
        self._tell("left", {"round": round, "reason": reason[:300]})

    def entered(
        self, name: tuple[int, bytes], members: Collection[int], first_round: int, fresh: Collection[int],
        stopping: bool, merging: bool = False,
    ) -> None:
        """Records that the node is a member of a generation in force.

        name: the generation's number and origin. fresh: members without a model of their own. stopping: the run was
        asked to stop. merging: the generation merges sides of a partitioned network.
        """
        number, origin = name
        self._tell("entered", {
            "generation": number, "origin": origin.hex(), "round": first_round, "members": sorted(members),
            "fresh": sorted(fresh), **({"stopping": True} if stopping else {}),
            **({"merging": True} if merging else {}),
        })  # fmt: skip

    def restored(self, round: int = -1, name: tuple[int, bytes] = (0, b""), digest: str = "") -> None:
        """Records that a restarted node restored the model and the training state of its own checkpoint.

        It made the checkpoint in generation `name` before `round`. Without digest: it has no recent enough checkpoint.
        """
        number, origin = name
        which = {"round": round, "generation": number, "origin": origin.hex(), "digest": digest}
        self._tell("restored", which if digest else {})

    def resumed(
        self, round: int, evaluated: int, without: Collection[int], cut: str = "", digest: str = ""
    ) -> None:
        """Records that the node is about to continue before `round` from its checkpoint in the folder `cut` of
        checkpoints/.

        evaluated: after how many rounds the last evaluation was. without: members that have no checkpoint. Without
        digest, this node has none.
        """
        which = {"cut": cut, "digest": digest} if digest else {}
        self._tell("resumed", {"round": round, "evaluated": evaluated, "without": sorted(without), **which})

    def leaving(self, round: int) -> None:
        """Records that only this node was asked to leave: it ends without beginning `round`."""
        self._tell("leaving", {"round": round})

    def ordered(self, round: int) -> None:
        """Records that the node is about to evaluate before this round, because a user requested it."""
        self._tell("ordered", {"round": round})

    def stopping(self, round: int) -> None:
        """Records that the run was asked to stop: the node ends without beginning `round`."""
        self._tell("stopping", {"round": round})
