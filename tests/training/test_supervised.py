from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from decentnode.build import build_in_process, step_all
from decentnode.data.base import Samples
from decentnode.errors import CheckpointError, DataError, Diverged
from decentnode.experiment import load
from decentnode.samples import DataSpec, Rows
from decentnode.sharing.full import Full
from decentnode.tasks.next_token import NextToken, NextTokenConfig
from decentnode.training.source import Source
from decentnode.training.supervised import evaluation_batch

from .contract import check_training
from .small import batch_norm_net, linear_net, make, make_samples

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
ALL = [
    {"batch_size": 4, "local_steps": 3, "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}},
    {"batch_size": 5, "local_epochs": 1, "optimizer": {"name": "adam", "lr": 0.01}, "clip_norm": 0.5},
    {"batch_size": 2, "accumulate": 3, "local_steps": 2, "optimizer": {"name": "adamw", "weight_decay": 0},
     "drop_last": True},
    {"batch_size": 4, "optimizer": {"name": "adagrad", "lr": 0.05}, "reset_optimizer": True, "shuffle": False},
    {"batch_size": 4, "local_steps": 2, "optimizer": {"name": "nadam"}, "label_smoothing": 0.1,
     "lr_schedule": {"name": "cosine", "T_max": 9, "every": "step", "warmup": 3}},
    {"batch_size": 4, "local_steps": 2, "validation": {"source": "train", "fraction": 0.3}, "drop_last": True,
     "lr_schedule": {"name": "step", "step_size": 2}},
    {"batch_size": 4, "optimizer": {"name": "rmsprop", "lr": 0.01}, "validation": {"source": "test", "fraction": 0.3},
     "lr_schedule": {"name": "one_cycle", "max_lr": 0.1, "total_steps": 20, "cycle_momentum": False}},
]


@pytest.mark.parametrize("keys", ALL)
@pytest.mark.parametrize("module", [linear_net, batch_norm_net])
def test_contract(keys: dict[str, Any], module: Any) -> None:
    if module is batch_norm_net and keys["batch_size"] == 2:
        keys = {**keys, "batch_size": 3, "accumulate": 2}  # batch norm needs more than one sample
    check_training(lambda uid: make(uid, module, make_samples(24, uid), **keys))


def gradient_by_hand(x: torch.Tensor, batch: Samples) -> torch.Tensor:
    """Gradient of the mean cross entropy of softmax regression, x = [W (4x6), b (4)], in float64."""
    weight, bias = x[:24].view(4, 6).double(), x[24:].double()
    inputs = torch.from_numpy(batch.inputs).double().flatten(1)
    wrong = torch.softmax(inputs @ weight.T + bias, 1)
    wrong[torch.arange(len(batch)), torch.from_numpy(batch.targets)] -= 1
    return torch.cat([(wrong.T @ inputs).flatten(), wrong.sum(0)]) / len(batch)


def test_steps_against_sgd_with_momentum_by_hand() -> None:
    """v <- .9 v + g; x <- x - .1 v, with v kept across rounds."""
    training = make(batch_size=4, local_steps=2, shuffle=False, optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9})
    x, velocity = training.model.parameters.double().clone(), torch.zeros(28, dtype=torch.float64)
    share, losses, start = make_samples(), [], 0
    for round in range(4):
        losses = []
        for _ in range(2):
            stop = min(start + 4, 23)
            batch = share.take(np.arange(start, stop))
            logits = torch.from_numpy(batch.inputs).double().flatten(1) @ x[:24].view(4, 6).T + x[24:]
            losses.append(float(functional.cross_entropy(logits, torch.from_numpy(batch.targets), reduction="sum")))
            velocity = 0.9 * velocity + gradient_by_hand(x, batch)
            x, start = x - 0.1 * velocity, stop % 23
        update = training.local_update(round)
        assert torch.allclose(training.model.parameters.double(), x, atol=1e-5)
        assert update.loss == pytest.approx(sum(losses) / update.samples, rel=1e-4)
    assert (update.steps, update.samples) == (2, 8)  # round 2 had the three samples that 23 leaves over


