from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tests share two cores with the processes they start


def scale(small: int, full: int) -> int:
    """The count of a stress test: small by default, full under `bash tests/run.sh --stress`."""
    return full if os.environ.get("DECENTNODE_STRESS") else small
