from __future__ import annotations

import pickle
import textwrap
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decentnode.errors import ConfigError
from decentnode.experiment import Experiment, load
from decentnode.experiment.identity import identity
from decentnode.sharing import SHARINGS

BASE = """\
name: base
graph: {name: ring, nodes: 4}
data: {name: digits}
model: {name: mlp}
training: {name: supervised, batch_size: 8}
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a file into the current directory; shown paths are then short."""
    monkeypatch.chdir(tmp_path)

    def _write(text: str | bytes, name: str = "a.yaml") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return name

    return _write


def said(path: str, *overrides: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides, environ or {})
    return "\n".join(caught.value.problems)


def test_defaults(write):
    experiment = load(write(BASE), environ={})
    assert experiment.seed == 1
    assert experiment.sharing.name == "full"
    assert experiment.communication.name == "auto"
    assert experiment.node.rounds == 60
    assert experiment.mapping.name == "linear"
    assert experiment.make_mapping().num_nodes == experiment.make_graph().num_nodes == 4
    assert experiment.make_mapping().num_machines == 1
    assert experiment.run_dir == Path.cwd() / "runs"


def test_the_name_is_the_files_when_not_given(write):
    assert load(write(BASE.replace("name: base\n", ""), "my first run.yaml"), environ={}).name == "my-first-run"


def test_a_name_must_be_a_folder(write):
    assert said(write(BASE.replace("base", "a/b"))) == (
        "a.yaml:1:7: name must be at most 100 letters, digits, '.', '_' or '-' (it names a folder), got 'a/b'\n"
        "    name: a/b\n"
        "          ^"
    )


def test_precedence(write):
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


def test_extends_in_a_circle_and_to_nowhere(write):
    write("extends: a.yaml\n", "p.yaml")
    assert "p.yaml:1:10: extends must not lead back to a file: a.yaml -> p.yaml -> a.yaml" in said(
        write("extends: p.yaml\n")
    )
    assert "b.yaml:1:10: extends: no such file: nope.yaml" in said(write("extends: nope.yaml\n", "b.yaml"))
    assert "extends must be the path of one file" in said(write("extends: [p.yaml]\n", "c.yaml"))


def test_problems_of_a_parent_name_the_parent(write):
    write(BASE + "node: {rounds: many}\n", "p.yaml")
    assert said(write("extends: p.yaml\nseed: -1\n")).splitlines()[::3] == [
        "a.yaml:2:7: seed must be >= 0, got -1",
        "p.yaml:6:16: node.rounds must be an integer, got 'many'",
    ]


def test_problems_of_set_and_environment_name_them(write):
    path = write(BASE)
    assert said(path, "training.batch_size=x") == (
        "--set training.batch_size=x: training.batch_size must be an integer, got 'x'"
    )
    assert said(path, "trainig.batch_size=1") == (
        "--set trainig.batch_size=1: trainig is not a known key\n    did you mean 'training'?"
    )
    assert said(path, environ={"DECENTNODE__SEED": "-1"}) == "environment DECENTNODE__SEED: seed must be >= 0, got -1"


def test_set_of_a_name_alone_hints_at_replacing_the_section(write):
    path = write(BASE.replace("name: ring, nodes: 4", "name: regular, nodes: 6, degree: 3"))
    assert "--set graph='{name: ring, ...}'" in said(path, "graph.name=ring")
    assert load(path, ["graph={name: ring, nodes: 5}"], {}).make_graph().num_nodes == 5


