"""The ranges of the rules' settings: values at their ends are accepted, values beyond are refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from decentnode.config.component import load_class
from decentnode.sharing import SHARINGS

# (accepted, refused)
SHARE = ([1e-9, 1], [0, -0.5, 1.001])
PORTION = ([0, 1], [-0.001, 1.001])
MOMENTUM = ([0, 0.999], [-0.001, 1])
COUNT = ([1, 1000], [0, -1])
POSITIVE = ([1e-9, 100], [0, -1])
BOUNDS: dict[str, dict[str, tuple[list[Any], list[Any]]]] = {
    "ac": {"factor": PORTION, "final": PORTION, "rounds": COUNT},
    "beer": {"fraction": SHARE, "step_size": SHARE}, "choco": {"fraction": SHARE, "step_size": SHARE},
    "deepsqueeze": {"fraction": SHARE, "step_size": SHARE},
    "diloco": {"every": COUNT, "outer_lr": POSITIVE, "outer_momentum": MOMENTUM},
    "elastic": {"every": COUNT, "pull": ([1e-9, 0.999], [0, 1])}, "fft": {"fraction": SHARE},
    "fedavg": {"fraction": SHARE, "clients": COUNT, "min_clients": COUNT, "server_lr": POSITIVE,
               "deadline_seconds": POSITIVE, "gossip_every": COUNT},
    "fedavgm": {"server_momentum": MOMENTUM}, "fedprox": {"proximal": ([0, 10], [-0.1])},
    "fedadam": {"beta1": MOMENTUM, "beta2": MOMENTUM, "tau": POSITIVE}, "fedstc": {"entries": SHARE},
    "jwins": {"full_from": SHARE}, "leader": {"every": COUNT, "pull": SHARE, "average": PORTION},
    "lead": {"fraction": SHARE, "step_size": SHARE},
    "local_sgd": {"every": COUNT}, "momentum_tracking": {"momentum": MOMENTUM},
    "moshpit": {"dimensions": ([1, 16], [0, 17])},
    "noloco": {"every": COUNT, "momentum": MOMENTUM, "pull": SHARE},
    "powergossip": {"rank": ([1, 64], [0, 65])}, "qg_momentum": {"momentum": MOMENTUM},
    "qsgd": {"fraction": SHARE, "step_size": SHARE}, "sign": {"step_size": SHARE},
    "secure_aggregation": {"largest": ([1e-6, 1e9], [0, -1, 1e-7, 1e10, float("inf")]), "fraction": SHARE},
    "slowmo": {"every": COUNT, "outer_lr": POSITIVE, "outer_momentum": MOMENTUM},
    "stc": {"fraction": SHARE, "step_size": SHARE}, "subsample": {"fraction": SHARE},
    "topk": {"fraction": SHARE, "full_from": SHARE}, "wavelet": {"level": ([1, 16], [0, 17])},
}  # fmt: skip


@pytest.mark.parametrize("name", BOUNDS)
def test_values_at_the_ends_of_a_range_are_accepted_and_values_beyond_are_refused(name: str) -> None:
    config = load_class(name, SHARINGS, "sharing").Config
    for key, (accepted, refused) in BOUNDS[name].items():
        for value in accepted:
            assert getattr(config.model_validate({"name": name, key: value}), key) == value
        for value in refused:
            with pytest.raises(ValidationError, match=key):
                config.model_validate({"name": name, key: value})


@pytest.mark.parametrize("name", SHARINGS)
def test_defaults_are_within_their_ranges(name: str) -> None:
    config = load_class(name, SHARINGS, "sharing").Config
    default = config.model_validate({"name": name})
    values = {key: getattr(default, key) for key in config.model_fields}
    numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
    assert config.model_validate({"name": name, **numbers}) == default
