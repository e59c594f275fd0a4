"""Keys that have no effect beside others, and missing files, are reported at their place."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from decentnode.cli import main
from decentnode.experiment import load
from tests.config.experiments import BASE, load_problems

TWO = "mapping: {machines: 2, nodes_per_machine: 2, base_port: 20100, addresses: [127.0.0.1, 127.0.0.2]}\n"


@pytest.mark.parametrize(("node", "wrong"), [
    ("{schedule: epidemic, asynchronous: {max_age: 3}}",
     "6:52: node.asynchronous.max_age is used only with schedule: gossip_async, got epidemic; leave it out"),
    ("{schedule: epidemic, asynchronous: {stale: wait, age_weights: false}}", "node.asynchronous.age_weights is used"),
    ("{schedule: ad_psgd, asynchronous: {advance_copies: false}}", "is used only with schedule: gossip_async"),
    ("{schedule: epidemic, asynchronous: {patience: 3}}", "is used only with schedule: ad_psgd, got epidemic"),
    ("{schedule: ad_psgd, asynchronous: {deadline_seconds: 3}}", "is used only with schedule: epidemic, got ad_psgd"),
    ("{schedule: gossip_async, asynchronous: {arrivals: 1}}", "is used only with schedule: epidemic"),
    ("{schedule: gossip_async, asynchronous: {wait_seconds: 2}}", "is used only with stale: wait, got leave_out"),
    ("{schedule: gossip_async, asynchronous: {stale: wait, wait_seconds: 60}}",
     "6:74: node.asynchronous.wait_seconds must be less than communication.timeout_seconds, 60, got 60"),
    ("{schedule: epidemic, asynchronous: {deadline_seconds: 90}}", "the others give up on a node that waits that long"),
    ("{asynchronous: {max_age: 3}}", "6:22: node.asynchronous needs schedule: gossip_async, ad_psgd or epidemic"),
    ("{merge_weights: rounds}", "6:23: node.merge_weights needs missing: regroup and on_partition: both, got fail"),
    ("{missing: regroup, merge_weights: rounds}", "6:41: node.merge_weights needs on_partition: both, got majority"),
    ("{missing: return_weight, quorum: {grace_seconds: 60}}",
     "6:56: node.quorum.grace_seconds must be less than communication.timeout_seconds, 60, got 60"),
    ("{quorum: {share: .5}}", "6:16: node.quorum needs missing: return_weight"),
])  # fmt: skip
def test_keys_without_an_effect_are_refused_at_their_place(write: Any, node: str, wrong: str) -> None:
    assert wrong in load_problems(write(f"{BASE}node: {node}\n"))


def test_sharing_by_running_sums_refuses_keys_about_stale_models(write: Any) -> None:
    node = "node: {schedule: gossip_async, asynchronous: {stale: wait}}\n"
    assert "asynchronous.stale: running sums" in load_problems(write(BASE + node), "sharing=push_sum")
    load(write(BASE + node), [], {})
    node = "node: {schedule: gossip_async, asynchronous: {advance_copies: false}}\n"
    assert "asynchronous.advance_copies: running sums" in load_problems(write(BASE + node), "sharing=push_sum")


@pytest.mark.parametrize("node", [
    "{schedule: gossip_async, asynchronous: {max_age: 3, stale: wait, wait_seconds: 2, age_weights: false}}",
    "{schedule: ad_psgd, asynchronous: {patience: 3}}",
    "{schedule: epidemic, asynchronous: {arrivals: 1, deadline_seconds: 2}}",
    "{missing: regroup, on_partition: both, merge_weights: rounds}",
    "{missing: return_weight, quorum: {grace_seconds: 59}}",
])  # fmt: skip
def test_keys_with_an_effect_are_accepted_and_load_again_from_the_resolved_file(write: Any, node: str) -> None:
    experiment = load(write(f"{BASE}node: {node}\n"), [], {})
    assert load(write(experiment.resolved_yaml(), "again.yaml"), [], {}).node == experiment.node
    assert not experiment.config_warnings


def test_more_arrivals_than_a_graph_sends_are_a_warning(write: Any) -> None:
    path = write(f"{BASE}node: {{schedule: epidemic, asynchronous: {{arrivals: 3}}}}\n")
    (warning,) = load(path, [], {}).config_warnings
    assert warning.startswith("a.yaml:6:53: node.asynchronous.arrivals is more than a node receives in a round")
    assert not load(path, ["node.asynchronous.arrivals=2"], {}).config_warnings
    assert not load(path, ["graph={name: complete, nodes: 4}"], {}).config_warnings


@pytest.mark.parametrize("schedule", ["epidemic", "ad_psgd"])
def test_weights_that_a_schedule_does_not_read_are_a_warning(write: Any, schedule: str) -> None:
    path = write(f"{BASE}weights: {{name: uniform}}\nnode: {{schedule: {schedule}}}\n")
    (warning,) = load(path, [], {}).config_warnings
    assert warning.startswith(f"a.yaml:6:1: weights: {schedule} takes ") and "ignores weights" in warning
    for change in ("weights=null", "node.schedule=gossip_async"):
        assert not load(path, [change], {}).config_warnings


@pytest.mark.parametrize(("graph", "weights"), [
    ("{name: base_k_plus_1, nodes: 3}", "{name: metropolis_hastings}"),
    ("{name: base_k_plus_1, nodes: 5, peers: 2}", "{name: uniform}"),
    ("{name: one_peer_exponential, nodes: 4}", "{name: metropolis_hastings, lazy: true}"),
])  # fmt: skip
def test_weights_with_which_an_exact_graph_is_not_exact_are_a_warning(write: Any, graph: str, weights: str) -> None:
    nodes = graph.partition("nodes: ")[2][0]
    path = write(f"{BASE}weights: {weights}\n")
    sets = [f"graph={graph}", f"mapping.nodes_per_machine={nodes}"]
    (warning,) = load(path, sets, {}).config_warnings
    assert warning.startswith("a.yaml:6:1: weights: ") and "averages exactly in" in warning
    assert not load(path, [*sets, "weights=null"], {}).config_warnings


def test_weights_with_which_the_exact_graph_of_a_fragment_is_not_exact_are_a_warning(write: Any) -> None:
    fragments = "[{parameters: '1.*'}, {parameters: '*', graph: {name: base_k_plus_1, nodes: 5}}]"
    sets = ["graph.nodes=5", "mapping.nodes_per_machine=5", f"parameters={{fragments: {fragments}}}"]
    path = write(f"{BASE}weights: {{name: metropolis_hastings}}\n")
    (warning,) = load(path, sets, {}).config_warnings
    assert "weights: base_k_plus_1 averages exactly in" in warning and "(see parameters.fragments[1].graph" in warning
    assert not load(path, [*sets, "weights=null"], {}).config_warnings


@pytest.mark.parametrize("graph", [
    "{name: base_k_plus_1, nodes: 4}", "{name: one_peer_exponential, nodes: 4}", "{name: ring, nodes: 4}",
    "{name: gossip_pga, nodes: 4, every: 3, base: {name: ring, nodes: 4}}", "{name: complete, nodes: 4}",
])  # fmt: skip
def test_weights_with_which_a_graph_averages_as_before_are_no_warning(write: Any, graph: str) -> None:
    assert not load(write(f"{BASE}weights: metropolis_hastings\n"), [f"graph={graph}"], {}).config_warnings


def test_weights_that_a_rule_with_servers_does_not_read_are_a_warning(write: Any) -> None:
    sets = ["graph={name: star, nodes: 4}", "sharing={name: fedavg}"]
    (warning,) = load(write(f"{BASE}weights: {{name: uniform}}\n"), sets, {}).config_warnings
    assert warning.startswith("a.yaml:6:1: weights: fedavg takes the mean of the clients' changes and ignores ")
    assert not load(write(BASE), sets, {}).config_warnings


@pytest.mark.parametrize("schedule", ["epidemic", "ad_psgd"])
def test_a_rule_that_the_schedule_cannot_run_is_refused_with_usable_alternatives(write: Any, schedule: str) -> None:
    problems = load_problems(write(f"{BASE}sharing: {{name: choco}}\nnode: {{schedule: {schedule}}}\n"))
    assert "; use sharing: full, or schedule: sequential" in problems


def test_a_rule_with_a_direction_method_that_is_never_called_is_refused(write: Any) -> None:
    rule = "    def direction(self, gradient, view):\n        return gradient.neg_()\n"
    head = "from decentnode.sharing.full import Full\nfrom decentnode.sharing.requirements import Requirements\n\n\n"
    needs = "    requirements = Requirements(gradient=True)\n"
    write(f"{head}class Unasked(Full):\n{rule}\n\nclass Asked(Full):\n{needs}{rule}", "unasked_rule.py")
    path = write(f'{BASE}sharing: {{name: "unasked_rule:Unasked"}}\n')
    problems = load_problems(path)
    assert "6:17: sharing.name has a method direction, which is only called where Unasked.requirements have " \
        "gradient" in problems
    load(path, ["sharing={name: 'unasked_rule:Asked'}"], {})


PLANNED = """\
from dataclasses import replace

