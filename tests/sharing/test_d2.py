"""Properties of d2, which is also called exact_diffusion, beyond the contract."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from decentnode.errors import ConfigError
from decentnode.experiment import load
from tests.conftest import scale
from tests.graph.contract import make
from tests.sharing.contract import random_models, rule, run_round, set_up_rules
from tests.sharing.helpers import Quadratics

ROOT = Path(__file__).parents[2]
RING = make("ring", nodes=16)


@pytest.mark.parametrize("name", ["d2", "exact_diffusion"])
def test_a_mixing_matrix_with_an_eigenvalue_below_minus_one_third_is_refused(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At -1/3 (rings of even size) there is a warning, above it none."""
    sets = [f"sharing={{name: {name}}}", "mapping={name: linear, nodes_per_machine: 8}"]
    load(ROOT / "configs" / "quickstart.yaml", [*sets, "graph={name: ring, nodes: 8}"])
    assert "smallest eigenvalue of the mixing matrix is -0.333" in caplog.text
    caplog.clear()
    load(ROOT / "configs" / "quickstart.yaml", [*sets, "graph={name: complete, nodes: 8}"])
    assert not caplog.text
    heavy = np.roll(np.eye(8), 1, 0) / 2 + np.roll(np.eye(8), -1, 0) / 2  # eigenvalues cos(2 pi k / 8)
    np.savetxt(tmp_path / "heavy.txt", heavy)
    sets += ["graph={name: ring, nodes: 8}", f"weights={{name: file, path: {tmp_path}/heavy.txt}}"]
    refusal = r"eigenvalues below -0.333, the smallest is -1.000; use .*lazy: true"
    with pytest.raises(ConfigError, match=refusal) as caught:
        load(ROOT / "configs" / "quickstart.yaml", sets)
    assert caught.value.exit_code == 2
    load(ROOT / "configs" / "quickstart.yaml", [*sets[:-1], "weights={name: metropolis_hastings, lazy: true}"])


def test_d2_refuses_the_overlapped_schedule() -> None:
    with pytest.raises(ConfigError, match="d2 works with schedule: sequential only"):
        load(ROOT / "configs" / "quickstart.yaml", [
            "sharing={name: d2}", "graph={name: ring, nodes: 16}", "node.schedule=overlapped",
        ])  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"compression": {"name": "bfloat16"}}, {"compression": {"name": "int8"}}],
                         ids=["whole", "bfloat16", "int8"])  # fmt: skip
def test_rounding_and_codec_errors_do_not_move_the_mean(options: dict[str, object]) -> None:
    """Without gradients. When the rule computed 2 x_t - x_{t-1}, the mean moved by 4e-3 of its norm in these rounds,
    and with the codecs by 0.4 and by 22 times its norm: each error moved the mean again in every later round."""
    graph, models = make("complete", nodes=7), random_models(7, 200)
    rules = set_up_rules(rule("d2", **options), models)
    before = torch.stack(models).double().mean(0)
    for r in range(400):
        run_round(rules, models, graph, r, step=lambda uid, model: None)
    after = torch.stack(models).double().mean(0)
    assert (after - before).norm() / before.norm() < 1e-4


@pytest.mark.slow
def test_exact_diffusion_with_momentum_is_exact() -> None:
    """EDM: the error is 1.6e-10 after 3000 rounds (--stress), and at most 1e-7 after the 600 of the default run."""
    rounds = scale(600, 3000)
    error = Quadratics().error(rule("exact_diffusion"), RING, rounds, 0.005, momentum=0.9)
    assert error <= (1.7e-10 if rounds == 3000 else 1e-7)
