"""Secure aggregation: the sum is that of plain gossip, a payload looks random, and whatever is missing, nothing wrong
is mixed."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from decentnode import entropy
from decentnode.cli.replay import refuse
from decentnode.errors import ConfigError, PeerFault, UsageError
from decentnode.experiment import load
from decentnode.graph.base import RoundView, view
from decentnode.graph.topology import Topology
from decentnode.parallel.planning.rules import make_sharing
from decentnode.payload import Payload
from decentnode.sharing.decoding import decode
from decentnode.sharing.masks import BLOCK_ELEMENTS, KeyPair, add_masks
from decentnode.sharing.secure_aggregation import MODELS, PUBLIC_KEYS, RECORD, RELAYED_KEYS, SecureAggregation
from tests.graph.contract import make
from tests.sharing.contract import matrix_reference, random_models, rule, run_round, set_up_rules
from tests.sharing.test_requirements import QUICKSTART

STEP = 128 / 2**30
"""What models are rounded to by default."""
MAX_CHI_SQUARE = 377.0
"""That of uniformly distributed bytes is larger with probability 1e-6 (255 degrees of freedom)."""
Lost = Callable[[int, int, int], bool]
"""(phase, source, receiver) -> whether the payload is lost."""


def secure(models: list[Tensor], **options: object) -> list[SecureAggregation]:
    return set_up_rules(rule("secure_aggregation", **options), models)  # type: ignore[return-value]


def exchange(
    rules: list[SecureAggregation], models: list[Tensor], graph: Topology, round: int = 0,
    lost: Lost = lambda *_: False,
) -> dict[tuple[int, int], Payload]:
    """Makes a round in place. Returns the payloads of the last phase by (source, receiver)."""
    sent: dict[tuple[int, int], Payload] = {}
    for phase in (PUBLIC_KEYS, RELAYED_KEYS, MODELS):
        views = [each.plan(replace(view(graph, uid, round, 1), phase=phase)) for uid, each in enumerate(rules)]
        sent = {(uid, to): payload for uid, each in enumerate(rules)
                for to, payload in each.outgoing(models[uid], views[uid]).items()}  # fmt: skip
        for uid, (each, seen) in enumerate(zip(rules, views, strict=True)):
            here = [j for j in seen.sources if not lost(phase, j, uid)]
            received = {j: each.unpack(sent[j, uid], j, seen) for j in here}
            each.mix(models[uid], received, seen.without(frozenset(seen.sources) - {*here}))
    return sent


# -- what a receiver learns


@pytest.mark.parametrize(("family", "options"), [
    ("ring", {"nodes": 5}), ("torus", {"nodes": 9}), ("complete", {"nodes": 6}),
    ("erdos_renyi", {"nodes": 9, "probability": 0.8}), ("random_regular", {"nodes": 8, "degree": 3}),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_models_are_those_of_plain_gossip(family: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    graph = make(family, **options)
    before = random_models(graph.num_nodes, 200, dtype)
    models = [model.clone() for model in before]
    rules = secure(models)
    for r in range(4):
        exchange(rules, models, graph, r)
    reference = torch.from_numpy(matrix_reference(graph, before, 4))
    torch.testing.assert_close(torch.stack(models).double(), reference, atol=4 * 4 * STEP, rtol=1e-6)


def test_the_sum_is_exact_for_integers() -> None:
    """Masks leave no rounding: models of multiples of the step are mixed to the bit of the integers' sum."""
    graph = make("complete", nodes=4)
    draws = torch.Generator().manual_seed(1)
    integers = [torch.randint(-(2**28), 2**28, (50,), generator=draws).double() * 4 for _ in range(4)]
    models = [each * STEP for each in integers]
    exchange(secure(models), models, graph)
    assert all(torch.equal(model / STEP, sum(integers) / 4) for model in models)  # type: ignore[arg-type]


def test_a_payload_looks_like_random_bytes_and_never_repeats() -> None:
    """In a chi-square test over its bytes, with a model of zeros and with one of normal numbers."""
    graph, seen = make("complete", nodes=4), []
    with entropy.use(entropy.seeded(1)):
        for model in (torch.zeros(20_000), random_models(1, 20_000)[0]):
            models = [model.clone() for _ in range(4)]
            rules = secure(models)
            for r in range(2):
                seen += [payload.tensors["x"].clone() for payload in exchange(rules, models, graph, r).values()]
    assert len(seen) == 2 * 2 * 12
    differences = [a - b for a, b in itertools.combinations(seen, 2)]  # nor do two payloads have the same mask
    for each in (*seen, *differences):
        counts = np.bincount(each.numpy().view(np.uint8), minlength=256)
        assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < MAX_CHI_SQUARE


