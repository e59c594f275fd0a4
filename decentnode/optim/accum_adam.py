"""Adam with moments over windows of several steps, for small batches on many nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from decentnode.optim import kernel

BLOCK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Elements that the fused step updates at a time, so that its scratch memory stays in the cache."""
FUSED_TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class AccumAdam(Optimizer):
    """Adam with moments over windows of `accum_iter` gradients, and an update in every step.

    Wang et al., ICLR 2025 (arXiv 2410.11998), algorithm 4 and appendix C. In step t of window k = ceil(t / s):

        m' = b1 m + (1 - b1) g,  v' = b2 v + (1 - b2) g^2        (not stored)
        x <- x - lr / (1 - b1^k) m' / (sqrt(v') / sqrt(1 - b2^k) + eps)

    and at the end of a window m and v are updated from the mean of its gradients. Larger windows give larger,
    large-batch-like steps; a good size grows with the number of nodes. With accum_iter 1 the result is bitwise that of
    torch.optim.Adam. weight_decay is added to the gradient (L2); in AccumAdamW it shrinks the parameters.
    """

    _decoupled = False

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, accum_iter: int = 4, *, fused: bool | None = None, maximize: bool = False,
    ) -> None:
        """fused: True uses torch's fused Adam, block by block; False one operation after the other over all parameters.
        None is like True where the parameters allow it, but uses one compiled loop for float32 on a CPU, which the
        first step compiles if there is a C compiler.

        Raises ValueError for values out of range.
        """
        for name, value, good in (
            ("lr", lr, lr >= 0), ("eps", eps, eps >= 0), ("weight_decay", weight_decay, weight_decay >= 0),
            ("betas", betas, all(0 <= beta < 1 for beta in betas)),
            ("accum_iter", accum_iter, isinstance(accum_iter, int) and accum_iter >= 1),
        ):  # fmt: skip
            if not good:
                raise ValueError(f"{name} is out of range: {value!r}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "accum_iter": accum_iter,
                    "fused": fused, "maximize": maximize}  # fmt: skip
        super().__init__(params, defaults)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads states, also those of Decent-DP's class, whose groups have fewer options, and whose moments are stored
        multiplied by their betas."""
        theirs = any("fused" not in group for group in state_dict["param_groups"])
        super().load_state_dict(state_dict)
        if not theirs:
            return
        for group in self.param_groups:
            group.update({key: group.get(key, self.defaults[key]) for key in ("fused", "maximize")})
            for state in (self.state[p] for p in group["params"] if self.state.get(p)):
                moments = zip(("exp_avg", "exp_avg_sq"), group["betas"], strict=True)
                state.update({"step": int(state["step"])} | {key: state[key] / beta for key, beta in moments})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Updates all parameters that have a gradient; returns the loss of `closure` if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            batches: dict[tuple[Any, ...], list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise RuntimeError("AccumAdam does not take sparse gradients")
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    for name in ("exp_avg", "exp_avg_sq"):
                        state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)
                    if group["accum_iter"] > 1:
                        state["accum_grad"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                state["step"] += 1
                batches.setdefault((state["step"], p.device, p.dtype), []).append(p)
            for params in batches.values():
                fits = params[0].dtype in FUSED_TYPES and params[0].device.type in BLOCK_ELEMENTS
                if fits and group["fused"] is not False and all(_is_dense(p) for p in params):
                    self._update_fused(group, params)
                else:
                    self._update(group, params)
        return loss

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Updates parameters that have taken equally many steps, one operation after the other."""
        states = [self.state[p] for p in params]
        grads = [p.grad for p in params if p.grad is not None]
        if group["maximize"]:
            grads = list(torch._foreach_neg(grads))
        if group["weight_decay"]:
            if self._decoupled:
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            else:
                grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
        beta1, beta2 = group["betas"]
        size, step = group["accum_iter"], states[0]["step"]
        window = -(-step // size)
        first = [state["exp_avg"] for state in states]
        second = [state["exp_avg_sq"] for state in states]
        if size == 1:
            self._advance(first, second, grads, beta1, beta2)
            self._apply(group, params, first, list(torch._foreach_sqrt(second)), window)
            return
        sums = [state["accum_grad"] for state in states]
        torch._foreach_add_(sums, grads, alpha=1 / size)
        ahead = list(torch._foreach_lerp(first, grads, 1 - beta1))
        root = list(torch._foreach_mul(second, beta2))
        torch._foreach_addcmul_(root, grads, grads, 1 - beta2)
        torch._foreach_sqrt_(root)
        self._apply(group, params, ahead, root, window)
        if step % size == 0:
            self._advance(first, second, sums, beta1, beta2)
            torch._foreach_zero_(sums)

    def _update_fused(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Does the same as `_update`, in one pass over parameters, gradients and state."""
        beta1, beta2 = group["betas"]
        size, step, decay = group["accum_iter"], self.state[params[0]]["step"], group["weight_decay"]
        device = params[0].device
        # torch.full, because torch.tensor would copy the number from the host to the device
        window = torch.full((), float(-(-step // size)), dtype=torch.float32, device=device)
        adam = torch._fused_adamw_ if self._decoupled else torch._fused_adam_

        def apply(p: list[Tensor], g: list[Tensor], m: list[Tensor], v: list[Tensor]) -> None:
            adam(p, g, m, v, [], [window] * len(p), lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=decay,
                 eps=group["eps"], amsgrad=False, maximize=group["maximize"])  # fmt: skip

        states = [self.state[p] for p in params]
        # copied where the layout or dtype differs from the parameter's (for the dtype see `Tensor.grad_dtype`)
        grads: list[Tensor] = [
            g if (g.stride(), g.dtype) == (p.stride(), p.dtype) else torch.empty_like(p).copy_(g)
            for p in params if (g := p.grad) is not None
        ]  # fmt: skip
        if size == 1:
            apply(params, grads, [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states])
            return
        rows = [(p, g, s["exp_avg"], s["exp_avg_sq"], s["accum_grad"]) for p, g, s in
                zip(params, grads, states, strict=True)]  # fmt: skip
        if group["fused"] is None and kernel.is_usable(params):
            kernel.step(
                rows, lr=float(group["lr"]), betas=group["betas"], eps=group["eps"], maximize=group["maximize"],
                l2=0.0 if self._decoupled else decay, shrink=1 - group["lr"] * decay if self._decoupled else 1.0,
                window=-(-step // size), accum_iter=size, last=step % size == 0,
            )  # fmt: skip
            return
        block = BLOCK_ELEMENTS[device.type]
        scratch = torch.empty(2, min(block, sum(p.numel() for p in params)), dtype=params[0].dtype, device=device)
        sign = -1 / size if group["maximize"] else 1 / size
        for xs, gs, m, v, sums in _blocks(rows, block):
            lengths = [part.numel() for part in xs]
            used = sum(lengths)
            ahead, root = (list(row[:used].split(lengths)) for row in scratch)
            torch._foreach_copy_(ahead, m)
            torch._foreach_copy_(root, v)
            torch._foreach_add_(sums, gs, alpha=sign)
            if decay and not self._decoupled:
                torch._foreach_add_(sums, xs, alpha=decay / size)
            apply(xs, gs, ahead, root)
            if step % size == 0:
                self._advance(m, v, sums, beta1, beta2)
                torch._foreach_zero_(sums)

    @staticmethod
    def _advance(first: list[Tensor], second: list[Tensor], grads: list[Tensor], beta1: float, beta2: float) -> None:
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)

    @staticmethod
    def _apply(
        group: dict[str, Any], params: list[Tensor], first: list[Tensor], root: list[Tensor], window: int
    ) -> None:
        """Sets x <- x - lr/(1 - b1^k) first / (root / sqrt(1 - b2^k) + eps); overwrites root."""
        beta1, beta2 = group["betas"]
        torch._foreach_div_(root, (1 - beta2**window) ** 0.5)
        torch._foreach_add_(root, group["eps"])
        torch._foreach_addcdiv_(params, first, root, -(group["lr"] / (1 - beta1**window)))


class AccumAdamW(AccumAdam):
    """AccumAdam with decoupled weight decay (Loshchilov and Hutter 2019): x <- (1 - lr weight_decay) x first."""

    _decoupled = True


def _is_dense(tensor: Tensor) -> bool:
    """Returns whether a tensor's elements fill one piece of memory, in rows or with channels last."""
    channels_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return channels_last or tensor.is_contiguous()


def _blocks(rows: Sequence[tuple[Tensor, ...]], block: int) -> Iterator[list[list[Tensor]]]:
    """Flattens tensors of all rows (each of one dense layout) and cuts them; yields a list of pieces per column.

    The pieces of one list have at most `block` elements in total.
    """
    columns: list[list[Tensor]] = [[] for _ in range(5)]
    filled = 0
    for row in rows:
        flat = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in row]
        total, at = flat[0].numel(), 0
        while at < total:
            take = min(block - filled, total - at)
            for column, tensor in zip(columns, flat, strict=True):
                column.append(tensor[at : at + take])
            at, filled = at + take, filled + take
            if filled == block:
                yield columns
                columns, filled = [[] for _ in range(5)], 0
    if filled:
        yield columns
