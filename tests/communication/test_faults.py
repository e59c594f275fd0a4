"""Bad links and bad peers: cut, corrupted, slow and frozen connections between nodes."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from decentnode import clock
from decentnode.communication.zeromq.protocol.link_state import BULK, Body
from decentnode.communication.zeromq.transport import ZeroMQ
from decentnode.payload import Payload
from decentnode.tensors import BLOCK_ELEMENTS
from decentnode.wire import framing
from decentnode.wire.stream import STUCK_SECONDS
from tests.communication.contract import flat_schema, make, together, values
from tests.communication.relay import Relay
from tests.conftest import scale, wait_until


def port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


@contextlib.contextmanager
def over_relays(
    transport: str, n: int, elements: int, relay: dict[str, int], spoiled: int | None = None, seed: int = 0,
    **options: object,
) -> Iterator[tuple[list[ZeroMQ], list[Relay]]]:
    """n started nodes whose connections to node `spoiled` (or to all) go through relays with these settings.

    Control, which carries little, is cut and corrupted 64 times as often per byte.
    """
    with tempfile.TemporaryDirectory(prefix="dn") as folder, contextlib.ExitStack() as stack:
        made = make(transport, n, flat_schema(elements), Path(folder), **options)
        stack.callback(lambda: [node.close() for node in made])  # type: ignore[func-returns-value]
        relays: list[Relay] = []
        endpoints = {}
        for node in made:
            endpoints[node.uid] = node.bind()
            if spoiled in (None, node.uid):
                ports = []
                for plane, endpoint in enumerate(endpoints[node.uid]):
                    settings = {k: v >> 6 if k.endswith("_every_bytes") and not plane else v for k, v in relay.items()}
                    relays.append(Relay(("127.0.0.1", port_of(endpoint)), seed=seed + len(relays), **settings))  # type: ignore[arg-type]
                    ports.append(stack.enter_context(relays[-1]).port)
                endpoints[node.uid] = (f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}")
        for node in made:
            node.set_peers(endpoints)
        together(made, lambda node: node.start(60))
        yield made, relays
        closing = [threading.Thread(target=node.close) for node in made]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(60)


def one_round(made: list[ZeroMQ], elements: int, r: int) -> None:
    """Round r between two nodes, each with a model of its own: it arrives once, bit-exact."""

    def run(node: ZeroMQ) -> None:
        other = 1 - node.uid
        payload = Payload({"x": values(elements, torch.float32, 1000 * r + node.uid)})
        exchange = node.exchange(r, {other: payload}, (other,))
        expected = values(elements, torch.float32, 1000 * r + other)
        got = torch.empty(elements)
        for arrival in exchange.arrivals(60):
            got[arrival.start : arrival.stop] = arrival.received[other].tensors["x"]
        assert torch.equal(got, expected) and not exchange.missing

    together(made, run)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(0, scale(4, 32), 4))
@pytest.mark.parametrize("transport", ["tcp", "tcp+curve", "tcp+aes-gcm"])
@pytest.mark.timeout(300)
@pytest.mark.slow
def test_cut_anywhere_every_model_arrives_once_and_bit_exact(transport: str, seed: int) -> None:
    elements, cuts = 3 * BLOCK_ELEMENTS + 17, scale(4, 50)
    settings = {"cut_every_bytes": 1 << 20, "cuts": cuts}
    with over_relays(transport, 2, elements, settings, seed=seed, chunk_bytes=1 << 20) as (made, relays):
        done = 0
        while sum(relay.cut_count for relay in relays) < 2 * cuts and done < 40 * cuts:
            one_round(made, elements, done)
            done += 1
        assert sum(relay.cut_count for relay in relays) >= 2 * cuts
        assert sum(edge.resends for node in made for edge in node.counters.edges.values()) > 0
        assert not {"stale_round", "duplicate_chunk", "window_exceeded"} & {k for n in made for k in n.counters.faults}


def watch_numbers(node: ZeroMQ, seen: dict[tuple[int, int], bytes]) -> list[int]:
    """Whatever `node` gives its bulk sockets under a number goes to `seen`, by peer and number; how often one came
    again. Fails where the bytes are others than before."""
    send, again = node._driver.send, [0]

    def watched(uid: int, plane: int, first: bytes, body: Body | None) -> bool:
        sequence = framing.opened(memoryview(first))[0]
        if plane == BULK and sequence:
            second = b"" if body is None else bytes(body if isinstance(body, bytes) else body.buffer)
            digest = hashlib.sha256(first + second).digest()
            again[0] += (uid, sequence) in seen
            assert seen.setdefault((uid, sequence), digest) == digest, "one number, and nonce, for two messages"
        return send(uid, plane, first, body)

    node._driver.send = watched  # type: ignore[method-assign]
    return again


@pytest.mark.parametrize("transport", ["tcp", "tcp+aes-gcm"])
@pytest.mark.timeout(300)
@pytest.mark.slow
def test_what_is_sent_again_is_what_was_sent_although_the_model_goes_on(transport: str) -> None:
    """Models live in places that the transport sends from; connections are cut, so that much is sent again."""
    elements, rounds = 2 * BLOCK_ELEMENTS, scale(20, 200)
    settings = {"cut_every_bytes": 1 << 20, "cuts": scale(5, 60)}
    with over_relays(transport, 2, elements, settings, chunk_bytes=1 << 20) as (made, relays):
        again = [watch_numbers(node, {}) for node in made]

        def run(node: ZeroMQ) -> None:
            other, model = 1 - node.uid, torch.zeros(elements)
            for r in range(rounds):
                model.fill_(10.0 * r + node.uid)  # the local steps, where the model lives
                exchange = node.exchange(r, {other: Payload({"x": model})}, (other,))
                place = node.acquire_slot(model, 60)
                assert place is not None
                for arrival in exchange.arrivals(60):
                    got = arrival.received[other].tensors["x"]
                    assert bool((got == 10.0 * r + other).all())
                    place[arrival.start : arrival.stop] = -1.0
                model = place

        together(made, run, 200)  # type: ignore[arg-type]
        assert sum(relay.cut_count for relay in relays) > 0 and sum(count for (count,) in again) > 0
        assert not {"checksum_mismatch", "duplicate_chunk"} & {k for node in made for k in node.counters.faults}


@pytest.mark.parametrize("transport", ["tcp", "tcp+aes-gcm"])
@pytest.mark.timeout(300)
def test_flipped_bits_are_noticed_and_sent_again(transport: str) -> None:
    elements = 2 * BLOCK_ELEMENTS
    settings = {"corrupt_every_bytes": 1 << 19, "corruptions": scale(10, 200)}
    with over_relays(transport, 2, elements, settings, chunk_bytes=1 << 20) as (made, relays):
        for r in range(scale(8, 120)):
            one_round(made, elements, r)
        assert sum(relay.corrupt_count for relay in relays) >= scale(8, 150)
        assert sum(edge.resends for node in made for edge in node.counters.edges.values()) > 0


def test_a_control_message_is_not_lost_when_the_connection_is() -> None:
    with over_relays("tcp", 3, 8, {}) as (made, relays):
        for turn in range(5):
            for relay in relays:
                relay.cut()
            together(made, lambda node: node.barrier(f"turn {turn}", 60))  # noqa: B023
        for relay in relays:
            relay.cut()
        made[2].announce_stop()
        wait_until(lambda: all(node.stopping for node in made))


def test_a_slow_link_slows_nobody_but_its_ends() -> None:
    """Node 2 sits behind 200 kB/s; nodes 0 and 1 exchange while it is still waiting, and then its link gets fast."""
    elements = 2 * BLOCK_ELEMENTS
    with over_relays("tcp", 3, elements, {"bytes_per_second": 200_000}, spoiled=2) as (made, relays):
        x = torch.ones(elements)
        finished: list[int] = []

        def run(node: ZeroMQ) -> None:
            sources = (1 - node.uid,) if node.uid < 2 else (0, 1)
            outgoing = dict.fromkeys({0, 1, 2} - {node.uid}, Payload({"x": x})) if node.uid < 2 else {}
            for r in range(3):
                exchange = node.exchange(r, outgoing, sources)
                assert all(len(arrival.received) == len(sources) for arrival in exchange.arrivals(60))
            finished.append(node.uid)
            if len(finished) == 2:
                for relay in relays:
                    relay.bytes_per_second = 1e12

        together(made, run)  # type: ignore[arg-type]
        assert finished[2] == 2, "who had a fast link did not wait for the slow one"
        assert not any(edge.resends for node in made for edge in node.counters.edges.values())


@pytest.mark.slow
def test_what_is_merely_slow_is_not_sent_twice() -> None:
    """One message takes longer than a dead connection may be silent, before any other told how slow this one is."""
    elements = BLOCK_ELEMENTS
    slow = {"bytes_per_second": 4 * elements // 9, "receive_buffer": 1 << 16}
    with over_relays("tcp", 2, elements, slow, spoiled=1, timeout_seconds=60.0) as (made, relays):
        started = clock.now()
        exchanges = [made[0].exchange(0, {1: Payload({"x": torch.ones(elements)})}, ()), made[1].exchange(0, {}, (0,))]
        assert all(not arrival.missing for arrival in exchanges[1].arrivals(60))
        assert clock.now() - started > STUCK_SECONDS + 2, "the cable is too fast: nothing is tried"
        assert not any(edge.resends for node in made for edge in node.counters.edges.values())
        for relay in relays:
            relay.bytes_per_second = 1e12


def test_a_frozen_link_ends_in_a_named_loss_and_heals() -> None:
    with over_relays("tcp", 2, 8, {}) as (made, relays):
        one_round(made, 8, 0)
        for relay in relays:
            relay.pause()
        exchange = made[0].exchange(1, {1: Payload({"x": torch.ones(8)})}, (1,))
        assert [arrival.missing for arrival in exchange.arrivals(0.5)] == [frozenset({1})]
        assert exchange.missing == {1}
        made[1].exchange(1, {0: Payload({"x": torch.ones(8)})}, ())
        for relay in relays:
            relay.resume()
        one_round(made, 8, 2)
