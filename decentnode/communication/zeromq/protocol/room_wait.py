"""The wait of a payload for room in the queue of a peer, and its outcome. No I/O."""

from __future__ import annotations

from typing import Literal

from decentnode.communication.counters import Counters
from decentnode.communication.parts import ExchangeKey
from decentnode.communication.run_state import RunFacts
from decentnode.communication.zeromq.protocol.link_sender import LinkSender


class RoomWait:
    """The wait for room in the queue of one peer.

    The caller calls `step` until it returns True: at once, whenever `LinkPort.has_room` is called, and at `deadline` at
    the latest. now: seconds of any monotonic clock.
    """

    def __init__(
        self, sender: LinkSender, facts: RunFacts, counters: Counters, *, uid: int, key: ExchangeKey,
        timeout_seconds: float, now: float,
    ) -> None:
        self._sender, self._facts, self._counters, self._uid, self._key = sender, facts, counters, uid, key
        self._began = now
        self.deadline = now + facts.room_wait_seconds(timeout_seconds)
        self.verdict: Literal["send", "withhold", "gone"] = "gone"
        """The outcome, once the wait is over. send: there is room. withhold: the peer accepts nothing in time, and is
        to be told so once it does. gone: the peer has left or the generation is over."""
        facts.wait_for((uid,), now)

    def postpone(self, seconds: float) -> None:
        """Implements `run_state.PostponableWait.postpone`."""
        self.deadline += seconds

    def step(self, now: float) -> bool:
        """Returns whether the wait is over. Raises what every wait raises once the run has failed."""
        facts, uid, round = self._facts, self._uid, self._key[0]
        if self._sender.takes(uid):
            self.verdict = "send"
        elif facts.failure is not None:
            self._end(now)
            raise facts.failure
        elif facts.regrouping or facts.departed.get(uid, round + 1) <= round:
            self._end(now)
            return True
        elif now >= self.deadline or uid in facts.silent:
            facts.give_up(uid)
            self.verdict = "withhold"
        else:
            return False
        self._end(now)
        facts.record_send_delay(now - self._began, [uid], self._counters)
        return True

    def _end(self, now: float) -> None:
        self._facts.waiting = None
        self._facts.waited_seconds += now - self._began
