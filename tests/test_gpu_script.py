"""The script that measures a GPU (eval/benchmarks/gpu.py), which is lent for minutes and may be taken away."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "eval" / "benchmarks"
SCRIPT = f"""
import os, sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
import gpu

def hangs(tiny):
    yield gpu.Row("hangs", "first", 1.0)
    time.sleep(600)

def dies(tiny):
    yield gpu.Row("dies", "first", 2.0)
    print("illegal memory access", file=sys.stderr)
    os._exit(9)

gpu.CASES.update(hangs=hangs, dies=dies)
sys.exit(gpu.main())
"""
PYTEST = """
tests/gpu/test_x.py::test_a[{name: full}] PASSED                          [ 25%]
tests/gpu/test_x.py::test_b FAILED                                        [ 50%]
tests/gpu/test_x.py::test_c SKIPPED (needs two GPUs)                      [ 75%]
"""
SUMMARY = """=========================== short test summary info ============================
SKIPPED [1] tests/gpu/test_x.py:7: needs two GPUs
FAILED tests/gpu/test_x.py::test_b - RuntimeError: CUDA error
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, by another name than the folder of tests has."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("gpu_script", BENCHMARKS / "gpu.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize(("case", "limit", "why"), [
    ("hangs", 5.0, "stopped after 5 s"), ("dies", 60.0, "failed: it ended with 9: illegal memory access"),
])  # fmt: skip
def test_a_case_that_hangs_or_dies_leaves_its_rows_and_says_so(
    gpu: ModuleType, case: str, limit: float, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setattr(gpu, "__file__", str(tmp_path / "script.py"))
    report = gpu.Report(tmp_path / "gpu.json", ["this machine"])
    began = time.monotonic()
    gpu.run_case(case, True, limit, report.add)
    assert time.monotonic() - began < 30
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["environment"] == ["this machine"]
    assert [(row["what"], row["note"]) for row in found["rows"]] == [("first", ""), ("the case", why)]
    assert [row.failed for row in report.rows] == [False, True]


@pytest.mark.parametrize("queued", [False, True])
def test_kernels_are_timed_behind_work_that_keeps_the_gpu_busy(
    gpu: ModuleType, queued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the time that the host takes to launch them counts."""
    told: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            told.append("record")

        def synchronize(self) -> None:
            told.append("wait")

        def elapsed_time(self, other: Event) -> float:
            assert other is not self
            return 3.0

    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda._sleep", lambda cycles: told.append(f"busy for {cycles}"))
    monkeypatch.setattr(sys.modules["gpu_rows"], "cache_filler", lambda: lambda: told.append("fill the cache"))
    assert gpu.milliseconds(lambda: told.append("work"), True, 1, warm=0, queued=queued) == 3.0
    assert told == [*(["fill the cache", "busy for 2000000"] if queued else []), "record", "work", "record", "wait"]


def test_a_machine_without_git_and_whatever_else_is_measured(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = gpu.environment()
    assert "commit unknown" in found[0] and any(line.startswith("triton") for line in found)

    def fails() -> str:
        raise OSError("no /proc")

    monkeypatch.setattr(sys.modules["common"], "machine", fails)
    assert "machine not found out: no /proc" in gpu.environment()


def test_the_report_is_json_at_any_moment(gpu: ModuleType, tmp_path: Path) -> None:
    report = gpu.Report(tmp_path / "gpu.json", [])
    for n in range(3):
        text = (tmp_path / "gpu.json").read_text()
        assert len(json.loads(text)["rows"]) == n and "NaN" not in text
        report.add(gpu.Row("mixing", "4 arrivals", float("nan") if n else 3.0, "GB/s", 4.0, ">= .85"))
    assert [row.failed for row in report.rows] == [False, True, True]


@pytest.mark.parametrize(("text", "ended", "expected"), [
    (PYTEST + SUMMARY, 1, ["test_x.py: passed 1.0 of 2", "test_x.py: 1 skipped absent: needs two GPUs",
                           "test_x.py::test_b failed: RuntimeError: CUDA error"]),
    (PYTEST + "tests/gpu/test_x.py::test_d[1] ", None,
     ["test_x.py: passed 1.0 of 2", "test_x.py::test_b failed: FAILED",
      "test_x.py: the file stopped at its limit, in test_x.py::test_d[1]"]),
    (PYTEST + "tests/gpu/test_x.py::test_d[1] ", -11,
     ["test_x.py: passed 1.0 of 2", "test_x.py::test_b failed: FAILED",
      "test_x.py: the file failed: pytest ended with -11, in test_x.py::test_d[1]"]),
    ("ImportError", 2, ["test_x.py: passed 0.0 of 0",
                        "test_x.py: the file failed: pytest ended with 2, in before a test began"]),
])  # fmt: skip
def test_what_pytest_said_is_told_though_it_was_cut_off(
    gpu: ModuleType, text: str, ended: int | None, expected: list[str]
) -> None:
    rows = list(sys.modules["gpu_tests"].rows_of("test_x.py", text, ended, 3.0))
    assert [f"{row.what} {row.note if row.value is None else f'{row.value:.1f} of {row.asked[2:]}'}" for row in rows] \
        == expected  # fmt: skip


def test_every_case_has_a_limit_and_every_file_of_tests_is_run(gpu: ModuleType) -> None:
    assert gpu.LIMITS.keys() == gpu.CASES.keys() and gpu.CASES.keys() > gpu.TOGETHER
    found = {path.name for path in (Path(__file__).parent / "gpu").glob("test_*.py")}
    assert {path.name for path in sys.modules["gpu_tests"].files()} == found - {"test_pretended.py"}


def test_models_of_plain_torch_are_as_large_as_those_they_stand_for(gpu: ModuleType) -> None:
    """torchvision's resnet50 and transformers' GPT-2 small, which a bare machine lacks."""
    models = importlib.import_module("gpu_models")
    with torch.device("meta"):
        made = models.resnet50(), models.GPT2()
        assert made[0](torch.randn(2, 3, 224, 224)).shape == (2, 1000)
        assert made[1](torch.zeros(2, 512, dtype=torch.int64)).shape == (2, 512, 50257)
    assert [(sum(p.numel() for p in each.parameters()), len([*each.parameters()])) for each in made] == [
        (25_557_032, 161), (124_439_808, 148)]  # fmt: skip


def test_the_language_model_sees_nothing_of_what_comes(gpu: ModuleType) -> None:
    models = importlib.import_module("gpu_models")
    model, tokens = models.GPT2(layers=1).eval(), models.tokens_of(1, 6, torch.device("cpu"))
    changed = tokens.clone()
    changed[:, 4] = (tokens[:, 4] + 1) % models.VOCABULARY
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:], atol=1e-3)
    assert models.gpt2_loss(before, tokens).item() > 8  # it has learned nothing
