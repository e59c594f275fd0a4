from __future__ import annotations

import contextlib
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from decentnode.config.component import Config
from decentnode.errors import ConfigError
from decentnode.experiment import Experiment, load
from decentnode.launch.children.messages import Request
from decentnode.launch.loading import load_request
from decentnode.node.schedules.schedules import SCHEDULES
from decentnode.samples import DataSpec
from decentnode.sharing import SHARINGS
from decentnode.tasks.classification import ACCURACY, Classification
from tests.config.experiments import BASE, load_problems


def test_keys_that_are_not_given_have_their_defaults(write):
    experiment = load(write(BASE), environ={})
    assert experiment.seed == 1
    assert experiment.sharing.name == "full"
    assert experiment.communication.name == "auto"
    assert experiment.node.rounds == 60
    assert experiment.mapping.name == "linear"
    assert experiment.make_mapping().num_nodes == experiment.make_graph().num_nodes == 4
    assert experiment.make_mapping().num_machines == 1
    assert experiment.run_dir == Path.cwd() / "runs"


def test_without_a_name_the_experiment_is_named_after_its_file(write):
    assert load(write(BASE.replace("name: base\n", ""), "my first run.yaml"), environ={}).name == "my-first-run"


def test_a_name_that_is_no_folder_name_is_refused(write):
    assert load_problems(write(BASE.replace("base", "a/b"))) == (
        "a.yaml:1:7: name must be at most 100 of A to Z, a to z, 0 to 9, '.', '_' and '-' (it names a folder), "
        "got 'a/b'\n"
        "    name: a/b\n"
        "          ^"
    )


def test_set_overrides_the_environment_which_overrides_the_file_and_its_parent(write):
    write(BASE + "seed: 2\nnode: {rounds: 2, evaluate_every: 2}\nrun: {dir: x}\n", "p.yaml")
    path = write("extends: p.yaml\nnode: {rounds: 3}\n")
    environ = {"DECENTNODE__NODE__EVALUATE_EVERY": "4", "DECENTNODE__NODE__CHECK_FINITE": "off"}
    experiment = load(path, ["node.evaluate_every=5"], environ)
    assert (experiment.node.rounds, experiment.node.evaluate_every, experiment.node.check_finite) == (3, 5, False)
    origins = ["seed", "node.rounds", "node.check_finite", "node.evaluate_every", "node.missing", "nothing.at.all"]
    assert [experiment.origin(key) for key in origins] == ["p.yaml:6", "a.yaml:2", "env", "--set", "default", "default"]


def test_extends_replaces_a_section_that_gets_another_name(write):
    write(BASE, "p.yaml")
    experiment = load(write("extends: p.yaml\ngraph: {name: regular, nodes: 6, degree: 3}\n"), environ={})
    assert experiment.resolved()["graph"]["degree"] == 3
    assert experiment.make_mapping().num_nodes == 6


def test_a_graph_file_replaces_a_named_graph_and_a_name_replaces_a_file(write):
    write("4\n0 1\n1 2\n2 3\n3 0\n", "square.edges")
    write(BASE, "p.yaml")
    for path, sets in ((write("extends: p.yaml\ngraph: {file: square.edges}\n"), []),
                       (write(BASE, "b.yaml"), ["graph.file=square.edges"])):  # fmt: skip
        experiment = load(path, sets, environ={})
        assert experiment.graph.name == "file" and set(experiment.resolved()["graph"]) == {"name", "file"}
    write(BASE.replace("{name: ring, nodes: 4}", "{file: square.edges}"), "f.yaml")
    back = load(write("extends: f.yaml\ngraph: {name: ring, nodes: 4}\n"), environ={})
    assert back.resolved()["graph"] == {"name": "ring", "nodes": 4}


def test_extends_chains_and_is_relative_to_its_file(write):
    write(BASE, "base/p.yaml")
    write("extends: base/p.yaml\nseed: 5\n", "q.yaml")
    experiment = load(write("extends: ../q.yaml\nnode: {rounds: 1}\n", "sub/a.yaml"), environ={})
    assert (experiment.seed, experiment.node.rounds, experiment.name) == (5, 1, "base")
    assert experiment.base_dir == Path("sub").absolute()


