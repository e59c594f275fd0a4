"""How often the host waits for the GPU between two local steps, for every rule and codec: compression/indices.py,
sharing/operator.py, sharing/powergossip.py and compression/lossless.py have the reasons."""

from __future__ import annotations

import pytest
import torch

from decentnode import tensors
from decentnode.communication.receive.partial_payload import non_finite_sources
from decentnode.payload import Payload
from tests.compression.contract import CODECS, random_values
from tests.gpu.waits import count_waits
from tests.sharing.contract import RULES, random_models, run_round, set_up_rules, suitable_graph

pytestmark = pytest.mark.gpu
EXACT = hasattr(torch.cuda, "host_waits")
"""Whether every wait is counted; a real GPU does not report all of them."""
NODES = 4
INDICES = 2 + 2 * 2
"""Waits to encode the indices of one payload, and to decode those of two neighbors."""
LOSSLESS = 1 + 2
"""The same for a tensor that is compressed on the CPU."""
SIZES_AT = 1 + 2
"""Waits for the number of chosen entries in each tensor, at which blocks of a codec end: for one payload and for
two."""
WAITS_OF_A_ROUND = {
    **dict.fromkeys(["topk", "fft", "wavelet", "jwins", "deepsqueeze", "choco", "stc", "topk cleared before",
                     "topk by value", "jwins by value", "fft+float16", "choco of random ones",
                     "lead of random ones"], INDICES),
    **dict.fromkeys(["topk+int8", "choco+int8", "deepsqueeze+int8"], INDICES + SIZES_AT),
    **dict.fromkeys(["beer", "beer dsgt"], 2 * INDICES), "beer+int8": 2 * (INDICES + SIZES_AT),
    **dict.fromkeys(["full+zlib", "full+zstd", "full+lz4"], LOSSLESS), "full+zstd of int4": 2 * LOSSLESS,
    "jwins+zstd": INDICES + LOSSLESS,
    **dict.fromkeys(["qsgd", "sign", "lead", "deepsqueeze of all"], 2),  # headers of indices, which say "all of them"
    **dict.fromkeys(["powergossip", "powergossip of rank 1"], 2),  # whether a neighbor's difference has full rank
    **dict.fromkeys(["clipped_gossip", "clipped_gossip he", "clipped_gossip nearest", "clipped_gossip of a radius"],
                    1),  # the distances of all neighbors
    **dict.fromkeys(["secure_aggregation", "secure_aggregation of a part"],
                    1 + 3 * 2),  # the largest entry; for each of two neighbors two kinds of keys and the model
    "fedstc": 5,  # three clients and a server, which codes for all of them
}  # fmt: skip
"""Rule -> waits per node in a round; 0 for all others."""
WAITS_OF_A_CODEC = {"zlib": 1, "zstd": 1, "lz4": 1, "zstd of int4": 2, "zlib of truncate": 1, "lz4 of sign": 2}
"""Codec -> waits to encode, and again to decode: one for each tensor; 0 for all others."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes models several blocks long: the number of blocks must not change the number of waits."""
    monkeypatch.setattr(tensors, "GPU_BLOCK_ELEMENTS", 1024)


def waits_of_a_round(name: str) -> dict[str, int]:
    models = [random_models(1, 5000)[0].cuda() for _ in range(NODES)]
    graph = suitable_graph(RULES[name](), NODES)
    rules = set_up_rules(RULES[name], models)
    for r in range(2):
        run_round(rules, models, graph, r)
    with count_waits() as waits:
        run_round(rules, models, graph, 2)
    return waits


def check_waits(waits: dict[str, int], expected: int) -> None:
    count = sum(waits.values())
    assert count == expected if EXACT else count <= expected, waits


@pytest.mark.parametrize("name", RULES)
def test_the_host_waits_in_a_round_of_every_rule_as_often_as_listed(name: str) -> None:
    check_waits(waits_of_a_round(name), NODES * WAITS_OF_A_ROUND.get(name, 0))


@pytest.mark.parametrize("name", CODECS)
def test_the_host_waits_in_every_codec_as_often_as_listed(name: str) -> None:
    codec, given = CODECS[name]().divided([2000, 2500, 37, 463]), random_values(5000).cuda()
    draws, expected = torch.Generator("cuda").manual_seed(1), WAITS_OF_A_CODEC.get(name, 0)
    with count_waits() as coding:
        coded = codec.encode(given, draws)
    with count_waits() as decoding:
        codec.decode(coded, 5000, given.dtype)
    for waits in (coding, decoding):
        check_waits(waits, expected)


def test_looking_for_non_finite_payloads_waits_once() -> None:
    """Once for all payloads that arrived together."""
    odd = torch.tensor([1.0, float("nan")], device="cuda")
    received = {uid: Payload({"x": odd[:uid], "y": torch.ones(3, device="cuda")}) for uid in (1, 2)}
    with count_waits() as waits:
        assert non_finite_sources(received) == [2]
    assert sum(waits.values()) == 1
