"""Writes the reference from the code: every key of every component, the command line, exit codes, rates of graphs.

python docs/generate.py FOLDER writes what Sphinx's build writes to docs/reference/generated.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from decentnode import errors
from decentnode.cli import COMMANDS, main
from decentnode.cli.graph import describe as describe_graph
from decentnode.cli.graph import family
from decentnode.config.component import load_class
from decentnode.describe import GROUPS, KINDS, ComponentInfo, describe, names
from decentnode.graph.equitopo import best_offsets
from decentnode.graph.spectrum import contraction
from decentnode.metrics.events import EVENTS, PER_KIND
from decentnode.metrics.figures import FIGURES, PURPOSES, Figure, Metric
from decentnode.samples import DataSpec
from decentnode.tasks import TASKS


def escaped(text: str) -> str:
    """Prose of a docstring as reStructuredText: `code` becomes ``code``, all else is taken literally."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(
        f"``{part.strip('`')}``" if part.startswith("`") and len(part) > 2 else re.sub(r"([\\*_|`])", r"\\\1", part)
        for part in parts
    )


def linked(text: str) -> str:
    """Escaped prose in which papers and pages of the documentation are links."""
    text = re.sub(r"arXiv (\d{4}\.\d{5})", r"`arXiv \1 <https://arxiv.org/abs/\1>`__", escaped(text))
    return re.sub(r"docs/([\w/\\]+)\.rst", lambda found: f":doc:`/{found[1].replace(chr(92), '')}`", text)


def table(heads: list[str], rows: list[list[str]], widths: list[int]) -> Iterator[str]:
    yield from (".. list-table::", "   :header-rows: 1", f"   :widths: {' '.join(map(str, widths))}", "")
    for row in [heads, *rows]:
        for number, cell in enumerate(row):
            yield f"   {'* -' if number == 0 else '  -'} {cell}"
    yield ""


def prose(paragraph: str) -> Iterator[str]:
    """A paragraph of a docstring; one whose lines go on indented is a list."""
    lines = paragraph.splitlines()
    if len(lines) > 2 and any(line.startswith("    ") for line in lines[1:]) and not lines[0].startswith(" "):
        items: list[str] = []
        for line in lines:
            if line.startswith("    "):
                items[-1] += " " + line.strip()
            else:
                items.append(line.strip())
        yield from (f"* {linked(item)}" for item in items)
    else:
        yield linked(" ".join(paragraph.split()))


def component(found: ComponentInfo, mark: str) -> Iterator[str]:
    title = found.name
    yield from (f".. _{found.kind}-{found.name}:", "", title, mark * len(title), "")
    for paragraph in found.text.split("\n\n"):
        yield from (*prose(paragraph), "")
    if not found.keys:
        yield from ("It has no keys of its own.", "")
        return
    rows = [
        [f"``{key.name}``", escaped(key.type) + (f" ({key.unit})" if key.unit else ""),
         "must be given" if key.default is None else f"``{key.default or ' '}``", escaped(key.range), linked(key.text)]
        for key in found.keys
    ]  # fmt: skip
    yield from table(["key", "type", "default", "range", "meaning"], rows, [18, 18, 14, 12, 38])


def kind_page(kind: str) -> str:
    title = f"``{kind}``"
    lines = [title, "=" * len(title), "", linked(KINDS[kind]), ""]
    if kind in GROUPS:
        found = describe(kind, kind)
        lines += list(component(found, "-"))
    else:
        every = [describe(kind, name) for name in names(kind)]
        rows = [[f":ref:`{each.name} <{kind}-{each.name}>`", linked(each.summary)] for each in every]
        lines += table(["name", "what it is"], rows, [25, 75])
        for each in every:
            lines += component(each, "-")
    return "\n".join(lines) + "\n"


def commands(group: click.Group, path: str, context: click.Context) -> Iterator[str]:
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        if found is None:
            continue
        own = click.Context(found, info_name=f"{path} {name}", terminal_width=100)
        title = f"{path} {name}"
        yield from (title, "-" * len(title), "", "::", "")
        yield from (f"    {line}".rstrip() for line in found.get_help(own).splitlines())
        yield ""
        if isinstance(found, click.Group):
            yield from commands(found, title, own)


