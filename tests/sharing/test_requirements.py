"""Requirements of rules: wrappers pass all of them on, and rules written for older versions keep working."""

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
from decentnode.sharing.full import Full
from decentnode.sharing.old_attributes import OLD_ATTRIBUTES
from decentnode.sharing.requirements import Requirements
from decentnode.sharing.weighted_by_training import WeightedByTraining
from decentnode.sharing.wrapper import Wrapper
from tests.compression.contract import codec
from tests.graph.contract import make
from tests.sharing.contract import random_models, rule, run_phase, set_up_rules

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
NON_DEFAULTS: dict[str, object] = {
    "phases": 3, "steps_before": 1, "min_neighbors": 3,
    "smallest_eigenvalue": -0.25, "scalars": {"a": ScalarSpec(int)}, "includes_self": frozenset({1}),
}  # fmt: skip
"""For every field that is not a boolean, a value other than its default."""


@dataclass(frozen=True, kw_only=True)
class LaterRequirements(Requirements):
    """Requirements with a field that did not exist when a wrapper was written."""

    invented: str = ""


def all_requirements() -> LaterRequirements:
    """Returns requirements of which every field differs from its default."""
    values = {field.name: NON_DEFAULTS.get(field.name, field.default is False) for field in fields(Requirements)}
    assert all(values[field.name] != field.default for field in fields(Requirements))
    return LaterRequirements(invented="later", **values)  # type: ignore[arg-type]


def rule_with_all_requirements() -> Sharing:
    made = rule("full")()
    made.requirements = all_requirements()
    return made


def int8() -> Any:
    return codec("int8")()


WRAPPERS: dict[str, tuple[Callable[[Sharing], Sharing], set[str]]] = {
    "Wrapper": (Wrapper, set()),
    "Compressed": (lambda inner: Compressed(inner, int8()), {"elementwise", "linear", "scalars"}),
    "Compressed twice": (lambda inner: Compressed(Compressed(inner, int8()), int8()),
                         {"elementwise", "linear", "scalars"}),
    "Attacked": (lambda inner: Attacked(inner, SignFlip(SignFlipConfig(name="sign_flip", count=1)), [0],
                                        make("ring", nodes=4)), {"elementwise", "linear"}),
    "WeightedByTraining": (lambda inner: WeightedByTraining(inner, "samples"), {"elementwise", "linear", "scalars"}),
}  # fmt: skip
"""Name -> (function that wraps a rule, the fields of the requirements that the wrapper changes)."""


def subclass_names(kind: type[Any]) -> set[str]:
    return {name for below in kind.__subclasses__() for name in (below.__name__, *subclass_names(below))}


def test_the_table_of_wrappers_has_every_wrapper_of_the_package() -> None:
    for name in SHARINGS:
        load_class(name, SHARINGS, "sharing")
    assert subclass_names(Wrapper) <= {name.split()[0] for name in WRAPPERS}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_passes_on_every_requirement_that_it_does_not_change(name: str) -> None:
    """Before and after `payload_schema`; also a requirement that the wrapper does not know."""
    wrap, changes = WRAPPERS[name]
    wrapper = wrap(rule_with_all_requirements())
    for _ in range(2):
        requirements = wrapper.requirements
        assert isinstance(requirements, LaterRequirements)
        for field in fields(LaterRequirements):
            if field.name not in changes:
                assert getattr(requirements, field.name) == getattr(all_requirements(), field.name), field.name
        assert requirements.scalars.keys() >= {"a"}
        wrapper.payload_schema(100, torch.float32)


def test_a_wrapper_passes_every_method_call_on_to_its_rule() -> None:
    """Also calls of the methods that a rule need not define."""
    methods = {name for name, _ in inspect.getmembers(Sharing, inspect.isfunction) if not name.startswith("_")}
    called: list[str] = []

    class Inner(Full):
        pass

    def recorder(name: str) -> Callable[..., object]:
        def method(self: object, *args: object) -> object:
            called.append(name)
            return args

        return method

    for name in methods:
        setattr(Inner, name, recorder(name))
    wrapper = Wrapper(Inner(Config()))
    for name in sorted(methods):
        arguments = [object() for _ in inspect.signature(getattr(Sharing, name)).parameters][1:]
        if name == "succeed":  # takes the rule of the generation before, which is wrapped, too
            arguments = [wrapper]
        passed_on = getattr(wrapper, name)(*arguments)
        assert called[-1] == name
        assert passed_on is None or passed_on == tuple(arguments), f"{name} changes its arguments"
    assert len(methods) > 15


@pytest.mark.parametrize("compression", ["int8", "bfloat16"])
def test_rules_with_a_codec_allow_no_sums_of_payloads(compression: str) -> None:
    """A transport sums the payloads of linear rules, with the node's own contribution, in one collective."""
    compressed = rule("full", compression={"name": compression})()
    round_view = view(make("complete", nodes=4), 0, 0)
    assert not compressed.requirements.linear and compressed.own_contribution(torch.zeros(4), round_view) is None
    assert rule("full")().own_contribution(torch.zeros(4), round_view) is not None


