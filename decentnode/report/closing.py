"""The closing lines that a run prints at its end, made from its summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from decentnode.formatting import duration, names, number, plural, size
from decentnode.metrics.summary import num_senders
from decentnode.report.reading.measured import metrics_of_summary


def closing(summary: Mapping[str, Any]) -> list[str]:
    """Returns lines with the results of a run, its time, its traffic and the longest wait."""
    rounds, planned = summary["rounds"], summary["rounds_planned"]
    wall = duration(summary["wall_seconds"])
    all_rounds = [round(each["rounds"]) for each in summary["nodes"].values() if each.get("rounds")]
    max_rounds = max(all_rounds, default=rounds)
    after = f"after round {rounds} of {planned}{f' (some nodes after {max_rounds})' if max_rounds > rounds else ''}"
    headline = {
        "finished": f"done in {wall}", "interrupted": f"stopped {after}, {wall}", "failed": f"failed {after}, {wall}",
    }[summary["status"]]  # fmt: skip
    if summary.get("ended") == "early_stop":
        headline = f"stopped early {after}, {wall}"
    sides = summary.get("sides", [])
    result = f", in {len(sides)} parts that ended separately" if sides else _main_metric(summary)
    lines = [f"{headline}{result}"]
    lines += [*_side_lines(summary), *([] if sides else _best_line(summary))]
    if not summary["nodes"]:
        return lines
    num_nodes, total = num_senders(summary), summary["bytes_sent_total"]
    traffic = f"traffic  {size(total)} of payloads sent by {plural(num_nodes, 'node')}, {size(total / num_nodes)} each"
    if rounds and summary["round_seconds_median"] is not None:
        rounds_text = plural(rounds, "round") if max_rounds <= rounds else f"{rounds} to {max_rounds} rounds"
        traffic += f"; {rounds_text} of {duration(summary['round_seconds_median'])}"
    resent_note = f" ({size(resent)} of it sent again)" if (resent := summary.get("bytes_resent_total")) else ""
    notes = {"evaluation": "", "protocol": resent_note, "control": ""}
    other_traffic = ", ".join(f"{size(summary[f'bytes_{purpose}_total'])} {purpose}{note}"
                              for purpose, note in notes.items())  # fmt: skip
    lines += [traffic, *_virtual_line(summary, max_rounds), f"other    {other_traffic}"]
    lines += [*_waiting_line(summary["waiting"]), *_left_line(summary), *_lost_line(summary), *_losses_line(summary)]
    return [*lines, *_checkpoint_lines(summary)]


def _virtual_line(summary: Mapping[str, Any], rounds: int) -> list[str]:
    """Returns the line on the virtual time of a simulation with described machines and links, which is not the time of
    its computation."""
    seconds = summary.get("virtual_seconds")
    if not seconds or not rounds:
        return []
    per_round = duration(seconds / rounds)
    return [f"virtual  {duration(seconds)} with the speeds and links of simulate, {per_round} per round"]


def _side_lines(summary: Mapping[str, Any]) -> list[str]:
    """Returns a line per group of nodes, if nodes ended in separate generations because the network was partitioned or
    they lost each other at the end."""
    if not summary.get("apart"):
        return []
    groups = [f"node{'s' if len(side) > 1 else ''} {names(side)}" for side in summary["apart"]]
    all_groups = "; ".join(groups)
    lines = [f"apart    {all_groups} ended in generations of their own; the merged model is that of {groups[0]}"]
    for group, side in zip(groups, summary.get("sides", []), strict=False):
        figures = {**side, "task": summary.get("task"), "nodes": {
            str(uid): summary["nodes"][str(uid)] for uid in side["nodes"] if str(uid) in summary["nodes"]}}  # fmt: skip
        lines.append(f"{'':9}{group} after round {side['rounds']}{_main_metric(figures)}")
        lines += [f"{'':9}{each[9:]} of {group}" for each in _best_line({**figures, "ended": summary.get("ended")})]
    return lines


def _left_line(summary: Mapping[str, Any]) -> list[str]:
    """Returns the line on nodes of this machine that were asked to leave."""
    departures = [f"node {uid} after round {after}" for uid, after in summary.get("left", {}).items()]
    rest = f" and {plural(len(departures) - MAX_NAMED, 'other')}" if len(departures) > MAX_NAMED else ""
    return [f"left     {', '.join(departures[:MAX_NAMED])}{rest}, on request"] if departures else []


def _lost_line(summary: Mapping[str, Any]) -> list[str]:
    """Returns the line on nodes that were lost and had not returned when the run ended."""
    by_reason: dict[str, list[int]] = {}
    for uid, title in summary.get("lost", {}).items():
        by_reason.setdefault(_without_prefix(f"node {uid}", str(title).partition("\n")[0]), []).append(int(uid))
    reasons = {f"node {names(sorted(uids))}": reason for reason, uids in by_reason.items()}
    reasons = {nodes: _without_prefix(nodes, reason) for nodes, reason in reasons.items()}
    entries = [f"{nodes}{reason if reason[:1] in ('', ' ', ':') else f': {reason}'}"
               for nodes, reason in reasons.items()]  # fmt: skip
    rest = f"; and {plural(len(entries) - MAX_NAMED, 'other')}" if len(entries) > MAX_NAMED else ""
    return [f"lost     {'; '.join(entries[:MAX_NAMED])}{rest}"] if entries else []


def _without_prefix(prefix: str, title: str) -> str:
    """Returns the title without `prefix`, if it begins with exactly these nodes."""
    rest = title.removeprefix(prefix)
    return rest if rest[:1] in ("", " ", ":") else title


def _main_metric(summary: Mapping[str, Any]) -> str:
    main = metrics_of_summary(summary).main
    if summary.get(f"{main.name}_mean") is None:
        return ""
    evaluated, when = summary.get("evaluated_round"), ""
    if evaluated is not None and evaluated < summary["rounds"]:
        when = f"after round {evaluated:.0f} "
    values = {uid: f[main.name] for uid, f in summary["nodes"].items() if f.get(main.name) is not None}
    if not values:
        return ""
    low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    departed = {*summary.get("lost", {}), *summary.get("left", {})}
    num_known = len({*summary["nodes"], *departed})
    is_partial = num_known < summary.get("num_nodes", num_known)
    scope = f" of the {plural(len(values), 'node')} here" if is_partial else ""  # on machines other than 0
    return (
        f": {when}mean test {main.text}{scope} {summary[f'{main.name}_mean']:.3f} (min {values[low]:.3f} node {low}, "
        f"max {values[high]:.3f} node {high}), merged model {number(summary[f'{main.name}_merged'], '.3f')}, "
        f"consensus distance {number(summary['consensus_distance'], '.1e')}"
    )


def _best_line(summary: Mapping[str, Any]) -> list[str]:
    """Returns the line on the best evaluation of a run that stopped early."""
    best = summary.get("best")
    if not best or summary.get("ended") != "early_stop":
        return []
    return [f"best     {best['figure']} {number(best['value'], '.4g')} after round {best['round']}, not better in "
            f"{plural(best['evaluations_since'], 'evaluation')} since"]  # fmt: skip


MAX_NAMED = 5
"""Most nodes that one line names."""


def _losses_line(summary: Mapping[str, Any]) -> list[str]:
    total, by_uid = summary.get("rounds_without_total") or 0, summary.get("losses") or {}
    if not total:
        return []
    named = [f"node {uid} ({count} times)" if count > 1 else f"node {uid}" for uid, count in by_uid.items()]
    rest = f" and {plural(len(named) - MAX_NAMED, 'other')}" if len(named) > MAX_NAMED else ""
    without = f" without {', '.join(named[:MAX_NAMED])}{rest}" if named else ""
    return [f"losses   {plural(total, 'round')} of nodes continued{without or ' without a neighbor'}"]


def _waiting_line(waiting: Mapping[str, Any]) -> list[str]:
    if "node" not in waiting:
        return []
    return [
        f"waiting  {100 * waiting['share']:.0f} % of the nodes' time; longest was node {waiting['node']} "
        f"for node {waiting['for']}: {duration(waiting['seconds'])} in all"
    ]


def _checkpoint_lines(summary: Mapping[str, Any]) -> list[str]:
    nodes = {uid: figures for uid, figures in summary["nodes"].items()
             if uid not in summary.get("lost", {}) and "checkpoints" in figures}  # fmt: skip
    written = {uid: round(figures["checkpoints"]) for uid, figures in nodes.items()}
    counts = {uid: round(figures.get("checkpoints_kept", written[uid])) for uid, figures in nodes.items()}
    most_written = max(written.values(), default=0)
    missed = {uid: figures for uid, figures in nodes.items() if figures.get("checkpoints_missed")}
    if not most_written and not missed:
        return []
    kept = max(counts.values())
    fraction = f" of {most_written}" if kept < most_written else ""
    if kept > most_written:
        fraction = f" ({most_written} of them new)"
    waited = summary["checkpoint_copy_seconds"] + summary["checkpoint_wait_seconds"]
    behind = [uid for uid in counts if (counts[uid] < kept and written[uid] < most_written) or uid in missed]
    exception = " but for those below" if any(counts[uid] < kept for uid in behind) else ""
    reason = "" if summary.get("own_rounds") else ", because they were away or started again"
    named = [f"{'':9}{_missing_checkpoints_text(uid, counts[uid], most_written, nodes[uid], reason)}"
             for uid in behind[:MAX_NAMED]]  # fmt: skip
    if len(behind) > MAX_NAMED:
        named.append(f"{'':9}{plural(len(behind) - MAX_NAMED, 'other node')} did not keep all of them either")
    ends = {figures["rounds"] for figures in summary["nodes"].values() if "rounds" in figures}
    resume_note: list[str] = []
    if summary["status"] == "interrupted" and len(ends) > 1 and not summary.get("own_rounds"):
        resume_note = [f"{'':9}nodes ended after {min(ends)} to {max(ends)} rounds: "
                       "--resume needs an earlier checkpoint that all nodes have"]
    return [
        f"kept     {plural(kept, 'checkpoint')}{fraction} per node{exception}, "
        f"{size(summary['bytes_checkpoints_total'])} written in all; training waited {duration(waited)} for them, "
        f"writing took {duration(summary['checkpoint_cpu_seconds'])} of CPU time",
        *named,
        *resume_note,
    ]


def _missing_checkpoints_text(uid: str, count: int, most_written: int, figures: Mapping[str, Any], reason: str) -> str:
    """Returns the line on a node that has fewer checkpoints than others, or could not write one of its own. reason:
    why it has fewer, if all writes succeeded."""
    has = f"node {uid} has {count or 'none'}"
    if missed := figures.get("checkpoints_missed"):
        last = ", the last of them" if missed > 1 else ""
        problem = figures.get("checkpoint_problem", "")
        return f"{has}: {plural(missed, 'checkpoint')} could not be written{last}: {problem}"
    return f"{has}: of {most_written} it made {round(figures['checkpoints']) or 'none'}{reason}"