def command_page() -> str:
    context = click.Context(main, info_name="decentnode")
    lines = ["Command line", "============", "", "What ``decentnode COMMAND --help`` prints.", ""]
    assert set(main.list_commands(context)) <= set(COMMANDS)
    return "\n".join([*lines, *commands(main, "decentnode", context)]) + "\n"


def exit_codes() -> str:
    """The table at the top of errors.py, from the classes themselves."""
    text = inspect.getdoc(errors) or ""
    found: dict[int, list[str]] = {}
    for line in text.splitlines():
        match = re.match(r"\s*([\w ]+?)\s{2,}(\d+)?\s*(\S.*)$", line)
        kinds = [getattr(errors, name, None) for name in match[1].split()] if match else []
        if match and kinds and all(isinstance(kind, type) for kind in kinds):
            code = getattr(kinds[0], "exit_code", None)
            if match[2] and code is not None:
                assert int(match[2]) == code, line
                found.setdefault(code, []).append(match[3])
    rows = [["0", "the run finished"], *([str(code), escaped("; ".join(found[code]))] for code in sorted(found)),
            ["143", "stopped by SIGTERM"]]  # fmt: skip
    lines = ["Exit codes", "==========", "", *table(["code", "meaning"], rows, [15, 85])]
    return "\n".join(lines) + "\n"


