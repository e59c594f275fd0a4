"""The sharing rule that a script names, for buckets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from decentnode.config.component import load_class
from decentnode.sharing import SHARINGS
from decentnode.sharing.base import Sharing

SharingRule = str | Mapping[str, Any] | Sharing | type[Sharing]


def sharing_named(given: SharingRule) -> Sharing:
    """Returns a sharing rule that buckets can use.

    Raises ValueError for a rule that is not elementwise or needs what buckets do not have, UsageError for an unknown
    name.

    given: a name of the table SHARINGS, a section such as {"name": "ac", "final": 0.2}, "package.module:Class", a
    class, or an object.
    """
    if isinstance(given, Sharing):
        rule = given
    elif isinstance(given, type):
        rule = given(given.Config())
    else:
        section = {"name": given} if isinstance(given, str) else dict(given)
        cls = load_class(section.get("name", "full"), SHARINGS, "sharing")
        config = cls.Config.model_validate(section)
        if getattr(config, "compression", None) is not None:
            raise ValueError(f"sharing must have no compression here: buckets travel as they are, got {section}")
        rule = cls(config)
    needs = rule.requirements
    lacks = next((why for bad, why in (
        (not needs.elementwise, "is not elementwise: it cannot mix one bucket after the other"),
        (needs.phases != 1, f"has {needs.phases} exchanges per round"),
        (needs.gradient, "needs gradients"),
        (type(rule).adjust is not Sharing.adjust, "needs the loss of the step"),
    ) if bad), None)  # fmt: skip
    if lacks is not None:
        raise ValueError(f"sharing must be an elementwise rule such as full, ac or local_sgd, got "
                         f"{type(rule).__name__}, which {lacks}")  # fmt: skip
    return rule
