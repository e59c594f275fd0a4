"""The interface by which the supervisor reports a run to the console, the API or a test, and the sentences for its
events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decentnode.formatting import names
from decentnode.launch.children.messages import Engine, Facts, Failed, NodesAbsent

if TYPE_CHECKING:
    from decentnode.launch.reporting.outcome import Outcome

MAX_PROBLEMS = 5
"""How many different reasons for failed checkpoints are reported during a run."""


class Observer:
    """Receives the events of a run. Every method does nothing: override those of interest. All are called in the
    supervisor's thread and must not block."""

    def facts(self, facts: Facts, run_dir: Path | None) -> None:
        """The experiment is loaded; `run_dir` is None for a dry run."""

    def header(self, lines: list[list[str]]) -> None:
        """(label, text) lines that describe the experiment."""

    def waiting(self, text: str) -> None:
        """The run has waited for a second or more; `text` says for what. Repeated while the wait lasts."""

    def joined(self, seconds: float) -> None:
        """All nodes of the run are connected, `seconds` after the command."""

    def asks_to_join(self, seconds: float) -> None:
        """Called instead of `joined` when this machine's nodes ask a run that has already begun for admission."""
        self.joined(seconds)

    def progress(self, uid: int, record: dict[str, Any]) -> None:
        """A record of a node's metrics.jsonl arrived: every evaluation, but only some of the rounds."""

    def notice(self, text: str) -> None:
        """`text` is something that the user should know and that does not stop the run."""

    def lost(self, uid: int) -> None:
        """The others continue without this node. It takes part again once it is a member of a new generation."""

    def restarted(self, uid: int) -> None:
        """A new process of this node was started, whose records count bytes from 0."""

    def failed(self, failure: Failed, log: Path | None) -> None:
        """The run fails because of `failure`; `log` is the folder of the node's logs."""

    def stopping(self, signal_name: str) -> None:
        """A first signal was received: the nodes finish their round and write their results."""

    def suspending(self) -> None:
        """The terminal suspends this process (Ctrl-Z); the nodes continue."""

    def resumed(self) -> None:
        """This process continues after `suspending`."""

    def ended(self, outcome: Outcome) -> None:
        """A run that was started from a program is over; `outcome` says how it ended. Not called for commands."""

    def tick(self) -> None:
        """Called at least four times per second, for example to redraw."""


def engine_notice(engine: Engine) -> str:
    """Returns a sentence about the engine that computes the nodes of a simulated run."""
    return f"simulated, {engine.name}: {engine.reason}"


def waiting_for(facts: Facts, phase: str, late: Sequence[int], absent: NodesAbsent | None, waited: float) -> str:
    """Returns, in words, for which nodes or machines a slow start is waiting.

    late: local nodes for which `phase` waits. absent: the last report of uid 0, if it is on this machine. waited:
    seconds.
    """
    if phase == "starting":
        return f"node {names(late)} to load data and model ({waited:.0f} s)"
    if facts.in_process:
        return f"node {names(late)} to be made ({waited:.0f} s)"
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
    text = "; ".join(filter(None, [", ".join(parts), *refused]))
    return f"{text or 'every node to receive the start signal'} ({waited:.0f} s)"


def resumed_notice(record: Mapping[str, Any]) -> str:
    """Returns the sentence for a record of kind "resumed"."""
    without = record.get("without", [])
    text = f"continues after round {record.get('round')}"
    if record.get("own_rounds"):
        text = f"continues, each node after its own last round, the first node after round {record.get('round')}"
    if not without:
        return text
    return f"{text}; node {names(without)} has no checkpoint and starts from the mean of the others' models; the " \
           "sharing rule starts anew"  # fmt: skip


def checkpoint_notice(uid: int, record: Mapping[str, Any], reported: set[str]) -> str:
    """Returns the sentence for a record of kind "checkpoint" about a failed or incomplete checkpoint; "" for others.

    reported: the problems reported before, to which this one is added. A problem that several nodes or checkpoints have
    is reported only once: the closing lines count problems by node.
    """
    lacking = ", ".join(record.get("left_out", ()))
    problem = str(record.get("problem", lacking))
    if not problem or problem in reported or len(reported) >= MAX_PROBLEMS:
        return ""
    reported.add(problem)
    if lacking:
        return f"checkpoints lack {lacking}, because the rule has no state_dict: state that it keeps between rounds " \
               "is lost on resume"  # fmt: skip
    return f"node {uid}: the checkpoint after round {record.get('round')} could not be written: {problem}; " \
           "training continues"  # fmt: skip


def apart_notice(record: Mapping[str, Any]) -> str:
    """Returns the sentence for a record of kind "apart"."""
    parts, edges = record.get("parts", []), record.get("edges", [])
    text = f"generation {record.get('generation', 0)}: without the absent nodes, the graph is split into nodes " \
           + " and ".join(names(part) for part in parts)  # fmt: skip
    if not edges:
        return f"{text}, which continue separately; node.repair would connect them"
    return f"{text}; edges added: {', '.join(f'{i} - {j}' for i, j in edges)}"


def lacking_notice(record: Mapping[str, Any]) -> str:
    """Returns the sentence for a record of kind "lacking"."""
    return f"generation {record.get('generation', 0)}: without the absent nodes, these have fewer neighbors than the " \
           f"sharing rule needs ({record.get('needed')}): node {names(record.get('nodes', []))}"  # fmt: skip


def objection_notice(record: Mapping[str, Any]) -> str:
    """Returns the sentence for a record of kind "objection"."""
    return f"generation {record.get('generation', 0)}: without the absent nodes, the sharing rule " \
           f"{record.get('reason', '')}"  # fmt: skip


def generation_notice(record: Mapping[str, Any], num_nodes: int) -> str:
    """Returns the sentence for a record of kind "generation"."""
    members, left, joined = (record.get(key, []) for key in ("members", "left", "joined"))
    departed = record.get("departed", [])
    lost = [uid for uid in left if uid not in departed]
    changes = [f"without node {names(lost)}"] if lost else []
    changes += [f"without node {names(departed)}, which left on request"] if departed else []
    back, new = [uid for uid in joined if uid < num_nodes], [uid for uid in joined if uid >= num_nodes]
    changes += [f"with node {names(back)} again"] if back else []
    changes += [f"with node {names(new)}, which is not in the mapping"] if new else []
    number = record.get("generation", 0)
    num_newcomers = sum(uid >= num_nodes for uid in members)
    extra = f" and {num_newcomers} more" if num_newcomers else ""
    count = f"{len(members) - num_newcomers} of {num_nodes} nodes{extra}"
    alone = len(members) == 1
    round, has_own_rounds = record.get("round", 0), record.get("own_rounds")  # own rounds: only the reporting node's
    text = f"{'continues' if alone else 'continue'}{'' if has_own_rounds else f' from round {round}'}"
    if record.get("stopping"):
        text = f"{'ends' if alone else 'end'} the run{'' if has_own_rounds else f' after round {round}'}"
    if not (changes or "merged" in record or record.get("stopping")):
        changes = ["the same as before"]
    merged = "; models that had been trained separately were replaced by their mean" if "merged" in record else ""
    return ", ".join([f"generation {number}: {count} {text}", *changes]) + merged
