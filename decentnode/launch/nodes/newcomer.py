"""Checks, before a newcomer asks for a uid, whether this machine could take part in the run at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from decentnode.build import device_of
from decentnode.errors import AssemblyError, UsageError
from decentnode.experiment import Experiment, load
from decentnode.launch.children.sockets import base_folder
from decentnode.mapping.newcomer import check_samples_of


def check(
    text: str, digest: str, chosen: Sequence[str], environ: Mapping[str, str], samples_of: int | None, device: str
) -> None:
    """Checks that this machine's own values (paths, threads, devices) leave the run's experiment unchanged, and that
    its data and device are here. Blocking while data is opened.

    text: the experiment that the run sent (YAML), whose digest is `digest`. chosen: this machine's --set overrides.
    environ: its environment variables for keys. Raises UsageError for overrides that change the experiment, and for
    missing data; ConfigError for unknown keys; AssemblyError if the text gives another experiment here even without
    overrides; EnvironmentFault for an unusable device, or if no temporary file can be written.
    """
    with tempfile.TemporaryDirectory(dir=base_folder()) as folder:
        path = os.path.join(folder, "experiment.yaml")
        Path(path).write_text(text, encoding="utf-8")

        def load_with(overrides: Sequence[str], environment: Mapping[str, str]) -> Experiment:
            return load(path, overrides, environment, False)

        experiment = load_with(chosen, environ)
        if experiment.digest() != digest:
            _raise_difference(load_with([], {}).digest() == digest, [
                *(f"--set {each}" for each in chosen if load_with([each], {}).digest() != digest),
                *(key for key, value in environ.items() if load_with([], {key: value}).digest() != digest),
            ])  # fmt: skip
        check_samples_of(samples_of, experiment.make_mapping())
        device_of(device, key="--device")
        experiment.measured()


def _raise_difference(same_without: bool, changing: Sequence[str]) -> None:
    """Raises the error for an experiment whose digest is not the run's: UsageError if it is `same_without` the values
    of this machine, of which `changing` change it, else AssemblyError."""
    if same_without:
        which = ", ".join(changing) or "--set"
        raise UsageError(f"{which} would change the experiment, which is the same on all nodes of the run; only paths "
                         "(data.path), threads and devices may be set per machine")  # fmt: skip
    raise AssemblyError("this machine gets another experiment than the run from the same text: the file of model.init "
                        "is missing here, or the run uses another version of decentnode", [])  # fmt: skip
