"""`decentnode convert`: translates a config file of decentralizepy into an experiment."""

from __future__ import annotations

from pathlib import Path

import click
import yaml

from decentnode.errors import ConfigError, UsageError
from decentnode.system import write_atomic


@click.command()
@click.argument("config", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False),
              help="File to write. Default: CONFIG's name with .yaml, in the current directory.")  # fmt: skip
@click.option("--graph-file", "-gf", type=click.Path(path_type=Path), help="File of the graph. Default: a ring.")
@click.option("--graph-type", "-gt", type=click.Choice(["edges", "adjacency"]), default="edges", show_default=True)
@click.option("--machines", "-ms", type=click.IntRange(1), default=1, show_default=True)
@click.option("--procs-per-machine", "-ps", type=click.IntRange(1), multiple=True, default=(16,), show_default=True,
              help="Nodes per machine; give it once per machine if the machines differ.")  # fmt: skip
@click.option("--addresses", type=click.Path(path_type=Path),
              help="File to use instead of the config's addresses_filepath.")  # fmt: skip
@click.option("--iterations", "-is", type=click.IntRange(1), default=1, show_default=True, help="Rounds.")
@click.option("--test-after", "-ta", type=click.IntRange(1), default=5, show_default=True)
@click.option("--train-evaluate-after", "-tea", type=click.IntRange(1),
              help="Also measure the training samples, with every test.")  # fmt: skip
@click.option("--log-level", "-ll", type=click.Choice(["INFO", "DEBUG", "WARNING", "ERROR", "CRITICAL"]),
              default="INFO", show_default=True)  # fmt: skip
@click.option("--reset-optimizer", "-ro", type=click.IntRange(0, 1), default=1, show_default=True)
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def command(
    config: Path, output: Path | None, graph_file: Path | None, graph_type: str, machines: int,
    procs_per_machine: tuple[int, ...], addresses: Path | None, iterations: int, test_after: int,
    train_evaluate_after: int | None, log_level: str, reset_optimizer: int, force: bool,
) -> None:
    """Translate CONFIG, a config file of decentralizepy (.ini), and its flags into an experiment.

    Keys that are unknown, misspelled or have no equivalent here are reported by name; then nothing is written and the
    exit code is 2.
    """
    from decentnode.compat.decentralizepy import CommandLine, translate
    from decentnode.experiment import load

    target = output or Path(f"{config.stem}.yaml")
    if target.exists() and not force:
        raise UsageError(f"{target} already exists; use -o for another file or --force to overwrite it")
    flags = CommandLine(graph_file, graph_type, machines, procs_per_machine, addresses, iterations, test_after,
                        bool(reset_optimizer), train_evaluate_after, log_level)  # fmt: skip
    found = translate(config, flags, target.absolute().parent)
    lines = [f"# {config.name} of decentralizepy", *(f"# {note}" for note in found.notes)]
    for key, value in found.experiment.items():
        text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6)
        lines.append(f"{key}: {text.removesuffix(chr(10)).removesuffix('...').strip()}")
    write_atomic(target, "\n".join(lines) + "\n")
    for note in found.notes:
        click.echo(f"note: {note}")
    load(target, environ={}, check=False)
    try:
        load(target, environ={})
    except ConfigError as error:
        click.echo(f"{target}: written, but it cannot run here yet:")
        for problem in error.problems:
            click.echo(problem)
        return
    click.echo(f"{target}: ok")