def test_set_over_a_bare_name(write):
    path = write(BASE.replace("{name: mlp}", "mlp"))
    experiment = load(path, ["model.hidden=[8]"], {})
    assert experiment.resolved()["model"]["hidden"] == [8]
    assert experiment.origin("model.name") == "a.yaml:4"


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "a.yaml: is empty; an experiment needs at least graph, data, model and training"),
        (b"# nothing\n", "a.yaml: is empty"),
        (b"- a\n", "a.yaml:1:1: an experiment must be keys and values"),
        (b"text", "an experiment must be keys and values"),
        (b"\x89PNG\r\n\x1a\n\x00", "a.yaml:1: must be UTF-8 text, got byte 0x89: is it a binary file?"),
        (b"graph: {name: ring, nodes: 4}\n", "a.yaml: data is missing\n    The dataset, and how its training"),
        (b"a: 1\n\tb: 1\n", "YAML does not allow tabs for indentation: use spaces"),
        (b"a: 1\na: 2\n", "a.yaml:2:1: duplicate key 'a', first given at line 1"),
    ],
)
def test_bad_files(write, data, part):
    assert part in said(write(data))


def test_a_missing_file(tmp_path):
    assert "nope.yaml: cannot be read: No such file or directory" in said(str(tmp_path / "nope.yaml"))


