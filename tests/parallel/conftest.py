from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from decentnode.parallel.process_group.shutdown import leave_groups


@pytest.fixture
def single_rank_group(tmp_path: Path) -> Iterator[None]:
    """The default process group, of this process alone: for tests of one rank that need no others."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    leave_groups()
