"""Compatibility with rules written before `Requirements` existed: attributes such as `needs_symmetric = True` set its
fields, with a warning."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from decentnode.sharing.requirements import Requirements

OLD_ATTRIBUTES: dict[str, str] = {
    "needs_symmetric": "symmetric", "needs_doubly_stochastic": "doubly_stochastic",
    "needs_column_stochastic": "column_stochastic", "needs_static": "static", "needs_tree": "tree",
    "needs_groups": "groups", "needs_sequential": "sequential", "needs_gradient": "gradient",
    "forgets_losses": "tolerates_missing", "includes_self": "includes_self",
} | {name: name for name in ("smallest_eigenvalue", "overrides_topology", "phases", "elementwise", "linear", "scalars",
                             "compresses", "star", "steps_before")}  # fmt: skip
"""Old attribute of a rule -> field of Requirements."""


class OldAttribute:
    """A descriptor that reads and writes one field of `requirements` under its old attribute name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.field = OLD_ATTRIBUTES[name]

    def __get__(self, rule: Any, owner: type[Any]) -> Any:
        return getattr((owner if rule is None else rule).requirements, self.field)

    def __set__(self, rule: Any, value: Any) -> None:
        _warn(type(rule), {self.name: value}, "self.requirements", stacklevel=3)
        rule.requirements = replace(rule.requirements, **{self.field: value})


def move_old_attributes(rule: type[Any]) -> None:
    """Moves old attributes in a rule's class body into its `requirements`.

    Raises TypeError for a computed one (a method or a property), which must be converted to a field by hand.
    """
    found = {name: vars(rule)[name] for name in OLD_ATTRIBUTES if name in vars(rule)}
    if not found:
        return
    for name, value in found.items():
        if callable(value) or hasattr(value, "__get__"):
            field = OLD_ATTRIBUTES[name]
            raise TypeError(f"{rule.__qualname__}.{name} must be a value now: set self.requirements = "
                            f"dataclasses.replace(self.requirements, {field}=...) in __init__")  # fmt: skip
        delattr(rule, name)
    # skips the frames of abc and __init_subclass__ up to the class body
    _warn(rule, found, "requirements", stacklevel=5)
    rule.requirements = replace(rule.requirements, **{OLD_ATTRIBUTES[name]: value for name, value in found.items()})


def _warn(rule: type[Any], found: dict[str, Any], where: str, stacklevel: int) -> None:
    names = ", ".join(found)
    fields = ", ".join(f"{OLD_ATTRIBUTES[name]}={value!r}" for name, value in found.items())
    parent: type[Any] = rule.__mro__[1]
    if where == "self.requirements":
        instead = f"{where} = dataclasses.replace({where}, {fields})"
    elif getattr(parent, "requirements", Requirements()) == Requirements():
        instead = f"{where} = Requirements({fields}), from decentnode.sharing.requirements"
    else:
        instead = f"{where} = dataclasses.replace({parent.__name__}.requirements, {fields})"
    warnings.warn(f"{rule.__qualname__}: {names} must now be written as {instead}", DeprecationWarning, stacklevel)
