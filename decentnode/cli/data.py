"""`decentnode data get|prepare|info`: downloads and converts datasets, and shows which samples each node gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml

from decentnode.errors import DataError

if TYPE_CHECKING:
    from decentnode.data.base import Dataset

BLOCK = 4096
"""Training samples that are in memory at once while they are checked."""
IMAGES = 256
"""The same for samples that are read from image files: 40 MB for ImageNet."""


@click.group("data")
def command() -> None:
    """Download, check and convert datasets, and show which samples each node gets."""


@command.command("get")
@click.argument("name")
@click.option("--to", "target", type=click.Path(path_type=Path, file_okay=False),
              help="Folder for the files. Default: data/NAME.")  # fmt: skip
@click.option("--mirror", metavar="URL", help="URL of a folder that holds the files, instead of the usual URLs.")
def get(name: str, target: Path | None, mirror: str | None) -> None:
    """Download the dataset NAME, check its digests and unpack it. Incomplete downloads are resumed."""
    from decentnode.data import sources

    shown: dict[str, int] = {}

    def progress(file: str, have: int, size: int) -> None:
        tenth = 10 * have // size
        if shown.get(file) != tenth:
            shown[file] = tenth
            click.echo(f"{file}: {have / 1e6:,.1f} of {size / 1e6:,.1f} MB", err=True)

    folder = sources.get(name, target or Path("data") / name, mirror, progress)
    source = sources.SOURCES[name]
    section = {"name": source.dataset or name, "folder": str(folder), **source.keys}
    click.echo(f"data: {_flow(section)}")


@command.command("prepare")
@click.argument("name")
@click.option("--from", "folder", required=True, type=click.Path(path_type=Path), help="Folder that holds the files.")
@click.option("--set", "-s", "keys", multiple=True, metavar="KEY=VALUE", help="More keys of the data section.")
def prepare(name: str, folder: Path, keys: tuple[str, ...]) -> None:
    """Convert the dataset NAME into the cache that runs use, read every sample, and print its section for the YAML
    file."""
    import pydantic

    from decentnode.config.component import load_class, section
    from decentnode.config.yaml_source import Item, Location, assignments, replace
    from decentnode.data import DATASETS

    made_of = section(DATASETS, "data").config_of(name)
    chosen, location = load_class(name, DATASETS, "data"), Location("command line")
    written = {"name": name, "file" if "file" in made_of.model_fields else "folder": str(folder)}
    tree = Item({key: Item(value, location) for key, value in written.items()}, location)
    for path, item in assignments(keys, {}):
        tree = replace(tree, path, item)
    values = tree.plain()
    try:
        config = made_of.model_validate(values)
    except pydantic.ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise DataError(f"data {name}: {problems}; --set KEY=VALUE gives a key") from error
    dataset = chosen(config, Path())
    if (index := getattr(dataset, "index", None)) is not None and (damaged := index.damaged()):
        click.echo(f"{index.folder}: {', '.join(damaged)} has changed since it was written and will be converted again")
        index.discard()
        dataset = chosen(config, Path())
    for line in check(dataset):
        click.echo(line)
    click.echo(f"data: {_flow(values)}")


def check(dataset: Dataset) -> list[str]:
    """Reads every sample. Returns lines with the numbers of samples and users. Raises DataError."""
    import numpy as np

    from decentnode.samples import ImageFiles

    index, keys = getattr(dataset, "index", None), dataset.train_keys()
    train, test = dataset.num_train(), dataset.num_test()
    block = IMAGES if isinstance(dataset.test_part(np.arange(0)), ImageFiles) else BLOCK
    for start in range(0, train, block):
        _read(dataset.train(np.arange(start, min(start + block, train))), f"training sample {start} on")
    for start in range(0, test, block):
        _read(dataset.test_part(np.arange(start, min(start + block, test))), f"test sample {start} on")
    lines = [f"{train:,} training samples, {test:,} test samples, all readable"]
    if keys is not None:
        sizes = np.unique(keys, return_counts=True)[1]
        lines.append(f"{len(sizes):,} users, with {sizes.min():,} to {sizes.max():,} training samples")
    if index is not None:
        lines.append(f"{'listed in' if block == IMAGES else 'converted into'} {index.folder}")
    return lines


def _read(samples: Any, where: str) -> None:
    """Reads samples completely and checks that they are finite. Raises DataError."""
    import numpy as np

    from decentnode.samples import ImageFiles

    if isinstance(samples, ImageFiles):
        samples.begin(np.arange(len(samples))).result()
        return
    inputs = getattr(samples, "inputs", None)
    if isinstance(inputs, np.ndarray) and inputs.dtype.kind == "f" and not np.isfinite(inputs).all():
        raise DataError(f"{where}: inputs must be finite")


@command.command("info")
@click.argument("config", type=click.Path())
@click.option("--set", "-s", "overrides", multiple=True, metavar="KEY=VALUE",
              help="Set a.b=value; a={...} replaces the whole section.")  # fmt: skip
@click.option("--draw", type=click.Path(path_type=Path, dir_okay=False), help="Picture to write: .png, .pdf or .svg.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def info(config: str, overrides: tuple[str, ...], draw: Path | None, as_json: bool) -> None:
    """Show how many training samples of each class and user every node of CONFIG gets."""
    from decentnode.cli import start
    from decentnode.experiment import load
    from decentnode.report.pictures import shares as report

    config, variables = start.config_of(config, start.environ())
    experiment = load(config, overrides, variables)
    data = experiment.open_data()
    shares, spec = report.shares_of(data), data.spec
    total, test = data.dataset().num_train(), data.dataset().num_test()
    left_out = max(total - sum(shares.sizes), 0)
    partition: Any = getattr(experiment.data, "partition", None)
    augment: Any = getattr(experiment.training, "augment", None)
    tested = report.tested(data)
    if as_json:
        facts = {"training_samples": total, "left_out": left_out, "test_samples": test, "tested_samples": tested,
                 **report.normalization(data), "augmentation": augment.model_dump() if augment is not None else None,
                 "nodes": shares.facts()}  # fmt: skip
        click.echo(json.dumps(facts))
    else:
        kind = f", {spec.num_classes} classes" if spec.num_classes is not None else f", {spec.task}"
        click.echo(f"{experiment.data.name}: {total:,} training samples, {test:,} test samples{kind}")
        rest = f"; {left_out:,} left out" if left_out else ""
        span = f"{min(shares.sizes):,} to {max(shares.sizes):,}"
        click.echo(f"{partition.name} on {len(shares.sizes)} nodes: {span} each{rest}")
        click.echo(report.inputs(data) + (f"; in training {augment.text}" if augment is not None else ""))
        if tested != test:
            click.echo(f"each node's model is tested on {'up to ' if data.sharded else ''}{tested:,} test samples")
        click.echo()
        for line in report.lines(shares):
            click.echo(line.rstrip())
    if draw is not None:
        report.draw(shares, draw, f"{experiment.data.name}, {partition.name}, {len(shares.sizes)} nodes")
        click.echo(str(draw), err=as_json)


def _flow(section: dict[str, Any]) -> str:
    """Returns a section as one line of YAML."""
    return yaml.safe_dump(section, default_flow_style=True, sort_keys=False, width=10**6).strip()
