"""The resolved experiment can be loaded again, its derived values are computed again, and its digest is the same on
every machine."""

from __future__ import annotations

import pickle

import pytest
import yaml

from decentnode.experiment import load
from decentnode.experiment.identity import identity
from tests.config.experiments import BASE, load_problems


def test_the_resolved_file_loads_to_the_same_experiment(write):
    experiment = load(write(BASE + "sharing: full\n"), ["node.rounds=3"], {})
    text = experiment.resolved_yaml()
    assert "  rounds: 3  # --set\n" in text
    assert "  batch_size: 8  # a.yaml:5\n" in text
    assert "sharing:\n  name: full  # a.yaml:6\n" in text
    assert yaml.safe_load(text) == {
        **experiment.resolved(), "run": {"dir": str(experiment.run_dir), "log_level": "info", "record": "auto",
                                             "trace": 0, "trackers": [], "profile": None},
        "derived": ["mapping", "task"],
    }  # fmt: skip
    again = load(write(text, "again.yaml"), environ={})
    assert yaml.safe_load(again.resolved_yaml()) == yaml.safe_load(text)
    assert again.digest() == experiment.digest()


STEP = "sharing: {name: choco, fraction: 0.2}\n"


@pytest.mark.slow
def test_derived_values_are_computed_again_when_a_resolved_file_is_loaded(write, caplog):
    """The step follows from the compression, the graph, its weights, and the seed of a random graph."""
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


def test_given_values_are_kept_when_a_resolved_file_is_loaded(write, caplog):
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


def test_a_derived_value_edited_in_the_resolved_file_is_recomputed_with_a_warning(write, caplog):
    """A file lists its derived keys, so that an edited value has no effect; the warning says how to set it."""
    text = load(write(BASE + STEP), environ={}).resolved_yaml()
    step = yaml.safe_load(text)["sharing"]["step_size"]
    found = load(write(text.replace(f"step_size: {step}", "step_size: 0.015"), "changed.yaml"), environ={})
    assert found.sharing.step_size == step
    assert f"sharing.step_size is derived: {step} now, where changed.yaml shows 0.015" in caplog.text
    assert "--set sharing.step_size=0.015" in caplog.text


@pytest.mark.parametrize("listed", ["[seed]", "mapping", "{mapping: 1}", "[[mapping]]"])
def test_derived_may_list_only_keys_that_can_be_derived(write, listed):
    known = "mapping, mapping.nodes_per_machine, task, sharing.step_size"
    problems = load_problems(write(BASE + f"derived: {listed}\n"))
    assert f"a.yaml:6:10: derived must be a list of some of {known}" in problems


def test_nodes_per_machine_is_derived_from_the_graph_and_the_machines(write, caplog):
    experiment = load(write(BASE + "mapping: {threads: 1}\n"), environ={})
    assert experiment.mapping.nodes_per_machine == 4 and experiment.mapping.threads == 1
    assert experiment.derived == ("mapping.nodes_per_machine", "task")
    path = write(experiment.resolved_yaml(), "resolved.yaml")
    two = load(path, ["mapping.machines=2", "mapping.addresses=[127.0.0.1, 127.0.0.2]", "graph.nodes=6"], {})
    assert two.mapping.nodes_per_machine == 3 and two.make_mapping().num_nodes == 6
    assert "mapping.nodes_per_machine is derived: 3 now, where resolved.yaml shows 4" in caplog.text
    three = "mapping: {machines: 3, addresses: [127.0.0.1, 127.0.0.2, 127.0.0.3]}\n"
    assert "mapping.nodes_per_machine must be given: the nodes of the graph are not a multiple of 3" in load_problems(
        write(BASE + three, "three.yaml"))  # fmt: skip


def test_a_pickled_experiment_is_the_same(write):
    experiment = load(write(BASE), environ={})
    twin = pickle.loads(pickle.dumps(experiment))
    assert twin.resolved() == experiment.resolved()
    assert (twin.base_dir, twin.digest(), twin.origin("name")) == (experiment.base_dir, experiment.digest(), "a.yaml:1")


def test_the_digest_ignores_the_run_folder_and_covers_all_else(write):
    path = write(BASE)
    digest = load(path, environ={}).digest()
    assert len(digest) == 16
    assert int(digest, 16) >= 0
    assert load(write(BASE + "run: {dir: elsewhere}\n", "sub/a.yaml"), environ={}).digest() == digest
    for change in ("node.rounds=3", "seed=2", "graph.nodes=5", "training.batch_size=9"):
        assert load(path, [change], {}).digest() != digest, change


def test_the_digests_of_sections_show_which_section_differs(write):
    path = write(BASE)
    experiment = load(path, environ={})
    sections = experiment.digests().sections
    assert experiment.digests().whole == experiment.digest()
    assert {"seed", "training", "faults", "graph (edges)"} < sections.keys()
    assert load(path, ["run.dir=elsewhere", "mapping.base_port=9999"], {}).digests().sections == sections
    for change, names in (("node.rounds=3", ["node"]), ("seed=2", ["seed"]), ("training.ema=0.9", ["training"]),
                          ("graph={name: complete, nodes: 4}", ["graph", "graph (edges)"])):  # fmt: skip
        other = load(path, [change], {}).digests().sections
        assert [name for name in sections if other[name] != sections[name]] == names, change
        assert [*other] == [*sections], "in one order"


def test_keys_that_were_added_later_do_not_change_the_digest_at_their_defaults(write):
    """So machines of two versions agree on a run that uses none of these keys, and old checkpoints fit. A key annotated
    with `ADDED` is left out of the digest at its default."""
    path = write(BASE)
    assert load(path, environ={}).digest() == "4a33443c217655b9"
    assert load(path, ["training.amp=null", "training.compile=false"], {}).digest() == "4a33443c217655b9"
    digests = {load(path, [change], {}).digest() for change in
               ("training.amp=bf16", "training.compile=true", "training.compile={mode: default}", "training.ema=0.9",
                "node.early_stop=loss_merged", "model={name: mlp, lora: {rank: 2}}")}  # fmt: skip
    assert len(digests | {"4a33443c217655b9"}) == 7
    assert load(path, ["run.log_level=debug"], {}).digest() == "4a33443c217655b9", "machines may log differently"
    kept = identity(load(path, environ={}))
    assert "training.amp" not in kept and "training.compile" not in kept and kept["training.batch_size"] == 8
    assert identity(load(path, ["training.amp=bf16"], {}))["training.amp"] == "bf16"


def test_the_digest_covers_the_content_of_a_graph_file_but_not_its_path(write):
    text = BASE.replace("{name: ring, nodes: 4}", "{file: g.edges}")
    ring = "4\n0 1\n1 0\n1 2\n2 1\n2 3\n3 2\n3 0\n0 3\n"
    write(ring, "one/g.edges")
    write(ring, "two/g.edges")
    write(ring + "0 2\n2 0\n", "three/g.edges")
    one, two, three = (load(write(text, f"{d}/a.yaml"), environ={}).digest() for d in ("one", "two", "three"))
    assert one == two != three
    moved = load(write(text.replace("g.edges", "../one/g.edges"), "four/a.yaml"), environ={}).digest()
    assert moved == one


def test_the_text_of_the_digest_has_no_paths_of_the_machine(write):
    """Changing it is allowed, but then nodes of different versions refuse each other: say so in the notes."""
    from decentnode.experiment.tree import portable_text

    text = portable_text(load(write(BASE), environ={}))
    assert " " not in text.replace("decentnode ", "")
    assert "runs" not in text
    assert '"nodes":4' in text