def test_last_gradient_is_clipped_but_not_directed() -> None:
    training = make(batch_size=23, shuffle=False, clip_norm=0.01, optimizer={"name": "sgd", "lr": 0.1})
    training.keep_gradient = True
    before = training.model.parameters.clone()
    gradient = gradient_by_hand(before, make_samples())
    update = training.local_update(0, lambda g: 3 * g)
    clipped = 0.01 * gradient / gradient.norm()
    assert update.last_gradient is not None
    assert torch.allclose(update.last_gradient.double(), clipped, atol=1e-8)
    assert torch.allclose(training.model.parameters, before - 0.3 * update.last_gradient, atol=1e-7)
    assert update.report["gradient_norm"] == pytest.approx(float(gradient.norm()), rel=1e-5)
    assert float(update.last_gradient.norm()) == pytest.approx(0.01, rel=1e-6)


def test_gradient_norms_are_reported_if_enabled_and_change_nothing() -> None:
    """The mean over the steps of the norms before a rule's direction; nothing is clipped."""
    keys = {"batch_size": 23, "shuffle": False, "local_steps": 2, "optimizer": {"name": "sgd", "lr": 0.1}}
    training, plain = make(gradient_norm=True, **keys), make(**keys)
    x = training.model.parameters.double().clone()
    norms = []
    for _ in range(2):
        gradient = gradient_by_hand(x, make_samples())
        norms.append(float(gradient.norm()))
        x -= 0.3 * gradient
    update = training.local_update(0, lambda g: 3 * g)
    assert norms[0] != pytest.approx(norms[1], rel=1e-3)
    assert update.report["gradient_norm"] == pytest.approx(sum(norms) / 2, rel=1e-5)
    assert "gradient_norm" not in plain.local_update(0, lambda g: 3 * g).report
    assert torch.equal(training.model.parameters, plain.model.parameters)


def test_a_short_gradient_is_not_scaled() -> None:
    plain, clipped = make(local_steps=3), make(local_steps=3, clip_norm=1e6)
    plain.local_update(0)
    clipped.local_update(0)
    assert torch.equal(plain.model.parameters, clipped.model.parameters)


@pytest.mark.parametrize("drop_last", [False, True])
def test_accumulated_small_batches_equal_a_large_batch(drop_last: bool) -> None:
    large = make(batch_size=6, local_epochs=2, drop_last=drop_last)
    small = make(batch_size=2, accumulate=3, local_epochs=2, drop_last=drop_last)
    for round in range(2):
        updates = [training.local_update(round) for training in (large, small)]
        assert updates[0].steps == updates[1].steps and updates[0].samples == updates[1].samples
        assert updates[0].loss == pytest.approx(updates[1].loss, rel=1e-5)
    assert torch.allclose(large.model.parameters, small.model.parameters, atol=1e-6)


def test_an_epoch_sees_every_sample_once_and_steps_go_on_through_epochs() -> None:
    by_epochs, by_steps = make(batch_size=4, local_epochs=1), make(batch_size=4, local_steps=2)
    assert by_epochs.steps_per_round == 6
    update = by_epochs.local_update(0)
    assert (update.steps, update.samples) == (6, 23)
    assert sum(by_steps.local_update(round).samples for round in range(3)) == 23
    assert torch.allclose(by_epochs.model.parameters, by_steps.model.parameters, atol=1e-6)


def test_no_local_steps_change_nothing() -> None:
    training = make(local_steps=0)
    before = training.model.parameters.clone()
    update = training.local_update(0)
    assert (update.steps, update.samples, update.loss) == (0, 0, 0.0)
    assert torch.equal(training.model.parameters, before)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adagrad"])
def test_a_reset_optimizer_starts_afresh_but_keeps_the_schedule(optimizer: str) -> None:
    keys: dict[str, Any] = {"optimizer": {"name": optimizer, "lr": 0.1}, "local_steps": 2}
    if optimizer == "sgd":
        keys["optimizer"]["momentum"] = 0.9
    reset = make(**keys, reset_optimizer=True, lr_schedule={"name": "exponential", "gamma": 0.5})
    reset.local_update(0)
    middle = reset.model.parameters.clone()
    reset.local_update(1)
    fresh = make(**{**keys, "optimizer": {**keys["optimizer"], "lr": 0.05}})
    fresh.model.parameters.copy_(middle)
    fresh.sampler.take(2)
    fresh.local_update(1)
    assert torch.equal(reset.model.parameters, fresh.model.parameters)


