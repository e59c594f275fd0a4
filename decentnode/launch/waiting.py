"""For whom a start that takes long is waiting, in words."""

from __future__ import annotations

from collections.abc import Sequence

from decentnode.launch.messages import Facts, NodesAbsent


def names(uids: Sequence[int]) -> str:
    """"0-7, 9" for ascending uids."""
    ranges: list[list[int]] = []
    for uid in uids:
        if ranges and uid == ranges[-1][1] + 1:
            ranges[-1][1] = uid
        else:
            ranges.append([uid, uid])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in ranges)


def waiting_for(facts: Facts, phase: str, late: Sequence[int], absent: NodesAbsent | None, waited: float) -> str:
    """late: local nodes that `phase` waits for. absent: what uid 0 last said, if it is here."""
    if phase == "starting":
        return f"node {names(late)} to load data and model ({waited:.0f} s)"
    if facts.machine:
        return f"machine 0 ({facts.hosts[0]}) to start the run ({waited:.0f} s)"
    if absent is None:
        return f"node {names(late)} to connect ({waited:.0f} s)"
    parts = [
        f"machine {machine} at {facts.hosts[machine]} (node {names(missing)})"
        for machine, uids in enumerate(facts.machines)
        if (missing := sorted(set(absent.uids).intersection(uids)))
    ]
    refused = [f"refused: {reason}" for reason in absent.refusals.values()]
    told = "; ".join(filter(None, [", ".join(parts), *refused]))
    return f"{told or 'the word to start to reach every node'} ({waited:.0f} s)"
