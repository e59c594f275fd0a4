"""Summarizes torch profiles of the work behind rows that missed their target: lines for a file, and the main
results."""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_rows import on_gpu

Event = dict[str, Any]
"""An event of a Chrome trace: "cat", "name", "ts" and "dur" in microseconds, "tid", "args"."""
CALL = "one call of the work"
CALLS, WARM = 3, 2
MAX_LINES = 6
"""Most lines of kernels, copies, waits or operators."""
ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
WAITS = re.compile(r"(cuda|cu)(Stream|Device|Event|Ctx)Synchronize|(cudaMemcpy|cuMemcpy)(?!.*Async)")
LAUNCHES = re.compile(r"(cuda|cu)(LaunchKernel|LaunchCooperativeKernel|GraphLaunch)")
SCALAR = "aten::_local_scalar_dense"
"""The operator that reads a scalar: on a GPU it would wait, so it is counted on the CPU."""


@dataclass(frozen=True)
class Profile:
    case: str
    what: str
    lines: list[str]
    main_results: list[str]


def trace_of(work: Callable[[], object], *, stacks: bool = False, calls: int = CALLS, warm: int = WARM) -> list[Event]:
    """Returns the trace of some consecutive calls of work(). stacks: include the Python lines of the callers."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

    for _ in range(warm):
        work()
    activities = {ProfilerActivity.CPU}
    if on_gpu():
        activities |= {ProfilerActivity.CUDA} & set(supported_activities())
        torch.cuda.synchronize()
    with profile(activities=sorted(activities, key=str), with_stack=stacks) as seen:
        for _ in range(calls):
            with record_function(CALL):
                work()
        if on_gpu():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events: list[Event] = json.loads(path.read_text(errors="replace"))["traceEvents"]
    return [each for each in events if each.get("ph") == "X" and "dur" in each]


def summarize(events: Sequence[Event], case: str, what: str) -> Profile:
    """Returns a summary of where the time of a trace from `trace_of` went."""
    calls = [each for each in events if each["name"] == CALL and each["cat"] == "user_annotation"]
    count = max(1, len(calls))
    host = [each for each in events if each["cat"] not in ON_DEVICE
            and any(call["ts"] <= each["ts"] < call["ts"] + call["dur"] for call in calls)]  # fmt: skip
    device = sorted((each for each in events if each["cat"] in ON_DEVICE), key=lambda each: each["ts"])
    taken = sum(call["dur"] for call in calls) / count
    lines = [f"{count} calls, {_time(taken)} each for the host, with what the profiler takes"]
    waits, of_waits = _host_waits(host, count, bool(device))
    if device:
        idle, most, of_device = _device_work(device, count)
        launches = f"{sum(bool(LAUNCHES.match(each['name'])) for each in host) / count:g} launches a call"
        main_results = [idle, most.strip(), f"{launches}; {waits}"]
        return Profile(case, what, [*lines, *of_device, launches, *of_waits], main_results)
    own = _own_times(host, count)
    lines += ["no kernel of a GPU in it: operators of the CPU, by their own time", *own, *of_waits]
    return Profile(case, what, lines, [*(line.strip() for line in own[:1]), waits])


def _device_work(device: Sequence[Event], calls: int) -> tuple[str, str, list[str]]:
    """Returns (the idle time of the device, the kernel that took longest, lines on all its work). device: sorted by
    start."""
    busy_time, gaps, until, last = 0.0, [], device[0]["ts"], device[0]
    for each in device:
        end = each["ts"] + each["dur"]
        if each["ts"] > until:
            gaps.append((each["ts"] - until, last["name"], each["name"]))
        busy_time += max(0.0, end - max(until, each["ts"]))
        if end >= until:
            until, last = end, each
    span = until - device[0]["ts"]
    idle = f"device: {_time(span / calls)} a call, idle for {100 * (1 - busy_time / max(span, 1e-9)):.1f} % of it"
    lines = [idle]
    for gap, before, after in sorted(gaps, reverse=True)[:3]:
        lines.append(f"  idle for {_time(gap)} between {_short(before)} and {_short(after)}")
    kernels = defaultdict(list)
    for each in device:
        if each["cat"] == "kernel":
            kernels[each["name"]].append(each)
    lines.append(f"kernels: {sum(map(len, kernels.values())) / calls:g} a call, of {len(kernels)} kinds")
    shown = []
    for name, those in _largest(kernels, lambda those: sum(each["dur"] for each in those)):
        found, took = those[0].get("args", {}), sum(each["dur"] for each in those)
        known = [f"{label} {found[key]}" for label, key in (
            ("grid", "grid"), ("block", "block"), ("registers", "registers per thread"),
            ("estimated occupancy %", "est. achieved occupancy %"),
        ) if key in found]  # fmt: skip
        shown.append(f"  {_time(took / calls)} a call in {len(those) / calls:g} of {_time(took / len(those))}: "
                     f"{_short(name)}{' (' + ', '.join(known) + ')' if known else ''}")  # fmt: skip
    lines += shown
    copies = defaultdict(list)
    for each in device:
        if each["cat"] != "kernel":
            copies[each["name"]].append(each)
    for name, those in _largest(copies, lambda those: sum(each["dur"] for each in those)):
        size = sum(each.get("args", {}).get("bytes", 0) for each in those)
        lines.append(f"copies: {len(those) / calls:g} a call, {1e-6 * size / calls:.4g} MB, "
                     f"{_time(sum(each['dur'] for each in those) / calls)}: {name}")  # fmt: skip
    return idle, shown[0] if shown else "no kernels", lines


def _host_waits(host: Sequence[Event], calls: int, gpu: bool) -> tuple[str, list[str]]:
    """Returns (how often and how long the host waited, lines on where)."""
    waits = [each for each in host if (WAITS.match(each["name"]) if gpu else each["name"] == SCALAR)]
    microseconds = sum(each["dur"] for each in waits)
    verb = "waits" if gpu else "reads scalars"
    sentence = f"the host {verb} {len(waits) / calls:g} times a call, {_time(microseconds / calls)}"
    by_place = defaultdict(list)
    around = [each for each in host if each["cat"] in ("cpu_op", "python_function") and each["name"] != SCALAR]
    for each in waits:
        inside = [other for other in around if other["tid"] == each["tid"] and other["ts"] <= each["ts"]
                  and each["ts"] + each["dur"] <= other["ts"] + other["dur"]]  # fmt: skip
        inside.sort(key=lambda other: other["dur"])
        operator = next((other["name"] for other in inside if other["cat"] == "cpu_op"), "no operator")
        names = [other["name"] for other in inside if other["cat"] == "python_function" and ".py(" in other["name"]]
        line = next((line for line in names if not line.startswith("torch/")), "")
        place = f", {line}" if line else ""
        by_place[f"{each['name']} in {operator}{place}"].append(each)
    lines = [f"waits: {sentence}"]
    for name, those in _largest(by_place, len):
        lines.append(f"  {len(those) / calls:g} a call, {_time(sum(each['dur'] for each in those) / calls)}: {name}")
    return sentence, lines


def _own_times(host: Sequence[Event], calls: int) -> list[str]:
    """Returns lines on operators on the CPU by their own time, without the operators that they call."""
    own: Counter[str] = Counter()
    number: Counter[str] = Counter()
    open_: dict[Any, list[Event]] = defaultdict(list)
    for each in sorted((e for e in host if e["cat"] == "cpu_op"), key=lambda e: (e["ts"], -e["dur"])):
        outer = open_[each["tid"]]
        while outer and outer[-1]["ts"] + outer[-1]["dur"] <= each["ts"]:
            outer.pop()
        if outer:
            own[outer[-1]["name"]] -= each["dur"]
        own[each["name"]] += each["dur"]
        number[each["name"]] += 1
        outer.append(each)
    most = own.most_common(MAX_LINES)
    return [f"  {_time(took / calls)} a call in {number[name] / calls:g}: {name}" for name, took in most]


def _largest(found: dict[str, list[Event]], by: Callable[[list[Event]], float]) -> Iterator[tuple[str, list[Event]]]:
    for name in sorted(found, key=lambda name: by(found[name]), reverse=True)[:MAX_LINES]:
        yield name, found[name]


def _short(name: str) -> str:
    return re.sub(r"\s+", " ", name)[:110]


def _time(microseconds: float) -> str:
    return f"{microseconds:.1f} us" if microseconds < 1000 else f"{1e-3 * microseconds:.2f} ms"