def figures_page() -> str:
    """What summary.json, CSV files, tables and plots show, with where it is computed."""

    def rows(figures: Iterable[Figure]) -> list[list[str]]:
        return [[f"``{each.name}``", escaped(each.unit), escaped(each.meaning), f"``{each.where}``",
                 escaped(each.title)] for each in figures]  # fmt: skip

    heads, widths = ["figure", "unit", "meaning", "computed in", "heading"], [22, 10, 40, 16, 12]
    purposes = [[f"``{purpose}``", escaped(meaning)] for purpose, meaning in PURPOSES.items()]
    lines = [
        "Figures", "=======", "",
        "``summary.json`` and CSV files have these names and units, tables and plots the headings in the last column.",
        "", *table(heads, rows(FIGURES), widths),
        "Before them stand the figures of what the run's task measures: ``<metric>_mean``, ``_min`` and ``_max`` over",
        "the nodes' own models, and ``_merged`` of the mean of all models. ``task.json`` in a run's folder says what",
        "its task measures.", "", *task_metrics(),
        "Of classification, for example:", "", *table(heads, rows(measured_by_tasks()["classification"][0]), widths),
        "Bytes are counted by purpose. Data and metadata are the sharing rule's, and the same on every transport;",
        "plots and tables show these two alone. ``metrics.jsonl`` counts from the start of each node's process.", "",
        *table(["purpose", "what"], purposes, [15, 85]),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


EXAMPLE = DataSpec((2,), num_classes=10, vocabulary=100, users=10, items=10, pairs=True)
"""Data that any task takes."""


def measured_by_tasks() -> dict[str, tuple[list[Figure], tuple[Metric, ...]]]:
    """Task -> (the figures, the metrics) of its runs."""
    found = {}
    for name in TASKS:
        task = load_class(name, TASKS, "task")
        measured = task(task.Config(), EXAMPLE).measured()
        found[name] = ([each for each in measured.figures if each not in FIGURES], measured.metrics)
    return found


def task_metrics() -> Iterator[str]:
    rows = [[f":ref:`{task} <task-{task}>`", f"``{each.name}``", escaped(each.unit), each.better, escaped(each.meaning)]
            for task, (_, metrics) in measured_by_tasks().items() for each in metrics]  # fmt: skip
    yield from table(["task", "metric", "unit", "better", "meaning"], rows, [16, 20, 14, 10, 40])


def events_page() -> str:
    """Kinds of lines of events.jsonl."""
    rows = [[f"``{kind}``", escaped(meaning)] for kind, meaning in EVENTS.items()]
    lines = [
        "Events", "======", "",
        "``nodes/000/events.jsonl`` has one line per event: ``time``, ``uid``, ``kind``, ``peer`` (the uid that",
        f"it concerns, or null) and ``detail``. Of one kind {PER_KIND} are written, those after them are counted.",
        "Where the run is recorded (``run.record``) there are also those of the end of the table, all of them, with",
        "fields of their own: :doc:`/howto/replay`.",
        "", *table(["kind", "meaning"], rows, [28, 72]),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


PARAMETERS = 89834
"""Of GN-LeNet, whose bytes the table of graphs counts."""
SHOWN: dict[str, dict[str, int]] = {
    "ring": {}, "torus": {}, "regular": {"degree": 4}, "exponential": {}, "hypercube": {}, "one_peer_exponential": {},
    "base_k_plus_1": {"peers": 1}, "d_equistatic": {}, "u_equistatic": {}, "od_equidyn": {}, "ou_equidyn": {},
    "complete": {},
}  # fmt: skip
"""Graphs of the tables, with their keys."""


def _label(name: str, keys: dict[str, int]) -> str:
    return f"``{name}``" + "".join(f", {key} {value}" for key, value in keys.items())


def graph_facts(nodes: int = 16) -> str:
    """What `decentnode graph info` says of some graphs, side by side."""
    rows = []
    for name, keys in SHOWN.items():
        facts = describe_graph(family(name, {"nodes": nodes, **keys}, 1), 4 * PARAMETERS)
        rounds = facts["rounds_to_consensus_1e-3"]
        rows.append([_label(name, keys), f"{facts['degree_mean']:g}", f"{facts['bytes_per_node_and_round']:,}",
                     f"{facts['spectral_gap']:.3f}", "never" if rounds is None else str(rounds)])  # fmt: skip
    heads = [f"graph of {nodes} nodes", "neighbors in a round", "bytes per node and round", "spectral gap",
             "rounds to 1/1000 of the distance"]  # fmt: skip
    return "\n".join(table(heads, rows, [36, 14, 20, 14, 16])) + "\n"


def rates() -> str:
    """Contraction per round of graphs of several sizes."""
    sizes = (8, 16, 32, 64)
    rows = [[_label(name, SHOWN[name]), *(f"{contraction(family(name, {'nodes': n, **SHOWN[name]}, 1)):.3f}"
                                          for n in sizes)]
            for name in ("ring", "torus", "regular", "exponential", "hypercube")]  # fmt: skip
    return "\n".join(table(["graph", *(f"n = {n}" for n in sizes)], rows, [40, 15, 15, 15, 15])) + "\n"


def equitopo_degrees() -> str:
    """Degrees and contraction per round of the static EquiTopo graphs."""
    sizes = (16, 64, 256, 1024, 4096)
    made = {name: [equitopo(name, n) for n in sizes] for name in ("d_equistatic", "u_equistatic")}
    rows = [[f"``{name}``", *(f"{degree} ({rate:.2f})" for degree, rate in found)] for name, found in made.items()]
    return "\n".join(table(["degree (rate)", *(f"n = {n:,}" for n in sizes)], rows, [20, *[16] * len(sizes)])) + "\n"


def equitopo(name: str, nodes: int) -> tuple[int, float]:
    """Returns the default degree of a static EquiTopo graph, and the rate."""
    degree = len(family(name, {"nodes": nodes}, 1).neighbors(0, 0))
    return degree, best_offsets(nodes, degree, name == "u_equistatic", 1)[0]


def base_lengths() -> str:
    """Periods of base_k_plus_1."""
    sizes = (3, 5, 6, 7, 9, 10, 12, 15, 16, 20, 25, 33, 50)
    rows = [[f"k = {k}", *(str(family("base_k_plus_1", {"nodes": n, "peers": k}, 1).period) for n in sizes)]
            for k in (1, 2, 4)]  # fmt: skip
    return "\n".join(table(["", *(f"n = {n}" for n in sizes)], rows, [10, *[7] * len(sizes)])) + "\n"


def write_all(folder: Path) -> None:
    """Blocking. Files whose text has not changed are left alone, so that Sphinx builds only what is new."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {f"{kind}.rst": kind_page(kind) for kind in KINDS}
    pages |= {"cli.rst": command_page(), "exit_codes.rst": exit_codes(), "figures.rst": figures_page()}
    pages["events.rst"] = events_page()
    pages |= {"graph_facts.txt": graph_facts(), "rates.txt": rates(), "base_lengths.txt": base_lengths(),
              "equitopo.txt": equitopo_degrees()}
    for path in folder.iterdir():
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
