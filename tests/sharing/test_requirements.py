"""A rule's requirements are one value: wrappers pass all of it on, and rules written before it keep working."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decentnode.config.component import Config, load_class
from decentnode.describe import describe
from decentnode.errors import ConfigError
from decentnode.experiment import load
from decentnode.graph.base import RoundView, view
from decentnode.payload import Payload, ScalarSpec
from decentnode.sharing import SHARINGS
from decentnode.sharing.attacks.attacked import Attacked
from decentnode.sharing.attacks.sign_flip import SignFlip, SignFlipConfig
from decentnode.sharing.base import Sharing
from decentnode.sharing.compressed import Compressed
from decentnode.sharing.d2 import D2
from decentnode.sharing.former import FORMER
from decentnode.sharing.full import Full
from decentnode.sharing.requirements import Requirements
from decentnode.sharing.weighted_by_training import WeightedByTraining
from decentnode.sharing.wrapper import Wrapper
from tests.compression.contract import codec
from tests.graph.contract import make
from tests.sharing.contract import bound, draw, one_phase, rule

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
OTHER: dict[str, object] = {
    "phases": 3, "steps_before": 1, "min_neighbors": 3,
    "smallest_eigenvalue": -0.25, "scalars": {"a": ScalarSpec(int)}, "includes_self": frozenset({1}),
}  # fmt: skip
"""A value other than the default of every field that is no boolean."""


@dataclass(frozen=True, kw_only=True)
class Later(Requirements):
    """Requirements with a field that wrappers cannot know."""

    invented: str = ""


def full_of_needs() -> Later:
    """No field has its default."""
    values = {each.name: OTHER.get(each.name, each.default is False) for each in fields(Requirements)}
    assert all(values[each.name] != each.default for each in fields(Requirements))
    return Later(invented="later", **values)  # type: ignore[arg-type]


def needy() -> Sharing:
    made = rule("full")()
    made.requirements = full_of_needs()
    return made


def int8() -> Any:
    return codec("int8")()


WRAPPERS: dict[str, tuple[Callable[[Sharing], Sharing], set[str]]] = {
    "Wrapper": (Wrapper, set()),
    "Compressed": (lambda inner: Compressed(inner, int8()), {"elementwise", "linear", "scalars"}),
    "Compressed twice": (lambda inner: Compressed(Compressed(inner, int8()), int8()),
                         {"elementwise", "linear", "scalars"}),
    "Attacked": (lambda inner: Attacked(inner, SignFlip(SignFlipConfig(name="sign_flip", count=1)), [0]),
                 {"elementwise", "linear"}),
    "WeightedByTraining": (lambda inner: WeightedByTraining(inner, "samples"), {"elementwise", "linear", "scalars"}),
}  # fmt: skip
"""Name -> (makes one, the fields that it changes)."""


def subclasses(kind: type[Any]) -> set[str]:
    return {name for below in kind.__subclasses__() for name in (below.__name__, *subclasses(below))}


def test_every_wrapper_of_the_package_is_looked_at() -> None:
    for name in SHARINGS:
        load_class(name, SHARINGS, "sharing")
    assert subclasses(Wrapper) <= {name.split()[0] for name in WRAPPERS}


@pytest.mark.parametrize("name", WRAPPERS)
def test_no_wrapper_loses_a_requirement(name: str) -> None:
    """Before and after the schema is known; also one that no wrapper has heard of."""
    wrap, changes = WRAPPERS[name]
    wrapper = wrap(needy())
    for _ in range(2):
        now = wrapper.requirements
        assert isinstance(now, Later)
        for each in fields(Later):
            if each.name not in changes:
                assert getattr(now, each.name) == getattr(full_of_needs(), each.name), each.name
        assert now.scalars.keys() >= {"a"}
        wrapper.payload_schema(100, torch.float32)


def test_a_wrapper_passes_on_what_it_does_not_name() -> None:
    """Every method of a rule, also those that a rule need not have."""
    methods = {name for name, each in inspect.getmembers(Sharing, inspect.isfunction) if not name.startswith("_")}
    heard: list[str] = []

    class Inner(Full):
        pass

    def noting(name: str) -> Callable[..., object]:
        def method(self: object, *args: object) -> object:
            heard.append(name)
            return args

        return method

    for name in methods:
        setattr(Inner, name, noting(name))
    wrapper = Wrapper(Inner(Config()))
    for name in sorted(methods):
        arguments = [object() for _ in inspect.signature(getattr(Sharing, name)).parameters][1:]
        if name == "succeed":  # the rule before is wrapped, too
            arguments = [wrapper]
        found = getattr(wrapper, name)(*arguments)
        assert heard[-1] == name
        assert found is None or found == tuple(arguments), f"{name} changes what it passes on"
    assert len(methods) > 15


@pytest.mark.parametrize("compression", ["int8", "bfloat16"])
def test_a_sum_is_never_taken_of_coded_payloads(compression: str) -> None:
    each = rule("full", compression={"name": compression})()
    seen = view(make("complete", nodes=4), 0, 0)
    assert not each.requirements.linear and each.own_contribution(torch.zeros(4), seen) is None
    assert rule("full")().own_contribution(torch.zeros(4), seen) is not None


@pytest.mark.parametrize("into", [False, True])
def test_the_owner_of_a_shard_keeps_it_as_others_read_it(into: bool) -> None:
    """Also where the transport has the result written to other memory, as shared memory does."""
    models = draw(4, 40)
    rules = bound(rule("hierarchical", compression={"name": "bfloat16"}), models)
    graph = make("complete", nodes=4)
    for phase in range(3):
        views = [each.plan(replace(view(graph, uid, 0, 1), phase=phase)) for uid, each in enumerate(rules)]
        if not into:
            one_phase(rules, models, views)
            continue
        sent = [each.outgoing(model, seen) for each, model, seen in zip(rules, models, views, strict=True)]
        results = []
        for uid, (each, model, seen) in enumerate(zip(rules, models, views, strict=True)):
            received = {j: each.unpack(sent[j][uid], j, seen) for j in seen.sources}
            for _ in range(2):  # again, as after a payload that changed while it was read
                out = torch.empty_like(model)
                each.mix_into(out, model, received, seen)
            results.append(out)
        models = results
    assert torch.equal(models[0], models[1]) and torch.equal(models[2], models[3])


# -- rules written before


class Before(Full):
    """A rule as a user wrote it."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        super().mix(model, received, view)


