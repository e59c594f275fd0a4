"""The GPU benchmarks (eval/benchmarks/gpu.py), which may be stopped at any time."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from decentnode.config.component import Config
from decentnode.parallel.buckets.bucket import make_buckets
from decentnode.sharing.full import Full

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

def seconds_left(tiny):
    yield gpu.Row("seconds_left", "seconds", float(os.environ[gpu.CASE_UNTIL]) - time.monotonic())

gpu.CASES.update(hangs=hangs, dies=dies, seconds_left=seconds_left)
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
    """Returns the script as a module, under another name than that of the folder tests/gpu."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("gpu_script", BENCHMARKS / "gpu.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize(("case", "limit", "why"), [
    ("hangs", 5.0, "stopped after 5 s"), ("dies", 60.0, "failed: it ended with 9: illegal memory access"),
])  # fmt: skip
def test_a_case_that_hangs_or_dies_keeps_its_rows_and_gets_a_row_with_the_reason(
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


def test_a_failed_measurement_does_not_stop_the_rest_of_its_case(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, if the memory does not suffice for one of its sizes."""

    def simulated(nodes: int, tiny: bool) -> Iterator[Any]:
        yield gpu.Row("simulator", f"{nodes} nodes: node-updates", 1.0)
        if nodes == 1024:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")

    monkeypatch.setattr(gpu, "_simulator_rows", simulated)
    rows = list(gpu.simulator(False))
    assert [row.what for row in rows if row.failed] == ["1024 nodes"] and len(rows) == 6
    assert rows[2].note == "failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB."


def test_a_case_gets_its_deadline(gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setattr(gpu, "__file__", str(tmp_path / "script.py"))
    rows: list[Any] = []
    gpu.run_case("seconds_left", True, 300.0, rows.append)
    assert len(rows) == 1 and 0 < rows[0].value < 300


def rows_of_test_files(folder: Path, monkeypatch: pytest.MonkeyPatch, **texts: str) -> list[str]:
    """Returns the rows, as text, of the case `tests` for these files."""
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(f"import pytest, time\npytestmark = pytest.mark.gpu\n{text}")
    module = sys.modules["gpu_tests"]
    monkeypatch.setattr(module, "files", lambda: sorted(folder.glob("test_*.py")))
    return [f"{row.what} {row.note if row.value is None else row.value}" for row in module.tests(True)]


def test_no_test_file_is_started_without_time_left(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(gpu.CASE_UNTIL, str(time.monotonic() + 15))
    assert rows_of_test_files(tmp_path, monkeypatch, test_a="") == ["test_a.py: the file not run: no time left"]


def test_without_a_gpu_one_process_runs_all_test_files(gpu: ModuleType) -> None:
    module = sys.modules["gpu_tests"]
    paths = [Path("test_a.py"), Path("test_b.py")]
    assert module.groups(paths, True) == [[paths[0]], [paths[1]]] and module.groups(paths, False) == [paths]


@pytest.mark.slow
def test_test_files_report_their_results_before_their_case_is_stopped(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the limit of the case is, which depends on `gpu.sh --seconds`."""
    monkeypatch.setenv(gpu.CASE_UNTIL, str(until := time.monotonic() + 40))
    text = "def test_passes(): pass\n\n@pytest.mark.timeout(600)\ndef test_hangs(): time.sleep(600)\n"
    rows = rows_of_test_files(tmp_path, monkeypatch, test_a=text)
    assert rows[0] == "test_a.py: passed 1" and rows[1].startswith("test_a.py: the file stopped at its limit")
    assert time.monotonic() < until


@pytest.mark.parametrize("queued", [False, True])
def test_kernels_are_queued_behind_other_work_before_they_are_timed(
    gpu: ModuleType, queued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the time that the host takes to launch them would be measured, too."""
    calls: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("wait")

        def elapsed_time(self, other: Event) -> float:
            assert other is not self
            return 3.0

    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda._sleep", lambda cycles: calls.append(f"busy for {cycles}"))
    monkeypatch.setattr(sys.modules["gpu_rows"], "cache_filler", lambda: lambda: calls.append("fill the cache"))
    assert gpu.milliseconds(lambda: calls.append("work"), True, 1, warm=0, queued=queued) == 3.0
    assert calls == [*(["fill the cache", "busy for 2000000"] if queued else []), "record", "work", "record", "wait"]


@pytest.mark.parametrize(("moved", "works"), [(100_000_000, 11), (8 << 30, 1), (8, 16)])
def test_a_bandwidth_is_measured_over_more_bytes_than_a_cache_keeps(
    gpu: ModuleType, moved: int, works: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a copy of 25 M elements would seem a third faster than the memory, and mixing would miss its target."""
    module, called = sys.modules["gpu_mixing"], list[int]()

    def milliseconds(work: Callable[[], object], gpu: bool, queued: bool) -> float:
        work()
        return 2.0

    monkeypatch.setattr(module, "milliseconds", milliseconds)
    made = iter(range(99))
    speed = module.sustained(lambda: partial(called.append, next(made)), moved, True)
    assert called == [*range(works)] and speed == pytest.approx(1e-9 * works * moved / 2e-3)


def test_the_environment_is_reported_although_git_and_proc_are_missing(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = gpu.environment()
    assert "commit unknown" in found[0] and any(line.startswith("triton") for line in found)

    def fails() -> str:
        raise OSError("no /proc")

    monkeypatch.setattr(sys.modules["common"], "machine", fails)
    assert "machine not found out: no /proc" in gpu.environment()


def test_the_report_is_valid_json_after_every_row(gpu: ModuleType, tmp_path: Path) -> None:
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
def test_truncated_output_of_pytest_becomes_rows(
    gpu: ModuleType, text: str, ended: int | None, expected: list[str]
) -> None:
    rows = list(sys.modules["gpu_tests"].rows_of("test_x.py", text, ended, 3.0))
    assert [f"{row.what} {row.note if row.value is None else f'{row.value:.1f} of {row.asked[2:]}'}" for row in rows] \
        == expected  # fmt: skip


def test_a_process_that_keeps_a_pipe_open_does_not_delay_the_end_of_its_case(gpu: ModuleType) -> None:
    """For example, processes that started a session of their own."""
    script = ("import subprocess, sys\nprint('row', flush=True)\n"
              "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(40)'], start_new_session=True)\n")
    lines: list[str] = []
    began = time.monotonic()
    assert gpu._run([sys.executable, "-c", script], 30, lines.append) == ""
    assert lines == ["row\n"] and time.monotonic() - began < 35


@pytest.mark.parametrize(("value", "ceiling", "asked", "missed"), [
    (80.0, 100.0, ">= .85", True), (86.0, 100.0, ">= .85", False), (1.03, None, "<= 1.02", True),
    (1.0, None, "<= 1.02", False), (0.0, None, "0", False), (1e-9, None, "0", True), (3, None, "= 4", True),
    (4, None, "= 4", False), (80.0, 100.0, "", False), (None, None, ">= .85", False),
])  # fmt: skip
def test_a_row_misses_its_target_if_it_is_on_the_wrong_side(
    gpu: ModuleType, value: float | None, ceiling: float | None, asked: str, missed: bool
) -> None:
    assert gpu.Row("mixing", "x", value, "GB/s", ceiling, asked).missed == missed


TRACE = [
    {"cat": "user_annotation", "name": "one call of the work", "tid": 1, "ts": 0.0, "dur": 100.0},
    {"cat": "user_annotation", "name": "one call of the work", "tid": 1, "ts": 100.0, "dur": 100.0},
    {"cat": "cpu_op", "name": "aten::item", "tid": 1, "ts": 10.0, "dur": 50.0},
    {"cat": "python_function", "name": "decentnode/node/rounds.py(7): step", "tid": 1, "ts": 8.0, "dur": 60.0},
    {"cat": "python_function", "name": "torch/_tensor.py(9): wrapped", "tid": 1, "ts": 9.0, "dur": 55.0},
    {"cat": "cuda_runtime", "name": "cudaStreamSynchronize", "tid": 1, "ts": 20.0, "dur": 30.0},
    {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": 1, "ts": 5.0, "dur": 3.0},
    {"cat": "cuda_driver", "name": "cuLaunchKernelEx", "tid": 1, "ts": 105.0, "dur": 3.0},
    {"cat": "cuda_runtime", "name": "cudaMemcpyAsync", "tid": 1, "ts": 106.0, "dur": 3.0},
    {"cat": "cuda_runtime", "name": "cudaDeviceSynchronize", "tid": 1, "ts": 300.0, "dur": 90.0},
    {"cat": "kernel", "name": "_weighted_sum", "tid": 7, "ts": 10.0, "dur": 20.0, "args": {"registers per thread": 40}},
    {"cat": "kernel", "name": "add", "tid": 8, "ts": 20.0, "dur": 20.0},
    {"cat": "kernel", "name": "_weighted_sum", "tid": 7, "ts": 100.0, "dur": 40.0},
    {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "tid": 7, "ts": 150.0, "dur": 10.0,
     "args": {"bytes": 4_000_000}},
]  # fmt: skip


def test_a_profile_summarizes_kernels_copies_gaps_and_waits_of_a_trace(gpu: ModuleType) -> None:
    profiles = sys.modules["gpu_profiles"]
    found = profiles.summarize(TRACE, "mixing", "4 arrivals")
    assert found.main_results == [
        "device: 75.0 us a call, idle for 46.7 % of it",
        "30.0 us a call in 1 of 30.0 us: _weighted_sum (registers 40)",
        "1 launches a call; the host waits 0.5 times a call, 15.0 us",
    ]
    text = "\n".join(found.lines)
    for part in ("2 calls, 100.0 us each", "idle for 60.0 us between add and _weighted_sum",
                 "idle for 10.0 us between _weighted_sum and Memcpy", "kernels: 1.5 a call, of 2 kinds",
                 "copies: 0.5 a call, 2 MB, 5.0 us: Memcpy DtoH",
                 "0.5 a call, 15.0 us: cudaStreamSynchronize in aten::item, decentnode/node/rounds.py(7): step"):
        assert part in text, text


def test_the_trace_of_real_work_is_summarized_with_its_source_lines(gpu: ModuleType) -> None:
    profiles = sys.modules["gpu_profiles"]
    found = profiles.summarize(profiles.trace_of(lambda: torch.ones(3).sum().item(), stacks=True), "host", "x")
    assert found.main_results[-1].startswith("the host reads scalars 1 times a call")
    assert any("aten::sum" in line for line in found.lines)
    assert any("aten::item, " in line and "test_gpu_script.py(" in line for line in found.lines), found.lines


NCU = """#!{python}
import json, pathlib, sys
pathlib.Path({arguments!r}).write_text(json.dumps(sys.argv[1:]))
print("==PROF== Connected to process 7")
print("    dram__throughput.avg.pct_of_peak_sustained_elapsed            %        91.92")
print("    launch__registers_per_thread                    register/thread           40")
"""


def test_rows_that_missed_are_profiled_worst_first_and_the_kernel_by_ncu(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ncu = tmp_path / "ncu"
    ncu.write_text(NCU.format(python=sys.executable, arguments=str(tmp_path / "arguments")))
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    profiled: list[list[str]] = []

    def run(command: list[str], limit: float, take: Callable[[str], None], run: Any = gpu._run) -> str:
        if command[0] == "ncu":
            return run(command, limit, take)
        profiled.append(command[command.index("--profile") + 1 :])
        take(gpu.PROFILE_MARK + json.dumps({"case": "mixing", "what": "w", "lines": ["a", "b"], "main_results": ["b"]}))
        return "stopped after 3 s"

    monkeypatch.setattr(gpu, "_run", run)
    report = gpu.Report(tmp_path / "gpu.json", [])
    for case, what, value in (("mixing", "1 arrivals, 1000 M elements, float32", 80.0), ("host", "waits", 9.0),
                              ("mixing", "2 arrivals, 25 M elements, float32", 50.0), ("mixing", "fine", 90.0)):
        report.add(gpu.Row(case, what, value, "", 100.0 if case == "mixing" else None,
                           ">= .85" if case == "mixing" else "<= 10"))  # fmt: skip
    gpu.profile_all(SimpleNamespace(tiny=False, patience=1), report, time.monotonic() + 100)
    assert profiled == [["mixing", "2 arrivals, 25 M elements, float32", "1 arrivals, 1000 M elements, float32"]]
    ncu_arguments = json.loads((tmp_path / "arguments").read_text())
    assert ncu_arguments[-2:] == ["--launch", "2 arrivals, 25 M elements, float32"]
    assert "regex:_weighted_sum" in ncu_arguments
    profiles = (tmp_path / "profiles.txt").read_text()
    assert profiles.startswith("== mixing: w\na\nb\n\n== mixing: profiles\nstopped after 3 s\n")
    table = report.table()
    assert "launch__registers_per_thread register/thread 40" in table and "91.92" in profiles
    assert table.index("mixing: w: b") < table.index("asked >= .85: MISSED")
    gpu.profile_all(SimpleNamespace(tiny=False, patience=1), report, time.monotonic() + 1)
    assert len(profiled) == 1 and report.profiles[-1].main_results == ["not profiled: no time left"]


def test_the_kernel_name_given_to_ncu_exists(gpu: ModuleType) -> None:
    kernel = Path(gpu.ROOT) / "decentnode" / "mixing" / "kernel.py"
    assert f"def {gpu.KERNEL}(" in kernel.read_text()


def test_the_work_of_a_profiled_row_is_found_by_its_name(gpu: ModuleType) -> None:
    work = gpu.mix_named("2 arrivals, 0.001 M elements, bfloat16")
    assert work is not None
    work()
    assert gpu.mix_named("Triton kernel by its interpreter, largest error") is None
    assert gpu.CASES.keys() > gpu.PROFILES.keys()


def test_the_final_table_is_shorter_than_12000_characters_and_keeps_failures(
    gpu: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    report = gpu.Report(None, ["an environment"] * 12)
    for n in range(80):
        report.add(gpu.Row("codecs", f"row {n} of a case with a name that is long", 0.5 * n, "GB/s", 100.0, ">= .85",
                           "a note " * 40))  # fmt: skip
    for n in range(25):
        report.add(gpu.Row("tests", f"test_{n}.py: passed", 9, "", asked="= 9", note="12 s"))
    report.add(gpu.Row("tests", "test_0.py::test_x", None, note=f"failed: {'RuntimeError ' * 40}"))
    report.add_profile(gpu.Profile("mixing", "4 arrivals", ["all"], ["device: idle for 40 %" * 30]))
    table = report.table()
    assert len(table) < 12_000 and "test_0.py::test_x: failed: RuntimeError" in table and "idle for 40 %" in table
    assert "tests: 225 of 225 passed, by 25 processes" in table and "test_7.py" not in table
    assert "row 79 of" in table and table.endswith("106 rows: 80 missed what is asked, 1 failed")
    for n in range(120):
        report.add(gpu.Row("mixing", f"row {n} of a case with a name that is long", 1.0, "GB/s", 100.0, ">= .85"))
    table = report.table()
    assert len(table) < 12_000 and "test_0.py::test_x: failed: RuntimeError" in table and "idle for 40 %" in table
    end = "and more: 226 rows in all, of which 200 missed what is asked, 1 failed"
    assert "row 110 of" not in table and table.endswith(end)
    capsys.readouterr()


def test_every_case_has_a_limit_and_every_gpu_test_file_is_run(gpu: ModuleType) -> None:
    assert gpu.LIMITS.keys() == gpu.CASES.keys() and gpu.CASES.keys() > gpu.CONCURRENT
    found = {path.name for path in (Path(__file__).parent / "gpu").glob("test_*.py")}
    assert {path.name for path in sys.modules["gpu_tests"].files()} == found - {"test_pretended.py"}


def test_the_measured_models_have_the_published_numbers_of_parameters(gpu: ModuleType) -> None:
    steps = importlib.import_module("gpu_steps")
    with torch.device("meta"):
        made = steps.resnet50(), steps.gpt2_small()
        assert made[0](torch.randn(2, 3, 224, 224)).shape == (2, 1000)
        assert made[1](torch.zeros(2, 512, dtype=torch.int64)).shape == (2, 512, 50257)
    assert [sum(p.numel() for p in each.parameters()) for each in made] == [25_557_032, 124_439_808]


def test_weights_behind_an_odd_number_of_classes_are_measured(gpu: ModuleType) -> None:
    """The model `UNALIGNED` has weights that start at odd multiples of 8 bytes, so not at multiples of 16."""
    steps = importlib.import_module("gpu_steps")
    whats = [what for what, _, _ in steps._wrapped_cases(False, False)]
    assert len(whats) == 7 and [what for what in whats if steps.UNALIGNED in what] == [whats[4]]
    with torch.device("meta"):
        (bucket,) = make_buckets([*steps.resnet50(10).parameters()], 1 << 30, True, iter([Full(Config())]))
    places = {p.storage_offset() * p.element_size() % 16 for p in bucket.params if p.ndim == 4}
    assert places == {8}
