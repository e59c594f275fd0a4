"""Runs forward and backward passes through torch.compile without changing the module or its parameters' memory."""

from __future__ import annotations

import importlib.util
import os
import shutil
import types
import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from decentnode.config.component import Settings
from decentnode.errors import EnvironmentFault

Forward = Callable[[Tensor], Any]
CPU_COMPILERS = ("g++", "clang++", "c++")


class CompileConfig(Settings):
    """How torch.compile compiles the model's training steps."""

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """Mode of torch.compile. The modes with max-autotune choose kernels by timing them, so two runs may differ in their
    last bits."""
    backend: str = "inductor"
    """Backend of torch.compile: inductor, or one that is registered with torch._dynamo."""
    dynamic: bool | None = None
    """false: every shape of a batch gets its own code, at most 8 shapes, so that the same batch always gives the same
    bits. true: one code for all shapes. Default: true for rows of unequal length, else false."""
    fullgraph: bool = False
    """Whether a model that cannot be compiled in one piece is an error."""


def compiled(module: nn.Module, config: CompileConfig, device: torch.device) -> Forward:
    """Returns the forward pass of `module`, which is compiled when it is first called with a shape, in seconds to
    minutes.

    config: its `dynamic` must be true or false. The module itself is not changed: its parameters may move to other
    storage, and direct calls of it run without the compiler. Raises EnvironmentFault if this machine has no compiler,
    or torch does not have this backend; calls raise errors that `failure_of` translates.
    """
    import torch._dynamo  # takes 72 MB and a second: only imported if needed
    import torch._inductor.config as inductor

    if config.backend == "inductor":
        _needs_compiler(device)
        inductor.compile_threads = 1  # no pool of compiler processes for each node
        inductor.fx_graph_cache = True  # nodes of a machine, and runs, share what one of them compiled
    elif config.backend not in (known := torch._dynamo.list_backends(exclude_tags=())):
        raise EnvironmentFault(f"training.compile.backend must be one of {', '.join(known)}, got {config.backend!r}")
    # By default, torch falls back to the plain module once there are too many shapes, which would give different bits
    # after a resume. torch 2.6 only has this name; later versions have it beside a new one, as they do for
    # `cache_size_limit`.
    torch._dynamo.config.fail_on_cache_limit_hit = True
    mode = None if config.mode == "default" else config.mode
    made: Forward = torch.compile(
        _own_code(module, config), mode=mode, backend=config.backend, dynamic=config.dynamic, fullgraph=config.fullgraph
    )
    return made


def reuses_memory(config: CompileConfig, device: torch.device) -> bool:
    """Returns whether steps run as CUDA graphs. Then the next pass overwrites gradients that autograd keeps without
    copying (pytorch #169545), with or without an error."""
    modes = ("reduce-overhead", "max-autotune")
    return device.type == "cuda" and (config.mode in modes or config.backend == "cudagraphs")


class _Code:
    """A code object that the compiler uses as its cache key for all modules of one kind."""

    def __init__(self) -> None:
        def forward(batch: Tensor) -> Any:
            return module(batch)

        module: nn.Module = nn.Identity()
        self.code = forward.__code__.replace()


_CODES: weakref.WeakValueDictionary[tuple[str, str], _Code] = weakref.WeakValueDictionary()
"""(the module's text, the compile config's text) -> the code object shared by such modules, as long as one of them
lives."""


def _own_code(module: nn.Module, config: CompileConfig) -> Forward:
    """Returns the module's forward pass as a function whose code object is only shared by equal modules.

    The compiler stores compiled code at the code object of the outermost function, and counts shapes there. The code
    object of a module's class would be shared by all models and runs of a process, such as `nn.Sequential.forward` by
    every nn.Sequential. With a code object per kind of module, the nodes of one process still share what one of them
    compiled, and it is released with the last of them.
    """
    key = str(module), repr(config)
    kept = _CODES.get(key)
    if kept is None:
        kept = _CODES[key] = _Code()

    def forward(batch: Tensor) -> Any:
        return module(batch)

    found = types.FunctionType(kept.code, globals(), "forward", None, forward.__closure__)
    found.kept = kept  # type: ignore[attr-defined]
    return found


def _needs_compiler(device: torch.device) -> None:
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            raise EnvironmentFault("training.compile needs triton for a GPU, which is not installed; install it, leave "
                                   "the key out, or set backend: cudagraphs")  # fmt: skip
        return
    wanted = os.environ.get("CXX")
    if not any(shutil.which(name) for name in ([wanted] if wanted else CPU_COMPILERS)):
        tried = f"CXX={wanted}" if wanted else ", ".join(CPU_COMPILERS)
        raise EnvironmentFault(f"training.compile needs a C++ compiler on a CPU, and there is none here (tried "
                               f"{tried}); install one, or leave the key out")  # fmt: skip


def failure_of(error: Exception) -> EnvironmentFault | None:
    """Returns an error message for the user about an exception of the compiler; None for any other exception."""
    import torch._dynamo.exc as exceptions

    if isinstance(error, exceptions.FailOnRecompileLimitHit):
        return EnvironmentFault("training.compile: batches have more than "
                                f"{torch._dynamo.config.cache_size_limit} shapes; dynamic: true makes one code for all")
    if isinstance(error, exceptions.TorchDynamoException):
        first = str(error).strip().split("\n")[0]
        return EnvironmentFault(f"training.compile: this model cannot be compiled here: {first:.300}")
    return None