def test_extends_refuses_cycles_and_missing_files(write):
    write("extends: a.yaml\n", "p.yaml")
    assert "p.yaml:1:10: extends must not form a cycle, got a.yaml -> p.yaml -> a.yaml" in load_problems(
        write("extends: p.yaml\n")
    )
    assert "b.yaml:1:10: extends: no such file: nope.yaml" in load_problems(write("extends: nope.yaml\n", "b.yaml"))
    assert "extends must be the path of one file" in load_problems(write("extends: [p.yaml]\n", "c.yaml"))


def test_problems_of_a_parent_name_the_parent(write):
    write(BASE + "node: {rounds: many}\n", "p.yaml")
    assert load_problems(write("extends: p.yaml\nseed: -1\n")).splitlines()[::3] == [
        "a.yaml:2:7: seed must be >= 0, got -1",
        "p.yaml:6:16: node.rounds must be an integer, got 'many'",
    ]


def test_problems_of_set_and_of_the_environment_name_the_assignment(write):
    path = write(BASE)
    assert load_problems(path, "training.batch_size=x") == (
        "--set training.batch_size=x: training.batch_size must be an integer, got 'x'"
    )
    assert load_problems(path, "trainig.batch_size=1") == (
        "--set trainig.batch_size=1: trainig is not a known key\n    did you mean 'training'?"
    )
    in_environment = load_problems(path, environ={"DECENTNODE__SEED": "-1"})
    assert in_environment == "environment DECENTNODE__SEED: seed must be >= 0, got -1"


def test_set_of_a_name_alone_hints_at_replacing_the_section(write):
    path = write(BASE.replace("name: ring, nodes: 4", "name: regular, nodes: 6, degree: 3"))
    assert "--set graph='{name: ring, ...}'" in load_problems(path, "graph.name=ring")
    assert load(path, ["graph={name: ring, nodes: 5}"], {}).make_graph().num_nodes == 5


def test_set_of_a_key_below_a_bare_component_name_keeps_the_name(write):
    path = write(BASE.replace("{name: mlp}", "mlp"))
    experiment = load(path, ["model.hidden=[8]"], {})
    assert experiment.resolved()["model"]["hidden"] == [8]
    assert experiment.origin("model.name") == "a.yaml:4"


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "a.yaml: the file is empty; an experiment needs at least graph, data, model and training"),
        (b"# nothing\n", "a.yaml: the file is empty"),
        (b"- a\n", "a.yaml:1:1: an experiment must consist of keys and values"),
        (b"text", "an experiment must consist of keys and values"),
        (b"\x89PNG\r\n\x1a\n\x00", "a.yaml:1: must be UTF-8 text, got byte 0x89: is it a binary file?"),
        (b"graph: {name: ring, nodes: 4}\n", "a.yaml: data is missing\n    The dataset, and how its training"),
        (b"a: 1\n\tb: 1\n", "YAML does not allow tabs for indentation: use spaces"),
        (b"a: 1\na: 2\n", "a.yaml:2:1: duplicate key 'a', first given at line 1"),
    ],
)
def test_unreadable_and_incomplete_files_are_refused(write, data, part):
    assert part in load_problems(write(data))


def test_a_missing_file_is_refused(tmp_path):
    assert "nope.yaml: cannot be read: No such file or directory" in load_problems(str(tmp_path / "nope.yaml"))


