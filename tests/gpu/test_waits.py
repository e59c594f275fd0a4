"""How often the host waits for the GPU between two local steps, for every rule and codec: compression/indices.py,
sharing/operator.py, sharing/powergossip.py and compression/lossless.py have the reasons."""

from __future__ import annotations

import pytest
import torch

from decentnode import tensors
from decentnode.communication.receive.partial_payload import non_finite_sources
from decentnode.payload import Payload
from tests.compression.contract import CODECS, values
from tests.gpu.waits import counted
from tests.sharing.contract import RULES, random_models, run_round, set_up_rules, suitable_graph

pytestmark = pytest.mark.gpu
EXACT = hasattr(torch.cuda, "host_waits")
"""A real GPU does not tell of every wait."""
NODES = 4
INDICES = 2 + 2 * 2
"""To code those of one payload, and to decode those of two neighbors."""
LOSSLESS = 1 + 2
"""The same of a tensor that is compressed on the CPU."""
SIZES_AT = 1 + 2
"""How many of the chosen entries lie in each tensor, where blocks of a codec end: of one payload, and of two."""
OF_A_ROUND = {
    **dict.fromkeys(["topk", "fft", "wavelet", "jwins", "deepsqueeze", "choco", "stc", "topk cleared before",
                     "topk by value", "jwins by value", "fft+float16", "choco of random ones"], INDICES),
    **dict.fromkeys(["topk+int8", "choco+int8", "deepsqueeze+int8"], INDICES + SIZES_AT),
    **dict.fromkeys(["beer", "beer dsgt"], 2 * INDICES), "beer+int8": 2 * (INDICES + SIZES_AT),
    **dict.fromkeys(["full+zlib", "full+zstd", "full+lz4"], LOSSLESS), "full+zstd of int4": 2 * LOSSLESS,
    "jwins+zstd": INDICES + LOSSLESS,
    **dict.fromkeys(["qsgd", "sign", "deepsqueeze of all"], 2),  # headers of indices, which say "all of them"
    **dict.fromkeys(["powergossip", "powergossip of rank 1"], 2),  # whether a neighbor's difference has full rank
    **dict.fromkeys(["clipped_gossip", "clipped_gossip he", "clipped_gossip nearest", "clipped_gossip of a radius"],
                    1),  # the distances of all neighbors
    "fedstc": 5,  # three clients and a server, which codes for all of them
}  # fmt: skip
"""By rule, per node; 0 for all others."""
OF_A_CODEC = {"zlib": 1, "zstd": 1, "lz4": 1, "zstd of int4": 2, "zlib of truncate": 1, "lz4 of sign": 2}
"""To code as often as to decode, once for each tensor; 0 for all others."""


@pytest.fixture(autouse=True)
def many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are processed in several pieces: none of them may cost a wait."""
    monkeypatch.setattr(tensors, "GPU_BLOCK_ELEMENTS", 1024)


def waits_of_a_round(name: str) -> dict[str, int]:
    models = [random_models(1, 5000)[0].cuda() for _ in range(NODES)]
    graph = suitable_graph(RULES[name](), NODES)
    rules = set_up_rules(RULES[name], models)
    for r in range(2):
        run_round(rules, models, graph, r)
    with counted() as found:
        run_round(rules, models, graph, 2)
    return found


@pytest.mark.parametrize("name", RULES)
def test_of_a_round(name: str) -> None:
    found, expected = waits_of_a_round(name), NODES * OF_A_ROUND.get(name, 0)
    assert sum(found.values()) == expected if EXACT else sum(found.values()) <= expected, found


@pytest.mark.parametrize("name", CODECS)
def test_of_a_codec(name: str) -> None:
    each, given = CODECS[name]().divided([2000, 2500, 37, 463]), values(5000).cuda()
    draws, expected = torch.Generator("cuda").manual_seed(1), OF_A_CODEC.get(name, 0)
    with counted() as coding:
        coded = each.encode(given, draws)
    with counted() as decoding:
        each.decode(coded, 5000, given.dtype)
    for found in (coding, decoding):
        assert sum(found.values()) == expected if EXACT else sum(found.values()) <= expected, found


def test_of_looking_for_what_is_not_finite() -> None:
    """Of all payloads that arrived together."""
    odd = torch.tensor([1.0, float("nan")], device="cuda")
    received = {uid: Payload({"x": odd[:uid], "y": torch.ones(3, device="cuda")}) for uid in (1, 2)}
    with counted() as found:
        assert non_finite_sources(received) == [2]
    assert sum(found.values()) == 1
