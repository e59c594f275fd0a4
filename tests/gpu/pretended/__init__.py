"""A pretended GPU, which refuses what a real one refuses, for tests on machines without a GPU.

A process with the environment `build.environment()`, and all processes that it starts, have `cuda:0`, or several
pretended GPUs. Their memory is the host's, their operators are those of the CPU (device.cpp), and gloo does what NCCL
is asked for (communication.cpp). Tests with it can check: operations on tensors of two devices, CPU generators and
`numpy()` for GPU tensors, the path of models through staging and CUDA IPC, how often the host waits, and which
operations ranks ask of NCCL in which order. They cannot check: Triton, streams and graphs, how NCCL itself fails, and
any measured figure. """

from __future__ import annotations

import os

import pytest

needs_a_real_gpu = pytest.mark.skipif("PRETENDED_CUDA" in os.environ, reason="needs a GPU that is not pretended: its "
                                      "kernels, or its size")  # fmt: skip
