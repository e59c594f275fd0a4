"""Trackers write the formats of their libraries: these libraries read the points back."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from decentnode.trackers.base import Point, TrackedRun
from decentnode.trackers.process import Feed, make, opened
from tests.trackers.test_process import write_recorded_run

ROOT = Path(__file__).parents[2]


def feed_tracker(tmp_path: Path, **section: Any) -> Any:
    """Returns (feed, tracker) after the points of a run of two nodes and four rounds; the tracker is still open."""
    run = opened(write_recorded_run(tmp_path / "run"))
    tracker = make(section, run)
    feed = Feed(run, tracker, pytest.fail)  # type: ignore[arg-type]
    feed.poll()
    return feed, tracker


def test_tensorboard_reads_the_scalars_that_its_tracker_wrote(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    feed, tracker = feed_tracker(tmp_path, name="tensorboard")
    feed.finish()
    events = EventAccumulator(str(tmp_path / "run" / "trackers" / "tensorboard"))
    events.Reload()
    losses = events.Tensors("train/loss")
    assert [(each.step, each.wall_time, float(make_ndarray(each.tensor_proto))) for each in losses] == [
        (1, 1.0, 1.0), (2, 2.0, 1.0), (3, 3.0, 1.0), (4, 4.0, 1.0),
    ]  # fmt: skip
    assert float(make_ndarray(events.Tensors("test/accuracy_merged")[0].tensor_proto)) == 0.75
    assert tracker.place.endswith("trackers/tensorboard")


class FakeWandb:
    """Stands in for the module wandb and records the arguments of its calls. `test_the_wandb_library_...` below uses
    the real library where it is installed."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.metrics: list[tuple[Any, ...]] = []
        self.summary: dict[str, Any] = {}
        self.finished: list[int] = []

    def init(self, *, project: str, entity: str | None, mode: str | None, dir: str, name: str, group: str,
             config: dict[str, Any]) -> FakeWandb:  # fmt: skip
        self.init_arguments = (project, entity, mode, dir, name, group, config)
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))

    def log(self, data: dict[str, float]) -> None:
        self.logged.append(data)

    def finish(self, exit_code: int | None = None) -> None:
        self.finished.append(exit_code or 0)


def test_the_wandb_tracker_calls_wandb_with_the_run_and_its_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = FakeWandb()
    monkeypatch.setitem(__import__("sys").modules, "wandb", library)
    feed, _ = feed_tracker(tmp_path, name="wandb", project="mine", mode="offline")
    feed.finish()
    project, entity, mode, _, name, group, config = library.init_arguments
    assert (project, entity, mode, name, group) == ("mine", None, "offline", "mine/run", "mine")
    assert config["graph"] == {"name": "ring", "nodes": 2}
    assert [each["round"] for each in library.logged] == [1, 2, 3, 4, 4] and ("*", "round") in library.metrics
    assert library.finished == [0] and library.summary == {"status": "finished", "accuracy_mean": 0.55}


@pytest.mark.slow
def test_the_wandb_library_writes_the_points_to_its_offline_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path))
    feed, _ = feed_tracker(tmp_path, name="wandb", mode="offline")
    feed.finish()
    wandb.teardown()  # as at the end of the tracker's own process: its helper has then written everything
    (file,) = (tmp_path / "run" / "trackers" / "wandb").glob("offline-run-*/run-*.wandb")
    data = file.read_bytes()
    assert b"train/loss" in data and b"test/accuracy_merged" in data


@pytest.mark.slow
def test_mlflow_reads_the_metrics_and_parameters_that_its_tracker_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    feed, _ = feed_tracker(tmp_path, name="mlflow", uri=f"file:{tmp_path}/store", every=2)
    feed.finish()
    client = mlflow.MlflowClient(f"file:{tmp_path}/store")
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["graph.nodes"] == "2"
    assert run.data.metrics["test/accuracy_merged"] == 0.75 and run.data.tags["summary.status"] == "finished"
    assert [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "train/loss")] == [
        (2, 1.0), (4, 1.0),
    ]  # fmt: skip