def test_splits_share_no_sample() -> None:
    for source, rest in (("train", "test"), ("test", "train")):
        plain = make(batch_size=1, local_epochs=1)
        training = make(batch_size=1, local_epochs=1, validation={"source": source, "fraction": 0.25})
        assert training.has_validation and not plain.has_validation
        counts = {name: training.evaluate(name).samples for name in ("train", "test", "validation")}
        whole = {name: plain.evaluate(name).samples for name in ("train", "test")}
        assert counts[source] + counts["validation"] == whole[source] and counts[rest] == whole[rest]
        assert counts["validation"] == round(0.25 * whole[source])
        both = sum(counts[name] * training.evaluate(name).metrics["loss"] for name in (source, "validation"))
        assert both == pytest.approx(whole[source] * plain.evaluate(source).metrics["loss"], rel=1e-5)
        assert training.num_samples == counts["train"] == training.local_update(0).samples


def test_validation_of_the_test_set_is_the_same_on_all_nodes() -> None:
    split = [make(uid, validation={"source": "test", "fraction": 0.3}).evaluate("validation") for uid in range(3)]
    assert split[0] == split[1] == split[2]
    own = [make(uid, validation={"source": "train", "fraction": 0.3}).evaluate("validation") for uid in range(3)]
    assert len({evaluation.metrics["loss"] for evaluation in own}) == 3


