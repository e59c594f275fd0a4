"""Checks the records of a run's nodes after a run with faults. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from decentnode.errors import NodeFailed, UsageError
from decentnode.formatting import names
from decentnode.launch.children.messages import Facts, Failed
from decentnode.launch.reporting.observer import Observer
from decentnode.launch.reporting.outcome import Ledger
from decentnode.simulate.world.records import (
    Violation,
    check_generations,
    check_payloads,
    every_event,
    read_lives,
    unseen,
)

NOTHING = "no node recorded any mixed payload"


def check_run(
    run_dir: Path | None, facts: Facts, ledger: Ledger, observer: Observer
) -> dict[str, Any] | None:
    """Calls `check`, reports its result to the observer and returns it. A violation is added to the ledger as a failure
    of the run. Returns None if nothing was to be recorded, or no node finished. Blocking."""
    if not facts.checks_records or run_dir is None or not ledger.finished:
        return None
    result = check(run_dir, facts)
    if "violation" in result:
        text = summarize_check(result)
        ledger.failures.append(Failed(facts.local[0], NodeFailed.exit_code, text, text))
    else:
        observer.notice(summarize_check(result))
    return result


def check(run_dir: Path, facts: Facts) -> dict[str, Any]:
    """Checks the nodes' records against each other. Returns the entry `checked` of summary.json: `payloads`, how
    many payloads were mixed as their sources sent them, `generations`, and `unseen`, how many mixed payloads came from
    each newcomer whose records are on another machine; or `violation`, the first record that contradicts another; or
    `unchecked`, why the check is impossible. Blocking: a million records take some seconds."""
    if len(facts.machines) > 1:
        return {"unchecked": "the records are on several machines: use decentnode collect to copy them into one "
                             "folder, then decentnode replay --check"}  # fmt: skip
    try:
        lives = read_lives(run_dir, facts.num_nodes, facts.newcomers)
        if any("total" in event.fields for _, event in every_event(lives)):
            return {"unchecked": "payloads were summed in transit (collective communication)"}
        payloads = check_payloads(lives)
        generations = check_generations(lives, min_nodes=facts.min_nodes, rounds=facts.rounds,
                                        founders=facts.num_nodes)  # fmt: skip
    except Violation as violation:
        return {"violation": str(violation)}
    except (UsageError, OSError) as error:
        return {"unchecked": str(error)}
    elsewhere = unseen(lives)
    if not payloads:
        return {"unchecked": NOTHING}
    return {"payloads": payloads, "generations": generations, **({"unseen": elsewhere} if elsewhere else {})}


def summarize_check(checked: dict[str, Any]) -> str:
    """Returns the result of `check` as a sentence."""
    if "violation" in checked:
        return f"a payload or a generation is wrong: {checked['violation']}"
    if "unchecked" in checked:
        return f"not checked: {checked['unchecked']}"
    if not checked["payloads"]:
        return f"not checked: {NOTHING}"
    suffix = ""
    if elsewhere := checked.get("unseen"):
        suffix = f"; {sum(elsewhere.values()):,} more came from node {names(sorted(map(int, elsewhere)))}, whose " \
               "records are on its machine: use decentnode collect, then decentnode replay --check"  # fmt: skip
    return f"checked: {checked['payloads']:,} payloads were mixed as their sources sent them{suffix}"
