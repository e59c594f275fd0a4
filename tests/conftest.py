from __future__ import annotations

import os


def scale(small: int, full: int) -> int:
    """The count of a stress test: small by default, full under `bash tests/run.sh --stress`."""
    return full if os.environ.get("DECENTNODE_STRESS") else small
