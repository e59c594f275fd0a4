"""Optimizers and learning rate schedules by name: valid and invalid sections, and the error messages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pydantic
import pytest
import torch
from torch import nn

from decentnode.errors import ConfigError
from decentnode.experiment import load
from decentnode.training.lr_schedules import LR_SCHEDULES, LearningRateSchedule, ScheduleConfig
from decentnode.training.optimizers import OptimizerConfig, load_state, make_optimizer
from decentnode.training.supervised_config import SupervisedConfig

REQUIRED: dict[str, dict[str, Any]] = {
    "cosine": {"T_max": 5}, "cosine_warm_restarts": {"T_0": 3}, "cyclic": {"base_lr": 0.01, "max_lr": 0.1},
    "exponential": {"gamma": 0.9}, "multistep": {"milestones": [2, 4]}, "step": {"step_size": 2},
    "one_cycle": {"max_lr": 0.1, "total_steps": 12},
}


def make_optimizer_of(section: dict[str, Any]) -> torch.optim.Optimizer:
    return make_optimizer(OptimizerConfig.model_validate(section), [nn.Parameter(torch.zeros(2, 2))])


@pytest.mark.parametrize("name", [
    "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd"])
def test_every_optimizer_can_step(name: str) -> None:
    optimizer = make_optimizer_of({"name": name})
    assert type(optimizer).__name__.lower() == name
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = torch.ones(2, 2)
    optimizer.step()
    assert (parameter != 0).all()


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "adagrad"])
def test_optimizers_are_fused_unless_the_config_chooses(name: str) -> None:
    assert make_optimizer_of({"name": name}).defaults["fused"] is True
    assert make_optimizer_of({"name": name, "foreach": False}).defaults["fused"] is None
    assert make_optimizer_of({"name": name, "fused": False}).defaults["fused"] is False


class LateRefusal(torch.optim.Adagrad):
    """Raises only at its first step that it has no fused kernel, as torch's Adagrad did on GPUs in earlier versions."""

    def step(self, closure: Any = None) -> Any:
        if self.param_groups[0]["fused"]:
            raise RuntimeError("`fused=True` requires all the params to be of supported devices")
        return super().step(closure)


def test_an_optimizer_whose_first_fused_step_fails_is_not_fused() -> None:
    optimizer = make_optimizer_of({"name": f"{__name__}:LateRefusal"})
    assert optimizer.defaults["fused"] is None and optimizer.defaults["foreach"] is True
    optimizer.step()


@pytest.mark.parametrize(("saved", "own"), [({}, {"fused": False}), ({"fused": False}, {}), ({"foreach": True}, {})])
def test_loading_a_state_keeps_the_kernel_of_the_loading_optimizer(saved: Any, own: Any) -> None:
    """The state may have been saved on a device with another kernel, for example a GPU."""
    made, given = make_optimizer_of({"name": "adam", **own}), make_optimizer_of({"name": "adam", "lr": 0.5, **saved})
    before = dict(made.param_groups[0])
    for optimizer in (given, made):
        (parameter,) = optimizer.param_groups[0]["params"]
        parameter.grad = torch.ones(2, 2)
    given.step()
    load_state(made, given.state_dict())
    made.step()
    (state,) = made.state.values()
    assert made.param_groups[0]["lr"] == 0.5 and float(state["step"]) == 2
    assert all(made.param_groups[0][key] == before[key] for key in ("fused", "foreach", "capturable"))
    with pytest.raises(ValueError):
        load_state(made, {"state": {}, "param_groups": []})


def test_arguments_reach_the_optimizer() -> None:
    optimizer = make_optimizer_of({"name": "adam", "lr": 0.5, "betas": [0.8, 0.9], "weight_decay": 0.1})
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.5, (0.8, 0.9), 0.1)