def test_the_sum_without_one_payload_is_noise() -> None:
    graph, models = make("complete", nodes=5), random_models(5, 20_000)
    sent = exchange(secure(models), models, graph)
    part = sum(sent[j, 0].tensors["x"].clone() for j in (1, 2, 3))
    assert float(part.double().std()) > 1e9  # type: ignore[union-attr]
    whole = part + sent[4, 0].tensors["x"]
    assert float(whole.double().std()) * STEP < 3


def test_masks_are_the_key_stream_of_aes() -> None:
    """Against the cipher itself, in one piece; over more than one block, added and subtracted."""
    count, keys = 2 * BLOCK_ELEMENTS + 77, [bytes([k]) * 32 for k in range(2)]
    ciphers = [Cipher(algorithms.AES(key), modes.CTR(bytes(16))) for key in keys]
    masks = [np.frombuffer(each.encryptor().update(bytes(4 * count)), "<u4") for each in ciphers]
    values = np.arange(count, dtype=np.uint32)
    add_masks(values, zip(keys, (True, False), strict=True))
    assert np.array_equal(values, np.arange(count, dtype=np.uint32) + masks[0] - masks[1])


def test_two_nodes_agree_on_a_key_per_receiver_that_a_third_cannot_compute() -> None:
    one, two, relay = KeyPair(), KeyPair(), KeyPair()
    assert one.mask_key(two.public, 5) == two.mask_key(one.public, 5) != one.mask_key(two.public, 6)
    assert len({one.mask_key(two.public, 5), relay.mask_key(one.public, 5), relay.mask_key(two.public, 5)}) == 3


def test_keys_are_new_in_every_round_and_gone_after_it() -> None:
    graph, models = make("ring", nodes=4), random_models(4, 5)
    rules, seen = secure(models), set()
    for r in range(3):
        views = [view(graph, uid, r) for uid in range(4)]
        for each, model, seen_by in zip(rules, models, views, strict=True):
            (keys,) = {payload.tensors["keys"].numpy().tobytes() for payload in each.outgoing(model, seen_by).values()}
            seen.add(keys)
        exchange(rules, models, graph, r)
        assert all(each._own is None and not each._senders_of and each.state_dict() == {} for each in rules)
    assert len(seen) == 12


def test_the_same_seed_gives_the_same_bits_though_keys_differ() -> None:
    graph, runs, payloads = make("torus", nodes=9), [], []
    for keys in ("a", "b"):
        models = random_models(9, 60)
        rules = secure(models)
        with entropy.use(entropy.seeded(keys)):
            payloads.append([exchange(rules, models, graph, r) for r in range(3)])
        runs.append(models)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    first, second = (sent[0][0, 1].tensors["x"] for sent in payloads)
    assert float((first != second).float().mean()) > 0.9


# -- a part of the models


