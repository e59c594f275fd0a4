"""The report of runs as one self-contained HTML file."""

from __future__ import annotations

import base64
import functools
import io
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decentnode import clock
from decentnode.config.run_files import CODE
from decentnode.errors import DecentnodeError, EnvironmentFault, UsageError
from decentnode.formatting import size
from decentnode.metrics.events import EVENTS
from decentnode.metrics.figures import VIRTUAL_AXES
from decentnode.metrics.history_kinds import HISTORY
from decentnode.metrics.machines import differences, machines_of
from decentnode.metrics.reader import read
from decentnode.metrics.summary import num_senders
from decentnode.report import compare
from decentnode.report.closing import closing
from decentnode.report.pictures.plots import draw
from decentnode.report.reading import repeats
from decentnode.report.reading.repeats import RunResult
from decentnode.report.reading.runs import Line, RecordedRun, axes_of, lines, overview
from decentnode.report.reading.significance import holm, p_text, paired
from decentnode.system import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from decentnode.graph.base import Graph

MAX_PAIRS, MAX_EVENTS, MAX_GRAPH_NODES, MAX_WAITING_NODES = 12, 60, 400, 256
"""Most rows of the table of waits and of the list of events; most nodes in the picture of a graph and in the picture of
waits."""
EVENTS_IN_ORDER = frozenset({
    "joined", "failed", "peer_lost", "diverged", "generation", "generation_over", "refused", "outside", "stopped",
    "left_run", "stranger", "wrong_identity",
})  # fmt: skip
"""Kinds of events that are listed one by one; all others are only counted."""
PURPOSES = {
    "data": "payloads: models, or compressed forms of them", "metadata": "payloads: indices, scales and the like",
    "evaluation": "evaluation of the merged model", "protocol": "headers, checksums and acknowledgments",
    "control": "joining, heartbeats, generations and reports", "checkpoints": "checkpoints",
}  # fmt: skip


@dataclass(frozen=True)
class Picture:
    """A picture with a description in words, for readers who cannot see it."""

    title: str
    description: str
    data: str
    """A data: URL that contains the picture."""


def write(paths: Sequence[Path], target: Path, names: Sequence[str] = ()) -> list[str]:
    """Writes the report of some runs atomically. Returns notes on what was left out, in sentences.

    names: labels of the lines, as for `lines`. Raises UsageError for runs without metrics, EnvironmentFault if the file
    cannot be written.
    """
    text, notes = render(paths, names)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EnvironmentFault(f"cannot write {target}: {error.strerror}; choose another place with -o") from error
    return notes


def render(paths: Sequence[Path], names: Sequence[str] = ()) -> tuple[str, list[str]]:
    """Returns (the HTML text, notes on what was left out). Raises UsageError for runs without metrics."""
    import jinja2

    drawn, notes = lines(paths, names)
    ran = [[_read_run(run.path) for run in line.runs] for line in drawn]
    notes = [*notes, *(f"{each.path}: its machines differ: {line}" for group in ran for each in group
                       for line in differences(machines_of(each.path)))]  # fmt: skip
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
                                     lstrip_blocks=True)  # fmt: skip
    text = resources.files("decentnode.report").joinpath("report.html.j2").read_text("utf-8")
    return environment.from_string(text).render(
        title=", ".join(dict.fromkeys(each.name for group in ran for each in group)),
        made=_time(clock.wall()), seeds=[_seeds(group) for group in ran], labels=[line.label for line in drawn],
        conclusions=[_conclusion_line(group) for group in ran],
        ends=[group[0].ended for group in ran], differing=differing(drawn, ran), texts=_texts(drawn),
        results=results(drawn, ran),
        curves=_curves(drawn), graphs=_graphs(drawn), waits=[_waits(line) for line in drawn],
        traffic=_traffic(drawn, ran), events=[_events(run) for line in drawn for run in line.runs],
        nodes=[_nodes(each) for group in ran for each in group],
        machines=[_machine(each) for group in ran for each in group],
        repeats=[_how_to_repeat(each) for group in ran for each in group], notes=notes,
    ), notes  # fmt: skip


def _read_run(path: Path) -> RunResult:
    try:
        return repeats.read(path)
    except UsageError:
        return RunResult(path, path.parent.name, None, {}, "not finished", {})


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"


def _conclusion_line(group: Sequence[RunResult]) -> str:
    """Returns the closing line of a run, and why it failed; "" for several runs, whose means are in the table, and for
    a run without a complete summary."""
    try:
        line = closing(group[0].summary)[0] if len(group) == 1 else ""
        failure = group[0].summary.get("failure") if line else None
        return f"{line}. It failed: {failure['title'].partition(chr(10))[0]}" if failure else line
    except (KeyError, TypeError, AttributeError):
        return ""