def test_all_problems_of_a_file_are_reported_at_once(write):
    text = BASE + textwrap.dedent(
        """\
        seed: no
        sharing: {name: fulll}
        node:
          rounds: 1e3
          schedule: overlaped
          missing: off
        extra: 1
        """
    )
    assert load_problems(write(text)).splitlines() == textwrap.dedent(
        """\
        a.yaml:6:7: seed must be a number, got no
            seed: no
                  ^ YAML reads a bare no as false
        a.yaml:7:17: sharing.name must be one of {NAMES}, got 'fulll'
            sharing: {name: fulll}
                            ^ did you mean 'full'?
        a.yaml:9:11: node.rounds must be an integer, got '1e3'
            rounds: 1e3
                    ^ write 1000
        a.yaml:10:13: node.schedule must be one of {SCHEDULES}, got 'overlaped'
            schedule: overlaped
                      ^ did you mean 'overlapped'?
        a.yaml:11:12: node.missing must be one of fail, return_weight, regroup, got off
            missing: off
                     ^ YAML reads a bare off as false: quote it
        a.yaml:12:1: extra is not a known key
            extra: 1
            ^ known keys: {KEYS}
        """
    ).replace("{NAMES}", ", ".join(SHARINGS)).replace("{KEYS}", ", ".join(Experiment.model_fields)).replace(
        "{SCHEDULES}", ", ".join(SCHEDULES)).splitlines()  # fmt: skip


def test_graph_and_mapping_must_agree(write):
    problem = load_problems(write(BASE + "mapping:\n  machines: 1\n  nodes_per_machine: 6\n"))
    assert problem == (
        "a.yaml:2:28: graph.nodes: the graph has 4 nodes but the mapping has places for 6\n"
        "    graph: {name: ring, nodes: 4}\n"
        "                               ^ see mapping at line 6"
    )


def test_only_machines_that_connect_need_addresses(write):
    path = write(BASE + "mapping: {machines: 4}\n")
    problems = load_problems(path)
    assert problems.startswith("a.yaml:6:1: mapping.addresses must name the hosts of the 4 machines, got none")
    assert load(path, environ={}, connected=False).make_mapping().nodes_by_machine() == [(0,), (1,), (2,), (3,)]
    for simulate in (True, False):
        request = Request(str(path), environ={}, simulate=simulate)
        with contextlib.nullcontext() if simulate else pytest.raises(ConfigError, match="must name the hosts"):
            load_request(request)


def test_a_graph_file_is_relative_to_the_file_that_names_it(write):
    write("4\n0 1\n1 0\n1 2\n2 1\n2 3\n3 2\n3 0\n0 3\n", "graphs/ring.edges")
    write(BASE.replace("{name: ring, nodes: 4}", "{file: ../graphs/ring.edges}"), "base/p.yaml")
    experiment = load(write("extends: ../base/p.yaml\n", "sub/a.yaml"), environ={})
    assert experiment.make_graph().num_nodes == 4
    assert load("base/p.yaml", ["graph={file: graphs/ring.edges}"], {}).make_graph().num_nodes == 4
    assert "graphs/none.edges: No such file" in load_problems("base/p.yaml", "graph.file=graphs/none.edges")


def test_a_bad_graph_file_is_reported_with_both_places(write):
    write("2\n0 1\n0 7\n", "g.edges")
    problem = load_problems(write(BASE.replace("{name: ring, nodes: 4}", "{file: g.edges}")))
    assert problem.startswith("a.yaml:2:1: graph: ")
    assert "g.edges:3: node 7 is out of range, nodes are 0 to 1" in problem


def test_run_dir_is_relative_to_where_it_was_written(write):
    path = write(BASE + "run: {dir: out}\n", "sub/a.yaml")
    assert load(path, environ={}).run_dir == Path("sub/out").absolute()
    assert load(path, ["run.dir=out"], {}).run_dir == Path("out").absolute()


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (("digits", "npz, file: none.npz"), "none.npz"),
        (("digits", "digits, partition: {name: k_classes, classes: 11}"), "must be at most 10, the classes of digits"),
        (("digits}\nmodel: {name: mlp}", "synthetic, input_shape: [9]}\nmodel: gn_lenet"), "a.yaml:4:8: model: "),
        (("nodes: 4", "nodes: 2000"), "a.yaml:3:1: data.partition"),
    ],
)
def test_sections_that_do_not_fit_together_are_refused(write, change, part):
    assert part in load_problems(write(BASE.replace(*change)))


