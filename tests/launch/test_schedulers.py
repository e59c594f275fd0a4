"""The machine number is detected from environments as schedulers set them, without the variables that do not matter."""

from __future__ import annotations

import pytest

from decentnode.errors import UsageError
from decentnode.launch.supervising.prepare import choose_machine
from decentnode.launch.supervising.schedulers import Hint, detect, machine_of
from decentnode.mapping.base import Mapping
from decentnode.mapping.linear import Linear

TORCHRUN = {
    "LOCAL_RANK": "0", "RANK": "1", "GROUP_RANK": "1", "ROLE_RANK": "1", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "4242", "SLURM_STEP_ID": "0", "SLURM_NODEID": "3", "SLURM_PROCID": "3", "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_NODES": "4", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "gpu[01-04]",
}  # fmt: skip
KUBERNETES = {"JOB_COMPLETION_INDEX": "1", "KUBERNETES_SERVICE_HOST": "10.96.0.1", "HOSTNAME": "run-1"}
SHELL = {"RANK": "3", "SLURM_NODEID": "2", "GROUP_RANK": "1"}


@pytest.mark.parametrize(
    ("variables", "hint"),
    [
        ({}, None), (SHELL, None),
        (TORCHRUN, Hint("torchrun", 1, 2)), (SLURM, Hint("Slurm", 3, 4)), (KUBERNETES, Hint("Kubernetes", 1, None)),
        (SLURM | TORCHRUN, Hint("torchrun", 1, 2)),
        (SLURM | {"DECENTNODE_MACHINE": "0"}, Hint("DECENTNODE_MACHINE", 0, None)),
    ],
)  # fmt: skip
def test_the_scheduler_and_machine_are_detected_from_its_environment(
    variables: dict[str, str], hint: Hint | None
) -> None:
    assert detect(variables) == hint


def test_a_hint_that_contradicts_the_mapping_is_an_error() -> None:
    with pytest.raises(UsageError, match="Slurm started 4 machines, but the mapping has 2"):
        machine_of(Hint("Slurm", 3, 4), 2)
    with pytest.raises(UsageError, match="Kubernetes says machine 2, but the mapping has only 2"):
        machine_of(Hint("Kubernetes", 2, None), 2)
    with pytest.raises(UsageError, match="SLURM_NODEID must be a number, got 'x'"):
        detect(SLURM | {"SLURM_NODEID": "x"})


@pytest.mark.parametrize(("wanted", "machine"), [("auto", 1), (0, 0)])
def test_machine_auto_takes_the_hint_and_a_number_overrides_it(
    monkeypatch: pytest.MonkeyPatch, wanted: str | int, machine: int
) -> None:
    for name, value in KUBERNETES.items():
        monkeypatch.setenv(name, value)
    config = Linear.Config.model_validate(
        {"name": "linear", "machines": 2, "nodes_per_machine": 1, "addresses": ["10.0.0.1", "10.0.0.2"]}
    )
    mapping: Mapping = Linear(config)
    assert choose_machine(mapping, wanted, "x.yaml") == machine