def _seeds(group: Sequence[RunResult]) -> str:
    seeds = [str(each.seed) for each in group if each.seed is not None]
    return f", seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}" if seeds else ""


# -- configs and results


def differing(drawn: Sequence[Line], ran: Sequence[Sequence[RunResult]]) -> dict[str, Any]:
    """Returns the keys in which the experiments differ, and for each experiment its values, or dashes. Keys that differ
    only because another component was chosen are left out."""
    configs = [group[0].config for group in ran]
    keys = repeats.differing_keys(configs)
    return {"heads": keys, "rows": [(line.label, [_short(_value_of(config, key)) for key in keys])
                                    for line, config in zip(drawn, configs, strict=True)]}  # fmt: skip


def _value_of(config: Mapping[str, str], key: str) -> str:
    """Returns the value of a key; "given" for a section without a component, and a dash if there is neither."""
    is_section = any(inner.startswith(f"{key}.") for inner in config)
    return repeats.value_of(config, key) or ("given" if is_section else "-")


def _short(value: str) -> str:
    """Returns a list of sections without the keys that are null; other values as they are."""
    if not value.startswith("[{"):
        return value
    return json.dumps([{k: v for k, v in each.items() if v is not None} for each in json.loads(value)])


def _texts(drawn: Sequence[Line]) -> list[tuple[str, str]]:
    """Returns the configs as they were written."""
    texts = []
    for line in drawn:
        try:
            texts.append((line.label, (line.runs[0].path / "config.yaml").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            continue
    return texts


def results(drawn: Sequence[Line], ran: Sequence[Sequence[RunResult]]) -> dict[str, Any]:
    """Returns the table of results: headings, and for each experiment its cells; for several experiments with common
    seeds, also each one's difference from the first in the main metric of its task."""
    with_summary = [(line, group) for line, group in zip(drawn, ran, strict=True) if any(r.summary for r in group)]
    if not with_summary:
        return {"heads": [], "rows": [], "paired": [], "unit": ""}
    groups = [[each for each in group if each.summary] for _, group in with_summary]
    rows = compare.rows(groups)
    shown = rows[0].columns
    rows_text = [(line.label, [str(row.runs), *(row.shown(figure) for figure in shown)])
                 for (line, _), row in zip(with_summary, rows, strict=True)]  # fmt: skip
    return {"heads": ["runs", *(figure.title for figure in shown)], "rows": rows_text,
            "paired": _paired([line.label for line, _ in with_summary], groups),
            "unit": shown[0].title}  # fmt: skip


def _paired(labels: Sequence[str], groups: Sequence[Sequence[RunResult]]) -> list[list[str]]:
    """Returns the differences in the unit in which the table shows the main metric: those of percentages are percentage
    points."""
    measured = groups[0][0].measured
    main = measured.by_name[f"{measured.main.name}_mean"]
    values = [{each.seed: float(value) for each in group
               if isinstance(value := each.summary.get(main.name), int | float)} for group in groups]  # fmt: skip
    tests = [paired(each, values[0]) for each in values[1:]]
    corrected = holm([None if each is None else each.p for each in tests])
    rows = []
    for label, each, p in zip(labels[1:], tests, corrected, strict=True):
        if each is not None:
            mean, low, high = (f"{main.scale * one:+.{main.digits}f}" for one in (each.mean, each.low, each.high))
            rows.append([label, str(each.seeds), mean, f"{low} to {high}", p_text(p)])
    return rows


# -- pictures


def _picture(figure: Figure, title: str, description: str) -> Picture:
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "decentnode"}):
        figure.savefig(data := io.BytesIO(), format="svg", metadata={"Date": None})
    return Picture(title, description, "data:image/svg+xml;base64," + base64.b64encode(data.getvalue()).decode())


def _curves(drawn: Sequence[Line]) -> list[Picture]:
    pictures = []
    for metric in overview(drawn):
        for axis in axes_of(drawn):
            try:
                figure, _ = draw(drawn, [metric], [axis])
            except UsageError:
                continue
            title = f"{metric.replace('_', ' ')} by {VIRTUAL_AXES[axis]}"
            pictures.append(_picture(figure, title, f"{title} of {', '.join(line.label for line in drawn)}"))
    return pictures


