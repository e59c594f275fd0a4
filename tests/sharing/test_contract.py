"""Every rule, also within a codec, passes the contract."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from decentnode.sharing import SHARINGS
from tests.sharing import contract


def by_check(name: str, check: Callable[[contract.Make], None]) -> set[tuple[str, ...]]:
    """Every check of every rule, and every codec."""
    return {(check.__name__, *each) if each[0] == "rule" else each for each in contract.by_rule(name)}


@pytest.mark.sampled(of=by_check)
@pytest.mark.parametrize("name", contract.RULES)
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda c: c.__name__)
def test_contract(name: str, check: Callable[[contract.Make], None]) -> None:
    check(contract.RULES[name])


def test_every_rule_has_its_name() -> None:
    for name, make_rule in contract.RULES.items():
        found = contract.name_of(make_rule)
        assert found in SHARINGS and name.startswith(found), (name, found)
