"""Differentially private training: clipping of every sample, noise, Poisson samples, epsilon."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from decentnode import entropy
from decentnode.errors import CheckpointError, EnvironmentFault
from decentnode.samples import DataSpec, LazySamples, NodeSamples, Rows, Samples
from decentnode.tasks.classification import Classification, ClassificationConfig
from decentnode.tasks.next_token import NextToken, NextTokenConfig
from decentnode.tensors import FlatModel
from decentnode.training import privacy
from decentnode.training.privacy import Accountant, epsilon_of, is_installed
from decentnode.training.private_gradients import PrivateGradients
from decentnode.training.sampler import PoissonSampler
from decentnode.training.supervised import Supervised
from decentnode.training.supervised_config import SupervisedConfig

from .contract import check_training, run_rounds
from .small import linear_net, make, make_samples

needs_opacus = pytest.mark.skipif(not is_installed(), reason="opacus is not installed (decentnode[privacy])")
NO_NOISE = {"noise": 0, "clip": 1e9}


def group_norm_net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Dropout(0.3), nn.Linear(8, 4))


@pytest.mark.parametrize("keys", [
    {"batch_size": 12, "local_steps": 3, "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}},
    {"batch_size": 6, "accumulate": 2, "local_epochs": 1, "optimizer": {"name": "adam", "lr": 0.01}},
    {"batch_size": 12, "local_steps": 2, "amp": "bf16", "clip_norm": 0.5, "ema": 0.9},
    {"batch_size": 12, "local_steps": 2, "validation": {"fraction": 0.2}, "reset_optimizer": True},
])  # fmt: skip
@pytest.mark.parametrize("module", [linear_net, group_norm_net])
def test_contract(keys: dict[str, Any], module: Any) -> None:
    check_training(lambda uid: make(uid, module, make_samples(24, uid), privacy={"noise": 0.5}, **keys))


def gradient_of_step(training: Supervised, share: Samples) -> torch.Tensor:
    inputs, targets = torch.from_numpy(share.inputs), torch.from_numpy(share.targets)
    training._step_gradient(inputs, targets, torch.zeros(()))
    return training.model.gradients()


@pytest.mark.parametrize("batch_size", [23, 5])  # all samples at once, and in groups
def test_every_gradient_is_clipped_as_in_a_loop_over_the_samples(batch_size: int) -> None:
    share, clip = make_samples(), 3.0
    training = make(batch_size=batch_size, accumulate=5, privacy={"noise": 0, "clip": clip})
    x = training.model.parameters.double()
    expected, norms = torch.zeros(28, dtype=torch.float64), []
    for inputs, target in zip(share.inputs.reshape(23, 6), share.targets, strict=True):
        wrong = torch.softmax(x[:24].view(4, 6) @ torch.from_numpy(inputs).double() + x[24:], 0)
        wrong[target] -= 1
        gradient = torch.cat([torch.outer(wrong, torch.from_numpy(inputs).double()).flatten(), wrong])
        norms.append(float(gradient.norm()))
        expected += gradient * min(1.0, clip / norms[-1])
    assert min(norms) < clip < max(norms)
    assert torch.allclose(gradient_of_step(training, share).double(), expected / 23, rtol=1e-5, atol=1e-7)


def test_no_sample_changes_the_sum_by_more_than_the_bound() -> None:
    clip, share = 0.3, make_samples()
    training = make(batch_size=23, privacy={"noise": 0, "clip": clip})
    whole = gradient_of_step(training, share)
    for left_out in range(23):
        rest = share.take(np.delete(np.arange(23), left_out))
        assert float((gradient_of_step(training, rest) - whole).norm()) <= clip / 23 * (1 + 1e-5)


def test_training_without_noise_and_with_a_huge_bound_equals_ordinary_training() -> None:
    """Every step has all samples; only their order differs."""
    keys = {"batch_size": 23, "local_steps": 2, "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}}
    private, ordinary = make(privacy=NO_NOISE, **keys), make(**keys)
    for round in range(3):
        losses = [each.local_update(round).loss for each in (private, ordinary)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert torch.allclose(private.model.parameters, ordinary.model.parameters, atol=1e-6)


def test_steps_divide_by_the_expected_number_of_samples() -> None:
    training, share = make(batch_size=8, privacy=NO_NOISE), make_samples().take(np.arange(3))
    gradient = gradient_of_step(training, share)
    training._gradients.compute(torch.from_numpy(share.inputs), torch.from_numpy(share.targets), torch.zeros(()))
    assert torch.allclose(gradient, training.model.gradients() * 3 / 8, atol=1e-6)


def test_noise_has_the_given_deviation_and_is_fresh_in_every_step() -> None:
    def wide_net() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(6, 2000), nn.Linear(2000, 4))

    made = [make(uid, wide_net, batch_size=10, privacy={"noise": 3.0, "clip": 0.5}) for uid in (0, 0, 1)]
    no_samples = make_samples().take(np.arange(0))
    first, again, other = (gradient_of_step(each, no_samples) for each in made)
    second = gradient_of_step(made[0], no_samples)
    assert torch.equal(first, again)
    for one in (first, second, other):
        assert float(one.mean()) == pytest.approx(0, abs=0.01)
        assert float(one.std()) == pytest.approx(3.0 * 0.5 / 10, rel=0.03)
    for pair in ((first, second), (first, other)):
        assert abs(float(torch.corrcoef(torch.stack(pair))[0, 1])) < 0.03


def test_noise_from_system_entropy_does_not_repeat() -> None:
    private = {"noise": 1.0, "draws": "system"}
    parameters = [run_rounds(make(batch_size=12, privacy=private), range(2)) for _ in range(2)]
    assert not torch.equal(*parameters)
    with entropy.use(entropy.seeded(1)):
        first = run_rounds(make(batch_size=12, privacy=private), range(2))
    with entropy.use(entropy.seeded(1)):  # as in a simulation
        assert torch.equal(first, run_rounds(make(batch_size=12, privacy=private), range(2)))


def test_a_sample_whose_gradient_is_not_finite_counts_as_zero() -> None:
    training, share = make(batch_size=23, privacy={"noise": 0}), make_samples()
    broken = Samples(share.inputs.copy(), share.targets)
    broken.inputs[4] = 1e30  # the square of its gradient overflows
    rest = share.take(np.delete(np.arange(23), 4))
    assert torch.allclose(gradient_of_step(training, broken), gradient_of_step(training, rest), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_private_training_of_16_bit_models_leaves_frozen_parameters_unchanged(dtype: torch.dtype) -> None:
    def module() -> nn.Module:
        made = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Linear(5, 4)).to(dtype)
        made[1].requires_grad_(False)
        return nn.Sequential(Cast(dtype), made)

    training = make(0, module, batch_size=12, privacy={"noise": 0.5})
    frozen = [p.clone() for p in training.model.module.parameters() if not p.requires_grad]
    before = training.model.parameters.clone()
    training.local_update(0)
    assert training.model.parameters.dtype == dtype and not torch.equal(before, training.model.parameters)
    assert all(map(torch.equal, frozen, (p for p in training.model.module.parameters() if not p.requires_grad)))


class Cast(nn.Module):
    """Converts its inputs to `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.to(self.dtype)


class RecurrentTagger(nn.Module):
    """A recurrent network, which torch.vmap cannot compute, whose output layer is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.known = nn.Embedding(7, 5)
        self.reads = nn.GRU(5, 5, batch_first=True)
        self.says = nn.Linear(5, 7, bias=False)
        self.says.weight = self.known.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.says(self.reads(self.known(tokens))[0])


def make_texts(lengths: list[int]) -> Samples:
    """Returns rows of unequal length whose targets are their own tokens."""
    draw = np.random.default_rng(3)
    tokens, starts = draw.integers(0, 7, sum(lengths)), np.cumsum([0, *lengths[:-1]])
    return Samples(Rows(tokens, starts, np.array(lengths), 0), Rows(tokens, starts, np.array(lengths), -100), ids=True)


def test_per_sample_gradients_of_a_recurrent_network_on_texts_of_unequal_length() -> None:
    torch.manual_seed(5)
    model, share = FlatModel(RecurrentTagger()), make_texts([5, 3, 9, 4])
    task = NextToken(NextTokenConfig(), DataSpec((9,), vocabulary=7, target_shape=(9,), inputs="tokens"))
    config = SupervisedConfig(name="supervised", batch_size=4, privacy=NO_NOISE)  # type: ignore[arg-type]
    training = Supervised(config, model, task, NodeSamples(share, share), seed=1, uid=0)
    (inputs, targets), = training.share.batches(1)
    training._step_gradient(inputs, targets, total := torch.zeros(()))
    found, expected = model.gradients(), torch.zeros_like(model.parameters)
    losses = []
    for one, wanted in zip(inputs, targets, strict=True):
        training._gradients.clear()
        loss = functional.cross_entropy(model.module(one[None])[0], wanted)
        loss.backward()
        losses.append(loss.item() * int((wanted != -100).sum()))
        expected += model.gradients() / 4
    assert torch.allclose(found, expected, atol=1e-6) and float(total) == pytest.approx(sum(losses), rel=1e-5)


class LazyShare(LazySamples):
    def __init__(self, share: Samples) -> None:
        self.share = share

    def __len__(self) -> int:
        return len(self.share)

    def take(self, indices: np.ndarray) -> LazyShare:
        return LazyShare(self.share.take(indices))

    def fetch(self, indices: np.ndarray) -> Samples:
        assert len(indices), "an empty batch must not be fetched"
        return self.share.take(indices)


@pytest.mark.parametrize("lazy", [False, True])
def test_steps_for_which_no_sample_is_drawn_are_counted(lazy: bool) -> None:
    share = make_samples()
    training = make(0, linear_net, LazyShare(share) if lazy else share, batch_size=1, local_steps=40, privacy=NO_NOISE)
    sizes = [len(targets) for _, targets in training.share.batches(40)]
    assert 0 in sizes and max(sizes) > 1
    update = training.local_update(0)
    assert (update.steps, training._private.accountant.steps) == (40, 40) and update.loss > 0


def test_poisson_sampling_draws_each_sample_independently_at_the_given_rate() -> None:
    sampler = PoissonSampler(200, 20, seed=1, uid=0)
    assert sampler.rate == 0.1 and PoissonSampler(5, 20, seed=1, uid=0).rate == 1.0
    indices, sizes = sampler.take(3000)
    assert (sampler.epoch, sampler.cursor) == (299, 200)
    assert np.mean(sizes) == pytest.approx(20, abs=0.3) and np.var(sizes) == pytest.approx(18, rel=0.1)  # n p (1 - p)
    each = np.bincount(indices, minlength=200) / 3000
    assert each == pytest.approx(np.full(200, 0.1), abs=0.03)
    steps = np.split(indices, np.cumsum(sizes)[:-1])
    assert all(len(np.unique(step)) == len(step) for step in steps)
    together = np.mean([{0, 1} <= {*step} for step in steps])
    assert together == pytest.approx(0.01, abs=0.006)
    later = PoissonSampler(200, 20, seed=1, uid=0)
    later.epoch, later.cursor = 7, 60
    assert np.array_equal(later.take(1)[0], steps[73])


@pytest.mark.parametrize(("checkpoint", "mixes", "steps"), [(0, (), 18), (0, (4, 5), 12), (2, (), 21), (2, (3, 5), 15)])
def test_a_node_that_lost_its_state_counts_the_steps_that_it_may_have_made(
    checkpoint: int, mixes: tuple[int, ...], steps: int
) -> None:
    """The node may have died in round 5, in which it begins again, after its steps. Before its checkpoint, it had come
    back once already, with three steps that it may have made twice."""
    keys: dict[str, Any] = {"batch_size": 12, "local_steps": 3, "privacy": {"noise": 1.0}}
    before, training = make(**keys), make(**keys)
    before.skip_to(0)
    run_rounds(before, range(checkpoint))
    for _ in range(2):  # another generation may begin before the node has begun a round
        if checkpoint:
            training.load_state_dict(before.state_dict())
        training.skip_to(5, lambda round: round not in mixes)
        assert training._private.accountant.steps == steps


@pytest.mark.parametrize("loads", [False, True])
def test_epsilon_is_infinite_if_the_number_of_lost_steps_is_unknown(loads: bool) -> None:
    keys: dict[str, Any] = {"batch_size": 12, "local_seconds": 0.1, "privacy": {"noise": 1.0}}
    before, training = make(**keys), make(**keys)
    run_rounds(before, range(2))
    if loads:
        training.load_state_dict(before.state_dict())
    training.skip_to(5)
    training.local_update(5)
    assert training.measure_further() == {"epsilon": math.inf}


def test_a_node_that_has_its_state_counts_no_steps_of_rounds_that_it_skips() -> None:
    training = make(batch_size=12, local_steps=3, privacy={"noise": 1.0})
    run_rounds(training, range(2))
    training.skip_to(5)
    assert training._private.accountant.steps == 6


def test_a_state_without_privacy_cannot_be_resumed_privately() -> None:
    state = make(batch_size=12).state_dict()
    with pytest.raises(CheckpointError, match="privacy"):
        make(batch_size=12, privacy={}).load_state_dict(state)


@pytest.mark.parametrize(("keys", "text"), [
    ({"shuffle": False}, "must be true with privacy"),
    ({"drop_last": True}, "must be false with privacy"),
    ({"sampling": "resample"}, "must be fixed with privacy"),
    ({"compile": True}, "must be false with privacy"),
    ({"amp": "fp16"}, "must not be fp16"),
])  # fmt: skip
def test_options_that_exclude_each_other_are_refused(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SupervisedConfig.model_validate({"name": "supervised", "privacy": {}, **keys})


@pytest.mark.parametrize("section", [{"clip": 0}, {"noise": -1}, {"delta": 0}, {"delta": 1}, {"clip": math.inf}])
def test_privacy_numbers_out_of_range_are_refused(section: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="privacy"):
        SupervisedConfig.model_validate({"name": "supervised", "privacy": section})


def test_a_sample_whose_loss_is_not_a_number_counts_as_zero() -> None:
    task = Classification(ClassificationConfig(), DataSpec((2,), num_classes=3))
    module = nn.Linear(2, 3)
    gradients = PrivateGradients(privacy.PrivacyConfig(noise=0), module, task,
                                 lambda forward, inputs, _: forward(inputs).sum() * 0 / 0, batch_size=4, seed=1, uid=0)
    gradients.compute(torch.ones(4, 2), torch.zeros(4, dtype=torch.int64), torch.zeros(()),
                      PoissonSampler(4, 4, seed=1, uid=0))  # fmt: skip
    assert [None if p.grad is None else float(p.grad.abs().max()) for p in module.parameters()] == [0.0, 0.0]


# -- epsilon --------------------------------------------------------------------------------------------------


def test_epsilon_without_opacus_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert epsilon_of({}, 1e-5) == epsilon_of({(1.0, 0.5): 0}, 1e-5) == 0
    assert epsilon_of({(0.0, 0.5): 1}, 1e-5) == math.inf
    monkeypatch.setattr(privacy, "is_installed", lambda: False)
    privacy._opacus.cache_clear()
    with pytest.raises(EnvironmentFault, match=r"decentnode\[privacy\]"):
        epsilon_of({(1.25, 0.125): 7}, 1e-5)


@needs_opacus
def test_epsilon_equals_that_of_opacus() -> None:
    from opacus.accountants import RDPAccountant

    library, ours, other = RDPAccountant(), Accountant(1.3), Accountant(2.0)
    for accountant, noise, rate, steps in ((ours, 1.3, 0.1, 40), (ours, 1.3, 0.2, 10), (other, 2.0, 0.1, 5)):
        for _ in range(steps):
            library.step(noise_multiplier=noise, sample_rate=rate)
            accountant.count(rate)
    joined = Accountant(1.3)
    joined.load_state_dict([*ours.state_dict(), *other.state_dict()])
    assert joined.steps == 55
    for delta in (1e-5, 1e-3):
        assert joined.epsilon(delta) == pytest.approx(library.get_epsilon(delta), rel=1e-9)
    assert ours.epsilon(1e-5) < joined.epsilon(1e-5)


@needs_opacus
def test_epsilon_of_a_single_step_without_sampling_is_above_the_exact_one() -> None:
    """The Gaussian mechanism's delta in closed form (Balle and Wang 2018, theorem 8, arXiv 1805.06530)."""
    def cumulative(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    noise = 2.0
    found = epsilon_of({(noise, 1.0): 1}, 1e-5)
    exact = next(e for e in np.arange(0.01, 10, 0.01)
                 if cumulative(0.5 / noise - e * noise) - math.exp(e) * cumulative(-0.5 / noise - e * noise) <= 1e-5)
    assert exact <= found <= 1.3 * exact


@needs_opacus
def test_epsilon_is_measured_and_continues_after_a_resume() -> None:
    training = make(batch_size=12, local_steps=3, privacy={"noise": 1.0, "delta": 1e-4})
    assert training.measure_further() == {"epsilon": 0.0}
    run_rounds(training, range(2))
    resumed = make(batch_size=12, local_steps=3, privacy={"noise": 1.0, "delta": 1e-4})
    resumed.load_state_dict(training.state_dict())
    resumed.local_update(2)
    assert resumed.measure_further() == {"epsilon": epsilon_of({(1.0, 12 / 23): 9}, 1e-4)}
    assert resumed.measure_further(merged=True) == {}
    assert make(privacy={"noise": 0}).further == make().further == ()
