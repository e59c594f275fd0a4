"""AccumAdam and AccumAdamW: equal to their definition, to torch's Adam with a window of one, and in every
implementation."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from decentnode.optim import (
    AccumAdam,
    AccumAdamW,
    kernel,
    lr_scheduler_fn_cosine_with_warmup,
    optim_fn_accum_adam,
    optim_fn_accum_adamw,
    optim_fn_adam,
    optim_fn_adamw,
)
from decentnode.optim.functions import DECAYED

SHAPES = [(33, 7), (129,), (), (4, 3, 5, 5)]


def parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Returns parameters of SHAPES, the last of them in channels_last."""
    torch.manual_seed(seed)
    params = [torch.randn(shape, dtype=torch.float32).to(dtype) for shape in SHAPES]
    params[3] = params[3].to(memory_format=torch.channels_last)
    return [p.requires_grad_() for p in params]


def draw_gradients(params: list[Tensor], generator: torch.Generator) -> None:
    for p in params:
        p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("ours", "theirs", "decay"), [
    (AccumAdam, torch.optim.Adam, 0.0), (AccumAdam, torch.optim.Adam, 0.1), (AccumAdamW, torch.optim.AdamW, 0.1),
])  # fmt: skip
def test_a_window_of_one_has_the_bits_of_torchs_adam(ours: type, theirs: type, decay: float, fused: bool) -> None:
    a, b = parameters(), parameters()
    mine = ours(a, lr=0.01, weight_decay=decay, accum_iter=1, fused=fused)
    other = theirs(b, lr=0.01, weight_decay=decay, fused=fused, foreach=None if fused else True)
    g, h = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    for _ in range(30):
        draw_gradients(a, g)
        draw_gradients(b, h)
        mine.step()
        other.step()
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="gradients have their parameters' dtype in this torch")
@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("window", [1, 2])
def test_gradients_of_another_dtype_are_converted(fused: bool | None, window: int) -> None:
    """The compiled loop once read gradients of 16 bits as 32 bits, past their end."""
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        p = torch.zeros(kernel.MIN_ELEMENTS).requires_grad_()
        p.grad_dtype = dtype
        p.grad = torch.linspace(-1, 1, p.numel()).to(torch.bfloat16).to(dtype)
        optimizer = AccumAdam([p], lr=0.01, accum_iter=window, fused=fused)
        for _ in range(3):
            optimizer.step()
        results.append(p.detach())
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_steps_are_counted_in_float32_whatever_the_default_dtype_is(
    dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    """In bfloat16, 256 + 1 is 256."""
    results = []
    for default in ("float32", "another"):
        if default == "another":
            request.getfixturevalue("default_dtype")
        p = torch.zeros(5, dtype=torch.float32).requires_grad_()
        p.grad = torch.linspace(-1, 1, 5, dtype=torch.float32)
        optimizer = AccumAdam([p], lr=0.01, accum_iter=1, fused=True)
        optimizer.step()
        optimizer.state[p]["step"] += 255
        optimizer.step()
        results.append(p.detach())
    assert torch.equal(*results)


def reference(x: Tensor, grads: list[Tensor], s: int, lr: float, decay: float, decoupled: bool) -> Tensor:
    """Returns x after steps by the definition in docs/explanation/algorithms.rst, "AccumAdam", in float64."""
    x, b1, b2, eps = x.double().clone(), 0.9, 0.999, 1e-8
    m, v, a = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    for t, g in enumerate(grads, 1):
        k = -(-t // s)
        g = g.double()
        if decoupled:
            x = x * (1 - lr * decay)
        else:
            g = g + decay * x
        mh, vh = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        x = x - lr / (1 - b1**k) * mh / (vh.sqrt() / (1 - b2**k) ** 0.5 + eps)
        a = a + g / s
        if t % s == 0:
            m, v, a = b1 * m + (1 - b1) * a, b2 * v + (1 - b2) * a * a, torch.zeros_like(x)
    return x


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("s", [1, 2, 4, 7])
@pytest.mark.parametrize(("cls", "decay"), [(AccumAdam, 0.0), (AccumAdam, 0.1), (AccumAdamW, 0.1)])
def test_steps_equal_the_definition(cls: type, decay: float, s: int, fused: bool) -> None:
    params = parameters()
    starts = [p.detach().clone() for p in params]
    optimizer = cls(params, lr=0.02, weight_decay=decay, accum_iter=s, fused=fused)
    generator, histories = torch.Generator().manual_seed(2), [[] for _ in params]  # type: ignore[var-annotated]
    for _ in range(23):
        draw_gradients(params, generator)
        for p, grads in zip(params, histories, strict=True):
            grads.append(p.grad.clone())  # type: ignore[union-attr]
        optimizer.step()
    for p, start, grads in zip(params, starts, histories, strict=True):
        expected = reference(start, grads, s, 0.02, decay, cls is AccumAdamW)
        torch.testing.assert_close(p.detach().double(), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.skipif(kernel.library() is None, reason="no C compiler")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("cls", "decay", "maximize"), [
    (AccumAdam, 0.0, False), (AccumAdam, 0.1, True), (AccumAdamW, 0.1, False),
])  # fmt: skip
def test_the_compiled_loop_equals_the_steps_of_torch_operations(
    cls: type, decay: float, maximize: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "MIN_ELEMENTS", 1)
    monkeypatch.setattr(kernel, "CHUNK_ELEMENTS", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    ends_window, run = [], kernel.step
    monkeypatch.setattr(kernel, "step",
                        lambda rows, **kwargs: (ends_window.append(kwargs["last"]), run(rows, **kwargs)))  # fmt: skip
    a, b = parameters(), parameters()
    options = {"lr": 0.02, "weight_decay": decay, "accum_iter": 3, "maximize": maximize}
    mine, other = cls(a, **options), cls(b, **options, fused=False)
    g, h = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    for _ in range(8):
        draw_gradients(a, g)
        draw_gradients(b, h)
        mine.step()
        other.step()
    assert ends_window == [False, False, True, False, False, True, False, False]
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-5, atol=2e-6)
        for name in ("exp_avg", "exp_avg_sq", "accum_grad"):
            torch.testing.assert_close(mine.state[p][name], other.state[q][name], rtol=1e-4, atol=1e-6)


def test_steps_are_taken_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "library", lambda: None)
    p = torch.zeros(kernel.MIN_ELEMENTS, requires_grad=True)
    optimizer = AccumAdam([p], lr=0.1)
    p.grad = torch.ones_like(p)
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full_like(p, -0.1))


