"""What only CUDA runs is called as this torch has it: its names, and its arguments in their order."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import torch
from torch._C import _distributed_c10d as c10d


def stub(name: str) -> ast.Module:
    """torch's own description of a compiled module, which builds without CUDA have, too."""
    path = Path(torch.__file__).parent / "_C" / f"{name}.pyi"
    if not path.exists():
        pytest.skip(f"this torch has no {path.name}")
    return ast.parse(path.read_text())


def inside(tree: ast.Module | ast.ClassDef, name: str) -> ast.ClassDef:
    return next(each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name)


def fields(tree: ast.ClassDef) -> set[str]:
    found = [each.target for each in tree.body if isinstance(each, ast.AnnAssign)]
    return {each.id for each in found if isinstance(each, ast.Name)}


def arguments(tree: ast.ClassDef, name: str) -> list[str]:
    method = next(each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == name)
    return [each.arg for each in method.args.args]


@pytest.mark.skipif(torch.__version__ < "2.7", reason="torch's description of itself was another one")
def test_nccl() -> None:
    made = inside(stub("_distributed_c10d"), "ProcessGroupNCCL")
    assert arguments(made, "__init__") == ["self", "store", "rank", "size", "options"]
    assert arguments(made, "_set_default_timeout") == ["self", "timeout"] and arguments(made, "abort") == ["self"]
    assert fields(inside(made, "Options")) >= {"config", "is_high_priority_stream"}
    assert "max_ctas" in fields(inside(made, "NCCLConfig"))
    for name in ("eager_connect_single_device", "abort", "shutdown"):
        assert hasattr(c10d.Backend, name)
    for name in ("_start_coalescing", "_end_coalescing", "_register_backend", "_set_default_backend",
                 "bound_device_id"):  # fmt: skip
        assert hasattr(c10d.ProcessGroup, name)


def test_memory_and_events_of_other_processes() -> None:
    for name in ("_share_cuda_", "_new_shared_cuda"):
        assert hasattr(torch.UntypedStorage, name)
    event = torch.cuda.Event
    assert list(inspect.signature(event.__new__).parameters)[:4] == ["cls", "enable_timing", "blocking", "interprocess"]
    assert list(inspect.signature(event.from_ipc_handle).parameters) == ["device", "handle"]
    assert list(inspect.signature(event.ipc_handle).parameters) == ["self"]
    assert issubclass(getattr(torch, "AcceleratorError", torch.OutOfMemoryError), RuntimeError)  # caught as that
