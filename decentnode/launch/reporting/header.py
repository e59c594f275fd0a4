"""Makes the header that the console shows before an experiment starts: (label, text) lines, including warnings."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import zmq
from torch import nn

from decentnode.build import devices_of, shared_model, threads_of
from decentnode.config.component import Config
from decentnode.data.opened import OpenedData
from decentnode.experiment import Experiment
from decentnode.experiment.initial_model import module_without_values
from decentnode.formatting import names, size
from decentnode.graph import spectrum
from decentnode.graph.base import Graph
from decentnode.launch.files.provenance import source_hash
from decentnode.launch.reporting.notices import default_lr_notice, privacy_notice, short_timeout_warning
from decentnode.mapping.hosts import address
from decentnode.node.schedules.schedules import payload_schema, sent_dtype
from decentnode.payload import SCALAR_BYTES, TensorSpec
from decentnode.sharing.base import Sharing
from decentnode.sharing.fragments import Fragment
from decentnode.sharing.parameters import ParametersConfig, layout_of, named
from decentnode.sharing.rounds import exchange_rounds, rule_view
from decentnode.simulate.traffic import (
    ServerBytes,
    buffer_receivers,
    bytes_down,
    follows_graph,
    payload_bytes,
)
from decentnode.version import __version__

LOOKED_AT, MAX_PLANS = 64, 2048
"""How many exchanges at most are counted to announce their mean, and how many plans of nodes are made for that."""
MEASURED_ELEMENTS = 4_000_000
"""Largest number of elements of payloads that are made and measured as their sizes depend on their values: the start
must not wait for it (.1 s of CPU with choco)."""


def header(experiment: Experiment, local: Sequence[int], connected: bool = True) -> list[list[str]]:
    """Returns (label, text) lines that describe the experiment. Builds one model, without values, and partitions the
    data as every node does. local: the nodes of this machine. connected: whether the nodes use a network; False in a
    simulation."""
    data = experiment.open_data()
    module = module_without_values(experiment, data.spec)
    count = sum(p.numel() for p in module.parameters() if p.requires_grad)
    sizes = [len(part) for part in data.shares().values()]
    partition = getattr(experiment.data, "partition", None)
    return [
        ["versions", _versions(experiment, local)],
        *_graphs(experiment),
        ["data", f"{experiment.data.name}, {_private_files(data, len(sizes))}{sum(sizes):,} training samples, "
                 f"{_section_text(partition)}: smallest node {min(sizes):,}, largest {max(sizes):,}"],
        ["task", f"{experiment.measured().task}: {', '.join(each.text for each in experiment.measured().metrics)}"],
        ["model", f"{experiment.model.name}, {count:,} parameters: {size(count * 4)}"],
        *_parameters(experiment, module),
        *([["training", text]] if (text := default_lr_notice(experiment)) else []),
        *([["privacy", text]] if (text := privacy_notice(experiment)) else []),
        ["sharing", f"{_rule_name(experiment)}: {_traffic(estimate_traffic(experiment, module), experiment)}"],
        *([["attack", text]] if (text := _attack_summary(experiment)) else []),
        *(["warning", doubt] for doubt in experiment.config_warnings),
        *([["warning", short]] if connected and (short := short_timeout_warning(experiment)) else []),
        *([["warning", exposed]] if connected and (exposed := exposure_warning(experiment)) else []),
    ]  # fmt: skip


def _graphs(experiment: Experiment) -> list[list[str]]:
    """Returns a line for the graph of the run, or for each different graph of its fragments."""
    parts = (experiment.parameters or ParametersConfig()).parts(experiment.make_graph().num_nodes)
    described: list[Config] = []
    lines = []
    for part, graph in zip(parts, experiment.make_fragment_graphs(), strict=True):
        config = part.graph or experiment.graph
        if config not in described:
            described.append(config)
            neighbors = [len(graph.neighbors(uid, 0)) for uid in range(graph.num_nodes)]
            text = f"{config.name}, {graph.num_nodes} nodes, {_degrees(neighbors)}{_spectral_gap(graph)}"
            lines.append(["graph", text])
    return lines


def _private_files(data: OpenedData, readable: int) -> str:
    """Returns the beginning of the line about data if nodes have private files, else ""."""
    return f"private files of each node, those of {readable} on this machine, " if data.private else ""


def _parameters(experiment: Experiment, module: nn.Module) -> list[list[str]]:
    """Returns a line such as "4,160 shared in 2 fragments, 650 local to each node"; none if the whole model is
    exchanged."""
    if experiment.parameters is None:
        return []
    layout = layout_of(experiment.parameters, named(module), experiment.make_graph().num_nodes)
    kept, count = sum(math.prod(shape) for shape in layout.shapes) - layout.shared, len(layout.ranges)
    parts = f" in {count} fragments" if count > 1 else ""
    return [["parameters", f"{layout.shared:,} shared{parts}, {kept:,} local to each node"]]


def _attack_summary(experiment: Experiment) -> str:
    """Returns the attack and its nodes, such as "sign_flip by nodes 3, 7", or "" if all nodes are honest."""
    if experiment.attack is None:
        return ""
    attackers = experiment.attackers()
    word = "node" if len(attackers) == 1 else "nodes"
    return f"{experiment.attack.name} by {word} {names(attackers)} (not in the figures over the nodes)"


def _rule_name(experiment: Experiment) -> str:
    """Returns the names of the sharing rule and its codec, such as "topk with int8"."""
    codec = getattr(experiment.sharing, "compression", None)
    return experiment.sharing.name + (f" with {codec.name}" if codec is not None else "")


def _traffic(estimate: TrafficEstimate, experiment: Experiment) -> str:
    if experiment.node.schedule == "ad_psgd":  # independent of the degree
        return f"{size(estimate.message)} per message, usually at most 2 per node per round (an offer and an answer)"
    frequency = "per round" if estimate.first == 0 else f"per exchange, the first in round {estimate.first}"
    word = {"exact": "", "measured": "about ", "bound": "at most "}[estimate.source]
    bound = f" (at most {size(estimate.most)})" if estimate.source == "measured" else ""
    return f"{word}{size(estimate.message)} per message{bound}, {word}{size(estimate.sent)} sent per node {frequency}"


def exposure_warning(experiment: Experiment) -> str:
    """Returns a warning if nodes listen on a non-loopback interface without security, else ""."""
    config, mapping = experiment.communication, experiment.make_mapping()
    if not config.networked or config.key_folder is not None:
        return ""
    places = [mapping.place(uid) for uid in range(mapping.num_nodes)]
    open_ = sorted({place.bind for place in places if place.port is not None and not _is_loopback(place.bind)})
    if not open_:
        return ""
    return (
        f"nodes listen on {', '.join(open_[:4])}{', ...' if len(open_) > 4 else ''} without security: anyone who can "
        "reach these ports can read the models and disturb the run; create keys with decentnode keygen and set "
        f"communication: {{security: required, keys: ...}}"
    )


def _is_loopback(host: str) -> bool:
    known = address(host)
    return host == "localhost" if known is None else known.is_loopback


def _versions(experiment: Experiment, local: Sequence[int]) -> str:
    threads = threads_of(experiment, local[0])
    devices = " and ".join(_devices(devices_of(experiment.make_mapping(), local)))
    per_node = f"{threads} thread{'s' if threads != 1 else ''} per node"
    return f"decentnode {__version__} · torch {torch.__version__} · zmq {zmq.zmq_version()} · {devices}, {per_node}"


def _devices(found: Sequence[torch.device]) -> Iterator[str]:
    """Yields the kinds of devices in words, such as "2 GPUs NVIDIA H200" and "CPU"."""
    counts = Counter(torch.cuda.get_device_name(device) for device in {*found} if device.type == "cuda")
    for name, count in sorted(counts.items()):
        yield f"{count} GPUs {name}" if count > 1 else f"GPU {name}"
    if any(device.type == "cpu" for device in found):
        yield "CPU"


def _degrees(neighbors: list[int]) -> str:
    low, high = min(neighbors), max(neighbors)
    return f"degree {low}" if low == high else f"degrees {low} to {high}"


def _spectral_gap(graph: Graph) -> str:
    """Returns a text about the graph's spectral gap; "" above 256 nodes, where computing it takes long."""
    if not 1 < graph.num_nodes <= 256:
        return ""
    rate, rounds = spectrum.mixing(graph)
    assert rate is not None, "the graph is small enough"
    about = f" (consensus to 1e-3 in about {rounds} rounds)" if rounds is not None else ""
    return f", spectral gap {1 - rate:.3f}{about}"