@pytest.mark.parametrize("section, place, message", [
    ({"optimizer": {"name": "sdg"}}, "optimizer.name", "must be one of .*adadelta, .*, got 'sdg'; did you mean 'sgd'"),
    ({"optimizer": "adgrad"}, "optimizer.name", "did you mean 'adagrad'"),
    ({"optimizer": {"name": "lbfgs"}}, "optimizer.name", "must be another optimizer than lbfgs: it evaluates"),
    ({"optimizer": {"momentun": 0.9}}, "optimizer.momentun", "argument of sgd; did you mean 'momentum'"),
    ({"optimizer": {"params": 1}}, "optimizer.params", "must be an argument of sgd"),
    ({"optimizer": {"lr": -1, "momentum": 0.9}}, "optimizer.lr", "must suit torch's SGD: Invalid learning rate: -1"),
    ({"optimizer": {"lr": "fast"}}, "optimizer.lr", "must be a number, got 'fast'"),
    ({"optimizer": {"lr": True}}, "optimizer.lr", "must be a number, got True"),
    ({"optimizer": {"lr": 0.1, "momentum": 0.5, "nesterov": "no"}}, "optimizer.nesterov",
     "must be true or false, got the text 'no'"),
    ({"lr_schedule": {"name": "cyclic", "base_lr": 0.1, "max_lr": 1.0, "cycle_momentum": "Off"}},
     "lr_schedule.cycle_momentum", "must be true or false, got the text 'Off'"),
    ({"optimizer": {"lr": 0.1, "nesterov": True}}, "optimizer.nesterov", "Nesterov momentum requires a momentum"),
    ({"optimizer": {"name": "adam", "betas": 3}}, "optimizer.betas", "must suit torch's Adam"),
    ({"optimizer": {"name": "adam", "betas": [0.9]}}, "optimizer.betas", "must suit torch's Adam: "),
    ({"optimizer": {"name": "rprop", "step_sizes": [1]}}, "optimizer.step_sizes", "must suit torch's Rprop: .*unpack"),
    ({"optimizer": {"lr": 0.1, "momentum": 0.9, "dampening": [1]}}, "optimizer.name", "must suit torch's SGD: "),
    ({"lr_schedule": "cosin"}, "lr_schedule.name", "did you mean 'cosine'"),
    ({"lr_schedule": "cosine"}, "lr_schedule.name", "needs 'T_max' beside it for cosine"),
    ({"lr_schedule": {"name": "cosine", "t_max": 3}}, "lr_schedule.t_max", "did you mean 'T_max'"),
    ({"lr_schedule": {"name": "step", "step_size": 3, "last_epoch": 2}}, "lr_schedule.last_epoch", "an argument"),
    ({"lr_schedule": {"name": "linear", "start_factor": 0}}, "lr_schedule.start_factor", "must suit torch's LinearLR"),
    ({"lr_schedule": {"name": "cosine", "T_max": [9]}}, "lr_schedule.T_max", "must suit torch's CosineAnnealingLR"),
    ({"lr_schedule": {"name": "cosine", "T_max": 0}}, "lr_schedule.T_max", "must suit torch's CosineAnnealingLR"),
    ({"lr_schedule": "torch.optim.lr_scheduler:ReduceLROnPlateau"}, "lr_schedule.name", "missing 1 required"),
    ({"lr_schedule": {"name": "constant", "warmup": -1}}, "lr_schedule.warmup", "greater than or equal to 0"),
    ({"lr_schedule": {"name": "one_cycle", "max_lr": 1, "total_steps": 9}, "optimizer": "adagrad"}, "lr_schedule",
     "must suit optimizer adagrad: optimizer must support momentum"),
    ({"local_steps": 1, "local_epochs": 1}, "", "must have local_steps or local_epochs, got both"),
    ({"loss": "nll", "label_smoothing": 0.1}, "", "must have loss cross_entropy with label_smoothing"),
    ({"batch_size": 0}, "batch_size", "greater than or equal to 1"),
    ({"validation": {"fraction": 1}}, "validation.fraction", "less than 1"),
    ({"clip_norm": 0}, "clip_norm", "greater than 0"),
])
def test_invalid_sections_are_refused_at_their_key(section: dict[str, Any], place: str, message: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=message) as caught:
        SupervisedConfig.model_validate(section)
    (error,) = caught.value.errors()
    assert ".".join(map(str, error["loc"])) == place


def test_a_config_survives_its_own_dump() -> None:
    config = SupervisedConfig.model_validate({
        "optimizer": {"name": "adam", "lr": 0.01, "betas": [0.9, 0.99]},
        "lr_schedule": {"name": "multistep", "milestones": [1, 2], "warmup": 2}, "validation": {"fraction": 0.2},
    })
    assert SupervisedConfig.model_validate(config.model_dump(mode="json")) == config


def learning_rates(section: dict[str, Any], ticks: int, lr: float = 0.1) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr, momentum=0.9)
    schedule = LearningRateSchedule(ScheduleConfig.model_validate(section), optimizer)
    found = []
    for _ in range(ticks):
        found.append(float(optimizer.param_groups[0]["lr"]))
        schedule.tick()
    return found


def test_the_table_of_required_arguments_names_known_schedules() -> None:
    assert set(REQUIRED) < set(LR_SCHEDULES)


@pytest.mark.parametrize("name", LR_SCHEDULES)
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_schedules_equal_those_of_torch(name: str) -> None:
    arguments = REQUIRED.get(name, {})
    ours = learning_rates({"name": name, **arguments}, 10)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    theirs = []
    scheduler = LR_SCHEDULES[name](optimizer, **arguments)
    for _ in range(10):
        theirs.append(float(optimizer.param_groups[0]["lr"]))
        scheduler.step()
    assert ours == theirs
    assert name == "constant" or len(set(ours)) > 1


