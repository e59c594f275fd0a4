"""Runs scripts of your checkouts on a CPU at a small size, with only the import changed; eval/compat.sh starts it.

No file of a checkout is changed: scripts run in a copy. What the machine lacks is replaced by stand-ins
(eval/stand_ins), sizes are set by the scripts' own options, and data is generated. Prints for each script whether it
ended successfully, its losses, and whether the file that it saved can be loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
RANKS, SECONDS = 2, 900.0
PATIENCE = 45.0
"""Seconds that a stopped script gets to end its ranks; torchrun gives them 30."""


@dataclass(frozen=True)
class Original:
    """One script of a checkout, and how it is run."""

    source: str
    """The name of its checkout's option."""
    name: str
    folder: str
    """The working directory, relative to the checkout."""
    command: Sequence[str]
    """The arguments of `python`."""
    loss: str
    """A pattern that finds the training losses in its output and in `files`."""
    prepare: Callable[[Path], None] = lambda _: None
    """Writes its configuration and data into the given folder."""
    files: str = ""
    """Files with losses: a glob pattern relative to the folder."""
    saved: str = ""
    """The file that it saves."""
    settings: dict[str, str] = field(default_factory=dict)
    """Environment variables that it needs."""


def write_toml(path: Path, tables: dict[str, object]) -> None:
    lines: list[str] = []
    for key, value in tables.items():  # plain values come first
        if isinstance(value, dict):
            lines += [f"[{key}]", *(f"{name} = {json.dumps(each)}" for name, each in value.items())]
        else:
            lines.append(f"{key} = {json.dumps(value)}")
    path.write_text("\n".join([*lines, ""]))


def write_digits(folder: Path, name: str = "MNIST") -> None:
    """Writes generated images as files that torchvision, if installed, can read."""
    raw = folder / name / "raw"
    raw.mkdir(parents=True)
    draw = np.random.default_rng(0)
    patterns = draw.integers(0, 256, (10, 28, 28))
    for split, count in (("train", 2048), ("t10k", 512)):
        labels = draw.integers(0, 10, count)
        images = (patterns[labels] + 3 * draw.integers(0, 256, (count, 28, 28))) // 4
        (raw / f"{split}-images-idx3-ubyte").write_bytes(
            struct.pack(">4i", 0x803, count, 28, 28) + images.astype(np.uint8).tobytes())
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(
            struct.pack(">2i", 0x801, count) + labels.astype(np.uint8).tobytes())


def prepare_fashion(folder: Path) -> None:
    write_digits(folder / "data", "FashionMNIST")


def prepare_cnn(folder: Path) -> None:
    (folder / "log/0").mkdir(parents=True)
    write_toml(folder / "data.toml", {"num_classes": 10})
    write_toml(folder / "train.toml", {
        "backend": "decentdp", "topology": "alternating-exp-ring", "batch_size": 64, "max_epochs": 3, "lr": 0.005,
        "arch": "resnet18", "use_amp": False,
        "preprocess": {"train_crop_size": 24, "val_image_size": 24, "val_crop_size": 24},
        "optim": {"name": "accumadam", "accum_iter": 2}, "lr_scheduler": {"name": "cosine", "warmup_epochs": 1},
        "log": {"log_freq": 4, "wandb_on": False, "checkpoint_freq": 3},
    })  # fmt: skip


def prepare_transformer(folder: Path) -> None:
    (folder / "log/0").mkdir(parents=True)
    data: dict[str, object] = {"data_dir": str(folder / "drawn"), "tokenizer": {"vocab_size": 32}}
    write_toml(folder / "data.toml", data)
    write_toml(folder / "train.toml", {
        "backend": "decentdp", "topology": "complete", "max_tokens_per_batch": 800, "max_epochs": 3, "use_amp": False,
        "optim": {"name": "accumadam", "lr": 0.01, "accum_iter": 2}, "lr_scheduler": {"warmup_steps": 10},
        "model": {"d_model": 32, "num_heads": 2, "num_layers": 1, "dim_feedforward": 64, "dropout": 0.0},
        "log": {"log_freq": 5, "wandb_on": False, "checkpoint_freq": 3},
    })  # fmt: skip
    tell = "import sys; from src.conf import Data; print(Data(**eval(sys.argv[1])).output_dir)"
    found = subprocess.run([sys.executable, "-c", tell, repr(data)], cwd=folder, capture_output=True, text=True)
    output = folder / found.stdout.strip()
    output.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for split, pairs in (("train", 600), ("valid", 100), ("val", 100), ("test", 100)):
        source, target = b"", b""
        for _ in range(pairs):
            words = [int(draw.integers(4, 32))] * int(draw.integers(5, 12))
            for_target = [2, *words, 3]
            source += struct.pack(">i", len(words)) + struct.pack(f"{len(words)}H", *words)
            target += struct.pack(">i", len(for_target)) + struct.pack(f"{len(for_target)}H", *for_target)
        (output / f"{split}.en").write_bytes(source)
        (output / f"{split}.de").write_bytes(target)