@pytest.mark.parametrize("s", [1, 4, 16])
def test_a_constant_gradient_gives_the_same_trajectory_for_every_window(s: int) -> None:
    p = torch.zeros(5, requires_grad=True)
    optimizer = AccumAdam([p], lr=0.01, accum_iter=s)
    for _ in range(40):
        p.grad = torch.full((5,), 0.3)
        optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((5,), -0.4), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_larger_windows_have_smaller_second_moments() -> None:
    """Gradients of mean 0.1 and variance 1: the mean square of a mean of s of them is 0.01 + 1 / s."""
    moments = []
    for s in (1, 4, 16):
        p, generator = torch.zeros(4000, requires_grad=True), torch.Generator().manual_seed(3)
        optimizer = AccumAdam([p], accum_iter=s)
        for _ in range(1024):
            p.grad = 0.1 + torch.randn(4000, generator=generator)
            optimizer.step()
        k = 1024 // s
        moments.append(float(optimizer.state[p]["exp_avg_sq"].mean()) / (1 - 0.999**k))
    assert moments == pytest.approx([1.01, 0.26, 0.0725], rel=0.05)


def test_a_restart_from_a_state_dict_changes_no_bit() -> None:
    straight, cut = parameters(), parameters()
    a, b = AccumAdamW(straight, accum_iter=4), AccumAdamW(cut, accum_iter=4)
    g, h = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    for step in range(11):
        draw_gradients(straight, g)
        a.step()
        draw_gradients(cut, h)
        if step == 5:
            state = copy.deepcopy(b.state_dict())
            b = AccumAdamW(cut, accum_iter=4)
            b.load_state_dict(state)
        b.step()
    assert all(torch.equal(x, y) for x, y in zip(straight, cut, strict=True))


def test_parameters_without_gradients_do_not_change_and_block_sizes_change_no_bit(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    from decentnode.optim import accum_adam

    whole, parts = parameters(), parameters()
    a = AccumAdam(whole, accum_iter=3)
    b = AccumAdam(parts, accum_iter=3)
    g, h = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    for _ in range(5):
        draw_gradients(whole, g)
        draw_gradients(parts, h)
        whole[1].grad = parts[1].grad = None
        a.step()
        with monkeypatch.context() as patch:
            patch.setitem(accum_adam.BLOCK_ELEMENTS, "cpu", 50)
            b.step()
    assert all(torch.equal(x, y) for x, y in zip(whole, parts, strict=True))
    assert torch.equal(whole[1], parameters()[1]) and whole[1] not in a.state


@pytest.mark.parametrize("wrong", [
    {"lr": -1}, {"betas": (1.0, 0.9)}, {"accum_iter": 0}, {"accum_iter": 1.5}, {"eps": -1},
])  # fmt: skip
def test_options_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="out of range"):
        AccumAdam(parameters(), **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("maker", [optim_fn_adam, optim_fn_adamw, optim_fn_accum_adam, optim_fn_accum_adamw])
def test_weight_decay_applies_to_weights_but_not_to_norms_and_biases(maker: object) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
    named = list(model.named_parameters())
    for params in (named, [(p, name) for name, p in named]):
        optimizer = maker(params, lr=0.1, weight_decay=0.5)  # type: ignore[operator]
        decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
        assert [decay[id(p)] for _, p in named] == [0.5, 0, 0, 0, 0.5, 0]
    for settings in ({"beta1": 0.8, "beta2": 0.9}, {"betas": (0.8, 0.9)}):  # as Decent-DP names them, and as torch does
        groups = maker(named, **settings).param_groups  # type: ignore[operator]
        assert all(group["betas"] == (0.8, 0.9) for group in groups)
    setattr(named[0][1], DECAYED, False)
    assert len(optim_fn_adam(named, weight_decay=0.5).param_groups[0]["params"]) == 1


def test_the_schedule_warms_up_and_follows_a_cosine() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    scheduler = lr_scheduler_fn_cosine_with_warmup(optimizer, t_max=20, t_warmup=5, cosine_eta_min=0.1)
    rates = []
    for _ in range(25):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[0] == pytest.approx(0.005) and rates[5] == 0.5 and rates[20:] == pytest.approx([0.1] * 5)
    assert rates[:6] == sorted(rates[:6]) and rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[12] == pytest.approx(0.1 + 0.4 * 0.5523, abs=1e-3)
    with pytest.raises(ValueError, match="t_warmup"):
        lr_scheduler_fn_cosine_with_warmup(optimizer, 5, 5)
