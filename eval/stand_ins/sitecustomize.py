"""Stands in for a GPU, NCCL and a few packages, so that scripts written for them run on a CPU. eval/originals.py puts
this folder on PYTHONPATH, only for the processes of such scripts.

What it replaces: `torch.cuda` answers as if there were one GPU per rank, whose tensors are on the CPU; `nccl` is gloo,
with the mean as an additional operation; memory is not pinned; packages that are not installed come from this folder
(see PACKAGES). It also changes the import: `decent_dp` and `DistOptimizers` are those of decentnode.compat.
"""

# ruff: noqa: ARG001, ARG002  # signatures are those of what is stood in for

import functools
import importlib
import importlib.abc
import importlib.machinery
import os
import sys

PACKAGES = {
    "torchvision": "vision", "nvidia.dali": "dali", "wandb": "small", "tomli_w": "small", "tokenizers": "small",
    "loguru": "small", "tqdm": "small",
}  # fmt: skip
"""Package -> the file of this folder that stands in for it and its modules."""


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of PACKAGES that no other finder has found."""

    def find_spec(self, name, path=None, target=None):
        package = next((known for known in PACKAGES if name == known or name.startswith(f"{known}.")), None)
        if package is None and not any(known.startswith(f"{name}.") for known in PACKAGES):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        package = next((p for p in PACKAGES if module.__name__ == p or module.__name__.startswith(f"{p}.")), None)
        if package is not None:
            source = importlib.import_module(PACKAGES[package])
            module.__dict__.update({key: value for key, value in vars(source).items() if not key.startswith("__")})


def without_gpu():
    import torch
    import torch.distributed as dist

    def on_cpu(value):
        return torch.device("cpu") if str(value).startswith("cuda") else value

    def moved(method):
        @functools.wraps(method)
        def to(self, *args, **kwargs):
            return method(self, *map(on_cpu, args), **{key: on_cpu(value) for key, value in kwargs.items()})
        return to

    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("STAND_IN_GPUS", "1")))
    for kind in (torch.Tensor, torch.nn.Module):
        kind.to, kind.cuda = moved(kind.to), lambda self, *_, **__: self
    torch.Tensor.pin_memory = lambda self, *_: self
    for name, answer in (("is_available", True), ("device_count", ranks), ("current_device", 0), ("set_device", None),
                         ("synchronize", None), ("max_memory_allocated", 0), ("manual_seed", None)):  # fmt: skip
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    loader = torch.utils.data.DataLoader
    begin = loader.__init__
    loader.__init__ = functools.wraps(begin)(lambda self, *a, **k: begin(self, *a, **{**k, "pin_memory": False}))
    join, reduce = dist.init_process_group, dist.all_reduce

    def init_process_group(backend=None, *args, device_id=None, **kwargs):
        return join("gloo" if backend in (None, "nccl") else backend, *args, **kwargs)

    def all_reduce(tensor, op=dist.ReduceOp.SUM, *args, **kwargs):
        if op != dist.ReduceOp.AVG:
            return reduce(tensor, op, *args, **kwargs)
        reduce(tensor)
        rounding = None if tensor.is_floating_point() else "floor"
        return tensor.copy_(tensor.div(dist.get_world_size(), rounding_mode=rounding))

    def all_reduce_multigpu(tensors, op=dist.ReduceOp.SUM, async_op=False):
        """Exists in torch before 2.1."""
        for tensor in tensors:
            all_reduce(tensor, op)

    # A build for CUDA would ask the GPU for its name, and optimizers for its stream
    dist.is_nccl_available, torch.accelerator.current_accelerator = lambda: False, lambda *_, **__: None
    dist.init_process_group, dist.all_reduce = init_process_group, all_reduce
    dist.all_reduce_multigpu = all_reduce_multigpu


def other_import():
    import decentnode.compat.decent_dp as decent_dp
    from decentnode.compat import sdtl

    sys.modules["decent_dp"], sys.modules["DistOptimizers"] = decent_dp, sdtl


if os.environ.get("STAND_IN_FOR_GPU") == "1":  # not in other processes that find this folder
    sys.meta_path.append(StandIns())
    without_gpu()
    other_import()