def _recorded_graph(path: Path) -> Graph:
    """Returns the graph of a run, built from the config's graph section alone: the components that other sections name
    import torch. Raises whatever reading or building it raises."""
    from decentnode.config.component import add_module_folder, section
    from decentnode.config.yaml_source import load_plain
    from decentnode.graph import GRAPHS, build

    resolved = load_plain((path / "config.resolved.yaml").read_text(encoding="utf-8"))
    if ":" in resolved["graph"]["name"] and (path / CODE).is_dir():
        add_module_folder(path / CODE, first=True)
    return build(section(GRAPHS, "graph").validate(resolved["graph"]), None, resolved["seed"], path)


def _graphs(drawn: Sequence[Line]) -> list[Picture]:
    """Returns a picture of the graph of every experiment; identical graphs appear once."""
    from decentnode.graph.topology import Topology
    from decentnode.report.pictures.graph import figure_of

    by_edges: dict[bytes, Picture] = {}
    for line in drawn:
        path = line.runs[0].path
        try:
            edges = (path / "graph.edges").read_bytes() if (path / "graph.edges").is_file() else str(path).encode()
            if edges in by_edges:
                continue
            graph = _recorded_graph(path)
            if not isinstance(graph, Topology) or graph.num_nodes > MAX_GRAPH_NODES:
                continue
            title = f"graph of {line.label}"
            by_edges[edges] = _picture(figure_of(graph), title, f"{title}: {graph.num_nodes} nodes")
        except (OSError, ValueError, LookupError, DecentnodeError):  # another version made it, or its file is gone
            continue
    return [*by_edges.values()]


# -- waits, traffic and events


def waited(run: RecordedRun) -> dict[tuple[int, int], float]:
    """Returns (node, neighbor) -> the seconds that the node waited for the neighbor's payloads in the whole run."""
    seconds_waited: Counter[tuple[int, int]] = Counter()
    for uid, records in run.nodes.items():
        for record in records:
            for neighbor, edge in record.get("edges", {}).items():
                if isinstance(edge, list) and len(edge) > 4 and edge[4]:
                    seconds_waited[uid, int(neighbor)] += edge[4]
    return dict(seconds_waited)


def _waits(line: Line) -> dict[str, Any]:
    total: Counter[tuple[int, int]] = Counter()
    for run in line.runs:
        total.update(waited(run))
    longest = total.most_common(MAX_PAIRS)
    rounds = {phase: _seconds(line, f"{phase}_seconds") for phase in ("train", "send", "wait", "mix")}
    all_seconds = sum(rounds.values())
    return {
        "label": line.label, "pairs": [(a, b, f"{seconds:.2f}") for (a, b), seconds in longest if seconds >= 0.005],
        "shares": [(phase, 100 * seconds / all_seconds) for phase, seconds in rounds.items()] if all_seconds else [],
        "picture": _waiting_picture(line, total),
    }  # fmt: skip


def _seconds(line: Line, key: str) -> float:
    return sum(record.get(key) or 0.0 for run in line.runs for records in run.nodes.values() for record in records)


