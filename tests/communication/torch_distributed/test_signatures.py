"""The functions of torch that only runs with CUDA call exist in this torch, with the expected arguments."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import torch
from torch._C import _distributed_c10d as c10d


def parse_stub(name: str) -> ast.Module:
    """Returns the type stub of a compiled module of torch, which builds without CUDA contain, too."""
    path = Path(torch.__file__).parent / "_C" / f"{name}.pyi"
    if not path.exists():
        pytest.skip(f"this torch has no {path.name}")
    return ast.parse(path.read_text())


def find_class(tree: ast.Module | ast.ClassDef, name: str) -> ast.ClassDef:
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def fields(tree: ast.ClassDef) -> set[str]:
    targets = [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def arguments(tree: ast.ClassDef, name: str) -> list[str]:
    method = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    return [argument.arg for argument in method.args.args]


@pytest.mark.skipif(torch.__version__ < "2.7", reason="the stubs of torch were different")
def test_nccl_groups_have_the_expected_methods_and_options() -> None:
    nccl_group = find_class(parse_stub("_distributed_c10d"), "ProcessGroupNCCL")
    assert arguments(nccl_group, "__init__") == ["self", "store", "rank", "size", "options"]
    assert arguments(nccl_group, "_set_default_timeout") == ["self", "timeout"]
    assert arguments(nccl_group, "abort") == ["self"]
    assert fields(find_class(nccl_group, "Options")) >= {"config", "is_high_priority_stream"}
    assert "max_ctas" in fields(find_class(nccl_group, "NCCLConfig"))
    for name in ("eager_connect_single_device", "abort", "shutdown"):
        assert hasattr(c10d.Backend, name)
    for name in ("_start_coalescing", "_end_coalescing", "_register_backend", "_set_default_backend",
                 "bound_device_id"):  # fmt: skip
        assert hasattr(c10d.ProcessGroup, name)


def test_cuda_memory_and_events_can_be_shared_between_processes() -> None:
    for name in ("_share_cuda_", "_new_shared_cuda"):
        assert hasattr(torch.UntypedStorage, name)
    event = torch.cuda.Event
    assert list(inspect.signature(event.__new__).parameters)[:4] == ["cls", "enable_timing", "blocking", "interprocess"]
    assert list(inspect.signature(event.from_ipc_handle).parameters) == ["device", "handle"]
    assert list(inspect.signature(event.ipc_handle).parameters) == ["self"]
    assert issubclass(getattr(torch, "AcceleratorError", torch.OutOfMemoryError), RuntimeError)  # caught so
