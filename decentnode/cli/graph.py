"""`decentnode graph make|info|draw|convert`: creates, inspects, draws and converts graphs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
import pydantic

from decentnode.config.component import load_class
from decentnode.errors import GraphError
from decentnode.graph import GRAPHS, WEIGHTS
from decentnode.similar_words import did_you_mean

if TYPE_CHECKING:
    from decentnode.graph.topology import Topology

ALIASES = {"fullyconnected": "complete", "smallworld": "small_world", "erdosrenyi": "erdos_renyi"}
"""decentralizepy's names in lower case -> ours."""
DEFAULT_SEED = 1
FLAGS = {"nodes": "-n N (the number of nodes)", "degree": "-d N (the degree)", "k_over_2": "-k N (half the degree)",
         "beta": "-b B (the probability of rewiring)", "probability": "-p P (the probability of an edge)"}  # fmt: skip


def family(name: str, options: dict[str, Any], seed: int, weights: str | None = None) -> Topology:
    """Returns a graph of a family (its name in any case) with those `options` that are not None. Raises GraphError."""
    graph_name = name.lower().replace("-", "_")
    graph_name = ALIASES.get(graph_name.replace("_", ""), graph_name)
    families = [each for each in GRAPHS if each != "file"]
    if graph_name not in families:
        raise GraphError(f"graph must be one of {', '.join(families)}, got {name!r}"
                         + did_you_mean(graph_name, families))  # fmt: skip
    graph_class = load_class(graph_name, GRAPHS, "graph")
    given_options = {key: value for key, value in options.items() if value is not None}
    try:
        config = graph_class.Config.model_validate({"name": graph_name, **given_options})
    except pydantic.ValidationError as error:
        needed = [str(each["loc"][0]) for each in error.errors() if each["type"] == "missing"]
        if needed and len(needed) == len(error.errors()):
            if sections := [key for key in needed if key not in options]:
                raise GraphError(f"graph {graph_name} needs {', '.join(sections)}, for which there is no option: put "
                                 "it in an experiment (.yaml) and give that to `graph info` or `graph draw`") from error
            flags = " and ".join(FLAGS.get(key, f"--{key.replace('_', '-')}") for key in needed)
            raise GraphError(f"graph {graph_name} needs {flags}") from error
        takes = ", ".join(sorted(set(graph_class.Config.model_fields) - {"name", "nodes", "seed"})) or "no options"
        problems = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise GraphError(f"graph {graph_name} (takes {takes}): {problems}") from error
    return _with_weights(graph_class, config, seed, weights)


def _with_weights(graph_class: Any, config: Any, seed: int, weights: str | None) -> Topology:
    rule = None
    if weights is not None:
        rule_class = load_class(weights, WEIGHTS, "weights")
        rule = rule_class(rule_class.Config(name=weights))
    graph: Topology = graph_class(config, seed=seed, weights=rule)
    return graph


def open_graph(
    text: str, options: dict[str, Any], seed: int | None, weights: str | None, overrides: Sequence[str]
) -> Topology:
    """Returns the graph of an experiment file, with its own weights, of a graph file, or of a family, depending on the
    form of `text`.

    seed: None for that of the experiment file, or 1. overrides: "a.b=value", for an experiment file only.
    """
    if text.endswith((".yaml", ".yml")):
        if unused := [key for key, value in {**options, "weights": weights}.items() if value is not None]:
            raise GraphError(f"{text} already defines the whole graph: change it with --set, and leave out "
                             f"--{unused[0].replace('_', '-')}")  # fmt: skip
        from decentnode.experiment import load

        seeds = [] if seed is None else [f"seed={seed}"]
        return cast("Topology", load(text, [*overrides, *seeds], check=False).make_graph())
    if overrides:
        raise GraphError(f"--set changes keys of an experiment (.yaml), got {text}")
    seed = DEFAULT_SEED if seed is None else seed
    if text.endswith((".edges", ".adj")) or Path(text).exists():
        graph_class = load_class("file", GRAPHS, "graph")
        return _with_weights(graph_class, graph_class.Config(name="file", file=Path(text).absolute()), seed, weights)
    return family(text, options, seed, weights)


def family_options(function: Any) -> Any:
    for option in reversed(
        [
            click.option("-n", "--nodes", type=int, help="Number of nodes."),
            click.option("-d", "--degree", type=int, help="Degree (regular, random_regular, el_local, *_equistatic)."),
            click.option("-k", "--k-over-2", type=int, help="Half the lattice degree (small_world)."),
            click.option("-b", "--beta", type=float, help="Probability of rewiring (small_world)."),
            click.option("-p", "--probability", type=float, help="Probability of an edge (erdos_renyi)."),
            click.option("--rows", type=int, help="Rows of the grid (torus)."),
            click.option("--branching", type=int, help="Children per node (tree)."),
            click.option("--peers", type=int, help="Peers per round (base_k_plus_1)."),
            click.option("--rate", type=float, help="Largest rate (*_equistatic)."),
            click.option("--offsets", type=int, help="Number of offsets (*_equidyn)."),
            click.option("--nodes-per-machine", type=int, help="Nodes per machine (alternating_exponential_ring)."),
            click.option("-s", "--seed", type=int,
                         help=f"Seed of random graphs. Default: {DEFAULT_SEED}, or that of the experiment."),
        ]
    ):
        function = option(function)
    return function


