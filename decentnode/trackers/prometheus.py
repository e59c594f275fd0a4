"""The tracker `prometheus`: an endpoint per machine from which Prometheus scrapes the latest figures of its nodes."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from decentnode.config import component
from decentnode.trackers.base import Point, TrackedRun, Tracker, TrackerConfig
from decentnode.trackers.points import is_of_own_model

if TYPE_CHECKING:
    from prometheus_client import Metric

PHASES = ("train", "send", "wait", "mix")
PURPOSES = ("data", "metadata", "protocol", "evaluation", "control")
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class PrometheusConfig(TrackerConfig):
    host: str = "127.0.0.1"
    """Address that the endpoint listens on. Anyone who can reach it can read the figures: it requires no password."""
    port: int = Field(0, ge=0, le=65535)
    """TCP port; 0: any free port, which is reported when the run starts."""


@dataclass
class NodeTotals:
    """The last known figures of a node, and its totals so far."""

    rounds: int = 0
    train_loss: float | None = None
    gradient_norm: float | None = None
    learning_rate: float | None = None
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    round_seconds: float = 0.0
    bytes: dict[str, float] = field(default_factory=dict)
    test: dict[str, float] = field(default_factory=dict)
    time: float = 0.0


class Prometheus(Tracker):
    """Serves the latest figures over HTTP at /metrics, in the text format of Prometheus or, if the scraper asks for it,
    OpenMetrics. Names and units follow Prometheus' rules; CPU and memory of the nodes' processes have the standard
    names. ``eval/grafana.json`` is a dashboard for them. The endpoint ends with the run."""

    Config: ClassVar[type[component.Config]] = PrometheusConfig
    config: PrometheusConfig
    needs: ClassVar[tuple[str, str]] = ("prometheus_client", "prometheus")

    def __init__(self, config: component.Config, run: TrackedRun) -> None:
        super().__init__(config, run)
        from prometheus_client import CollectorRegistry, start_http_server

        self._lock = threading.Lock()
        self._nodes: dict[int, NodeTotals] = {}
        self._of_run: dict[str, float] = {}
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._server, self._thread = start_http_server(self.config.port, self.config.host, self.registry)

    @property
    def place(self) -> str:
        host, port = self._server.server_address[:2]
        text = f"http://{f'[{host!s}]' if ':' in str(host) else host!s}:{port}/metrics"
        return text if self.config.host in LOOPBACK else f"{text}, which anyone who can reach this machine can read"

    # -- taking records ---------------------------------------------------------------------------------------

    def record(self, uid: int, record: Mapping[str, Any]) -> None:
        with self._lock:
            node = self._nodes.setdefault(uid, NodeTotals())
            node.time = max(node.time, _number(record.get("time")) or 0.0)
            if record.get("kind") == "round":
                self._take_round(node, record)
            elif record.get("kind") == "evaluation":
                self._take_evaluation(node, record)

    def _take_round(self, node: NodeTotals, record: Mapping[str, Any]) -> None:
        node.rounds = max(node.rounds, int(record["round"]) + 1)
        node.train_loss, node.learning_rate = _number(record.get("loss")), _number(record.get("lr"))
        node.gradient_norm = _number(record.get("gradient_norm"))
        node.round_seconds += _number(record.get("seconds")) or 0.0
        for phase in PHASES:
            node.seconds[phase] += _number(record.get(f"{phase}_seconds")) or 0.0
        node.bytes = {each: _number(record.get(f"{each}_bytes_sent")) or 0.0 for each in PURPOSES}

    def _take_evaluation(self, node: NodeTotals, record: Mapping[str, Any]) -> None:
        for key, found in record.items():
            if (value := _number(found)) is None:
                continue
            if key.endswith("_merged") or key.startswith("consensus_"):
                self._of_run[key] = value
            elif is_of_own_model(key):
                node.test[key] = value

    def log(self, point: Point) -> None:
        """Does nothing: Prometheus asks for the latest figures of every node, which come from records."""

    def close(self, summary: Mapping[str, Any] | None) -> None:  # noqa: ARG002
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)

    # -- answering a scrape -----------------------------------------------------------------------------------

    def collect(self) -> Iterable[Metric]:
        """Returns all metrics. The server calls it once per scrape, in one of its threads."""
        with self._lock:
            return [*self._info(), *self._counters(), *self._gauges(), *self._processes()]

    def _info(self) -> Iterator[Metric]:
        from prometheus_client.core import InfoMetricFamily

        yield InfoMetricFamily("decentnode_run", "The run that the figures are of.", {
            "name": self.run.name, "run": self.run.path.name, "machine": str(self.run.machine)})  # fmt: skip

    def _counters(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily

        rounds = CounterMetricFamily("decentnode_rounds", "Rounds that the node has finished.", labels=["node"])
        whole = CounterMetricFamily("decentnode_round_seconds", "Time that the node's rounds took.", labels=["node"])
        phases = CounterMetricFamily("decentnode_phase_seconds", "Time of the node in local steps (train), sending, "
                                     "waiting for neighbors and mixing.", labels=["node", "phase"])  # fmt: skip
        sent = CounterMetricFamily("decentnode_sent_bytes", "Bytes that the node has sent, by purpose.",
                                   labels=["node", "purpose"])  # fmt: skip
        for uid, node in sorted(self._nodes.items()):
            rounds.add_metric([str(uid)], node.rounds)
            whole.add_metric([str(uid)], node.round_seconds)
            for phase, seconds in node.seconds.items():
                phases.add_metric([str(uid), phase], seconds)
            for purpose, count in node.bytes.items():
                sent.add_metric([str(uid), purpose], count)
        yield from (rounds, whole, phases, sent)

    def _gauges(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        loss = GaugeMetricFamily("decentnode_train_loss", "Mean loss of the last round's steps.", labels=["node"])
        norm = GaugeMetricFamily("decentnode_gradient_norm", "Mean norm of the gradients of the last round's "
                                 "steps, before clipping.", labels=["node"])  # fmt: skip
        rate = GaugeMetricFamily("decentnode_learning_rate", "Learning rate of the last round.", labels=["node"])
        test = GaugeMetricFamily("decentnode_test", "What the task measures of the node's own model, at the last "
                                 "evaluation.", labels=["node", "metric"])  # fmt: skip
        latest = GaugeMetricFamily("decentnode_last_record_timestamp_seconds", "Time of the node's last record, since "
                                                                             "1970.", labels=["node"])  # fmt: skip
        merged = GaugeMetricFamily("decentnode_merged_test", "What the task measures of the mean of all models, at the "
                                   "last evaluation.", labels=["metric"])  # fmt: skip
        distance = GaugeMetricFamily("decentnode_consensus_distance", "Distance of the nodes' models from their mean, "
                                                                      "relative to the size of the mean.")  # fmt: skip
        for uid, node in sorted(self._nodes.items()):
            if node.train_loss is not None:
                loss.add_metric([str(uid)], node.train_loss)
            if node.gradient_norm is not None:
                norm.add_metric([str(uid)], node.gradient_norm)
            if node.learning_rate is not None:
                rate.add_metric([str(uid)], node.learning_rate)
            for metric, value in node.test.items():
                test.add_metric([str(uid), metric], value)
            latest.add_metric([str(uid)], node.time)
        for key, value in self._of_run.items():
            if key.endswith("_merged"):
                merged.add_metric([key.removesuffix("_merged")], value)
        if "consensus_distance" in self._of_run:
            distance.add_metric([], self._of_run["consensus_distance"])
        yield from (loss, *([norm] if norm.samples else []), rate, test, latest, merged, distance)

    def _processes(self) -> Iterator[Metric]:
        """Yields CPU and memory of the nodes' processes; a process with several nodes is listed under its lowest
        uid."""
        import psutil
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        cpu = CounterMetricFamily("process_cpu_seconds", "CPU time of the node's process.", labels=["node"])
        memory = GaugeMetricFamily("process_resident_memory_bytes", "Resident memory of the node's process.",
                                   labels=["node"])  # fmt: skip
        began = GaugeMetricFamily("process_start_time_seconds", "Start time of the node's process, since 1970.",
                                  labels=["node"])  # fmt: skip
        seen: set[int] = set()
        for path in sorted(self.run.path.glob("nodes/*/status.json")):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, psutil.Error):
                status = json.loads(path.read_text())
                pid, uid = int(status["pid"]), str(int(status["uid"]))
                if pid in seen:
                    continue
                process = psutil.Process(pid)
                with process.oneshot():
                    times, size, start = process.cpu_times(), process.memory_info().rss, process.create_time()
                seen.add(pid)
                cpu.add_metric([uid], times.user + times.system)
                memory.add_metric([uid], size)
                began.add_metric([uid], start)
        yield from (cpu, memory, began)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
