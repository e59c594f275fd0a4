"""The closing lines that a run prints at its end, made from its summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from decentnode.report.reading.measured import measured_in
from decentnode.words import duration, names, number, plural, size


def closing(summary: Mapping[str, Any]) -> list[str]:
    """Returns lines with the results of a run, its time, its traffic and the longest wait."""
    rounds, planned = summary["rounds"], summary["rounds_planned"]
    wall = duration(summary["wall_seconds"])
    most = max([round(each["rounds"]) for each in summary["nodes"].values() if each.get("rounds")], default=rounds)
    after = f"after round {rounds} of {planned}{f' (some nodes after {most})' if most > rounds else ''}"
    did = {
        "finished": f"done in {wall}", "interrupted": f"stopped {after}, {wall}", "failed": f"failed {after}, {wall}",
    }[summary["status"]]  # fmt: skip
    if summary.get("ended") == "early_stop":
        did = f"stopped early {after}, {wall}"
    sides = summary.get("sides", [])
    lines = [f"{did}, in {len(sides)} parts that ended separately" if sides else f"{did}{_main_metric(summary)}"]
    lines += [*_sides(summary), *([] if sides else _best(summary))]
    if not summary["nodes"]:
        return lines
    # Traffic includes that of this machine's nodes that left or were lost, which have no figures at the end.
    elsewhere = {str(uid) for uid in summary.get("elsewhere", [])}
    count = len({*summary["nodes"], *summary.get("left", {}), *summary.get("lost", {})} - elsewhere)
    total = summary["bytes_sent_total"]
    traffic = f"traffic  {size(total)} of payloads sent by {plural(count, 'node')}, {size(total / count)} each"
    if rounds and summary["round_seconds_median"] is not None:
        made = plural(rounds, "round") if most <= rounds else f"{rounds} to {most} rounds"
        traffic += f"; {made} of {duration(summary['round_seconds_median'])}"
    others = ("evaluation", "protocol", "control")
    again = f" ({size(resent)} of it sent again)" if (resent := summary.get("bytes_resent_total")) else ""
    beside = ", ".join(f"{size(summary[f'bytes_{purpose}_total'])} {purpose}{again if purpose == 'protocol' else ''}"
                       for purpose in others)  # fmt: skip
    found = [*lines, traffic, *_virtual(summary, most), f"other    {beside}", *_waiting(summary["waiting"])]
    return [*found, *_left(summary), *_lost(summary), *_losses(summary), *_checkpoints(summary)]


def _virtual(summary: Mapping[str, Any], rounds: int) -> list[str]:
    """Returns the line on the virtual time of a simulation with described machines and links, which is not the time of
    its computation."""
    seconds = summary.get("virtual_seconds")
    if not seconds or not rounds:
        return []
    per_round = duration(seconds / rounds)
    return [f"virtual  {duration(seconds)} with the speeds and links of simulate, {per_round} per round"]


def _sides(summary: Mapping[str, Any]) -> list[str]:
    """Returns a line per group of nodes, if nodes ended in separate generations because the network was partitioned or
    they lost each other at the end."""
    if not summary.get("apart"):
        return []
    whose = [f"node{'s' if len(side) > 1 else ''} {names(side)}" for side in summary["apart"]]
    all_of_them = "; ".join(whose)
    lines = [f"apart    {all_of_them} ended in generations of their own; the merged model is that of {whose[0]}"]
    for who, side in zip(whose, summary.get("sides", []), strict=False):
        figures = {**side, "task": summary.get("task"), "nodes": {
            str(uid): summary["nodes"][str(uid)] for uid in side["nodes"] if str(uid) in summary["nodes"]}}  # fmt: skip
        lines.append(f"{'':9}{who} after round {side['rounds']}{_main_metric(figures)}")
        lines += [f"{'':9}{each[9:]} of {who}" for each in _best({**figures, "ended": summary.get("ended")})]
    return lines


def _left(summary: Mapping[str, Any]) -> list[str]:
    """Returns the line on nodes of this machine that were asked to leave."""
    told = [f"node {uid} after round {after}" for uid, after in summary.get("left", {}).items()]
    more = f" and {plural(len(told) - MOST_NAMED, 'other')}" if len(told) > MOST_NAMED else ""
    return [f"left     {', '.join(told[:MOST_NAMED])}{more}, on request"] if told else []


def _lost(summary: Mapping[str, Any]) -> list[str]:
    """Returns the line on nodes that were lost and had not returned when the run ended."""
    alike: dict[str, list[int]] = {}
    for uid, title in summary.get("lost", {}).items():
        alike.setdefault(_without(f"node {uid}", str(title).partition("\n")[0]), []).append(int(uid))
    found = {f"node {names(sorted(uids))}": what for what, uids in alike.items()}
    told = [f"{who}{what if what[:1] in ('', ' ', ':') else f': {what}'}"
            for who, what in ((who, _without(who, what)) for who, what in found.items())]  # fmt: skip
    more = f"; and {plural(len(told) - MOST_NAMED, 'other')}" if len(told) > MOST_NAMED else ""
    return [f"lost     {'; '.join(told[:MOST_NAMED])}{more}"] if told else []


def _without(who: str, title: str) -> str:
    """Returns the title without the prefix `who`, if it begins with exactly these nodes."""
    rest = title.removeprefix(who)
    return rest if rest[:1] in ("", " ", ":") else title


def _main_metric(summary: Mapping[str, Any]) -> str:
    main = measured_in(summary).main
    if summary.get(f"{main.name}_mean") is None:
        return ""
    evaluated, when = summary.get("evaluated_round"), ""
    if evaluated is not None and evaluated < summary["rounds"]:
        when = f"after round {evaluated:.0f} "
    told = {uid: f[main.name] for uid, f in summary["nodes"].items() if f.get(main.name) is not None}
    if not told:
        return ""
    low, high = min(told, key=told.__getitem__), max(told, key=told.__getitem__)
    gone = {*summary.get("lost", {}), *summary.get("left", {})}
    known = len({*summary["nodes"], *gone})
    here = summary.get("status") == "finished" and known < summary.get("num_nodes", known)
    whose = f" of the {plural(len(told), 'node')} here" if here else ""  # on machines other than 0
    return (
        f": {when}mean test {main.text}{whose} {summary[f'{main.name}_mean']:.3f} (min {told[low]:.3f} node {low}, "
        f"max {told[high]:.3f} node {high}), merged model {number(summary[f'{main.name}_merged'], '.3f')}, "
        f"consensus distance {number(summary['consensus_distance'], '.1e')}"
    )


def _best(summary: Mapping[str, Any]) -> list[str]:
    """Returns the line on the best evaluation of a run that stopped early."""
    best = summary.get("best")
    if not best or summary.get("ended") != "early_stop":
        return []
    return [f"best     {best['figure']} {number(best['value'], '.4g')} after round {best['round']}, not better in "
            f"{plural(best['evaluations_since'], 'evaluation')} since"]  # fmt: skip


MOST_NAMED = 5
"""Most nodes that one line names."""


def _losses(summary: Mapping[str, Any]) -> list[str]:
    total, by_uid = summary.get("rounds_without_total") or 0, summary.get("losses") or {}
    if not total:
        return []
    named = [f"node {uid} ({count} times)" if count > 1 else f"node {uid}" for uid, count in by_uid.items()]
    more = f" and {plural(len(named) - MOST_NAMED, 'other')}" if len(named) > MOST_NAMED else ""
    whom = f" without {', '.join(named[:MOST_NAMED])}{more}" if named else ""
    return [f"losses   {plural(total, 'round')} of nodes continued{whom or ' without a neighbor'}"]


def _waiting(waiting: Mapping[str, Any]) -> list[str]:
    if "node" not in waiting:
        return []
    return [
        f"waiting  {100 * waiting['share']:.0f} % of the nodes' time; longest was node {waiting['node']} "
        f"for node {waiting['for']}: {duration(waiting['seconds'])} in all"
    ]


def _checkpoints(summary: Mapping[str, Any]) -> list[str]:
    told = {uid: figures for uid, figures in summary["nodes"].items()
            if uid not in summary.get("lost", {}) and "checkpoints" in figures}  # fmt: skip
    wrote = {uid: round(figures["checkpoints"]) for uid, figures in told.items()}
    counts = {uid: round(figures.get("checkpoints_kept", wrote[uid])) for uid, figures in told.items()}
    made = max(wrote.values(), default=0)
    missed = {uid: figures for uid, figures in told.items() if figures.get("checkpoints_missed")}
    if not made and not missed:
        return []
    kept = max(counts.values())
    of = f" of {made}" if kept < made else f" ({made} of them new)" if kept > made else ""
    waited = summary["checkpoint_copy_seconds"] + summary["checkpoint_wait_seconds"]
    fewer = [uid for uid in counts if (counts[uid] < kept and wrote[uid] < made) or uid in missed]
    but = " but for those below" if any(counts[uid] < kept for uid in fewer) else ""
    why = "" if summary.get("own_rounds") else ", because they were away or started again"
    named = [f"{'':9}{_fewer(uid, counts[uid], made, told[uid], why)}" for uid in fewer[:MOST_NAMED]]
    if len(fewer) > MOST_NAMED:
        named.append(f"{'':9}{plural(len(fewer) - MOST_NAMED, 'other node')} did not keep all of them either")
    ended = {figures["rounds"] for figures in summary["nodes"].values() if "rounds" in figures}
    apart: list[str] = []
    if summary["status"] == "interrupted" and len(ended) > 1 and not summary.get("own_rounds"):
        apart = [f"{'':9}nodes ended after {min(ended)} to {max(ended)} rounds: "
                 "--resume needs an earlier checkpoint that all nodes have"]
    return [
        f"kept     {plural(kept, 'checkpoint')}{of} per node{but}, "
        f"{size(summary['bytes_checkpoints_total'])} written in all; training waited {duration(waited)} for them, "
        f"writing took {duration(summary['checkpoint_cpu_seconds'])} of CPU time",
        *named,
        *apart,
    ]


def _fewer(uid: str, count: int, made: int, figures: Mapping[str, Any], otherwise: str) -> str:
    """Returns the line on a node that has fewer checkpoints than others, or could not write one of its own. otherwise:
    the reason if all writes succeeded."""
    has = f"node {uid} has {count or 'none'}"
    if missed := figures.get("checkpoints_missed"):
        last = ", the last of them" if missed > 1 else ""
        why = figures.get("checkpoint_problem", "")
        return f"{has}: {plural(missed, 'checkpoint')} could not be written{last}: {why}"
    return f"{has}: of {made} it made {round(figures['checkpoints']) or 'none'}{otherwise}"
