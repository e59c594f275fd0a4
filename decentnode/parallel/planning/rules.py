"""Makes the sharing rule that a script names, for use with buckets."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from decentnode.compression.base import Codec, make_codec
from decentnode.config.component import load_class
from decentnode.graph.base import RoundView
from decentnode.parallel.planning.differences import Differences
from decentnode.parallel.planning.sections import config_of
from decentnode.sharing import SHARINGS
from decentnode.sharing.base import Sharing
from decentnode.sharing.choco import Choco
from decentnode.sharing.hooks import AROUND_STEPS, own_methods
from decentnode.sharing.operator import Operator

NEVER_CALLED = ("direction", "trains", "trained", "advance")
"""Methods of a rule that are never called when a script trains."""
TRIAL_ROUNDS = 4
"""In how many rounds a user's own rule is asked what it would send, as it may send other payloads in some rounds."""
SharingRule = str | Mapping[str, Any] | Sharing | type[Sharing]


@dataclass(frozen=True)
class Coding:
    """How ranks compress what they send."""

    codec: Codec | None
    """None: values are sent uncompressed."""
    fraction: float
    """The fraction of a bucket's entries, the largest, that is sent."""
    differences: bool
    """Whether changes of public copies are sent (differences.py); otherwise the parameters."""


MAX_MODEL_LOSS = 1e-3
"""The largest fraction of the energy of a normal vector that a codec may lose of whole models: int8 loses 1e-4, int4
3e-2. Ranks agree no more closely than the loss allows."""


def make_coding(rule: Sharing) -> Coding | None:
    """Returns how payloads are compressed; None if the rule's payloads are sent uncompressed."""
    section = getattr(rule.config, "compression", None)
    codec = None if section is None else make_codec(section)
    if isinstance(rule, Differences):
        return Coding(codec, rule.fraction, differences=True)
    return None if codec is None else Coding(codec, 1.0, differences=False)


def make_sharing(given: SharingRule) -> Sharing:
    """Returns a sharing rule that buckets can use.

    Raises ValueError for a rule that is not elementwise or needs what buckets do not have, UsageError for an unknown
    name.

    given: a name of the table SHARINGS, a section such as {"name": "ac", "final": 0.2}, "package.module:Class", a
    class, or an object.
    """
    if isinstance(given, Sharing):
        rule = Differences.of(given.config) if type(given) is Choco else given  # type: ignore[arg-type]
    elif isinstance(given, type):
        cls = Differences if given is Choco else given
        rule = cls(cls.Config())
    else:
        section = {"name": given} if isinstance(given, str) else dict(given)
        cls = load_class(section.get("name", "full"), SHARINGS, "sharing")
        cls = Differences if cls is Choco else cls
        rule = cls(config_of("sharing", cls, section))
    needs, never_called = rule.requirements, own_methods(type(rule), NEVER_CALLED)
    around = [] if needs.sequential else own_methods(type(rule), AROUND_STEPS)
    lacks = next((why for bad, why in (
        (not needs.elementwise, "is not elementwise: it cannot mix one bucket after the other"),
        (needs.phases != 1, f"has {needs.phases} exchanges per round"),
        (needs.gradient, "needs gradients"),
        (type(rule).adjust is not Sharing.adjust, "has a method adjust, which scripts do not call"),
        (not needs.linear and getattr(rule.config, "compression", None) is not None,
         "is not linear, and has compression"),
        (bool(never_called), f"has a method {next(iter(never_called), '')}, which scripts do not call"),
        (bool(around), f"has a method {next(iter(around), '')}, which is only called where its requirements have "
         "sequential=True"),
        (_sends_other_payloads(rule), "sends something other than the parameters (its method outgoing), where scripts "
         "send the parameters"),
    ) if bad), None)  # fmt: skip
    if lacks is not None:
        raise ValueError(f"sharing must be an elementwise rule such as full, ac or local_sgd, or choco, got "
                         f"{type(rule).__name__}, which {lacks}")  # fmt: skip
    coding = make_coding(rule)
    if coding is not None and not coding.differences:
        lost = Operator(1.0, "all", coding.codec).lost()
        if lost > MAX_MODEL_LOSS:
            name = rule.config.compression.name  # type: ignore[attr-defined]
            raise ValueError(f"compression must lose at most {MAX_MODEL_LOSS:.1%} of a model here, {name} loses "
                             f"{lost:.1%}: sharing={{'name': 'choco', 'choose': 'all', 'compression': ...}} sends "
                             "changes of models, which may be coarser")  # fmt: skip
    return rule


def _sends_other_payloads(rule: Sharing) -> bool:
    """Returns whether a user's own rule sends something else than the parameters, tried in a few rounds of two ranks.
    Its `outgoing` is never called in training, because ranks exchange their buckets directly."""
    if not own_methods(type(rule), ("outgoing",)):
        return False
    rule = copy.deepcopy(rule)
    model = torch.linspace(-1.0, 1.0, 7)
    for round in range(TRIAL_ROUNDS):
        view = RoundView(uid=0, round=round, neighbors=(1,), sources=(1,), weights={0: 0.5, 1: 0.5},
                         out_weights={0: 0.5, 1: 0.5}, members=(0, 1))  # fmt: skip
        try:
            with torch.no_grad():
                sent = rule.outgoing(model.clone(), view)
        except Exception:  # a failure in this trial says nothing about what the rule would send in training
            return False
        if set(sent) != {1} or set(sent[1].tensors) != {"x"} or sent[1].scalars \
                or not torch.equal(sent[1].tensors["x"], model):  # fmt: skip
            return True
    return False
