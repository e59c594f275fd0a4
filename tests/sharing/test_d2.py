"""What d2, which is exact_diffusion too, promises beyond the contract."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from decentnode.errors import ConfigError
from decentnode.experiment import load
from tests.conftest import scale
from tests.graph.contract import make
from tests.sharing.contract import bound, draw, one_round, rule
from tests.sharing.helpers import Quadratics

ROOT = Path(__file__).parents[2]
RING = make("ring", nodes=16)


@pytest.mark.parametrize("name", ["d2", "exact_diffusion"])
def test_the_smallest_eigenvalue_decides(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At -1/3 (rings of even size) with a warning, above in silence, below refused until the weights are lazy."""
    sets = [f"sharing={{name: {name}}}", "mapping={name: linear, nodes_per_machine: 8}"]
    load(ROOT / "configs" / "quickstart.yaml", [*sets, "graph={name: ring, nodes: 8}"])
    assert "smallest eigenvalue of the mixing matrix is -0.333" in caplog.text
    caplog.clear()
    load(ROOT / "configs" / "quickstart.yaml", [*sets, "graph={name: complete, nodes: 8}"])
    assert not caplog.text
    heavy = np.roll(np.eye(8), 1, 0) / 2 + np.roll(np.eye(8), -1, 0) / 2  # eigenvalues cos(2 pi k / 8)
    np.savetxt(tmp_path / "heavy.txt", heavy)
    sets += ["graph={name: ring, nodes: 8}", f"weights={{name: file, path: {tmp_path}/heavy.txt}}"]
    with pytest.raises(ConfigError, match=r"eigenvalues below -0.333, the smallest is -1.000; use .*lazy: true"):
        load(ROOT / "configs" / "quickstart.yaml", sets)
    assert ConfigError.exit_code == 2


def test_rules_that_need_the_round_in_order_refuse_to_overlap() -> None:
    with pytest.raises(ConfigError, match="d2 works with schedule: sequential only"):
        load(ROOT / "configs" / "quickstart.yaml", [
            "sharing={name: d2}", "graph={name: ring, nodes: 16}", "node.schedule=overlapped",
        ])  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"compression": {"name": "bfloat16"}}, {"compression": {"name": "int8"}}],
                         ids=["whole", "bfloat16", "int8"])  # fmt: skip
def test_neither_roundings_nor_codecs_move_the_mean(options: dict[str, object]) -> None:
    """Without gradients. Computed from 2 x_t - x_{t-1} it moved by 4e-3 of its norm in these rounds, with codecs by 0.4
    and by 22 times its norm: each error was a move of the mean in every later round."""
    graph, models = make("complete", nodes=7), draw(7, 200)
    rules = bound(rule("d2", **options), models)
    before = torch.stack(models).double().mean(0)
    for r in range(400):
        one_round(rules, models, graph, r, step=lambda uid, model: None)
    after = torch.stack(models).double().mean(0)
    assert (after - before).norm() / before.norm() < 1e-4


@pytest.mark.slow
def test_exact_diffusion_with_momentum_is_exact() -> None:
    """EDM: 1.6e-10 after 3000 rounds; the default run is on the way there."""
    rounds = scale(600, 3000)
    error = Quadratics().error(rule("exact_diffusion"), RING, rounds, 0.005, momentum=0.9)
    assert error <= (1.7e-10 if rounds == 3000 else 1e-7)
