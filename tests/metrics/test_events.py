from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import decentnode
from decentnode.metrics.events import EVENTS, MAX_DETAIL, PER_KIND, EventLog

PACKAGE = Path(decentnode.__file__).parent


def read_lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_of_a_flood_of_events_only_the_first_are_written_and_the_others_counted(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", 3)
    threads = [threading.Thread(target=lambda: [log("stranger", None, "x" * 5000) for _ in range(500)]) for _ in "ab"]
    for thread in threads:
        thread.start()
    log("peer_lost", 7, "nothing came")
    for thread in threads:
        thread.join()
    log.close()
    log.close()
    log("stranger")
    events = read_lines(tmp_path / "events.jsonl")
    assert len(events) == PER_KIND + 2 and (tmp_path / "events.jsonl").stat().st_size < 100_000
    assert events[-1]["count"] == 1000 - PER_KIND and events[-1]["kind"] == "stranger"
    assert {event["uid"] for event in events} == {3}
    assert max(len(str(event["detail"])) for event in events) == MAX_DETAIL
    assert [event["peer"] for event in events if event["kind"] == "peer_lost"] == [7]


def test_every_fault_is_a_known_kind_of_event() -> None:
    used = set()
    for path in PACKAGE.rglob("*.py"):
        used |= set(re.findall(r'(?:PeerFault|on_event|\.fault)\(\s*"([a-z_0-9]+)"', path.read_text()))
    assert used and used <= EVENTS.keys(), used - EVENTS.keys()