@pytest.mark.parametrize("into", [False, True])
def test_the_owner_of_a_shard_keeps_its_decoded_values_as_the_other_members_do(into: bool) -> None:
    """So that members of a group agree bit for bit. into: the result is written to other memory, as by the transport
    shared_memory."""
    models = random_models(4, 40)
    rules = set_up_rules(rule("hierarchical", compression={"name": "bfloat16"}), models)
    graph = make("complete", nodes=4)
    for phase in range(3):
        views = [each.plan(replace(view(graph, uid, 0, 1), phase=phase)) for uid, each in enumerate(rules)]
        if not into:
            run_phase(rules, models, views)
            continue
        sent = [each.outgoing(model, round_view) for each, model, round_view in zip(rules, models, views, strict=True)]
        results = []
        for uid, (each, model, round_view) in enumerate(zip(rules, models, views, strict=True)):
            received = {j: each.unpack(sent[j][uid], j, round_view) for j in round_view.sources}
            for _ in range(2):  # twice, as after a payload that changed while it was read
                out = torch.empty_like(model)
                each.mix_into(out, model, received, round_view)
            results.append(out)
        models = results
    assert torch.equal(models[0], models[1]) and torch.equal(models[2], models[3])


# -- rules written for versions in which requirements were separate attributes


class OldRule(Full):
    """A rule as users wrote them."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        super().mix(model, received, view)


def test_former_attributes_set_the_fields_of_the_requirements_and_warn() -> None:
    with pytest.warns(DeprecationWarning, match=r"Old: needs_static, phases must now be written as requirements = "
                      r"dataclasses.replace\(OldRule.requirements, static=True, phases=2\)"):  # fmt: skip
        class Old(OldRule):
            needs_static = True
            phases = 2

    assert Old.requirements == replace(Full.requirements, static=True, phases=2)
    old: Any = Old(Config())
    assert old.needs_static and old.phases == 2 and Old.phases == 2  # type: ignore[comparison-overlap]
    advice = r"self.requirements = dataclasses.replace\(self.requirements,"
    with pytest.warns(DeprecationWarning, match=advice) as warned:
        old.phases = 3
    assert warned[0].filename == __file__, "the warning does not name the line that sets the attribute"
    assert old.requirements == replace(Full.requirements, static=True, phases=3) and Old.requirements.phases == 2
    with pytest.warns(DeprecationWarning, match=r"requirements = Requirements\(elementwise=True\)") as warned:
        class Simple(Sharing):
            elementwise = True

    assert Simple.requirements == Requirements(elementwise=True) and warned[0].filename == __file__


def test_every_field_that_was_an_attribute_can_be_read_by_its_former_name() -> None:
    newer = {"min_neighbors", "unweighted", "private"}
    assert set(OLD_ATTRIBUTES.values()) == {field.name for field in fields(Requirements)} - newer
    for name, field in OLD_ATTRIBUTES.items():
        assert getattr(Full, name) == getattr(Full.requirements, field)


def test_a_former_attribute_that_is_a_method_or_a_property_is_refused_with_advice() -> None:
    with pytest.raises(TypeError, match=r"Computed.includes_self must be a value now: .*includes_self=\.\.\."):
        class Computed(OldRule):
            def includes_self(self, view: RoundView) -> bool:
                return view.phase == 2

    with pytest.raises(TypeError, match=r"Late.phases must be a value now"):
        class Late(OldRule):
            @property
            def phases(self) -> int:
                return 2


def test_a_rule_with_two_parents_of_different_requirements_must_state_its_own() -> None:
    class NotElementwise(Full):
        requirements = replace(Full.requirements, elementwise=False)

    refusal = "Both must have requirements of its own, for those of NotElementwise and D2 differ"
    with pytest.raises(TypeError, match=refusal):
        class Both(NotElementwise, D2):
            pass

    class StatesItsOwn(NotElementwise, D2):
        requirements = replace(D2.requirements, elementwise=False)

    assert StatesItsOwn.requirements.static and not StatesItsOwn.requirements.elementwise


class NeedsByConfig(Full):
    """Needs a static graph; sets this in its constructor, not in the class."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.requirements = replace(self.requirements, static=True, tolerates_missing=False)


def test_requirements_that_a_constructor_sets_are_checked() -> None:
    own_rule = "sharing={name: 'tests.sharing.test_requirements:NeedsByConfig'}"
    with pytest.raises(ConfigError, match="NeedsByConfig needs a static graph"):
        load(QUICKSTART, [own_rule, "graph={name: one_peer_exponential, nodes: 16}"])
    with pytest.raises(ConfigError, match="cannot recover"):
        load(QUICKSTART, [own_rule, "node.missing=return_weight"])


def test_a_class_that_is_not_a_sharing_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must name a class derived from decentnode\.sharing\.base\.Sharing"):
        load(QUICKSTART, ["sharing={name: 'decentnode.models.mlp:Mlp'}"])


def test_describe_lists_the_requirements_of_a_rule() -> None:
    assert describe("sharing", "d2").text.endswith(
        "\n\nNeeds: a static graph, a symmetric W, a doubly stochastic W, no eigenvalue of W below -0.333, "
        "schedule: sequential, missing: fail or regroup."
    )
    assert "Needs:" not in describe("sharing", "full").text and describe("sharing", "d2").summary.startswith("D2")


def test_a_rule_has_at_least_one_phase() -> None:
    with pytest.raises(ValueError, match="phases must be at least 1, got 0"):
        Requirements(phases=0)
