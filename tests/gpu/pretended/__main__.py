"""python -m tests.gpu.pretended COMMAND [ARGUMENT...]: runs a command that finds a GPU, which is pretended."""

from __future__ import annotations

import os
import sys

from tests.gpu.pretended import build

if len(sys.argv) < 2:
    sys.exit("usage: python -m tests.gpu.pretended COMMAND [ARGUMENT...]")
if (why := build.unavailable()) is not None:
    sys.exit(why)
try:
    os.execvpe(sys.argv[1], sys.argv[1:], build.environment())
except FileNotFoundError:
    sys.exit(f"no such command: {sys.argv[1]}")
