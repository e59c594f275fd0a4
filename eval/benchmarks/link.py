"""One edge at full speed: throughput and latency of every transport, beside the limits of the machine.

Two processes. Ceilings are measured in the same run: raw pyzmq (DEALER to ROUTER, messages of 1 or 4 MiB, whichever is
faster, without a copy or a checksum; the receiver only counts), memory copy + axpy by two processes at once, and a raw
4 KB ping-pong.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import torch
import zmq
from common import machine, memory_ceilings

from decentnode.communication.parts import BindPlan, Schema, TransportParts
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.communication.zeromq.sockets.security import load_keyring, write_keys
from decentnode.communication.zeromq.transport import ZeroMQ
from decentnode.payload import Payload, TensorSpec
from decentnode.tensors import keep_freed_memory

ELEMENTS = 25_000_000
SMALL = 1024
MEBIBYTE = 1 << 20


def run_pair(work: Callable[[int, Connection], object]) -> list[object]:
    """Runs work(uid, pipe to the other process) in two forked processes and returns their results."""
    pipes, here = Pipe(), [Pipe(), Pipe()]
    pids = []
    for uid in (0, 1):
        pid = os.fork()
        if pid == 0:
            try:
                torch.set_num_threads(1)
                keep_freed_memory()
                here[uid][1].send(work(uid, pipes[uid]))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        pids.append(pid)
    for _, theirs in here:
        theirs.close()
    try:
        return [mine.recv() for mine, _ in here]
    finally:
        for pid in pids:
            os.waitpid(pid, 0)


def raw_stream_seconds(size: int, uid: int, pipe: Connection) -> list[float]:
    """Returns the seconds for 100 MB in messages of `size` bytes, per repetition, measured by the sender until the
    answer."""
    context, times = zmq.Context(), []
    chunks = -(-4 * ELEMENTS // size)
    if uid:
        router = context.socket(zmq.ROUTER)
        pipe.send(router.bind_to_random_port("tcp://127.0.0.1"))
        for _ in range(REPEATS + 1):
            for _ in range(chunks):
                sender, *_ = router.recv_multipart(copy=False)
            router.send_multipart([sender.bytes, b"!"])
        pipe.recv()
        return []
    data = memoryview(torch.ones(ELEMENTS).numpy()).cast("B")
    dealer = context.socket(zmq.DEALER)
    dealer.connect(f"tcp://127.0.0.1:{pipe.recv()}")
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        for start in range(0, data.nbytes, size):
            dealer.send_multipart([b"h" * 60, data[start : start + size]], copy=False)
        dealer.recv()
        times.append(time.perf_counter() - started)
    pipe.send(None)
    context.destroy(linger=0)
    return times[1:]


def raw_pingpong(uid: int, pipe: Connection) -> list[float]:
    """Returns half round trips of a 4 KB message over two DEALER -> ROUTER pairs, as decentnode uses them."""
    context = zmq.Context()
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    pipe.send(router.bind_to_random_port("tcp://127.0.0.1"))
    dealer.connect(f"tcp://127.0.0.1:{pipe.recv()}")
    data, times = bytes(4 * SMALL), []
    for _ in range(1000):
        started = time.perf_counter()
        if uid == 0:
            dealer.send_multipart([b"h" * 60, data])
        router.recv_multipart(copy=False)
        if uid == 1:
            dealer.send_multipart([b"h" * 60, data])
        times.append((time.perf_counter() - started) / 2)
    context.destroy(linger=0)
    return times[200:]


def copy_and_axpy(uid: int, pipe: Connection) -> list[float]:
    """Returns the minimum cost of publishing and mixing: one process copies 100 MB, then the other adds 100 MB."""
    x, y = torch.ones(ELEMENTS), torch.ones(ELEMENTS)
    times = []
    for _ in range(REPEATS + 1):
        if uid == 0:
            started = time.perf_counter()
            x.copy_(y)
            pipe.send(time.perf_counter() - started)
        else:
            copied = pipe.recv()
            started = time.perf_counter()
            x.add_(y, alpha=0.5)
            times.append(copied + time.perf_counter() - started)
            pipe.send(None)
        if uid == 0:
            pipe.recv()
    return times[1:]


class Edge:
    """Two nodes with one variant of the transport between them."""

    def __init__(self, way: str, elements: int, folder: Path) -> None:
        self.way, self.elements, self.folder = way, elements, folder

    def open(self, uid: int, pipe: Connection) -> ZeroMQ:
        transport, _, bulk = self.way.partition("+")
        name = "shared_memory" if transport == "shared_memory" else "zeromq"
        keys = {"keys": str(self.folder / "keys"), "bulk_security": bulk} if bulk else {}
        if transport == "unchecked":
            keys = {"checksum": "none"}
        node = ZeroMQ(ZeroMQConfig.model_validate({"name": name, **keys}), TransportParts(
            uid=uid, machine_of={0: 0, 1: 0}, digest="d",
            schemas=(Schema(self.elements, {"x": TensorSpec(torch.float32, self.elements)}, True),),
            bind=BindPlan(None if transport in ("tcp", "unchecked") else self.folder),
        ), load_keyring(self.folder / "keys", uid, 2) if bulk else None)
        pipe.send(node.bind())
        node.set_peers({1 - uid: pipe.recv()})
        node.start(30)
        return node

    def stream(self, uid: int, pipe: Connection) -> list[float]:
        """Node 0 sends its model and node 1 mixes it. Returns the seconds from the call to the last mixed slice."""
        node = self.open(uid, pipe)
        x, times = torch.ones(self.elements), []
        for r in range(REPEATS + 1):
            place = node.acquire_slot(x, 60)  # as in a real round: the model moves to where it can be sent from
            x = x if place is None else place.copy_(x)
            node.barrier(f"round {r}", 60)
            started = time.perf_counter()
            if uid == 0:
                node.exchange(r, {1: Payload({"x": x})}, ())
                pipe.recv()
                times.append(time.perf_counter() - started)
            else:
                for arrival in node.exchange(r, {}, (0,)).arrivals(60):
                    if MIX:
                        x[arrival.start : arrival.stop].add_(arrival.received[0].tensors["x"], alpha=0.5)
                pipe.send(None)
        node.close()
        return times[1:]

    def pingpong(self, uid: int, pipe: Connection) -> list[float]:
        """Returns half of the time of one message there and one back."""
        node = self.open(uid, pipe)
        x, times = Payload({"x": torch.ones(self.elements)}), []
        node.barrier("go", 60)
        for r in range(1000):
            started = time.perf_counter()
            if uid == 0:
                node.exchange(2 * r, {1: x}, ())
                list(node.exchange(2 * r + 1, {}, (1,)).arrivals(60))
            else:
                list(node.exchange(2 * r, {}, (0,)).arrivals(60))
                node.exchange(2 * r + 1, {0: x}, ())
            times.append((time.perf_counter() - started) / 2)
        node.close()
        return times[200:]


REPEATS = 30
MIX = True


def main() -> None:
    global MIX
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ceilings = memory_ceilings()
    rows: list[dict[str, object]] = []

    def say(what: str, value: float, unit: str, ceiling: float, of: str, ratio: float, asked: str) -> None:
        rows.append({"what": what, "value": value, "unit": unit, "ceiling": ceiling, "ceiling_is": of, "ratio": ratio})
        if not options.json:
            print(f"{what:44} {value:9.2f} {unit:5} {of:>34} {ceiling:9.2f}   ratio {ratio:5.2f}   asked {asked}",
                  flush=True)  # fmt: skip

    if not options.json:
        print(machine())
        print(f"ceilings: memory copy {ceilings['copy']:.1f} GB/s, axpy {ceilings['axpy']:.1f} GB/s (one thread)\n")
    with tempfile.TemporaryDirectory(prefix="dn") as name:
        folder = Path(name)
        write_keys(folder / "keys", range(2))
        size = 4e-9 * ELEMENTS
        streams = [run_pair(partial(raw_stream_seconds, chunk))[0] for chunk in (MEBIBYTE, 4 * MEBIBYTE)]
        raw = size / min(statistics.median(times) for times in streams)  # type: ignore[type-var]
        bare = 1e6 * statistics.median(run_pair(raw_pingpong)[0])  # type: ignore[type-var]
        local = 1e3 * statistics.median(run_pair(copy_and_axpy)[1])  # type: ignore[type-var]
        plain = 0.0
        for way, asked in (
            ("tcp", ">= 0.8"), ("unchecked", "-"), ("ipc", "-"), ("tcp+curve", "-"), ("tcp+aes-gcm", "-"),
        ):
            MIX = False
            seconds = statistics.median(run_pair(Edge(way, ELEMENTS, folder).stream)[0])  # type: ignore[type-var]
            speed = size / seconds
            plain = plain or speed
            what = "tcp without checksums" if way == "unchecked" else way
            say(f"100 MB, one edge, {what}", speed, "GB/s", raw, "raw pyzmq stream (tcp)", speed / raw, asked)
        say("100 MB, aes-gcm against plain", speed, "GB/s", plain, "plain tcp above", speed / plain, ">= 0.75")
        MIX = True
        mixed = 1e3 * statistics.median(run_pair(Edge("shared_memory", ELEMENTS, folder).stream)[0])  # type: ignore[type-var]
        say("100 MB, shared memory, publish + mix", mixed, "ms", local, "copy + axpy", local / mixed, ">= 0.8")
        for way, asked in (("tcp", "<= 2"), ("ipc", "-"), ("shared_memory", "-")):
            half = 1e6 * statistics.median(run_pair(Edge(way, SMALL, folder).pingpong)[0])  # type: ignore[type-var]
            say(f"4 KB half round trip, {way}", half, "us", bare, "raw DEALER-ROUTER (tcp)", half / bare, asked)
    if options.json:
        print(json.dumps({"machine": machine(), "ceilings": ceilings, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