def prepare_gpt2(folder: Path) -> None:
    (folder / "drawn").mkdir()
    pattern = np.random.default_rng(0).integers(0, 64, 40, np.uint16)
    for split, times in (("train", 200), ("val", 50)):
        np.tile(pattern, times).tofile(folder / f"drawn/{split}.bin")
    write_toml(folder / "config.toml", {
        "log_dir": "./log", "data_dir": "./drawn", "log": {"wandb_log": False, "eval_interval": 20, "eval_steps": 4},
        "train": {"backend": "decentdp", "topology": "alternating-exp-ring", "global_batch_size": 16,
                  "context_length": 16, "n_steps": 60, "compile": False, "amp": False},
        "train.optim": {"name": "accumadamw", "accum_steps": 2},
        "train.lr_schedule": {"name": "cosine", "lr": 0.003, "warmup_steps": 10},
        "model": {"n_layers": 1, "n_heads": 2, "n_embd": 32, "vocab_size": 64},
    })  # fmt: skip


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
CONFIGS = ("--data-cfg", "data.toml", "--train-cfg", "train.toml")
SDTL = ("--ip_address", "127.0.0.1", "--node_gpus", str(RANKS), "--dataset", "fashionmnist", "--model", "simplenetwork",
        "--epochs", "3", "--bs", "16", "--lr", "0.05", "--save_model")  # fmt: skip
ORIGINALS = (
    Original("decent-dp", "tests/test.py", ".", (*TORCHRUN, "tests/test.py"), r"Training loss: ([\d.]+)", write_digits),
    Original("experiments", "cnn/cnn/decent_train.py", "cnn", (*TORCHRUN, "-m", "cnn.decent_train", *CONFIGS),
             r"Epoch: \d+, Train Loss: ([\d.]+)", prepare_cnn, saved="log/0/checkpoints/model_3.pt"),
    Original("experiments", "transformer/src/decent_train.py", "transformer",
             (*TORCHRUN, "-m", "src.decent_train", *CONFIGS), r"\] train loss: ([\d.]+)", prepare_transformer,
             saved="log/0/checkpoints/checkpoint_3.pt"),
    Original("experiments", "gpt2/gpt/decent_train.py", "gpt2",
             (*TORCHRUN, "-m", "gpt.decent_train", "--config", "config.toml"), r"Train loss: ([\d.]+)", prepare_gpt2,
             saved="log/0/checkpoint.pth"),
    *(Original("sdtl", f"main.py {name}", ".", ("main.py", *SDTL, "--dist_optim_name", name),
               r"^\d+,0,[\d.]+,([\d.]+),", prepare_fashion, files="export/experiment/messages.csv",
               saved="export/experiment/model_params-end-w0.pt") for name in ("EASGD", "LSGD")),
)  # fmt: skip


def environment() -> dict[str, str]:
    path = [str(HERE / "stand_ins"), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, path)), "STAND_IN_FOR_GPU": "1", "STAND_IN_GPUS": str(RANKS),
        "PATH": f"{HERE / 'stand_ins/bin'}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "0",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(RANKS))), "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "Agg",
    }  # fmt: skip


def saved_values(path: Path) -> int:
    """Returns how many numbers the model in a file has. Raises if it cannot be loaded, or one of them is not finite."""
    found = torch.load(path, weights_only=True)
    model = next((found[key] for key in ("model_state_dict", "model") if key in found), found)
    if not all(torch.isfinite(value).all() for value in model.values()):
        raise ValueError(f"{path} has a number that is not finite")
    return sum(value.numel() for value in model.values())


def run_command(command: Sequence[str], where: Path) -> tuple[int, str]:
    """Runs a command. Returns its exit code and output. Raises TimeoutExpired. If a time-out or Ctrl-C ends it, it gets
    time to end the ranks that it has started."""
    with subprocess.Popen(command, cwd=where, env=environment(), text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, start_new_session=True) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except BaseException:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=PATIENCE)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
        return process.returncode, output


def run(original: Original, checkout: Path) -> bool:
    """Runs a script and prints a line. Returns whether it ended successfully, with a loss that fell and a file that can
    be loaded."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git"), symlinks=True)
        where, started = copy / original.folder, time.monotonic()
        original.prepare(where)
        try:
            code, output = run_command([sys.executable, *original.command], where)
        except subprocess.TimeoutExpired:
            print(f"{original.name:32} took longer than {SECONDS:g} s", flush=True)
            return False
        text = output + "".join(p.read_text() for p in where.glob(original.files or "no file"))
        losses = [float(each) for each in re.findall(original.loss, text, re.MULTILINE)]
        if code or len(losses) < 2:
            print(f"{original.name:32} ended with {code}:\n{output[-4000:]}", flush=True)
            return False
        saved_text = "saves nothing"
        if original.saved:
            saved_text = f"{saved_values(where / original.saved)} numbers saved and loaded"
        falls = losses[-1] < losses[0]
        losses_text = f"loss {losses[0]:.4f} to {losses[-1]:.4f}{'' if falls else ' (did not fall)'}"
        seconds = time.monotonic() - started
        print(f"{original.name:32} {len(losses):3} losses, {losses_text}, {saved_text}, {seconds:.0f} s", flush=True)
        return falls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for source in ("decent-dp", "experiments", "sdtl"):
        parser.add_argument(f"--{source}", type=Path, metavar="PATH", help="a checkout of it")
    parser.add_argument("--only", default="", help="scripts whose name has this in it")
    options = vars(parser.parse_args())
    by_original = [(each, options[each.source.replace("-", "_")]) for each in ORIGINALS]
    chosen = [(each, path.resolve()) for each, path in by_original if path is not None]
    for each, path in chosen:
        script = each.name.split(" ")[0]
        if not (path / script).is_file():
            parser.error(f"there is no {path / script}: --{each.source} takes the path of a checkout")
    chosen = [(each, path) for each, path in chosen if options["only"] in each.name]
    if not chosen:
        names = ", ".join(each.name for each in ORIGINALS)
        parser.error(f"nothing to run: give the path of a checkout, and --only a part of one of {names}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        found = [run(each, path) for each, path in chosen]
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    sys.exit(not all(found))


if __name__ == "__main__":
    main()
