"""Stacked rules: one rule object that processes the models of all nodes at once, a row per node.

Most operations of a rule are the same for every entry of every model, so that they work on a stack [N, P] as on one
model [P]. A rule that declares this (`Hooks.STACKED`) is created once for all nodes; `begin`, `adjust` and `finish` get
the stack, and `mix_stacked` is called instead of `outgoing` and `mix`. Linear rules that override none of these methods
need not declare it.
"""

from __future__ import annotations

import inspect
from typing import Any

from decentnode.sharing.hooks import Hooks

NOT_OVERRIDDEN = ("begin", "direction", "adjust", "finish", "advance")
"""Methods that a linear rule must not override if it does not declare a stacked form."""


def has_stacked_form(rule: Any) -> bool:
    """Returns whether one object of the rule can hold the state of all nodes.

    A subclass only inherits its parent's stacked form if it declares so itself or adds no method: one that overrides
    `adjust` might depend on its own uid.
    """
    for each in type(rule).__mro__:
        if vars(each).get("STACKED"):
            return True
        if each is Hooks:
            break
        if any(inspect.isfunction(value) and name != "__init__" for name, value in vars(each).items()):
            break
    plain = all(getattr(type(rule), name) is getattr(Hooks, name) for name in NOT_OVERRIDDEN)
    return bool(rule.requirements.linear and rule.requirements.phases == 1 and plain)
