"""`decentnode replay`: repeats a run from its nodes' records, including everything that failed in it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from decentnode.cli.run_names import run_names
from decentnode.errors import DecentnodeError, UsageError

if TYPE_CHECKING:
    from decentnode.experiment import Experiment
    from decentnode.simulate.world.records import ProcessRecords
    from decentnode.simulate.world.replay import ReplayWorld


class ReplayDiffers(DecentnodeError):
    """The replay differs from the records, or the records contradict each other."""

    exit_code = 1


@click.command()
@click.argument("run", metavar="RUN", shell_complete=run_names)
@click.option("--check", "only_check", is_flag=True,
              help="Only check the records against each other; do not repeat the run.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(run: str, only_check: bool, as_json: bool) -> None:
    """Repeat RUN from its records: the same nodes in one process, on virtual time, with the same deaths, returns,
    missing payloads and generations of members. Every payload that a node sends or mixes, and every generation, is
    compared with the run's; the first difference is reported with its node and round.

    RUN is a run directory, the folder of an experiment or its name (its latest run), or latest. The records are checked
    first: payloads must be mixed as their sources sent them, and generations must follow each other. A run that was
    resumed from another run needs that run's checkpoint, in its own folder or in a run beside it.

    The exit code is 1 if anything differs.
    """
    from decentnode.launch.files.run_dir import resolve

    folder = resolve(run)
    if not (folder / "summary.json").is_file():
        raise UsageError(f"{folder} is not finished: it has no summary.json; only finished runs can be repeated")
    from decentnode.experiment import load
    from decentnode.simulate.world.records import Violation, read_lives

    experiment = load(folder / "config.resolved.yaml", check=False)
    lives = read_lives(folder, experiment.make_graph().num_nodes, experiment.node.newcomers)
    if not only_check:
        refuse(experiment, lives)
    for warning in warnings(experiment, lives):
        click.echo(f"warning: {warning}", err=True)
    try:
        facts = {"run": str(folder), **_check_records(experiment, lives, folder)}
        if not only_check:
            facts |= _repeat_run(experiment, lives, folder)
    except Violation as violation:
        raise ReplayDiffers(str(violation)) from violation
    click.echo(json.dumps(facts) if as_json else _text(facts))


def refuse(experiment: Experiment, lives: ProcessRecords) -> None:
    """Raises UsageError for runs that cannot be repeated."""
    from decentnode.sharing.compressed import make_sharing
    from decentnode.simulate.world.records import every_event, place_of

    if experiment.node.schedule not in ("sequential", "overlapped"):
        raise UsageError(f"node.schedule was {experiment.node.schedule}: its nodes mix whatever has arrived, and no "
                         f"record says when; --check compares the records without repeating the run")  # fmt: skip
    if make_sharing(experiment.sharing).requirements.private:
        raise UsageError(f"sharing was {experiment.sharing.name}: its payloads depend on keys that are not recorded; "
                         "--check compares the records without repeating the run")  # fmt: skip
    if experiment.node.on_partition == "both" and any(event.kind == "entered" for _, event in every_event(lives)):
        raise UsageError("node.on_partition was both: the sides of a network partition may have continued "
                         "separately, but a replay has only one generation at a time; --check compares the records "
                         "without repeating the run")
    founders = experiment.make_graph().num_nodes
    for life, event in every_event(lives):
        if event.kind == "entered" and max(event.members) >= founders:
            raise UsageError(f"{place_of(life, event)}: it has node {max(event.members)} beside it, which is not in "
                             "the mapping: a replay begins with the nodes of the mapping and admits no others; "
                             "--check compares the records without repeating the run")  # fmt: skip
    for each in lives.values():
        first = next((event for event in each[0].events if event.kind in ("steps", "resumed")), None)
        if first is not None and first.kind == "steps" and first.round:
            raise UsageError(f"{each[0].path} begins with round {first.round}: the run was resumed from a checkpoint "
                             "of another run, but the records, of an older version, do not say which")  # fmt: skip
        for life in each if experiment.node.checkpoint is not None else ():
            return_event = None
            for event in life.events:
                if event.kind == "steps" and return_event is not None:
                    raise UsageError(f"{place_of(life, return_event)}: it came back, but the records do not say what "
                                     "it took from a checkpoint (an older version wrote them)")  # fmt: skip
                if event.kind in ("entered", "restored"):
                    return_event = event if event.kind == "entered" and life.uid in event.fresh else None
    for life, event in every_event(lives):
        if "total" in event.fields:
            raise UsageError(f"{place_of(life, event)}: torch.distributed summed the payloads of a whole group. Its "
                             "order of additions depends on the group and the machines, so one process cannot get "
                             "the same bits, on which all later records depend; --check "
                             f"compares the records without repeating the run")  # fmt: skip


def warnings(experiment: Experiment, lives: ProcessRecords) -> list[str]:
    """Returns reasons for which a correct replay may differ."""
    import torch

    from decentnode.launch.reporting.header import changed_code_warning
    from decentnode.version import __version__

    texts = [text for _, text in changed_code_warning(experiment)]
    headers = [life.header for each in lives.values() for life in each]
    for key, present in (("version", __version__), ("torch", torch.__version__)):
        others = sorted({str(each.get(key)) for each in headers} - {present})
        if others:
            package = "decentnode" if key == "version" else key
            texts.append(f"the run was made with {package} {', '.join(others)}, this is {present}: results may differ")
    threads = sorted({int(each.get("threads", 1)) for each in headers})
    if len(threads) > 1:
        texts.append(f"nodes computed with {threads} threads; here all compute with {threads[0]}: results may differ")
    return texts


def _check_records(experiment: Experiment, lives: ProcessRecords, folder: Path) -> dict[str, Any]:
    from decentnode.build import limits_of
    from decentnode.metrics import summary as summaries
    from decentnode.simulate.world.records import check_generations, check_payloads, unseen

    limits, founders = limits_of(experiment), experiment.make_graph().num_nodes
    summary = summaries.read(folder / "summary.json")
    rounds = summary["rounds"] if summary.get("ended") == "early_stop" else limits.rounds
    facts = {
        "nodes": len(lives), "processes": sum(map(len, lives.values())), "payloads": check_payloads(lives),
        "generations": check_generations(lives, min_nodes=limits.min_nodes, rounds=rounds, founders=founders),
    }  # fmt: skip
    unseen_nodes = unseen(lives)
    return {**facts, "unseen": unseen_nodes} if unseen_nodes else facts


def _repeat_run(experiment: Experiment, lives: ProcessRecords, folder: Path) -> dict[str, Any]:
    from decentnode import native
    from decentnode.simulate.world.replay_run import checkpoints_of, replay_run

    files = checkpoints_of(folder, lives)
    logger = logging.getLogger("decentnode")
    level, threads = logger.level, min(int(life.header.get("threads", 1)) for each in lives.values() for life in each)
    logger.setLevel(logging.ERROR)  # nodes repeat the log lines of the run
    try:
        with native.torch_threads(threads):
            world, outcome = replay_run(experiment, lives, files)
    finally:
        logger.setLevel(level)
    return {
        "compared": outcome.compared, "rounds": max(process.node.round for process in world.processes.values()),
        "models": _compare_models(world, folder),
        "skipped": [[life.uid, life.number] for life in outcome.skipped],
    }  # fmt: skip


def _compare_models(world: ReplayWorld, folder: Path) -> int:
    """Compares the final models of the run with those of the replay, as no record covers them after the last exchange.
    Returns how many were compared. Raises Violation."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from decentnode.launch.files.node_files import model_path
    from decentnode.simulate.world.records import Violation, must

    compared = 0
    for uid, process in world.processes.items():
        path = model_path(folder, uid)
        if not path.is_file() or not process.record.ended:
            continue
        try:
            recorded = load_file(path)
        except (OSError, SafetensorError) as error:
            raise Violation(f"{path.relative_to(folder)}: cannot be read: {error}") from error
        replayed = process.node.training.model.module.state_dict()
        others = [name for name, value in replayed.items() if name not in recorded or not recorded[name].equal(value)]
        must(not others, f"{path.relative_to(folder)}: node {uid} ended with another {', '.join(others)} in the run")
        compared += 1
    return compared


def _text(facts: dict[str, Any]) -> str:
    from decentnode.launch.reporting.checked import summarize_check as sentence

    generations = facts["generations"] + 1
    processes = facts["processes"] - facts["nodes"]
    lines = [
        f"{Path(facts['run']).name}: {facts['nodes']} nodes, {processes} of them started again, "
        f"{generations} generation{'s' if generations > 1 else ''} of members",
        sentence(facts),
    ]
    if "compared" in facts:
        lines.append(f"repeated: {facts['rounds']} rounds, {facts['compared']:,} records and the models at the end of "
                     f"{facts['models']} nodes, all the same")
    for uid, number in facts.get("skipped", []):
        lines.append(f"  not repeated: process {number} of node {uid}, which ended before it took part")
    return "\n".join(lines)