@pytest.mark.parametrize(("family", "options"), [
    ("ring", {"nodes": 5}), ("torus", {"nodes": 9}), ("random_regular", {"nodes": 8, "degree": 3}),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_part_is_mixed_as_by_plain_gossip(family: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """In each of three rounds all nodes mix the same 3 of 10 entries, none of them twice; the others keep their
    bits."""
    graph, models, mixed = make(family, **options), random_models(options["nodes"], 100, dtype), []
    rules, error = secure(models, fraction=0.3), max(torch.finfo(dtype).eps, 1e-6)
    for r in range(3):
        before = torch.stack(models)
        sent = exchange(rules, models, graph, r)
        after = torch.stack(models)
        assert {payload.tensors["x"].numel() for payload in sent.values()} == {30}
        expected = torch.from_numpy(graph.matrix(r)) @ before.double()
        at = (after != before).any(0).nonzero().flatten()
        torch.testing.assert_close(after[:, at].double(), expected[:, at], atol=4 * error, rtol=error)
        assert len(at) == 30
        mixed.append(at)
    assert len(torch.cat(mixed).unique()) == 90


def test_entries_follow_from_seed_and_round_alone() -> None:
    """Not from the model, the node or earlier rounds; later turns have another order."""
    (one, two), models = secure(random_models(2, 1000), fraction=0.25), random_models(2, 1000)
    graph = make("complete", nodes=4)
    first = [one._sent_entries(models[0], view(graph, 0, r, 1)) for r in range(8)]
    later = [two._sent_entries(models[1].half(), view(graph, 3, r, 1)) for r in reversed(range(8))]
    assert all(torch.equal(a, b) for a, b in zip(first, reversed(later), strict=True))  # type: ignore[arg-type]
    assert all(torch.equal(torch.cat(first[a : a + 4]).sort().values, torch.arange(1000)) for a in (0, 4))  # type: ignore[arg-type]
    assert not torch.equal(first[0], first[4])  # type: ignore[arg-type]
    assert not torch.equal(first[0], one._sent_entries(models[0], view(graph, 0, 0, 2)))  # type: ignore[arg-type]


@given(elements=st.integers(2, 400), fraction=st.floats(1e-3, 0.99))
@settings(deadline=None)
def test_no_entry_is_left_out_of_a_turn(elements: int, fraction: float) -> None:
    """Whether or not the entries can be divided into equal pieces; in one round, no entry is sent twice."""
    model = torch.zeros(elements)
    (each,), graph = secure([model], fraction=fraction), make("complete", nodes=4)
    assume(each._count(elements) < elements)
    turn = -(-elements // each._count(elements))
    pieces = [each._sent_entries(model, view(graph, 0, r, 1)) for r in range(turn, 2 * turn)]
    sizes = [(len(piece), len(piece.unique())) for piece in pieces]  # type: ignore[arg-type,union-attr]
    assert set(sizes) == {(each._count(elements),) * 2}
    assert torch.equal(torch.cat(pieces).unique(), torch.arange(elements))  # type: ignore[arg-type]


@pytest.mark.parametrize("fraction", [0.1, 0.5])
def test_every_entry_is_sent_over_all_edges_of_a_graph_that_alternates(fraction: float) -> None:
    """Turns of an even number of rounds do not keep an entry to the odd ones."""
    model, graph = torch.zeros(1000), make("complete", nodes=4)
    (each,) = secure([model], fraction=fraction)
    sent = torch.zeros(2, 1000)
    for r in range(400):
        sent[r % 2, each._sent_entries(model, view(graph, 0, r, 1))] += 1
    expected = 200 * fraction
    assert float((sent.sum(0) - 2 * expected).abs().max()) == 0
    assert float(sent.min()) > expected / 3 and abs(float(sent[0].mean()) - expected) < 1e-3


def test_the_choice_of_entries_takes_no_memory_of_the_size_of_the_model() -> None:
    """An index for each of these entries would take 8 GB."""
    model = torch.zeros(1).expand(10**9)
    (each,) = secure([torch.zeros(2)], fraction=1e-8)
    at = each._sent_entries(model, view(make("complete", nodes=4), 0, 5, 1))
    assert at is not None and len(at.unique()) == 10
    assert 0 <= int(at.min()) < int(at.max()) < 10**9


@pytest.mark.parametrize("family", ["ring", "complete"])
@pytest.mark.parametrize("fraction", [1e-9, 0.1, 0.5, 0.7, 0.999])
def test_parts_keep_the_mean_and_bring_models_together(family: str, fraction: float) -> None:
    graph, before = make(family, nodes=5), random_models(5, 20)
    models = [model.clone() for model in before]
    rules = secure(models, fraction=fraction)
    for r in range(400):
        exchange(rules, models, graph, r)
    assert float((torch.stack(models) - torch.stack(before).mean(0)).abs().max()) < 2e-2 + 400 * STEP


def test_a_part_is_not_mixed_if_a_payload_is_missing() -> None:
    graph, models = make("complete", nodes=5), random_models(5, 40)
    before = [model.clone() for model in models]
    exchange(secure(models, fraction=0.2), models, graph, lost=lambda *each: each == (MODELS, 1, 0))
    assert torch.equal(models[0], before[0])
    assert all(int((models[uid] != before[uid]).sum()) == 8 for uid in range(1, 5))


def test_whole_models_are_refused_where_a_part_is_due() -> None:
    models = random_models(4, 10)
    each, seen = secure(models, fraction=0.3)[0], view(make("complete", nodes=4), 0, 0)
    forged(MODELS, b"", 3)(each, seen)
    for count in (2, 4, 10):
        with pytest.raises(PeerFault, match="malformed_payload"):
            forged(MODELS, b"", count)(each, seen)


# -- what is missing


@given(lost=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(0, 4)), max_size=12))
@settings(deadline=None, max_examples=60)
def test_whatever_is_lost_a_node_mixes_a_sum_of_models_or_keeps_its_own(lost: set[tuple[int, int, int]]) -> None:
    graph = make("complete", nodes=5)
    before = random_models(5, 40)
    models = [model.clone() for model in before]
    exchange(secure(models), models, graph, lost=lambda *each: each in lost)
    for uid, model in enumerate(models):
        gone = {phase: {j for j in range(5) if (phase, j, uid) in lost} for phase in range(3)}
        senders = set(range(5)) - {uid} - gone[PUBLIC_KEYS]
        late = {j for j in senders if j in gone[MODELS] or (RELAYED_KEYS, uid, j) in lost}
        added = set() if late or len(senders) < 2 else senders
        expected = before[uid] + sum((before[j] - before[uid]) / 5 for j in added)
        torch.testing.assert_close(model, expected, atol=1e-6, rtol=0)


def test_a_sum_of_one_model_is_never_sent() -> None:
    """If the key of one of two neighbors is missing, the other one sends nothing."""
    graph, models = make("ring", nodes=4), random_models(4, 30)
    before = models[0].clone()
    sent = exchange(secure(models), models, graph, lost=lambda phase, source, to: (phase, source, to) == (0, 1, 0))
    assert sent[3, 0].tensors["x"].numel() == sent[1, 0].tensors["x"].numel() == 0
    assert torch.equal(models[0], before)
    assert sent[1, 2].tensors["x"].numel() == 30


def test_an_edge_without_weight_hides_nothing_and_is_left_out() -> None:
    graph, models = make("ring", nodes=4), random_models(4, 5)
    seen = replace(view(graph, 0, 0), weights={0: 0.5, 1: 0.5, 3: 0.0})
    planned = secure(models)[0].plan(seen)
    assert planned.neighbors == planned.sources == (1,)


# -- numbers that cannot be sent


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_values_do_not_wrap(dtype: torch.dtype, sign: int) -> None:
    graph = make("complete", nodes=6)
    models = [torch.full((7,), sign * 128.0, dtype=dtype) for _ in range(6)]
    exchange(secure(models), models, graph)
    for model in models:
        assert model.dtype == dtype
        torch.testing.assert_close(model, torch.full((7,), sign * 128.0, dtype=dtype))


def test_a_larger_value_is_an_error_that_says_what_to_set() -> None:
    models = random_models(4, 9)
    models[2][4] = -200.5
    with pytest.raises(UsageError, match=r"sharing.largest must be .*, got 128, and 200.5 in the model of node 2 in "
                       "round 3"):
        exchange(secure(models), models, make("ring", nodes=4), 3)
    exchange(secure(models, largest=256), models, make("ring", nodes=4), 3)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_model_that_is_not_finite_is_not_sent(value: float) -> None:
    """`node.check_finite` ends such a run; without it, the neighbors keep their own models."""
    graph, models = make("complete", nodes=4), random_models(4, 9)
    models[1][3] = value
    before = [model.clone() for model in models]
    exchange(secure(models), models, graph)
    assert all(torch.equal(models[uid], before[uid]) for uid in (0, 2, 3))
    assert not bool(models[1].isfinite().all())


# -- payloads that no node sends


def forged(phase: int, keys: bytes = b"", count: int = 0) -> Callable[[SecureAggregation, RoundView], None]:
    def receive(each: SecureAggregation, seen: RoundView) -> None:
        tensors: Mapping[str, Tensor] = {
            "keys": torch.from_numpy(np.frombuffer(bytearray(keys), np.uint8)),
            "x": torch.zeros(count, dtype=torch.int32),
        }  # fmt: skip
        decode(each, Payload(tensors), 1, replace(seen, phase=phase))

    return receive


OTHERS = [RECORD.pack(uid, KeyPair().public) for uid in (1, 2, 3)]


@pytest.mark.parametrize("receive", [
    forged(PUBLIC_KEYS), forged(PUBLIC_KEYS, bytes(31)), forged(PUBLIC_KEYS, KeyPair().public, 1),
    forged(PUBLIC_KEYS, bytes(32)),
    forged(RELAYED_KEYS, OTHERS[0]), forged(RELAYED_KEYS, OTHERS[0] + OTHERS[1][:-1]),
    forged(RELAYED_KEYS, OTHERS[0] * 2), forged(RELAYED_KEYS, OTHERS[0] + RECORD.pack(2, bytes(32))),
    forged(RELAYED_KEYS, OTHERS[0] + RECORD.pack(0, KeyPair().public)), forged(MODELS, OTHERS[0], 9),
    forged(MODELS, b"", 8),
])  # fmt: skip
def test_forged_payloads_are_refused(receive: Callable[[SecureAggregation, RoundView], None]) -> None:
    """Among them a single key, another key as the node's own, and a key with which everybody would know the secret,
    from its owner or passed on by another node, which is then to blame."""
    models = random_models(4, 9)
    each, seen = secure(models)[0], view(make("complete", nodes=4), 0, 0)
    each.outgoing(models[0], seen)
    with pytest.raises(PeerFault, match="malformed_payload"):
        receive(each, seen)
    forged(RELAYED_KEYS, b"".join(OTHERS))(each, seen)


# -- runs


def test_nodes_agree_at_zero_gradient_as_with_plain_gossip() -> None:
    graph, found = make("torus", nodes=9), {}
    for name in ("full", "secure_aggregation"):
        models = random_models(9, 30)
        rules = set_up_rules(rule(name), models)
        for r in range(60):
            run_round(rules, models, graph, r, pull=0.0)
        found[name] = torch.stack(models)
    assert float((found["secure_aggregation"] - found["secure_aggregation"].mean(0)).abs().max()) < 1e-5
    torch.testing.assert_close(found["secure_aggregation"], found["full"], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("changes", "message"), [
    (["graph={name: line, nodes: 16}"], "at least 2 neighbors of every node.*{name: regular, nodes: 16, degree: 3}"),
    (["graph={name: star, nodes: 5}", "mapping.nodes_per_machine=5"], "use {name: regular, nodes: 5, degree: 4}"),
    (["graph={name: one_peer_exponential, nodes: 16}"], "needs at least 2 neighbors|needs an undirected graph"),
    (["graph={name: erdos_renyi, nodes: 16, probability: 0.5}", "weights={name: uniform}"],
     "needs symmetric weights, the weights of the edge between nodes"),
    (["sharing.compression={name: int8}"], "sharing.compression is not a known key"),
    (["node.schedule=gossip_async"], "needs its neighbors' payloads of the same round"),
    (["model={name: resnet, depth: 8}"], "does not protect the model's statistics"),
    (["node.missing=return_weight", "node.quorum={weights: samples}"], "secure_aggregation needs weights that keep the "
     "mean of all models"),
])  # fmt: skip
def test_runs_that_would_protect_nothing_are_refused(changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(QUICKSTART, ["sharing={name: secure_aggregation}", *changes])


def test_graphs_that_change_are_warned_of() -> None:
    found = [load(QUICKSTART, ["sharing={name: secure_aggregation}", f"graph={{name: {graph}, nodes: 16, degree: 4}}"])
             for graph in ("regular", "random_regular")]  # fmt: skip
    told = ["such sums tell single models" in " ".join(each.config_warnings) for each in found]
    assert told == [False, True]


def test_a_missing_library_is_found_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "decentnode.sharing.masks")
    with pytest.raises(ConfigError, match=r"sharing: secure_aggregation needs the library cryptography.*\[security\]"):
        load(QUICKSTART, ["sharing={name: secure_aggregation}"])


def test_scripts_and_replays_refuse_the_rule() -> None:
    with pytest.raises(ValueError, match="got SecureAggregation, which is not elementwise"):
        make_sharing("secure_aggregation")
    with pytest.raises(UsageError, match="its payloads depend on keys that are not recorded; --check"):
        refuse(load(QUICKSTART, ["sharing={name: secure_aggregation}"]), {})


def test_statistics_that_stay_local_are_allowed() -> None:
    load(QUICKSTART, ["sharing={name: secure_aggregation}", "model={name: resnet, depth: 8}", "node.buffers=local"])
