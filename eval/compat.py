"""Runs a script of Decent-DP with only the import changed; eval/compat.sh starts it under torchrun."""

import runpy
import sys

import decentnode.compat.decent_dp as decent_dp
from decentnode.compat import sdtl

sys.modules["decent_dp"] = decent_dp
sys.modules["DistOptimizers"] = sdtl
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