@pytest.mark.parametrize("rescale", [False, True])
def test_uint8_pixels_train_to_the_same_bits_as_their_floats(rescale: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    pixels = Samples(draw.integers(0, 256, (23, 3, 2), np.uint8), draw.integers(0, 4, 23), 1 / 255, -0.5)
    ready = pixels.inputs.astype(np.float32)
    ready *= np.float32(1 / 255)
    floats = Samples(ready + np.float32(-0.5), pixels.targets)
    if rescale:  # as large shares do: kept as they are, converted batch by batch
        monkeypatch.setattr("decentnode.training.source.CONVERT_ONCE_BYTES", 0)
    kept = pixels.inputs.copy()
    trainings = [make(train=share, local_steps=4, batch_size=5) for share in (pixels, floats)]
    for training in trainings:
        training.local_update(0)
    assert torch.equal(trainings[0].model.parameters, trainings[1].model.parameters)
    assert np.array_equal(kept, pixels.inputs)


def test_scaled_floats_leave_the_readers_array_alone() -> None:
    share = Samples(make_samples().inputs, make_samples().targets, 1.0, 2.0)
    kept = share.inputs.copy()
    make(train=share).local_update(0)
    assert np.array_equal(kept, share.inputs)


def test_gathering_in_groups_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make(batch_size=4, local_epochs=2)
    whole.local_update(0)
    monkeypatch.setattr("decentnode.training.share.GATHER_ELEMENTS", 50)
    grouped = make(batch_size=4, local_epochs=2)
    grouped.local_update(0)
    # Not the same bits: the last ones of a matrix product depend on the alignment of a batch in memory.
    assert torch.allclose(whole.model.parameters, grouped.model.parameters, atol=1e-6)


def test_evaluation_in_batches_equals_evaluation_of_the_whole_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decentnode.training.supervised.EVALUATION_ELEMENTS", 60)
    training = make(module=batch_norm_net, label_smoothing=0.3)
    training.local_update(0)
    test, module = make_samples(31, 1), training.model.module.eval()
    with torch.no_grad():
        outputs = module(torch.from_numpy(test.inputs))
    module.train()
    module[2].eval()  # evaluation must leave a frozen part in evaluation mode
    result = training.evaluate()
    targets = torch.from_numpy(test.targets)
    assert result.metrics["loss"] == pytest.approx(float(functional.cross_entropy(outputs, targets)), rel=1e-5)
    assert result.metrics["accuracy"] == pytest.approx(float((outputs.argmax(1) == targets).float().mean()))
    assert module.training and not module[2].training


def test_divergence_names_node_and_round() -> None:
    training = make(uid=3, optimizer={"name": "sgd", "lr": 1e38}, local_steps=4)
    with pytest.raises(Diverged, match=r"node 3: the training loss is (nan|inf) in round 8; .*training\.optimizer\.lr"):
        training.local_update(8)


def test_shares_with_too_few_samples_are_refused() -> None:
    none, one = make_samples().take(np.arange(0)), make_samples().take(np.arange(1))
    with pytest.raises(DataError, match="node 2 has no training sample"):
        make(2, train=none)
    with pytest.raises(DataError, match=r"node 2: training\.validation\.fraction must leave samples of the 1 train"):
        make(2, train=one, validation={"fraction": 0.1})
    with pytest.raises(DataError, match=r"node 2 has 1 training samples, fewer than one step of 16, .*drop_last"):
        make(2, train=one, drop_last=True)
    assert make(2, train=one).local_update(0).samples == 1


def test_a_state_of_another_model_or_optimizer_is_refused() -> None:
    other = make(module=batch_norm_net, optimizer={"name": "adam"}).state_dict()
    for state in ({}, other):
        with pytest.raises(CheckpointError, match="node 0: the training state does not fit"):
            make().load_state_dict(state)


def test_a_convex_problem_is_solved() -> None:
    training = make(local_epochs=1, batch_size=8, optimizer={"name": "adam", "lr": 0.05})
    before = training.evaluate("train").metrics["loss"]
    for round in range(60):
        training.local_update(round)
    assert training.evaluate("train").metrics["loss"] < 0.5 * before


@pytest.mark.parametrize("keys", [
    {"local_steps": 3}, {"local_epochs": 2, "drop_last": True}, {"local_steps": 0},
    {"local_steps": 2, "lr_schedule": {"name": "step", "step_size": 3, "every": "step"}},
])  # fmt: skip
@pytest.mark.parametrize("rounds", [0, 1, 4, 5, 9])
def test_skipping_to_a_round_gives_the_samples_and_the_learning_rate_of_that_round(
    keys: dict[str, Any], rounds: int
) -> None:
    trained, skipped = make(batch_size=5, **keys), make(batch_size=5, **keys)
    for round in range(rounds):
        trained.local_update(round)
    skipped.skip_to(7)
    skipped.skip_to(rounds)
    names = ("ticks", "epoch", "cursor")
    assert [skipped.state_dict()[name] for name in names] == [trained.state_dict()[name] for name in names]
    assert skipped.learning_rate == trained.learning_rate


def test_skipping_rounds_of_which_some_have_no_local_steps_counts_the_others() -> None:
    keys = {"local_steps": 2, "lr_schedule": {"name": "step", "step_size": 3, "every": "step"}}
    trained, skipped = make(batch_size=5, **keys), make(batch_size=5, **keys)
    for round in range(7):
        if round % 3 < 2:
            trained.local_update(round)
        else:
            trained.rest(round)
    skipped.skip_to(7, lambda round: round % 3 < 2)
    names = ("ticks", "epoch", "cursor")
    assert [skipped.state_dict()[name] for name in names] == [trained.state_dict()[name] for name in names]


class FillsModelWithNan(Full):
    """A sharing rule that fills the model with NaN after the local steps of round 1."""

    def adjust(self, model: torch.Tensor, view: Any, loss: float) -> None:
        if view.round == 1:
            model.fill_(torch.nan)


@pytest.mark.parametrize(("sharing", "lr", "round"), [("full", 3e38, 0), (f"{__name__}:FillsModelWithNan", 0.1, 1)])
def test_a_model_that_is_not_finite_is_found_before_it_is_sent(sharing: str, lr: float, round: int) -> None:
    """The sum of the parameters that comes with the loss shows it, or a second sum if the rule changed the model."""
    made = make(optimizer={"name": "sgd", "lr": 0.1})
    assert made.local_update(0).parameters_sum is None
    made.keep_sum = True
    assert made.local_update(1).parameters_sum == pytest.approx(float(made.model.parameters.sum()))
    nodes = build_in_process(load(QUICKSTART, [
        "graph={name: ring, nodes: 3}", "mapping={nodes_per_machine: 3}", "node={rounds: 3, evaluate_every: 0}",
        f"sharing={sharing}", "model={name: mlp, hidden: [4]}",
        f"training={{batch_size: 4, optimizer: {{name: sgd, lr: {lr}}}}}",
    ], check=False))  # fmt: skip
    assert nodes[0].training.keep_sum
    with pytest.raises(Diverged, match=f"NaN or infinity.* round {round}"):
        step_all(nodes)


@pytest.mark.parametrize(("device", "vocabulary", "together"), [
    ("cpu", 50, 41), ("cpu", 50_000, 1), ("cuda", 50_000, 16), ("cuda", 50, 41),
])  # fmt: skip
def test_the_size_of_the_outputs_bounds_an_evaluation_batch(device: str, vocabulary: int, together: int) -> None:
    places = 320
    data = DataSpec((places,), "ids", "next_token", vocabulary=vocabulary, target_shape=(places,))
    rows = Rows(np.zeros(400, np.int32), np.arange(60), places)
    source = Source(Samples(rows, rows, ids=True), torch.device("cpu"))
    task = NextToken(NextTokenConfig(), data)
    assert evaluation_batch(places * 41, source, task, torch.device(device)) == together