@pytest.mark.parametrize(
    ("graph", "problem"),
    [
        ("{name: torus, nodes: 6, rows: 4}", "a.yaml:2:38: graph.rows must divide 6 nodes, got 4"),
        ("{name: hypercube, nodes: 6}", "a.yaml:2:1: graph: hypercube needs a power of two, got 6 nodes"),
        (
            "{name: ring, nodes: 4}\nsharing: {name: topk, dump: {nodes: [0, 9]}}",
            "a.yaml:3:41: sharing.dump.nodes[1] must be uids below 4, got 9",
        ),
        ("{name: regular, nodes: 5, degree: 3}", "a.yaml:2:1: graph: regular: 5 nodes of degree 3 need"),
        (
            "{name: ring, nodes: 4}\nweights: {name: laplacian, step: 0.9}",
            "a.yaml:3:34: weights.step must be at most 1 / 2, the degree of node 0, got 0.9",
        ),
        (
            "{name: ring, nodes: 4}\nsharing: exact_diffusion\nweights: {name: laplacian, step: 0.9}",
            "a.yaml:4:34: weights.step must be at most 1 / 2, the degree of node 0, got 0.9",
        ),
        (
            "{name: directed_one_peer_exponential, nodes: 4}\nweights: laplacian",
            "a.yaml:3:10: weights: laplacian need an undirected graph; use weights uniform, or leave weights out",
        ),
    ],
)
def test_a_graph_that_cannot_be_made_is_refused_at_its_place(write, graph, problem):
    assert problem in load_problems(write(BASE.replace("{name: ring, nodes: 4}", graph)))


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ("validation: {fraction: 0.999}", "a.yaml:5:68: training.validation.fraction of node 0 must leave samples of "
         "the 360 train samples, got 0.999; choose another partition or a smaller fraction"),
        ("validation: {fraction: 0.9, source: test}", "of node 0 must leave samples of the 1 test samples, got 0.9"),
        ("validation: {fraction: 0.9}, drop_last: true, accumulate: 5", "training.drop_last: node 0 has 36 training "
         "samples, fewer than one step of 40, which training.drop_last leaves out"),
    ],
)  # fmt: skip
def test_validation_or_drop_last_that_leave_a_node_no_samples_are_refused(write, keys, problem):
    text = BASE.replace("digits}", "digits, sample_test: 4, shard_test: true}")
    assert problem in load_problems(write(text.replace("batch_size: 8", "batch_size: 8, " + keys)))


def test_ports_must_not_collide(write):
    text = "mapping: {name: table, machines: [{nodes: 2, base_port: 8000}, {nodes: 2, base_port: 8002}]}\n"
    assert load_problems(write(BASE + text)).startswith("a.yaml:6:1: mapping: port 8002 on 127.0.0.1 is taken twice: ")
    assert "ports end at 65535" in load_problems(write(BASE + text.replace("8002", "65533")))


def test_cliques_and_edges_must_fit_the_mapping(write):
    wrong = "communication: {name: hybrid, cliques: [[0, 99]], edges: [{nodes: [0, 1], by: collective}]}\n"
    text = load_problems(write(BASE + "mapping: {name: linear, nodes_per_machine: 4}\n" + wrong))
    assert "communication.cliques[0][1] must be a node of the run, 0 to 3, got 99" in text
    assert "communication.edges by collective need both nodes in one clique, got 0 and 1" in text


def test_a_key_under_its_former_name_is_read_with_a_hint(write, caplog: pytest.LogCaptureFixture) -> None:
    text = BASE + "communication: {name: collective, at_once: false}\nnode: {rounds: 2, mix_behind: false}\n"
    experiment = load(write(text), environ={}, check=False)
    assert experiment.communication.use_collectives is False
    assert experiment.origin("communication.use_collectives").startswith("a.yaml:")
    assert "communication.at_once is called communication.use_collectives now" in caplog.text
    assert "node.mix_behind is called node.mix_in_background now" in caplog.text
    assert load(write(BASE), ["node.mix_behind=false"], environ={}, check=False).node.mix_in_background is False


