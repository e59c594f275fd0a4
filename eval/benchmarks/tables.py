"""bash eval/tables.sh: makes the tables of docs/results.rst from the configs of configs/tables.

Every point is one run with all nodes in one process with one thread; as many run at a time as there are cores. Its
figures are those of `decentnode run`: the mean over the nodes, the model averaged over the nodes (merged), and the
payload bytes that one node sent. The result of predicting without learning is shown beside them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import table_data
from common import cores, machine, workers

from decentnode.report.reading.significance import paired

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs" / "tables"
STORE = ROOT / "runs" / "tables"
DOCS = ROOT / "docs" / "tables"
PARTITIONS = {"iid": "{name: iid}", "2 shards": "{name: shards, shards: 2}",
              "Dirichlet .1": "{name: dirichlet, alpha: 0.1}"}  # fmt: skip
ARMS = {"full": "D-PSGD", "el_oracle": "EL-Oracle", "jwins": "JWINS", "choco": "CHOCO-SGD"}
TASKS = ("femnist", "celeba", "shakespeare", "reddit", "movielens")


@dataclass(frozen=True)
class Point:
    """One run: a config and its overrides."""

    config: str
    overrides: tuple[str, ...]

    @property
    def key(self) -> str:
        return " ".join((self.config, *self.overrides))


@dataclass(frozen=True)
class PointResult:
    """Main metric of the task as a fraction (.5 is 50 %), MB of 10^6 bytes that one node sent, CPU seconds of the whole
    run (all nodes in one thread), which other programs on the machine change little."""

    metric: str
    local: float
    merged: float
    megabytes: float
    seconds: float


def run(point: Point) -> PointResult:
    """Makes a run. Blocking; in a process of its own."""
    import torch

    from decentnode.experiment import load
    from decentnode.launch.one_process.in_process import run_in_process

    torch.set_num_threads(1)
    experiment = load(CONFIGS / f"{point.config}.yaml", list(point.overrides))
    started = time.process_time()
    nodes = run_in_process(experiment)
    seconds = time.process_time() - started
    figures = nodes[0].figures()
    metric = experiment.make_task().metrics[0].name
    sent = statistics.fmean(float(each["bytes_data"]) + float(each["bytes_metadata"])
                            for each in (node.figures() for node in nodes))  # fmt: skip
    local, merged = float(figures[f"{metric}_mean"]), float(figures[f"{metric}_merged"])
    return PointResult(metric, local, merged, sent / 1e6, seconds)


def centralized(point: Point) -> Point:
    """Returns the same budget of samples and steps in one place: one node has all samples, and its batches are as large
    as those of all nodes together."""
    from decentnode.experiment import load

    experiment = load(CONFIGS / f"{point.config}.yaml", list(point.overrides))
    batch = experiment.make_mapping().num_nodes * experiment.training.batch_size  # type: ignore[attr-defined]
    return Point(point.config, (*point.overrides, "graph={name: ring, nodes: 1}", f"training.batch_size={batch}"))


def untrained(point: Point, metric: str) -> float:
    """Returns the metric of a constant prediction, from the frequencies of the training targets or their mean, on all
    test samples of the nodes."""
    from decentnode.experiment import load

    experiment = load(CONFIGS / f"{point.config}.yaml", list(point.overrides))
    data, train, test = experiment.open_data(), [], []
    for uid in range(experiment.make_mapping().num_nodes):
        samples = data.of(uid)
        train.append(np.asarray(samples.train.targets))  # type: ignore[union-attr]
        test.append(np.asarray(samples.test.targets))  # type: ignore[union-attr]
    train_targets, test_targets = np.concatenate(train), np.concatenate(test)
    if metric == "rmse":
        return float(np.sqrt(np.mean((test_targets - train_targets.mean()) ** 2)))
    counts = np.bincount(train_targets, minlength=int(test_targets.max()) + 1)
    if metric == "perplexity":
        return float(np.exp(-np.mean(np.log((counts[test_targets] + 1) / (counts + 1).sum()))))
    return float(np.mean(test_targets == counts.argmax()))


class Store:
    """Results of points by commit: appended as they arrive, and read when an interrupted script is repeated."""

    def __init__(self, commit: str) -> None:
        self.path = STORE / "points.jsonl"
        self.commit = commit
        self.found: dict[str, PointResult] = {}
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                row = json.loads(line)
                if row.pop("commit") == commit:
                    key = row.pop("point")
                    self.found[key] = PointResult(**row)

    def append(self, point: Point, reached: PointResult) -> None:
        self.found[point.key] = reached
        with self.path.open("a") as file:
            file.write(json.dumps({"commit": self.commit, "point": point.key, **asdict(reached)}) + "\n")


def run_points(points: Sequence[Point], store: Store) -> dict[Point, PointResult]:
    """Returns the results of all points, from the store if it has them. Blocking; prints a line per point."""
    todo = [point for point in dict.fromkeys(points) if point.key not in store.found]
    started = time.monotonic()
    with workers(cores(), max_tasks_per_child=1) as pool:
        futures: list[tuple[Point, Future[PointResult]]] = [(point, pool.submit(run, point)) for point in todo]
        try:
            for done, (point, future) in enumerate(futures, 1):
                reached = future.result()
                store.append(point, reached)
                left = (time.monotonic() - started) / done * (len(todo) - done)
                figures = f"{reached.metric} {reached.local:.4f}, merged {reached.merged:.4f}"
                print(f"{done}/{len(todo)}  {point.key}: {figures}; about {left / 60:.0f} min left", file=sys.stderr)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return {point: store.found[point.key] for point in points}


def mean_and_deviation(values: Sequence[float], scale: float = 100, digits: int = 1) -> str:
    text = f"{scale * statistics.fmean(values):.{digits}f}"
    return f"{text} ± {scale * statistics.stdev(values):.{digits}f}" if len(values) > 1 else text


def cifar_table(folder: Path, seeds: int, more: Sequence[str], store: Store) -> list[list[str]]:
    where = f"data.folder={folder}"
    points = {}
    for partition, section in PARTITIONS.items():
        for arm in ARMS:
            points[arm, partition] = [Point(f"cifar_{arm}", (where, f"data.partition={section}", f"seed={seed}", *more))
                                      for seed in range(1, seeds + 1)]  # fmt: skip
    points["central", "-"] = [Point("cifar_central", (where, f"seed={seed}", *more)) for seed in range(1, seeds + 1)]
    found = run_points([point for each in points.values() for point in each], store)
    rows = [["partition", "rule", "local %", "merged %", "MB per node", "CPU s"]]
    for (arm, partition), each in points.items():
        reached = [found[point] for point in each]
        rows.append([partition, ARMS.get(arm, "centralized"),
                     "-" if arm == "central" else mean_and_deviation([one.local for one in reached]),
                     mean_and_deviation([one.merged for one in reached]),
                     f"{statistics.fmean(one.megabytes for one in reached):.1f}",
                     f"{statistics.median(one.seconds for one in reached):.0f}"])  # fmt: skip
    return rows


IMAGE = 3073  # bytes of a label and an image in CIFAR-10's binary files
MIN_TEST_IMAGES = 5_000


def with_enough_tests(folder: Path) -> Path:
    """Returns a folder with at least MIN_TEST_IMAGES test images: `folder`, or one with the same images, of which the
    last MIN_TEST_IMAGES are for testing. With 2,000, two equally good models differ by more than a point by chance
    alone."""
    test = folder / "test_batch.bin"
    if test.stat().st_size >= MIN_TEST_IMAGES * IMAGE:
        return folder
    images = (folder / "data_batch_1.bin").read_bytes() + test.read_bytes()
    other = STORE / "data" / "cifar-10-more-tests"
    other.mkdir(parents=True, exist_ok=True)
    border = len(images) - MIN_TEST_IMAGES * IMAGE
    (other / "data_batch_1.bin").write_bytes(images[:border])
    (other / "test_batch.bin").write_bytes(images[border:])
    return other


def paired_table(folder: Path, seeds: int, more: Sequence[str], store: Store) -> list[list[str]]:
    """Returns merged minus centralized by seed, the mean and its 95 % interval (Student's t), with an exchange after
    every step.

    Both let the learning rate fall to zero: at a constant rate the last steps would move the centralized model by
    points.
    """
    more = ("training.lr_schedule={name: cosine, T_max: 800, every: step}", *more)
    where = f"data.folder={with_enough_tests(folder)}"
    iid = f"data.partition={PARTITIONS['iid']}"
    pairs = [(Point("cifar_every_step", (where, iid, f"seed={seed}", *more)),
              Point("cifar_central", (where, f"seed={seed}", *more))) for seed in range(1, seeds + 1)]  # fmt: skip
    found = run_points([point for pair in pairs for point in pair], store)
    rows = [["seed", "merged %", "centralized %", "difference"]]
    merged, alone = ({seed: 100 * found[pair[side]].merged for seed, pair in enumerate(pairs, 1)} for side in (0, 1))
    rows += [[str(seed), f"{merged[seed]:.2f}", f"{alone[seed]:.2f}", f"{merged[seed] - alone[seed]:+.2f}"]
             for seed in merged]  # fmt: skip
    difference = paired(merged, alone)
    assert difference is not None
    rows.append(["mean", f"{statistics.fmean(merged.values()):.2f}", f"{statistics.fmean(alone.values()):.2f}",
                 f"{difference.mean:+.2f} [{difference.low:+.2f}, {difference.high:+.2f}]"])  # fmt: skip
    return rows


def tasks_table(folders: dict[str, Path], seeds: int, more: Sequence[str], store: Store) -> list[list[str]]:
    points, alone = {}, {}
    for name, folder in folders.items():
        images = [f"data.images={folder}/img_align_celeba"] if name == "celeba" else []
        points[name] = [Point(name, (f"data.folder={folder}", *images, f"seed={seed}", *more))
                        for seed in range(1, seeds + 1)]  # fmt: skip
        alone[name] = [centralized(point) for point in points[name]]
    found = run_points([point for each in (*points.values(), *alone.values()) for point in each], store)
    rows = [["task", "metric", "without learning", "local", "merged", "centralized", "MB per node", "CPU s"]]
    for name, each in points.items():
        reached = [found[point] for point in each]
        percent = reached[0].metric == "accuracy"
        scale, digits = (100, 1) if percent else (1, 3)
        rows.append([name, {"accuracy": "accuracy %", "rmse": "RMSE"}.get(reached[0].metric, reached[0].metric),
                     f"{scale * untrained(each[0], reached[0].metric):.{digits}f}",
                     mean_and_deviation([one.local for one in reached], scale, digits),
                     mean_and_deviation([one.merged for one in reached], scale, digits),
                     mean_and_deviation([found[point].merged for point in alone[name]], scale, digits),
                     f"{statistics.fmean(one.megabytes for one in reached):.1f}",
                     f"{statistics.median(one.seconds for one in reached):.0f}"])  # fmt: skip
    return rows


def write(name: str, rows: list[list[str]], options: str) -> None:
    """Writes docs/tables/NAME.txt, which docs/results.rst includes, and prints it."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rule = " ".join("=" * width for width in widths)
    lines = [" ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    table = "\n".join([rule, lines[0], rule, *lines[1:], rule])
    made_by = f"Made by ``bash eval/tables.sh --only {name}``{options} on {time.strftime('%Y-%m-%d')}: {machine()}."
    DOCS.mkdir(parents=True, exist_ok=True)
    (DOCS / f"{name}.txt").write_text(f"{table}\n\n{made_by}\n")
    print(f"\n{name}\n{table}\n{made_by}", flush=True)


def generated_data(given: Path | None) -> dict[str, Path]:
    """Returns the folders of the tasks' files, which are generated once."""
    folder = STORE / "data"
    plays = given / "tinyshakespeare" / "input.txt" if given else None
    if plays is None or not plays.exists():
        print(f"shakespeare is left out: no {plays or 'tinyshakespeare/input.txt; see --data'}", file=sys.stderr)
        plays = None
    table_data.write(folder, plays)
    return {name: folder / name for name in TASKS if name != "shakespeare" or plays is not None}


def main() -> None:
    parser = argparse.ArgumentParser(prog="eval/tables.sh")
    parser.add_argument("--data", type=Path, help="folder with cifar-10-batches-bin and tinyshakespeare/input.txt")
    parser.add_argument("--only", choices=("cifar", "paired", "tasks"))
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each row, 2 to 10; those of `paired` are five")
    parser.add_argument("--rounds", type=int, help="instead of the configs' own")
    given = parser.parse_args()
    if not 2 <= given.seeds <= 10:
        parser.error("--seeds must be 2 to 10")
    more = [f"node.rounds={given.rounds}"] if given.rounds else []
    STORE.mkdir(parents=True, exist_ok=True)
    store = Store(machine().partition("commit ")[2].partition(",")[0])
    options = f" with {given.rounds} rounds" if given.rounds else ""
    cifar = (given.data or STORE / "data") / "cifar-10-batches-bin"
    if given.only in (None, "tasks"):
        write("tasks", tasks_table(generated_data(given.data), given.seeds, more, store), options)
    if given.only != "tasks" and not cifar.exists():
        raise SystemExit(f"the tables of CIFAR-10 are left out: no {cifar}; see --data")
    if given.only in (None, "cifar"):
        write("cifar", cifar_table(cifar, given.seeds, more, store), options)
    if given.only in (None, "paired"):
        write("paired", paired_table(cifar, 5, more, store), options)


if __name__ == "__main__":
    main()
