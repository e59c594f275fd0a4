"""Rules on the models of all nodes at once: one object, a row per node.

Most of what a rule does is the same for every entry of every model: it works on a stack [N, P] as it does on one model
[P]. A rule that says so (`Hooks.STACKED`) is made once for all nodes; `begin`, `adjust` and `finish` get the stack, and
`mix_stacked` is called instead of `outgoing` and `mix`. Rules that are linear and override none of these need not say
it.
"""

from __future__ import annotations

import inspect
from typing import Any

from decentnode.sharing.hooks import Hooks

AROUND = ("begin", "direction", "adjust", "finish", "advance")
"""Methods that a linear rule without a stacked form of its own must not override."""


def has_stacked_form(rule: Any) -> bool:
    """Whether one object of the rule can hold the state of all nodes.

    A subclass has the form of its parent only where it says so itself, or adds no method: one that overrides `adjust`
    may look at its own uid.
    """
    for each in type(rule).__mro__:
        if vars(each).get("STACKED"):
            return True
        if each is Hooks:
            break
        if any(inspect.isfunction(value) and name != "__init__" for name, value in vars(each).items()):
            break
    plain = all(getattr(type(rule), name) is getattr(Hooks, name) for name in AROUND)
    return bool(rule.requirements.linear and rule.requirements.phases == 1 and plain)
