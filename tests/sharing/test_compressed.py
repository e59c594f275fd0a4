"""Rules with a codec (the key `compression`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from decentnode.build import build_in_process, step_all
from decentnode.errors import ConfigError
from decentnode.experiment import load
from tests.graph.contract import make
from tests.sharing.contract import random_models, rule, run_rounds

ROOT = Path(__file__).parents[2]


def test_bfloat16_values_are_mixed_in_float32() -> None:
    models, reference = random_models(4, 1000), random_models(4, 1000)
    run_rounds(rule("full", compression={"name": "bfloat16"}), make("complete", nodes=4), models, 1)
    expected = (reference[0] + sum(m.bfloat16().float() for m in reference[1:])) / 4
    torch.testing.assert_close(models[0], expected, atol=1e-6, rtol=0)


def test_rules_stay_elementwise_with_elementwise_codecs_alone() -> None:
    cast = rule("full", compression={"name": "float16"})()
    assert cast.requirements.elementwise and cast.payload_schema(10, torch.float32)["x"].dtype == torch.float16
    assert not rule("full", compression={"name": "int8"})().requirements.elementwise


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sharing.compression.name must be one of .*got 'int9'"):
        load(ROOT / "configs" / "quickstart.yaml", ["sharing={name: full, compression: {name: int9}}"])


@pytest.mark.slow
@pytest.mark.sampled(one=["sharing"])
@pytest.mark.parametrize("sharing", [
    "{name: full, compression: {name: bfloat16}}", "{name: jwins, compression: {name: zlib}}",
    "{name: choco, compression: {name: int8}}", "{name: topk, compression: {name: int8, unbiased: true}}",
])  # fmt: skip
def test_compressed_runs_learn_and_send_fewer_bytes(sharing: str) -> None:
    sets = [f"sharing={sharing}", "graph={name: ring, nodes: 8}", "mapping.nodes_per_machine=8",
            "node={rounds: 20, evaluate_every: 0}"]  # fmt: skip
    nodes = build_in_process(load(ROOT / "configs" / "quickstart.yaml", sets))
    step_all(nodes)
    accuracy = float(np.mean([node.figures()["accuracy"] for node in nodes]))  # type: ignore[arg-type]
    counters = nodes[0].communication.counters
    uncompressed = 20 * 2 * 4 * nodes[0].training.model.num_parameters  # rounds, neighbors, bytes of a float32
    sent = counters.bytes_sent()
    assert accuracy > 0.7 and 0 < sent["data"] + sent["metadata"] < 0.6 * uncompressed
