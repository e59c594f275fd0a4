"""A valid experiment, and the problems that loading an invalid one reports."""

from __future__ import annotations

import pytest

from decentnode.errors import ConfigError
from decentnode.experiment import load

BASE = """\
name: base
graph: {name: ring, nodes: 4}
data: {name: digits}
model: {name: mlp}
training: {name: supervised, batch_size: 8}
"""


def load_problems(path: str, *overrides: str, environ: dict[str, str] | None = None) -> str:
    """Asserts that `load` refuses the experiment, and returns the text of its problems."""
    with pytest.raises(ConfigError) as caught:
        load(path, overrides, environ or {})
    return "\n".join(caught.value.problems)