def _section_text(config: object) -> str:
    """Returns a section's name and values in one line, such as "dirichlet alpha 0.5"."""
    values = {key: value for key, value in dict(config or {}).items() if key != "name"}  # type: ignore[call-overload]
    return " ".join([str(getattr(config, "name", "iid")), *(f"{key} {value}" for key, value in values.items())])


def changed_code_warning(experiment: Experiment) -> list[list[str]]:
    """Returns a warning line if the experiment repeats a run that was made with another version of decentnode's code.
    """
    try:
        recorded_hash = json.loads((experiment.base_dir / "env.json").read_text())["source"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    if recorded_hash == source_hash():
        return []
    return [["warning", "the original run used a different version of decentnode's code: results may differ"]]


@dataclass(frozen=True)
class TrafficEstimate:
    """Bytes of payloads, without headers and acknowledgements."""

    message: float
    """Bytes of one payload; that of the largest fragment if there are several."""
    sent: float
    """Bytes that a node sends in a round with an exchange, as the mean over the nodes and over the run's rounds, or
    over the first of these or a period of the graph. With fragments, the mean also counts rounds without an
    exchange."""
    source: Literal["exact", "measured", "bound"]
    """Whether all payloads have these sizes; or sizes differ and these are means over the rounds, of payloads of random
    values where they depend on values; or these are upper bounds."""
    most: float
    """The largest possible `message`."""
    first: int
    """The round of the first exchange."""


def estimate_traffic(experiment: Experiment, module: nn.Module) -> TrafficEstimate:
    """Returns the traffic of the experiment's sharing rule and codec, estimated from the rule's schemas and the
    neighbors that it plans; includes float buffers. Where sizes depend on values, it makes one payload of up to
    MEASURED_ELEMENTS elements. Raises what building the rule raises."""
    shared = shared_model(experiment, module)
    model, graph = shared.model, experiment.make_graph()
    fragments = shared.fragments or (Fragment(0, model.num_parameters, graph),)
    rules, estimates, rounds = shared.make_rules(), [], experiment.node.rounds
    for fragment, rule, measured in zip(fragments, rules, shared.make_rules(), strict=True):
        schema, _ = (payload_schema(experiment.node.schedule, each, fragment.elements, model.dtype)
                     for each in (rule, measured))  # fmt: skip
        dtype = sent_dtype(experiment.node.schedule, rule, model.dtype)
        sizes = _phase_sizes(fragment, measured, schema, experiment.seed, dtype)
        estimates.append(_estimate_fragment(fragment, rule, schema, experiment.seed, rounds, sizes))
    buffers = model.buffers.nbytes if experiment.node.buffers == "average" else 0
    first = min(each.first for each in estimates)
    largest, sent = max(estimates, key=lambda each: each.message), sum(each.sent for each in estimates)
    if buffers:
        counted = _counted_exchanges(Fragment(0, model.num_parameters, graph), rules[0], rounds)
        edges = sum(len(buffer_receivers(rules[0], graph, uid, round, experiment.seed))
                    for uid in range(graph.num_nodes) for round in counted)  # fmt: skip
        sent += buffers * edges / graph.num_nodes / len(counted)
    return replace(largest, sent=sent, first=first)


def _counted_exchanges(fragment: Fragment, rule: Sharing, rounds: int) -> list[int]:
    """Returns the first exchanges, whose mean is announced: those of a period if the rule uses the graph's edges, else
    those of the run, up to LOOKED_AT; at least one."""
    period = fragment.graph.period if follows_graph(rule) else None
    most = max(1, min(LOOKED_AT, MAX_PLANS // fragment.graph.num_nodes))
    found = [*itertools.islice(exchange_rounds(rule), most if period is None else min(most, period))]
    return [exchange for exchange in found if fragment.round_of(exchange) < rounds] or found[:1] or [0]


def _phase_sizes(
    fragment: Fragment, rule: Sharing, schema: Mapping[str, TensorSpec], seed: int, dtype: torch.dtype
) -> tuple[float, ...] | ServerBytes:
    """Returns the measured bytes of a payload in each phase, or what a server sends, or () if sizes are known or the
    payload is too large to measure. rule: one that has sent nothing, whose state this changes."""
    if all(spec.exact for spec in schema.values()) or _has_phase_bytes(fragment, rule):
        return ()
    payloads = len(rule.measured_views(rule_view(rule, fragment.graph, 0, 0, seed)))
    if payloads * fragment.elements > MEASURED_ELEMENTS:
        return ()
    measure = bytes_down if rule.requirements.star else payload_bytes
    found = measure(rule, fragment, seed, dtype)
    return found if isinstance(found, ServerBytes) else found[0]


def _has_phase_bytes(fragment: Fragment, rule: Sharing) -> bool:
    return rule.phase_bytes(rule_view(rule, fragment.graph, 0, 0), fragment.elements) is not None


def _estimate_fragment(
    fragment: Fragment, rule: Sharing, schema: Mapping[str, TensorSpec], seed: int, rounds: int,
    measured: tuple[float, ...] | ServerBytes,
) -> TrafficEstimate:
    """Returns the traffic of one fragment whose payloads have this schema. For a fragment that is exchanged every k-th
    round, `sent` is the k-th part of an exchange's bytes. rounds: those of the run."""
    bound = sum(spec.max_elements * spec.dtype.itemsize for spec in schema.values())
    bound += SCALAR_BYTES * len(rule.requirements.scalars)
    num_phases, nodes = rule.requirements.phases, range(fragment.graph.num_nodes)
    down = measured if isinstance(measured, ServerBytes) else None
    usual = measured if not isinstance(measured, ServerBytes) else measured.phases

    def messages(uid: int, exchange: int) -> list[float]:
        view = replace(rule_view(rule, fragment.graph, uid, exchange, seed), fragment=fragment.index)
        sizes = rule.phase_bytes(view, fragment.elements) or usual or (bound,) * num_phases
        plans = [rule.plan(replace(view, phase=phase)) for phase in range(num_phases)]
        found = [each for plan, each in zip(plans, sizes, strict=True) for _ in plan.neighbors]
        if down is not None and uid in fragment.graph.servers:
            clients, sources = plans[0].neighbors, plans[rule.requirements.steps_before].sources
            found[: len(clients)] = [down.to(client in sources, exchange) for client in clients]
        return found

    counted = _counted_exchanges(fragment, rule, rounds)
    sizes = {exchange: [each for uid in nodes for each in messages(uid, exchange)] for exchange in counted}
    later = [sizes[exchange] for exchange in counted[1:] or counted]
    # servers begin with payloads of other sizes, which count once in the whole run
    total = max(1, rounds) if down is not None else len(counted)
    sent = (sum(sizes[counted[0]]) + (total - 1) * sum(map(sum, later)) / len(later)) / total
    known = _has_phase_bytes(fragment, rule)
    exact = all(spec.exact for spec in schema.values()) or (known and num_phases > 1)
    return TrafficEstimate(
        max((each for found in later for each in found), default=bound), sent / len(nodes) / fragment.every,
        "exact" if exact else "measured" if measured or known else "bound", bound,
        fragment.round_of(next((exchange for exchange in counted if sizes[exchange]), 0)),
    )  # fmt: skip
