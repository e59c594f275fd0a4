"""python -m tests.gpu.pretended COMMAND [ARGUMENT...]: runs a command with a pretended GPU, or with as many as
PRETENDED_CUDA_COUNT says."""

from __future__ import annotations

import os
import sys

from tests.gpu.pretended import build

if len(sys.argv) < 2:
    sys.exit("usage: python -m tests.gpu.pretended COMMAND [ARGUMENT...]")
if (reason := build.unavailable()) is not None:
    sys.exit(reason)
try:
    os.execvpe(sys.argv[1], sys.argv[1:], build.environment(int(os.environ.get(build.COUNT, "1"))))
except FileNotFoundError:
    sys.exit(f"no such command: {sys.argv[1]}")
