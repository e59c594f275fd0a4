"""Every rule, with and without a codec, passes the checks of the contract."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from decentnode.sharing import SHARINGS
from tests.sharing import contract


def check_traits(name: str, check: Callable[[contract.RuleFactory], None]) -> set[tuple[str, ...]]:
    """Returns what a case covers: the pair of check and rule, and the codec."""
    return {(check.__name__, *trait) if trait[0] == "rule" else trait for trait in contract.rule_traits(name)}


@pytest.mark.sampled(of=check_traits)
@pytest.mark.parametrize("name", contract.RULES)
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda c: c.__name__)
def test_contract(name: str, check: Callable[[contract.RuleFactory], None]) -> None:
    check(contract.RULES[name])


def test_rule_name_returns_the_first_word_of_the_key_in_RULES() -> None:
    for key, make_rule in contract.RULES.items():
        name = contract.rule_name(make_rule)
        assert name in SHARINGS and key.startswith(name), (key, name)