from decentnode.sharing.full import Full
from decentnode.sharing.hierarchical import Hierarchical


class WaitsForSilent(Full):
    requirements = replace(Full.requirements, overrides_topology=True, linear=False)

    def plan(self, view):
        if view.uid == 1 and view.round == 2:
            return replace(view, sources=(0, 2, 3), weights={**view.weights, 3: 0.0})
        return view


class WaitsForAbsent(WaitsForSilent):
    def plan(self, view):
        return replace(view, sources=(9,), weights={**view.weights, 9: 0.0})


class Matching(WaitsForSilent):
    def plan(self, view):
        if view.uid in (1, 3) and view.round == 2:
            return replace(view, neighbors=tuple(sorted((*view.neighbors, 4 - view.uid))),
                           sources=tuple(sorted((*view.sources, 4 - view.uid))))
        return view


class SilentInOnePhase(Hierarchical):
    def plan(self, view):
        found = super().plan(view)
        return replace(found, sources=(), neighbors=()) if view.phase == 2 and view.uid == 0 else found
"""


@pytest.mark.parametrize(("rule", "mismatch"), [
    ("WaitsForSilent", "in round 2 node 1 waits for node 3, which sends to 0, 2"),
    ("WaitsForAbsent", "in round 0 node 0 waits for node 9, which sends to no node"),
    ("SilentInOnePhase, groups: [[0, 1], [2, 3]]",
     "in round 0, phase 2 node 1 waits for node 0, which sends to no node"),
])  # fmt: skip
def test_a_rule_whose_nodes_wait_for_nodes_that_do_not_send_is_refused(write: Any, rule: str, mismatch: str) -> None:
    write(PLANNED, "planned_rules.py")
    graph = "graph: {name: complete, nodes: 4}" if "SilentInOnePhase" in rule else "graph: {name: ring, nodes: 4}"
    text = BASE.replace("graph: {name: ring, nodes: 4}", graph)
    name = rule.partition(",")[0]
    section = f"sharing: {{name: 'planned_rules:{rule.replace(name, name + chr(39), 1)}}}\n"
    problems = load_problems(write(text + section))
    assert "6:17: sharing.name: every node must send to the nodes that wait for it, but by the plans of " in problems
    assert f"planned_rules:{name} {mismatch}" in problems


def test_a_rule_whose_plans_match_is_accepted(write: Any) -> None:
    write(PLANNED, "planned_rules.py")
    load(write(f"{BASE}sharing: {{name: 'planned_rules:Matching'}}\n"), [], {})


def test_an_elementwise_rule_with_two_tensors_is_refused(write: Any) -> None:
    write("from decentnode.payload import TensorSpec\nfrom decentnode.sharing.full import Full\n\n\n"
          "class Two(Full):\n    def payload_schema(self, elements, dtype):\n"
          "        return {each: TensorSpec(dtype, elements) for each in 'xy'}\n\n\n"
          "class Half(Full):\n    def payload_schema(self, elements, dtype):\n"
          "        return {'x': TensorSpec(dtype, elements // 2)}\n", "two_tensors.py")  # fmt: skip
    path = write(f"{BASE}sharing: {{name: 'two_tensors:Two'}}\n")
    must = ("6:17: sharing.name must send one tensor 'x' as large as the model, because its requirements have "
            "elementwise=True")  # fmt: skip
    assert f"{must}, got 'x' of 8 values, 'y' of 8 values for a model of 8" in load_problems(path)
    assert "got 'x' of 4 values for a model of 8; use elem" in load_problems(path, "sharing.name=two_tensors:Half")


@pytest.mark.parametrize("hook", ["begin", "adjust", "finish"])
def test_a_rule_whose_hooks_an_overlapped_schedule_does_not_call_is_refused(write: Any, hook: str) -> None:
    rule = f"    def {hook}(self, model, view, *more):\n        pass\n"
    head = "from decentnode.sharing.full import Full\nfrom decentnode.sharing.push_sum import PushSum\n\n\n"
    serves = "\n    def advance(self, model, update, view):\n        model.add_(update)\n"
    name = f"own_{hook}"
    write(f"{head}class Ignored(Full):\n{rule}\n\nclass Both(Full):\n{rule}{serves}\n\n"
          "class Kept(PushSum):\n    pass\n", f"{name}.py")  # fmt: skip
    path = write(f'{BASE}sharing: {{name: "{name}:Ignored"}}\nnode: {{schedule: overlapped}}\n')
    problems = load_problems(path)
    assert f"node.schedule: {name}:Ignored has a method {hook}, which overlapped does not call; " \
        "use schedule: sequ" in problems
    load(path, ["node.schedule=sequential"], {})
    for other in ("Both", "Kept"):
        load(path, [f"sharing={{name: '{name}:{other}'}}"], {})


@pytest.mark.parametrize("key", ["keys", "invitations"])
def test_missing_key_files_are_refused_when_the_experiment_is_loaded(write: Any, key: str) -> None:
    port = "mapping: {machines: 1, nodes_per_machine: 4, base_port: 20100}\n"
    text = f"{BASE}{port}node: {{missing: regroup, newcomers: 1}}\ncommunication: {{name: zeromq, {key}: nowhere}}\n"
    problems = load_problems(write(text))
    assert problems.startswith("a.yaml:8:") and f"communication.{key}: " in problems
    assert "nowhere does not exist" in problems
    write("", "nowhere")
    load(write(text), [], {})


def test_a_missing_key_file_is_a_warning_if_it_may_exist_on_another_machine(write: Any) -> None:
    path = write(f"{BASE}{TWO}communication: {{name: zeromq, keys: nowhere}}\n")
    (warning,) = load(path, [], {}).config_warnings
    assert warning.startswith("a.yaml:7:37: communication.keys: ") and "does not exist on this machine" in warning
    done = CliRunner().invoke(main, ["validate", path])
    assert done.exit_code == 0 and f"warning: {warning}" in done.stderr


def test_a_start_time_out_below_the_time_out_of_a_round_is_a_warning(write: Any) -> None:
    path = write(f"{BASE}communication: {{timeout_seconds: 60, start_timeout_seconds: 30}}\n")
    (warning,) = load(path, [], {}).config_warnings
    assert warning.startswith("a.yaml:6:61: communication.start_timeout_seconds is less than timeout_seconds, 60, got "
                              "30")  # fmt: skip
    assert warning.endswith("(see communication.timeout_seconds at line 6)")


def test_bulk_encryption_without_keys_is_a_warning(write: Any) -> None:
    (warning,) = load(write(f"{BASE}communication: {{name: zeromq, bulk_security: aes-gcm}}\n"), [], {}).config_warnings
    assert warning.startswith("a.yaml:6:46: communication.bulk_security: aes-gcm needs keys, got none")