def test_former_attributes_set_the_fields() -> None:
    with pytest.warns(DeprecationWarning, match=r"Old: needs_static, phases must now be written as requirements = "
                      r"dataclasses.replace\(Before.requirements, static=True, phases=2\)"):  # fmt: skip
        class Old(Before):
            needs_static = True
            phases = 2

    assert Old.requirements == replace(Full.requirements, static=True, phases=2)
    made: Any = Old(Config())
    assert made.needs_static and made.phases == 2 and Old.phases == 2  # type: ignore[comparison-overlap]
    with pytest.warns(DeprecationWarning, match=r"self.requirements = dataclasses.replace\(self.requirements,") as told:
        made.phases = 3
    assert told[0].filename == __file__, "where it is written, not where it is noticed"
    assert made.requirements == replace(Full.requirements, static=True, phases=3) and Old.requirements.phases == 2
    with pytest.warns(DeprecationWarning, match=r"requirements = Requirements\(elementwise=True\)") as told:
        class Simple(Sharing):
            elementwise = True

    assert Simple.requirements == Requirements(elementwise=True) and told[0].filename == __file__


def test_all_former_attributes_are_known() -> None:
    newer = {"min_neighbors", "unweighted"}
    assert set(FORMER.values()) == {each.name for each in fields(Requirements)} - newer
    for name, field in FORMER.items():
        assert getattr(Full, name) == getattr(Full.requirements, field)


def test_a_former_attribute_that_is_computed_is_refused_with_what_to_write() -> None:
    with pytest.raises(TypeError, match=r"Computed.includes_self must be a value now: .*includes_self=\.\.\."):
        class Computed(Before):
            def includes_self(self, view: RoundView) -> bool:
                return view.phase == 2

    with pytest.raises(TypeError, match=r"Late.phases must be a value now"):
        class Late(Before):
            @property
            def phases(self) -> int:
                return 2


def test_requirements_of_two_parents_are_not_chosen_by_chance() -> None:
    class Picky(Full):
        requirements = replace(Full.requirements, elementwise=False)

    with pytest.raises(TypeError, match="Both must have requirements of its own, for those of Picky and D2 differ"):
        class Both(Picky, D2):
            pass

    class Said(Picky, D2):
        requirements = replace(D2.requirements, elementwise=False)

    assert Said.requirements.static and not Said.requirements.elementwise


class ByConfig(Full):
    """Needs a static graph, which only an object of it says."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.requirements = replace(self.requirements, static=True, tolerates_missing=False)


def test_what_the_config_makes_of_the_requirements_is_checked() -> None:
    mine = "sharing={name: 'tests.sharing.test_requirements:ByConfig'}"
    with pytest.raises(ConfigError, match="ByConfig needs a static graph"):
        load(QUICKSTART, [mine, "graph={name: one_peer_exponential, nodes: 16}"])
    with pytest.raises(ConfigError, match="cannot recover"):
        load(QUICKSTART, [mine, "node.missing=return_weight"])


def test_a_class_that_is_no_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must name a class derived from decentnode\.sharing\.base\.Sharing"):
        load(QUICKSTART, ["sharing={name: 'decentnode.models.mlp:Mlp'}"])


def test_the_reference_says_what_a_rule_needs() -> None:
    assert describe("sharing", "d2").text.endswith(
        "\n\nNeeds: a static graph, a symmetric W, a doubly stochastic W, no eigenvalue of W below -0.333, "
        "schedule: sequential, missing: fail or regroup."
    )
    assert "Needs:" not in describe("sharing", "full").text and describe("sharing", "d2").summary.startswith("D2")


def test_phases_are_counted_from_one() -> None:
    with pytest.raises(ValueError, match="phases must be at least 1, got 0"):
        Requirements(phases=0)
