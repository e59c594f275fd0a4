"""Forward and backward passes through torch.compile, of a module whose parameters stay where they are."""

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
    """Returns the forward pass of `module`, compiled when a shape is first seen, in seconds to minutes.

    config: its `dynamic` is true or false. The module itself stays as it is: its parameters may move to other storage,
    and whatever calls it directly runs without the compiler. Raises EnvironmentFault where this machine has no
    compiler, or torch not this backend; calls raise what `failure_of` translates.
    """
    import torch._dynamo  # 72 MB in a second: only where it is wanted
    import torch._inductor.config as inductor

    if config.backend == "inductor":
        _needs_compiler(device)
        inductor.compile_threads = 1  # no pool of processes beside each node
        inductor.fx_graph_cache = True  # nodes of a machine, and runs, share what one of them compiled
    elif config.backend not in (known := torch._dynamo.list_backends(exclude_tags=())):
        raise EnvironmentFault(f"training.compile.backend must be one of {', '.join(known)}, got {config.backend!r}")
    # Code that is replaced by the plain module once there are too many shapes would give other bits after a resume.
    # torch 2.6 has this name alone; later ones have it beside a new one, as they have the next.
    torch._dynamo.config.fail_on_cache_limit_hit = True
    mode = None if config.mode == "default" else config.mode
    made: Forward = torch.compile(
        _own_code(module, config), mode=mode, backend=config.backend, dynamic=config.dynamic, fullgraph=config.fullgraph
    )
    return made


def reuses_memory(config: CompileConfig, device: torch.device) -> bool:
    """Whether steps run as CUDA graphs: the next pass then overwrites gradients that autograd has taken over as they
    are (pytorch #169545), with an error or without."""
    modes = ("reduce-overhead", "max-autotune")
    return device.type == "cuda" and (config.mode in modes or config.backend == "cudagraphs")


class _Code:
    """A code object that is the compiler's key for all modules of one kind."""

    def __init__(self) -> None:
        def forward(batch: Tensor) -> Any:
            return module(batch)

        module: nn.Module = nn.Identity()
        self.code = forward.__code__.replace()


_CODES: weakref.WeakValueDictionary[tuple[str, str], _Code] = weakref.WeakValueDictionary()
"""By what a module is and how it is compiled: of modules that live."""


def _own_code(module: nn.Module, config: CompileConfig) -> Forward:
    """Returns the module's forward pass as a function whose code object only modules like it share.

    The compiler keeps what it compiled at the code object of the outermost function, and counts shapes there. That of a
    module's class would be one for all models and runs of a process: `nn.Sequential.forward` of every nn.Sequential.
    Nodes of one process still share what one of them compiled, and with the last of them it goes.
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
    """Returns what to tell the user of an error that the compiler raised; None for any other error."""
    import torch._dynamo.exc as exceptions

    if isinstance(error, exceptions.FailOnRecompileLimitHit):
        return EnvironmentFault("training.compile: batches have more than "
                                f"{torch._dynamo.config.cache_size_limit} shapes; dynamic: true makes one code for all")
    if isinstance(error, exceptions.TorchDynamoException):
        first = str(error).strip().split("\n")[0]
        return EnvironmentFault(f"training.compile: this model cannot be compiled here: {first:.300}")
    return None