def test_a_key_under_both_its_names_is_an_error(write) -> None:
    text = BASE + "communication: {name: collective, at_once: false, use_collectives: true}\n"
    with pytest.raises(ConfigError, match=r"communication.at_once is called communication.use_collectives now"):
        load(write(text), environ={}, check=False)


@pytest.mark.parametrize(("by", "why"), [
    ("nowhere:Path", "nowhere"),
    ("decentnode.payload:Payload", "must be a class derived from decentnode.communication"),
])
def test_an_edge_by_a_class_that_is_no_communicator_is_refused_before_the_start(write, by: str, why: str) -> None:
    text = load_problems(write(BASE + f"communication: {{name: hybrid, edges: [{{nodes: [0, 1], by: '{by}'}}]}}\n"))
    assert "communication.edges" in text and why in text


@pytest.mark.parametrize(("change", "text"), [
    ("seed=1e400", "seed must be"), ("seed=-1e400", "seed must be"), ("node.rounds=1e999", "node.rounds must be"),
    ("node.rounds=9223372036854775808", "node.rounds must be within 64 bits, from -2^63 to 2^63 - 1, got 92233720368"),
    ("model.lora={rank: 4611686018427387904}", "model.lora.rank must be <= 65536"),
    ("training.augment={cutout: 10000000000000000000000}", "training.augment.cutout must be within 64 bits"),
    ("model={name: mlp, hidden: [8, 10000000000000000000000]}", "model.hidden must be within 64 bits"),
    ("sharing={name: slowmo, outer_lr: 1.0e300}", "sharing.outer_lr must be within float32, from -3.4e38 to 3.4e38"),
    ("sharing={name: jwins, fractions: [0.1, 1.0e300]}", "sharing.fractions must be"),
    ("training.clip_norm=1e39", "training.clip_norm must be within float32"),
    ("training.optimizer={name: sgd, lr: 1.0e+300}", "training.optimizer.lr must be within float32"),
    ("data={name: synthetic, train_samples: 1000000000000}", "data.train_samples must be at most 100,000,000"),
    ("data={name: synthetic, test_samples: 1000000000000}", "data.test_samples must be at most 100,000,000"),
    ("data={name: synthetic, input_shape: [1000000000, 1000000000]}", "data.input_shape must leave room"),
])  # fmt: skip
def test_numbers_beyond_64_bits_float32_or_memory_are_refused(write, change, text):
    assert text in load_problems(write(BASE), change)


@pytest.mark.parametrize("test", ["own", "both"])
def test_resampling_is_refused_with_test_samples_of_each_nodes_own(write, test):
    path = write(BASE.replace("{name: digits}", f"{{name: digits, test: {test}}}"))
    text = load_problems(path, "training.sampling=resample")
    assert f"training.sampling must be fixed with data.test: {test}, got resample" in text and "see data.test" in text
    load(path, ["training.sampling=resample", "data.test=global"], {})
    load(path, (), {})


class TooManyMetrics(Classification):
    names = tuple(f"accuracy_{number}" for number in range(700))

    def __init__(self, config: Config, data: DataSpec) -> None:
        super().__init__(config, data)
        self.metrics = tuple(replace(ACCURACY, name=name) for name in self.names)


class TooLongNames(TooManyMetrics):
    names = ("accuracy_of_the_classes_that_hardly_any_of_the_nodes_has_seen",)


@pytest.mark.parametrize(("task", "message"), [
    ("TooManyMetrics",
     "must have at most 640 metrics, with those of moving averages, training and own samples, got 701"),
    ("TooLongNames", "must have metrics with names of at most 57 characters, got accuracy_of_the_classes"),
])  # fmt: skip
def test_a_task_whose_metrics_do_not_fit_into_a_message_is_refused(write, task, message):
    assert message in load_problems(write(BASE), f"task={{name: '{__name__}:{task}'}}")
