"""The fork server imports the modules that nodes need, and makes nothing that a fork would break."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from decentnode.launch.children.forkserver import COMPILES, EXPERIMENT, PRIVATE, may_be_private, may_compile
from decentnode.launch.children.messages import Request

REPORT_IMPORTS = """
import json, sys, threading, torch
asked = []
for owner in (torch.cuda, torch.accelerator):
    for name in ("is_available", "device_count"):
        if hasattr(owner, name):
            setattr(owner, name, lambda *_, now=getattr(owner, name), name=name: asked.append(name) or now())
from decentnode.launch.children import preload
import gc, os, torch
print(json.dumps({
    "missing": [name for name in (*preload.MODULES, *preload.COMPILER) if name not in sys.modules],
    "compiler": "torch._dynamo" in sys.modules, "inductor": "torch._inductor.compile_fx" in sys.modules, "asked": asked,
    "targets": [target for table in preload.TABLES for target in table.values()],
    "threads": len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else threading.active_count(),
    "cuda": torch.cuda.is_initialized(), "collects": gc.isenabled(), "frozen": gc.get_freeze_count(),
}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["", COMPILES, PRIVATE])
def test_children_find_their_modules_imported_and_inherit_no_thread(extra: str) -> None:
    """A fork has the calling thread alone: a pool or a CUDA context made before would be broken in every child."""
    environ = {**os.environ, **({extra: "1"} if extra else {})}
    found = subprocess.run([sys.executable, "-c", REPORT_IMPORTS], capture_output=True, text=True, timeout=300,
                           check=False, env=environ)  # fmt: skip
    assert found.returncode == 0, found.stderr
    seen = json.loads(found.stdout)
    assert not seen["missing"]
    assert seen["threads"] == 1 and not seen["cuda"] and not seen["asked"]
    assert seen["compiler"] is bool(extra) and (seen["inductor"] is (extra == COMPILES) or extra == PRIVATE)
    assert not seen["collects"] and seen["frozen"] > 100_000, "the garbage collector would copy shared pages"
    assert {"decentnode.sharing.full:Full", "decentnode.communication.inproc.transport:Inproc"} <= {*seen["targets"]}


def test_may_compile_is_true_for_configs_that_compile_models(tmp_path: Path) -> None:
    plain, compiled, child = (tmp_path / name for name in ("plain.yaml", "compiled.yaml", "child.yaml"))
    plain.write_text("# compile: true would do\ntraining: {batch_size: 8, compile: null}\nname: compiled\n")
    compiled.write_text("training:\n  compile:\n    {backend: eager}\n")
    child.write_text("extends: compiled.yaml\nname: child\n")
    for request, expected in (
        (Request(str(plain)), False), (Request(str(compiled)), True), (Request(str(child)), True),
        (Request(str(plain), ["training.compile={mode: default}"]), True),
        (Request(str(plain), ["training.compile=null"]), False),
        (Request(str(plain), [], {"DECENTNODE__TRAINING__COMPILE": "{}"}), True),
        (Request("", layers=[{"training": {"compile": {"backend": "eager"}}}]), True),
        (Request("", layers=[{"training": {"compile": None}}]), False), (Request(str(tmp_path / "none.yaml")), False),
    ):  # fmt: skip
        assert may_compile(request) is expected, request


def test_private_nodes_are_foreseen() -> None:
    for section, expected in (("{noise: 1}", True), ("null", False)):
        assert may_be_private(Request("", [f"training.privacy={section}"])) is expected
        assert not may_compile(Request("", [f"training.privacy={section}"]))


REPORT_PARSED = """
import os, sys
from decentnode.launch.children import preload
from decentnode.config.yaml_source import parse
from decentnode.experiment import load
before = parse.cache_info()
found = load(sys.argv[1], ["node.rounds=3"], {}, check=False)
after = parse.cache_info()
hits, misses = after.hits - before.hits, after.misses - before.misses
print(found.node.rounds, found.name, hits, misses, os.environ.get(sys.argv[2]))
"""


@pytest.mark.slow
def test_children_find_the_text_of_the_experiment_parsed(tmp_path: Path) -> None:
    """Parsing it was a quarter of a node's CPU time before its first round."""
    base, child = tmp_path / "base.yaml", tmp_path / "child.yaml"
    base.write_text((Path(__file__).parents[2] / "configs" / "quickstart.yaml").read_text())
    child.write_text("extends: base.yaml\nname: child\n")
    for given, misses in (([str(child), ["node.rounds=3"]], 0), (["none.yaml", ["=1"]], 3)):
        environ = {**os.environ, EXPERIMENT: json.dumps(given)}
        found = subprocess.run([sys.executable, "-c", REPORT_PARSED, str(child), EXPERIMENT], capture_output=True,
                               text=True, timeout=300, check=False, env=environ)  # fmt: skip
        assert found.returncode == 0, found.stderr
        assert found.stdout.split() == ["3", "child", str(3 - misses), str(misses), "None"]
