"""Writes folders of runs with the records that nodes write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

START_TIME = 1_000_000.0
PAYLOAD_BYTES = 1000


def append_records(path: Path, *records: dict[str, Any]) -> None:
    """Appends records to a file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def round_record(uid: int, round: int, nodes: int, **more: Any) -> dict[str, Any]:
    """Returns the record of a round in a ring: payloads to and from both neighbors, and a wait for the next node."""
    before, after = str((uid - 1) % nodes), str((uid + 1) % nodes)
    return {
        "kind": "round", "round": round, "time": START_TIME + round + 1.0, "seconds": 1.0, "train_seconds": 0.5,
        "wait_seconds": 0.25, "loss": 2.0 / (round + 1) + 0.01 * uid,
        "data_bytes_sent": 2 * PAYLOAD_BYTES * (round + 1), "metadata_bytes_sent": 0,
        "edges": {before: [PAYLOAD_BYTES, PAYLOAD_BYTES, 1, 0, 0.0], after: [PAYLOAD_BYTES, PAYLOAD_BYTES, 1, 0, 0.25]},
        **more,
    }  # fmt: skip


def evaluation_record(uid: int, rounds: int) -> dict[str, Any]:
    return {"kind": "evaluation", "round": rounds, "time": START_TIME + rounds + 0.1, "accuracy": 0.1 * min(9, rounds),
            "loss": 1.0, "accuracy_merged": 0.95, "consensus_distance": 0.5 / (rounds + 1)}  # fmt: skip


def write_run_folder(
    root: Path, nodes: int = 4, rounds: int = 6, name: str = "ring", stamp: str = "2026-01-01"
) -> Path:
    """Writes a finished run of a ring, evaluated after every second round. Returns its folder, root/<name>/<stamp>."""
    run = root / name / stamp
    for uid in range(nodes):
        folder = run / "nodes" / f"{uid:03d}"
        append_records(folder / "metrics.jsonl", evaluation_record(uid, 0))
        for round in range(rounds):
            append_records(folder / "metrics.jsonl", round_record(uid, round, nodes))
            if (round + 1) % 2 == 0:
                append_records(folder / "metrics.jsonl", evaluation_record(uid, round + 1))
        joined = {"time": START_TIME, "uid": uid, "kind": "joined", "peer": None, "detail": ""}
        append_records(folder / "events.jsonl", joined)
    edges = "".join(f"{uid} {(uid + step) % nodes}\n" for uid in range(nodes) for step in (1, -1))
    (run / "graph.edges").write_text(f"{nodes}\n{edges}")
    (run / "config.yaml").write_text(f"name: {name}\n")
    (run / "config.resolved.yaml").write_text(f"name: {name}\nseed: 3\nnode:\n  rounds: {rounds}\n")
    (run / "mapping.yaml").write_text("".join(
        f"- {{uid: {uid}, machine: {uid % 2}, host: host{uid % 2}}}\n" for uid in range(nodes)))  # fmt: skip
    (run / "summary.json").write_text(json.dumps({"name": name, "status": "finished", "rounds": rounds}))
    return run