set_option = click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE",
                          help="Set a key of the experiment; a={...} replaces the whole section.")  # fmt: skip


@click.group("graph")
def command() -> None:
    """Create, inspect, draw and convert graphs."""


@command.command("make")
@click.argument("name", metavar="FAMILY")
@family_options
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="File to write (.edges or .adj).")
def make(name: str, seed: int | None, output: Path | None, **options: Any) -> None:
    """Write a static graph to a file, or to standard output."""
    from decentnode.graph.file import format_edges, write

    graph = family(name, options, DEFAULT_SEED if seed is None else seed)
    if graph.directed or graph.period != 1:
        raise GraphError(
            f"graph files are static and undirected, {name} is not; name it in the experiment instead: "
            f"graph: {{name: {name}, nodes: {graph.num_nodes}}}"
        )
    if output is None:
        click.echo(format_edges(graph.lists(0)), nl=False)
        return
    write(graph.lists(0), output)
    edges = sum(map(len, graph.lists(0))) // 2
    click.echo(f"{output}: {graph.num_nodes} nodes, {edges} edges")


@command.command("info")
@click.argument("graph", metavar="FILE|FAMILY")
@family_options
@set_option
@click.option("--weights", type=click.Choice([w for w in WEIGHTS if w != "file"]), help="Mixing weights.")
@click.option("--parameters", type=int,
              help="Number of model parameters (4 bytes each), to compute the bytes per round.")  # fmt: skip
@click.option("--model-bytes", type=int, help="Model size in bytes, instead of --parameters.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info(
    graph: str,
    seed: int | None,
    overrides: tuple[str, ...],
    weights: str | None,
    parameters: int | None,
    model_bytes: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Show degrees, diameter, spectral gap, rounds to consensus and bytes per round.

    FILE holds edges (.edges, .adj) or is an experiment (.yaml), whose graph and weights may also be your own classes.
    """
    opened = open_graph(graph, options, seed, weights, overrides)
    facts = describe(opened, model_bytes if model_bytes is not None else 4 * parameters if parameters else None)
    if as_json:
        click.echo(json.dumps(facts))
        return
    for key, value in facts.items():
        none = "unknown" if facts["spectral_gap"] is None and key != "diameter" else "never"
        click.echo(f"{key.replace('_', ' '):24} {value if value is not None else none}")


def describe(graph: Topology, model_bytes: int | None = None) -> dict[str, Any]:
    """Returns the facts that `graph info` prints, by name."""
    from decentnode.graph.spectrum import diameter, keeps_mean, mixing

    rounds = range(graph.period or 8)
    degrees = [len(graph.neighbors(uid, r)) for r in rounds for uid in range(graph.num_nodes)]
    facts: dict[str, Any] = {
        "nodes": graph.num_nodes,
        "period": graph.period if graph.period is not None else "none (a new graph in each round)",
        "directed": graph.directed,
        "degree_min": min(degrees),
        "degree_mean": round(sum(degrees) / len(degrees), 3),
        "degree_max": max(degrees),
    }
    if graph.directed and graph.period != 1:
        facts["sources_max"] = max(len(graph.sources(uid, r)) for r in rounds for uid in range(graph.num_nodes))
    facts["keeps_mean"] = keeps_mean(graph)
    if graph.period == 1:
        facts["edges"] = sum(degrees) // (1 if graph.directed else 2)
        facts["diameter"] = diameter(graph.lists(0))
    rate, facts["rounds_to_consensus_1e-3"] = mixing(graph)
    facts["spectral_gap"] = None if rate is None else float(f"{1 - rate:.6g}")
    if model_bytes is not None:
        facts["bytes_per_node_and_round"] = round(model_bytes * sum(degrees) / len(degrees))
        facts["bytes_per_round"] = round(model_bytes * sum(degrees) / len(rounds))
    return facts


@command.command("draw")
@click.argument("graph", metavar="FILE|FAMILY")
@family_options
@set_option
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="Picture to write: .png, .pdf or .svg.",
)
def draw(graph: str, seed: int | None, overrides: tuple[str, ...], output: Path, **options: Any) -> None:
    """Draw a graph (one panel per round of its period, at most eight)."""
    if output.suffix not in (".png", ".pdf", ".svg"):
        raise GraphError(f"{output}: must end in .png, .pdf or .svg")
    from decentnode.report.pictures.graph import draw_graph

    draw_graph(open_graph(graph, options, seed, None, overrides), output)
    click.echo(str(output))


@command.command("convert")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
def convert(source: Path, target: Path) -> None:
    """Convert between .edges and .adj, by suffix."""
    from decentnode.graph.file import read, write

    lists = read(source)
    write(lists, target)
    click.echo(f"{target}: {len(lists)} nodes, {sum(map(len, lists)) // 2} edges")