def test_all_problems_at_once(write):
    text = BASE + textwrap.dedent(
        """\
        seed: no
        sharing: {name: fulll}
        node:
          rounds: 1e3
          schedule: overlaped
          missing: off
        qqqqq: 1
        """
    )
    assert said(write(text)).splitlines() == textwrap.dedent(
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
        a.yaml:10:13: node.schedule must be one of sequential, overlapped, got 'overlaped'
            schedule: overlaped
                      ^ did you mean 'overlapped'?
        a.yaml:11:12: node.missing must be one of fail, return_weight, regroup, got off
            missing: off
                     ^ YAML reads a bare off as false: quote it
        a.yaml:12:1: qqqqq is not a known key
            qqqqq: 1
            ^ known keys: {KEYS}
        """
    ).replace("{NAMES}", ", ".join(SHARINGS)).replace("{KEYS}", ", ".join(Experiment.model_fields)).splitlines()


def test_graph_and_mapping_must_agree(write):
    problem = said(write(BASE + "mapping:\n  machines: 1\n  nodes_per_machine: 6\n"))
    assert problem == (
        "a.yaml:2:28: graph.nodes: the graph has 4 nodes but the mapping has places for 6\n"
        "    graph: {name: ring, nodes: 4}\n"
        "                               ^ see mapping at line 6"
    )


def test_a_graph_file_is_relative_to_the_file_that_names_it(write):
    write("4\n0 1\n1 0\n1 2\n2 1\n2 3\n3 2\n3 0\n0 3\n", "graphs/ring.edges")
    write(BASE.replace("{name: ring, nodes: 4}", "{file: ../graphs/ring.edges}"), "base/p.yaml")
    experiment = load(write("extends: ../base/p.yaml\n", "sub/a.yaml"), environ={})
    assert experiment.make_graph().num_nodes == 4
    assert load("base/p.yaml", ["graph={file: graphs/ring.edges}"], {}).make_graph().num_nodes == 4
    assert "graphs/none.edges: No such file" in said("base/p.yaml", "graph.file=graphs/none.edges")


def test_a_bad_graph_file_is_reported_with_both_places(write):
    write("2\n0 1\n0 7\n", "g.edges")
    problem = said(write(BASE.replace("{name: ring, nodes: 4}", "{file: g.edges}")))
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
def test_parts_that_do_not_fit_together(write, change, part):
    assert part in said(write(BASE.replace(*change)))


@pytest.mark.parametrize(
    ("graph", "said_first"),
    [
        ("{name: torus, nodes: 6, rows: 4}", "a.yaml:2:38: graph.rows must divide 6 nodes, got 4"),
        ("{name: hypercube, nodes: 6}", "a.yaml:2:1: graph: hypercube needs a power of two, got 6 nodes"),
        ("{name: regular, nodes: 5, degree: 3}", "a.yaml:2:1: graph: regular: 5 nodes of degree 3 need"),
        (
            "{name: ring, nodes: 4}\nweights: {name: laplacian, step: 0.9}",
            "a.yaml:3:34: weights.step must be at most 1 / 2, the degree of node 0, got 0.9",
        ),
        (
            "{name: directed_one_peer_exponential, nodes: 4}\nweights: laplacian",
            "a.yaml:3:10: weights: laplacian need an undirected graph; use weights uniform, or leave weights out",
        ),
    ],
)
def test_a_graph_that_cannot_be_made(write, graph, said_first):
    assert said_first in said(write(BASE.replace("{name: ring, nodes: 4}", graph)))


def test_ports_must_not_collide(write):
    text = "mapping: {name: table, machines: [{nodes: 2, base_port: 8000}, {nodes: 2, base_port: 8002}]}\n"
    assert said(write(BASE + text)).startswith("a.yaml:6:1: mapping: port 8002 on 127.0.0.1 is taken twice: ")
    assert "ports end at 65535" in said(write(BASE + text.replace("8002", "65533")))


def test_resolved_reads_back(write):
    experiment = load(write(BASE + "sharing: full\n"), ["node.rounds=3"], {})
    text = experiment.resolved_yaml()
    assert "  rounds: 3  # --set\n" in text
    assert "  batch_size: 8  # a.yaml:5\n" in text
    assert "sharing:\n  name: full  # a.yaml:6\n" in text
    assert yaml.safe_load(text) == {
        **experiment.resolved(), "run": {"dir": str(experiment.run_dir), "log_level": "info"},
        "derived": ["mapping", "task"],
    }  # fmt: skip
    again = load(write(text, "again.yaml"), environ={})
    assert yaml.safe_load(again.resolved_yaml()) == yaml.safe_load(text)
    assert again.digest() == experiment.digest()


STEP = "sharing: {name: choco, fraction: 0.2}\n"


def test_derived_values_are_found_anew_when_a_resolved_file_is_loaded(write, caplog):
    """Whatever they follow from was changed: the compression, the graph, its weights, or the seed of a random one."""
    text = BASE.replace("{name: ring, nodes: 4}", "{name: erdos_renyi, nodes: 10}") + STEP
    experiment = load(write(text), environ={})
    path = write(experiment.resolved_yaml(), "resolved.yaml")
    assert experiment.derived == ("mapping", "task", "sharing.step_size")
    assert experiment.origin("sharing.step_size") == experiment.origin("mapping.machines") == "derived"
    assert f"step_size: {experiment.sharing.step_size}  # derived\n" in experiment.resolved_yaml()
    same = load(path, environ={})
    assert same.digest() == experiment.digest() and same.derived == experiment.derived and not caplog.records
    for change in ("sharing.fraction=0.01", "sharing.compression=sign", "graph={name: ring, nodes: 4}", "seed=4",
                   "sharing={name: stc}", "weights={name: laplacian, step: 0.05}"):  # fmt: skip
        caplog.clear()
        changed = load(path, [change], {})
        fresh = load("a.yaml", [change], {})
        assert {**changed.resolved(), "run": 0} == {**fresh.resolved(), "run": 0}, change
        assert changed.digest() == fresh.digest() and changed.sharing.step_size != same.sharing.step_size, change
        assert f"where {path} shows {same.sharing.step_size}" in caplog.text


def test_given_values_stay(write, caplog):
    experiment = load(write(BASE + "sharing: {name: choco, step_size: 0.125}\nmapping: {name: linear, machines: 1, "
                            "nodes_per_machine: 4}\n"), environ={})  # fmt: skip
    assert experiment.derived == ("task",) and "derived: [task]" in experiment.resolved_yaml()
    changed = load(write(experiment.resolved_yaml(), "resolved.yaml"), ["sharing.fraction=0.2"], {})
    assert changed.sharing.step_size == 0.125 and changed.origin("mapping.machines") != "derived"
    path = write(load(write(BASE + STEP), environ={}).resolved_yaml(), "derived.yaml")
    given = load(path, ["sharing.step_size=0.0625"], {})
    assert given.sharing.step_size == 0.0625 and given.derived == ("mapping", "task")
    assert not caplog.records
    child = load(write(f"extends: {path}\nsharing: {{step_size: 0.0625}}\ngraph: {{nodes: 6}}\n", "child.yaml"),
                 environ={})  # fmt: skip
    assert child.sharing.step_size == 0.0625 and child.make_mapping().num_nodes == 6


def test_a_derived_value_that_was_changed_in_the_file_is_told(write, caplog):
    """The file says that it is found anew; whoever wrote another there hears what is done."""
    text = load(write(BASE + STEP), environ={}).resolved_yaml()
    step = yaml.safe_load(text)["sharing"]["step_size"]
    found = load(write(text.replace(f"step_size: {step}", "step_size: 0.015"), "changed.yaml"), environ={})
    assert found.sharing.step_size == step
    assert f"sharing.step_size is derived: {step} now, where changed.yaml shows 0.015" in caplog.text
    assert "--set sharing.step_size=0.015" in caplog.text


@pytest.mark.parametrize("listed", ["[seed]", "mapping", "{mapping: 1}", "[[mapping]]"])
def test_only_what_can_be_derived_is_listed_as_derived(write, listed):
    assert "a.yaml:6:10: derived must be a list of some of mapping, task, sharing.step_size" in said(
        write(BASE + f"derived: {listed}\n"))  # fmt: skip


def test_an_experiment_travels_to_another_process(write):
    experiment = load(write(BASE), environ={})
    twin = pickle.loads(pickle.dumps(experiment))
    assert twin.resolved() == experiment.resolved()
    assert (twin.base_dir, twin.digest(), twin.origin("name")) == (experiment.base_dir, experiment.digest(), "a.yaml:1")


def test_digest(write):
    path = write(BASE)
    digest = load(path, environ={}).digest()
    assert len(digest) == 16
    assert int(digest, 16) >= 0
    assert load(write(BASE + "run: {dir: elsewhere}\n", "sub/a.yaml"), environ={}).digest() == digest
    for change in ("node.rounds=3", "seed=2", "graph.nodes=5", "training.batch_size=9"):
        assert load(path, [change], {}).digest() != digest, change


def test_keys_that_came_later_leave_digests_as_they_were(write):
    """Machines of two versions agree on a run that uses none of them, and its old checkpoints fit. Annotated with
    `ADDED`, a key is left out of the digest at its default."""
    path = write(BASE)
    assert load(path, environ={}).digest() == "4a33443c217655b9"
    assert load(path, ["training.amp=null", "training.compile=false"], {}).digest() == "4a33443c217655b9"
    digests = {load(path, [change], {}).digest() for change in
               ("training.amp=bf16", "training.compile=true", "training.compile={mode: default}", "training.ema=0.9",
                "node.early_stop=loss_merged", "model={name: mlp, lora: {rank: 2}}")}  # fmt: skip
    assert len(digests | {"4a33443c217655b9"}) == 7
    assert load(path, ["run.log_level=debug"], {}).digest() == "4a33443c217655b9", "machines may differ in it"
    kept = identity(load(path, environ={}))
    assert "training.amp" not in kept and "training.compile" not in kept and kept["training.batch_size"] == 8
    assert identity(load(path, ["training.amp=bf16"], {}))["training.amp"] == "bf16"


def test_digest_covers_the_content_of_a_graph_file_not_its_place(write):
    text = BASE.replace("{name: ring, nodes: 4}", "{file: g.edges}")
    ring = "4\n0 1\n1 0\n1 2\n2 1\n2 3\n3 2\n3 0\n0 3\n"
    write(ring, "one/g.edges")
    write(ring, "two/g.edges")
    write(ring + "0 2\n2 0\n", "three/g.edges")
    one, two, three = (load(write(text, f"{d}/a.yaml"), environ={}).digest() for d in ("one", "two", "three"))
    assert one == two != three
    moved = load(write(text.replace("g.edges", "../one/g.edges"), "four/a.yaml"), environ={}).digest()
    assert moved == one


def test_digest_is_the_same_on_every_machine(write):
    """Changing it is allowed, but then nodes of different versions refuse each other: say so in the notes."""
    from decentnode.experiment.tree import portable_text

    text = portable_text(load(write(BASE), environ={}))
    assert " " not in text.replace("decentnode ", "")
    assert "runs" not in text
    assert '"nodes":4' in text


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.dates(),
    st.sampled_from(["ring", "digits", "mlp", "full", "no:thing", "os:path", "supervised", "1e-3", "runs"]),
)  # fmt: skip
NAMES = [*Experiment.model_fields, "nodes", "lr", "optimizer", "extends"]
KEYS = st.one_of(st.sampled_from(NAMES), st.text(max_size=5))
TREES = st.recursive(
    LEAVES, lambda below: st.lists(below, max_size=3) | st.dictionaries(KEYS, below, max_size=6), max_leaves=20
)
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(st.dictionaries(KEYS, TREES, max_size=8), st.lists(KEYS, min_size=1, max_size=3), LEAVES)
def test_any_tree_is_an_experiment_or_a_config_error(write, tree, keys, value):
    good = yaml.safe_load(BASE)
    for text in (yaml.safe_dump(tree), yaml.safe_dump(good | tree)):
        path = write(text.encode("utf-8", "replace"))
        try:
            load(path, [".".join(keys) + "=" + str(value)], {})
        except ConfigError as error:
            assert error.problems


@FUZZ
@given(st.binary(max_size=60))
def test_any_bytes_are_a_config_error(write, data):
    with pytest.raises(ConfigError):
        load(write(data), environ={})


@pytest.mark.parametrize("cut", range(0, len(BASE), 7))
def test_a_file_cut_short(write, cut):
    try:
        load(write(BASE[:cut]), environ={})
    except ConfigError as error:
        assert error.problems


def test_cliques_and_edges_must_fit_the_mapping(write):
    wrong = "communication: {name: hybrid, cliques: [[0, 99]], edges: [{nodes: [0, 1], by: collective}]}\n"
    text = said(write(BASE + "mapping: {name: linear, nodes_per_machine: 4}\n" + wrong))
    assert "communication.cliques must name nodes of the run, got 99 of 4 nodes" in text
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
def test_a_path_of_ones_own_that_there_is_not_is_told_before_the_start(write, by: str, why: str) -> None:
    text = said(write(BASE + f"communication: {{name: hybrid, edges: [{{nodes: [0, 1], by: '{by}'}}]}}\n"))
    assert "communication.edges" in text and why in text


@pytest.mark.parametrize(("change", "text"), [
    ("seed=1e400", "seed must be"), ("seed=-1e400", "seed must be"), ("node.rounds=1e999", "node.rounds must be"),
    ("data={name: synthetic, train_samples: 1000000000000}", "data.train_samples must be at most 100,000,000"),
    ("data={name: synthetic, test_samples: 1000000000000}", "data.test_samples must be at most 100,000,000"),
    ("data={name: synthetic, input_shape: [1000000000, 1000000000]}", "data.input_shape must leave room"),
])  # fmt: skip
def test_numbers_beyond_all_bounds_are_problems_too(write, change, text):
    assert text in said(write(BASE), change)


@pytest.mark.parametrize("test", ["own", "both"])
def test_samples_dealt_anew_have_no_test_samples_of_their_own(write, test):
    path = write(BASE.replace("{name: digits}", f"{{name: digits, test: {test}}}"))
    text = said(path, "training.sampling=resample")
    assert f"training.sampling must be fixed with data.test: {test}, got resample" in text and "see data.test" in text
    load(path, ["training.sampling=resample", "data.test=global"], {})
    load(path, (), {})