@pytest.mark.parametrize(("schedule", "training", "ticks"), [
    ("max_lr: 0.1, total_steps: {}", "local_steps: 3", 12),
    ("max_lr: 0.1, total_steps: {}, every: step", "local_steps: 3", 36),
    ("max_lr: 0.1, total_steps: {}, every: step", "", 12),
    ("max_lr: 0.1, epochs: {}, steps_per_epoch: 1", "local_steps: 3", 12),
    ("max_lr: 0.1, total_steps: {}, warmup: 5", "local_steps: 3", 12 - 5),
    ("max_lr: 0.1, total_steps: {}, every: step", "local_epochs: 2, batch_size: 10", 12 * 2 * 18),
    ("max_lr: 0.1, total_steps: {}, every: step", "local_epochs: 2, batch_size: 11, drop_last: true", 12 * 2 * 16),
    ("max_lr: 0.1, total_steps: {}, every: step", "local_epochs: 1, batch_size: 10, validation: {fraction: 0.5}",
     12 * 9),
])  # fmt: skip
def test_a_schedule_that_ends_before_the_run_is_refused(schedule: str, training: str, ticks: int) -> None:
    """Eight nodes have 179 or 180 of the 1,437 digits each."""
    def sets(length: int) -> list[str]:
        one_cycle = f"{{name: one_cycle, {schedule.format(length)}}}"
        keys = ", ".join(filter(None, ["name: supervised", training, f"lr_schedule: {one_cycle}"]))
        return ["graph={name: ring, nodes: 8}", "mapping.nodes_per_machine=8", "data.partition={name: iid}",
                "node={rounds: 12}", f"training={{{keys}}}"]  # fmt: skip

    quickstart = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    with pytest.raises(ConfigError, match=r"(?s)one_cycle ends after .*see node\.rounds"):
        load(quickstart, sets(ticks - 1))
    chosen: Any = load(quickstart, sets(ticks)).training
    assert chosen.most_ticks(12, 180) == chosen.lr_schedule.most_ticks()


def test_a_schedule_that_has_ended_keeps_its_last_learning_rate() -> None:
    """A client takes part in more rounds than expected once others are lost, and torch raises after the end."""
    schedule = {"name": "one_cycle", "max_lr": 0.1, "total_steps": 6, "anneal_strategy": "linear", "warmup": 2}
    rates = learning_rates(schedule, 12)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    expected = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 6, anneal_strategy="linear")
    for rate in rates[2:8]:
        assert rate == optimizer.param_groups[0]["lr"]
        optimizer.step()
        expected.step()
    assert rates[7:] == [rates[7]] * 5 and rates[7] < 0.01 * max(rates)


def test_the_number_of_ticks_omits_a_last_batch_of_one_sample() -> None:
    """Batch normalization cannot train on the last sample of 181 in batches of 10."""
    config = SupervisedConfig.model_validate({
        "name": "supervised", "batch_size": 10, "local_epochs": 2,
        "lr_schedule": {"name": "one_cycle", "max_lr": 0.1, "total_steps": 72, "every": "step"},
    })
    assert (config.most_ticks(2, 181), config.most_ticks(2, 181, needs_two_samples=True)) == (2 * 2 * 19, 2 * 2 * 18)
    assert config.most_ticks(2, 182, needs_two_samples=True) == 2 * 2 * 19


def test_warm_up_precedes_the_schedule() -> None:
    plain = learning_rates({"name": "cosine", "T_max": 6}, 6)
    warmed = learning_rates({"name": "cosine", "T_max": 6, "warmup": 4, "warmup_factor": 0.2}, 10)
    assert warmed[:4] == pytest.approx([0.02, 0.04, 0.06, 0.08])
    assert warmed[4:] == plain
    constant = learning_rates({"name": "constant", "warmup": 2, "warmup_factor": 0.5}, 4)
    assert constant == pytest.approx([0.05, 0.075, 0.1, 0.1])


@pytest.mark.parametrize("name", LR_SCHEDULES)
def test_a_restored_schedule_continues_bit_for_bit(name: str) -> None:
    config = ScheduleConfig.model_validate({"name": name, "warmup": 2, **REQUIRED.get(name, {})})

    def make() -> tuple[torch.optim.Optimizer, LearningRateSchedule]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
        return optimizer, LearningRateSchedule(config, optimizer)

    first, schedule = make()
    for _ in range(5):
        schedule.tick()
    second, restored = make()
    second.load_state_dict(first.state_dict())
    restored.restore(schedule.ticks)
    for _ in range(3):
        assert first.param_groups[0]["lr"] == second.param_groups[0]["lr"]
        assert first.param_groups[0]["momentum"] == second.param_groups[0]["momentum"]
        schedule.tick()
        restored.tick()


@pytest.mark.slow
def test_checking_a_config_does_not_import_the_compiler() -> None:
    code = (
        "import sys; from decentnode.training.supervised_config import SupervisedConfig;"
        "SupervisedConfig.model_validate({'optimizer': 'adam', 'lr_schedule': {'name': 'cosine', 'T_max': 3}});"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_schedules_emit_no_warnings(recwarn: pytest.WarningsRecorder) -> None:
    for name in LR_SCHEDULES:
        learning_rates({"name": name, **REQUIRED.get(name, {})}, 5)
    assert not recwarn.list
