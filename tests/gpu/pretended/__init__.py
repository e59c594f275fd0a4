"""A GPU that is pretended, so that what a GPU refuses is refused on machines that have none.

`build.environment()` is the environment of a process in which `cuda:0` is there, or several, and in all processes that
it starts; its memory is the host's, its operators are those of the CPU (device.cpp), and gloo does what NCCL is asked
for (communication.cpp). It checks: tensors of two devices in one operation, CPU generators and `numpy()` of GPU
tensors, the path of models through staging and CUDA IPC, how often the host waits, in which order ranks ask NCCL, and
for what. It cannot check: anything of Triton, streams and graphs, how NCCL itself fails, and no figure.
"""

from __future__ import annotations

import os

import pytest

needs_a_real_gpu = pytest.mark.skipif("PRETENDED_CUDA" in os.environ, reason="needs a GPU that is not pretended: its "
                                      "kernels, or its size")  # fmt: skip
