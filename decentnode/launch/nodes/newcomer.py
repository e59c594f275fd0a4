"""What a node that is in no mapping can know before it asks for a uid: whether it could take part in the run at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from decentnode.build import device_of
from decentnode.errors import AssemblyError, UsageError
from decentnode.experiment import Experiment, load
from decentnode.mapping.newcomer import check_samples_of


def check(
    text: str, digest: str, chosen: Sequence[str], environ: Mapping[str, str], samples_of: int | None, device: str
) -> None:
    """Check that this machine comes to the run's experiment with its own values, and has what that needs. Blocking
    while data is opened.

    text: the experiment that the run told (YAML), of this digest. chosen, environ: the values of this machine.
    Raises UsageError for what its command says, and for data that is not here; ConfigError for unknown keys;
    AssemblyError where it is no node of this run, whatever the command says; EnvironmentFault for a device.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "told.yaml")
        Path(path).write_text(text, encoding="utf-8")

        def found(overrides: Sequence[str], variables: Mapping[str, str]) -> Experiment:
            return load(path, overrides, variables, False)

        experiment = found(chosen, environ)
        if experiment.digest() != digest:
            _tell_apart(found([], {}).digest() == digest, [
                *(f"--set {each}" for each in chosen if found([each], {}).digest() != digest),
                *(key for key, value in environ.items() if found([], {key: value}).digest() != digest),
            ])  # fmt: skip
        check_samples_of(samples_of, experiment.make_mapping())
        device_of(device, key="--device")
        experiment.measured()


def _tell_apart(same_without: bool, changing: Sequence[str]) -> None:
    """Raises the error of an experiment that is not the run's."""
    if same_without:
        which = ", ".join(changing) or "--set"
        raise UsageError(f"{which} would change the experiment, which is the same on all nodes of the run; only paths "
                         "(data.path), threads and devices may be set per machine")  # fmt: skip
    raise AssemblyError("this machine gets another experiment than the run from the same text: the file of model.init "
                        "is missing here, or the run uses another version of decentnode", [])  # fmt: skip
