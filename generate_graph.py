#!/usr/bin/env python3
"""Creates a graph file with the flags of decentralizepy's generate_graph.py, using decentnode.graph."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import click

from decentnode.cli.graph import family
from decentnode.errors import DecentnodeError, GraphError
from decentnode.graph.file import write


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-g", "--graph", required=True, help="Regular, FullyConnected, Ring, SmallWorld, Star, or any family.")
@click.option("-n", "--nodes", type=int, required=True, help="Number of nodes.")
@click.option("-s", "--seed", type=int, default=1, show_default=True, help="Seed of random families.")
@click.option("-d", "--degree", type=int, help="Degree (Regular).")
@click.option("-k", "--kover2", type=int, help="Half the lattice degree (SmallWorld).")
@click.option("-b", "--beta", type=float, help="Probability of rewiring (SmallWorld).")
@click.option("-f", "--file", "path", type=click.Path(path_type=Path, dir_okay=False), help="File to write.")
@click.option("-a", "--adjacency", is_flag=True, help="Write neighbor lists (.adj) instead of edges.")
def main(
    graph: str,
    nodes: int,
    seed: int,
    degree: int | None,
    kover2: int | None,
    beta: float | None,
    path: Path | None,
    adjacency: bool,
) -> None:
    """Generate a graph file."""
    try:
        made = family(graph, {"nodes": nodes, "degree": degree, "k_over_2": kover2, "beta": beta}, seed)
        if made.directed or made.period != 1:
            raise GraphError(f"a file holds a static undirected graph, {graph} is not one")
        suffix = ".adj" if adjacency else ".edges"
        path = path or Path(f"{nodes}_{graph}{suffix}")
        write(made.lists(0), path, adjacency or path.suffix == ".adj")
    except DecentnodeError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    click.echo(f"{path}: {nodes} nodes, {sum(map(len, made.lists(0))) // 2} edges")


if __name__ == "__main__":
    main()
