"""Any rule with its values coded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from decentnode.build import build_in_process, step_all
from decentnode.errors import ConfigError
from decentnode.experiment import load
from tests.graph.contract import make
from tests.sharing.contract import draw, gossip, rule

ROOT = Path(__file__).parents[2]


def test_half_values_are_mixed_in_single_precision() -> None:
    models, reference = draw(4, 1000), draw(4, 1000)
    gossip(rule("full", compression={"name": "bfloat16"}), make("complete", nodes=4), models, 1)
    expected = (reference[0] + sum(m.bfloat16().float() for m in reference[1:])) / 4
    torch.testing.assert_close(models[0], expected, atol=1e-6, rtol=0)


def test_elementwise_codecs_keep_the_slices() -> None:
    each = rule("full", compression={"name": "float16"})()
    assert each.requirements.elementwise and each.payload_schema(10, torch.float32)["x"].dtype == torch.float16
    assert not rule("full", compression={"name": "int8"})().requirements.elementwise


def test_unknown_compression_is_named() -> None:
    with pytest.raises(ConfigError, match="compression"):
        load(ROOT / "configs" / "quickstart.yaml", ["sharing={name: full, compression: {name: int9}}"])


@pytest.mark.slow
@pytest.mark.sampled(one=["sharing"])
@pytest.mark.parametrize("sharing", [
    "{name: full, compression: {name: bfloat16}}", "{name: jwins, compression: {name: zlib}}",
    "{name: choco, compression: {name: int8}}", "{name: topk, compression: {name: int8, unbiased: true}}",
])  # fmt: skip
def test_compressed_runs_learn_and_count_their_bytes(sharing: str) -> None:
    sets = [f"sharing={sharing}", "graph={name: ring, nodes: 8}", "mapping.nodes_per_machine=8",
            "node={rounds: 20, evaluate_every: 0}"]  # fmt: skip
    nodes = build_in_process(load(ROOT / "configs" / "quickstart.yaml", sets))
    step_all(nodes)
    accuracy = float(np.mean([node.figures()["accuracy"] for node in nodes]))  # type: ignore[arg-type]
    counters = nodes[0].communication.counters
    full = 20 * 2 * 4 * nodes[0].training.model.num_parameters
    sent = counters.bytes_sent()
    assert accuracy > 0.7 and 0 < sent["data"] + sent["metadata"] < 0.6 * full