def _waiting_picture(line: Line, total: Mapping[tuple[int, int], float]) -> Picture | None:
    """Returns a heat map of the waits: each row's node waited for each column's."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    uids = sorted({uid for run in line.runs for uid in run.nodes})
    if not total or not 1 < len(uids) <= MAX_WAITING_NODES:
        return None
    place = {uid: index for index, uid in enumerate(uids)}
    values = np.full((len(uids), len(uids)), np.nan)
    for (node, neighbor), seconds in total.items():
        if node in place and neighbor in place:
            values[place[node], place[neighbor]] = seconds
    figure = Figure(figsize=(4.6, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    image = panel.imshow(values, cmap="cividis")
    figure.colorbar(image, ax=panel, label="seconds waited in all")
    step = max(1, len(uids) // 16)
    for axis, name in ((panel.xaxis, "waited for"), (panel.yaxis, "node that waited")):
        axis.set_ticks(range(0, len(uids), step), [str(uid) for uid in uids[::step]])
        axis.set_label_text(name)
    return _picture(figure, "who waited for whom", f"seconds that each node of {line.label} waited for each neighbor")


def _traffic(drawn: Sequence[Line], ran: Sequence[Sequence[RunResult]]) -> dict[str, Any]:
    """Returns the bytes by purpose, in all and per node."""
    summaries = [[each.summary for each in group if each.summary] for group in ran]
    sent = [purpose for purpose in PURPOSES
            if any(each.get(f"bytes_{purpose}_total") for group in summaries for each in group)]  # fmt: skip

    def cell(group: Sequence[Mapping[str, Any]], purpose: str) -> str:
        if not group:
            return "-"
        totals = [float(each.get(f"bytes_{purpose}_total") or 0) for each in group]
        per_node = [total / num_senders(each) for total, each in zip(totals, group, strict=True)]
        return f"{size(statistics.fmean(totals))} ({size(statistics.fmean(per_node))})"

    return {"heads": [PURPOSES[purpose] for purpose in sent],
            "rows": [(line.label, [cell(group, purpose) for purpose in sent])
                     for line, group in zip(drawn, summaries, strict=True)]}  # fmt: skip


def _events(run: RecordedRun) -> dict[str, Any]:
    """Returns the events of a run: counts by kind, and the important ones in the order of time."""
    counts: Counter[str] = Counter()
    listed: list[tuple[float, int, str, str]] = []
    for path in sorted(run.path.glob("nodes/*/events.jsonl")):
        for event in _readable(path):
            kind = str(event.get("kind"))
            if kind in HISTORY or kind == "recording":
                continue
            counts[kind] += int(event.get("count") or 1)
            if kind in EVENTS_IN_ORDER and kind != "joined":
                peer = event.get("peer")
                peer_text = f"node {peer}" if peer is not None else ""
                detail = " ".join(filter(None, (peer_text, str(event.get("detail") or ""))))
                listed.append((float(event.get("time") or 0.0), int(event.get("uid") or 0), kind, detail))
    began = min((r[0].get("time", 0.0) for r in run.nodes.values() if r), default=0.0)
    listed.sort()
    planned = [json.dumps(each) for each in _readable(run.path / "faults.jsonl")]
    return {
        "label": str(run.path), "planned": planned,
        "counts": [(kind, count, EVENTS.get(kind, "")) for kind, count in sorted(counts.items())],
        "listed": [(f"{time - began:+.1f} s", uid, kind, detail) for time, uid, kind, detail in listed[:MAX_EVENTS]],
        "more": max(0, len(listed) - MAX_EVENTS),
    }  # fmt: skip


def _readable(path: Path) -> Iterable[dict[str, Any]]:
    try:
        yield from read(path)
    except OSError:
        return


# -- figures of every node; how to repeat the runs


def _nodes(ran: RunResult) -> dict[str, Any]:
    """Returns a table with a row per node: the metrics of its task, time and bytes."""
    nodes = ran.summary.get("nodes", {})
    metrics = [*ran.measured.metrics]
    headings = ["node", "rounds", *(metric.name.replace("_", " ") for metric in metrics), "round", "sent", "faults"]
    formatters: list[Callable[[Mapping[str, Any]], str]] = [
        *(functools.partial(_figure, name=metric.name, scale=metric.scale, digits=metric.digits, suffix=metric.suffix)
          for metric in metrics),
    ]  # fmt: skip
    rows = [
        [uid, str(node.get("rounds", "-")), *(tell(node) for tell in formatters),
         _figure(node, "round_seconds_median", 1000, 1, " ms"),
         size(sum(float(node.get(key) or 0) for key in ("bytes_data", "bytes_metadata"))),
         str(node.get("faults", "-"))]
        for uid, node in nodes.items() if isinstance(node, dict)
    ]  # fmt: skip
    return {"label": str(ran.path), "heads": headings, "rows": rows}


def _figure(node: Mapping[str, Any], name: str, scale: float, digits: int, suffix: str) -> str:
    value = node.get(name)
    return f"{scale * value:.{digits}f}{suffix}" if isinstance(value, int | float) else "-"


def _machine(ran: RunResult) -> dict[str, Any]:
    """Returns the environment of each machine of the run, as far as it is recorded."""
    machines = machines_of(ran.path)
    rows = []
    for each in machines:
        facts = [(key, str(each.environment[key])) for key in ("time", "host", "system", "cpu", "cores", "memory")
                 if key in each.environment]  # fmt: skip
        if each.versions:
            facts.append(("versions", ", ".join(f"{name} {version}" for name, version in each.versions.items())))
        if each.commit and len(machines) > 1:
            facts.append(("commit", each.commit))
        rows += [(f"machine {each.number}: {key}" if len(machines) > 1 else key, value) for key, value in facts]
    return {"label": str(ran.path), "rows": rows}


def _how_to_repeat(ran: RunResult) -> dict[str, Any]:
    def text(name: str) -> str:
        try:
            return (ran.path / name).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return ""

    return {"label": str(ran.path), "command": text("command.txt"), "commit": text("git.txt"), "seed": ran.seed,
            "digest": str(ran.summary.get("digest", ""))}  # fmt: skip