def scrape(url: str, accept: str = "") -> tuple[str, str]:
    """Returns (content type, text) of an endpoint."""
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept}), timeout=30) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def test_prometheus_serves_text_that_its_own_parsers_read(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
    from prometheus_client.parser import text_string_to_metric_families as plain

    feed, tracker = feed_tracker(tmp_path, name="prometheus")
    try:
        (tmp_path / "run" / "nodes" / "000" / "status.json").write_text(
            json.dumps({"uid": 0, "pid": __import__("os").getpid()}))  # fmt: skip
        assert tracker.place.startswith("http://127.0.0.1:") and not tracker.place.endswith(":0/metrics")
        content_type, text = scrape(tracker.place, "application/openmetrics-text; version=1.0.0")
        assert content_type.startswith("application/openmetrics-text") and text.endswith("# EOF\n")
        samples = {(s.name, *sorted(s.labels.items())): s.value for family in openmetrics(text) for s in family.samples}
        assert samples["decentnode_rounds_total", ("node", "1")] == 4
        assert samples["decentnode_sent_bytes_total", ("node", "0"), ("purpose", "data")] == 400
        assert samples["decentnode_round_seconds_total", ("node", "0")] == 1.0
        assert samples["decentnode_test", ("metric", "accuracy"), ("node", "1")] == 0.6
        assert samples["decentnode_merged_test", ("metric", "accuracy")] == 0.75
        assert samples["decentnode_consensus_distance",] == 0.125
        assert not any(name == "decentnode_gradient_norm" for name, *_ in samples)
        tracker.record(1, {"kind": "round", "round": 4, "time": 9.0, "gradient_norm": 2.5})
        assert 'decentnode_gradient_norm{node="1"} 2.5' in scrape(tracker.place)[1]
        assert samples["decentnode_last_record_timestamp_seconds", ("node", "0")] == 9.0
        assert samples["process_resident_memory_bytes", ("node", "0")] > 1e6
        assert samples["process_cpu_seconds_total", ("node", "0")] > 0
        # The nodes of asynchronous runs evaluate alone: their first values stayed until the end
        tracker.record(1, {"kind": "evaluation", "round": 8, "time": 10.0, "virtual_seconds": 3.0, "accuracy": 0.9})
        assert 'decentnode_test{metric="accuracy",node="1"} 0.9' in scrape(tracker.place)[1]
        assert "virtual" not in scrape(tracker.place)[1]
        content_type, text = scrape(tracker.place)
        assert content_type.startswith("text/plain") and {f.name for f in plain(text)} >= {"decentnode_rounds"}
    finally:
        feed.finish()
    with pytest.raises(OSError):
        scrape(tracker.place)


def test_every_metric_that_the_grafana_dashboard_queries_is_served(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    import re

    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    dashboard = json.loads((ROOT / "eval" / "grafana.json").read_text())
    queried = {name for panel in dashboard["panels"] for target in panel.get("targets", [])
               for name in re.findall(r"\b(?:decentnode|process)_\w+", target["expr"])}  # fmt: skip
    feed, tracker = feed_tracker(tmp_path, name="prometheus")
    _, text = scrape(tracker.place, "application/openmetrics-text; version=1.0.0")
    feed.finish()
    families = {family.name: family.type for family in text_string_to_metric_families(text)}
    served = {f"{name}_total" if kind == "counter" else f"{name}_info" if kind == "info" else name
              for name, kind in families.items()}  # fmt: skip
    assert queried and queried <= served, queried - served


def test_serving_on_all_addresses_is_pointed_out_and_a_taken_port_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    run = TrackedRun(tmp_path, "mine", {}, 0)
    tracker = make({"name": "prometheus", "host": "0.0.0.0"}, run)
    tracker.log(Point(1, 1.0, {}))
    assert "anyone who can reach this machine can read" in tracker.place
    taken = int(tracker.place.partition("/metrics")[0].rpartition(":")[2])
    with pytest.raises(OSError):
        make({"name": "prometheus", "port": taken, "host": "0.0.0.0"}, run)
    tracker.close(None)
