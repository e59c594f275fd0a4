"""The weighted sum x <- w x + sum_k w_k r_k, with as few passes over memory as possible.

A pass is one read or write of all P elements from or to main memory, outside any cache. With d arrivals:

=========================================================== ========== =====
method                                                      passes     d = 4
=========================================================== ========== =====
one mul and d times add_ over the whole model (chained)     2 + 3 d    14
blocked: the same per block, which stays in the cache (CPU) d + 2      6
one kernel (GPU, Triton; up to 8 arrivals per launch)       d + 2      6
one loop (CPU with a C compiler, float32)                   d + 2      6
=========================================================== ========== =====

The last three read every arrival and the model once and write the result once; no method needs fewer passes.
"""

from __future__ import annotations

from decentnode.mixing.mix import KERNEL_ARRIVALS, mix_into, passes, uses_fewest_passes

__all__ = ["KERNEL_ARRIVALS", "mix_into", "passes", "uses_fewest_passes"]
