"""Loading any file returns an experiment or raises ConfigError with problems, never another exception."""


import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decentnode.errors import ConfigError
from decentnode.experiment import Experiment, load
from tests.config.experiments import BASE

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
@pytest.mark.slow
def test_any_yaml_tree_is_an_experiment_or_a_config_error(write, tree, keys, value):
    good = yaml.safe_load(BASE)
    for text in (yaml.safe_dump(tree), yaml.safe_dump(good | tree)):
        path = write(text.encode("utf-8", "replace"))
        try:
            load(path, [".".join(keys) + "=" + str(value)], {})
        except ConfigError as error:
            assert error.problems


@pytest.mark.slow
@FUZZ
@given(st.binary(max_size=60))
def test_any_bytes_are_a_config_error(write, data):
    with pytest.raises(ConfigError):
        load(write(data), environ={})


@pytest.mark.parametrize("cut", range(0, len(BASE), 7))
def test_a_truncated_file_is_an_experiment_or_a_config_error(write, cut):
    try:
        load(write(BASE[:cut]), environ={})
    except ConfigError as error:
        assert error.problems
