"""Short digests of the sections of an experiment, which `Hello.software` contains.

A node that refuses a `Hello` because of its digest names the sections that differ. Nothing is decided by them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

DIGITS = 3
"""Hexadecimal digits of a section's digest. Two different sections have the same three digits once in 4,096 times;
sixteen sections and the versions of three packages fit into the 128 characters of `Hello.software`."""
MARK = "sections "


def encode_sections(sections: Mapping[str, str]) -> str:
    """Returns the text that stands for the sections (name -> digest in hex) in `Hello.software`; empty for no sections.

    It begins with a digest of the names, because another version of decentnode may have other sections.
    """
    if not sections:
        return ""
    names = hashlib.blake2b("\n".join(sections).encode(), digest_size=8).hexdigest()
    return f"{MARK}{''.join(each[:DIGITS] for each in (names, *sections.values()))}; "


def differing_sections(own: Mapping[str, str], software: str) -> list[str]:
    """Returns the names of this node's sections that differ from those in the `software` of another node's `Hello`.

    Returns no names if `software` does not describe the same sections.
    """
    mine, theirs = encode_sections(own), software.partition("; ")[0] + "; "
    first = len(MARK) + DIGITS
    if not mine or len(mine) != len(theirs) or mine[:first] != theirs[:first]:
        return []
    at = {name: slice(first + place * DIGITS, first + (place + 1) * DIGITS) for place, name in enumerate(own)}
    return [name for name, piece in at.items() if mine[piece] != theirs[piece]]
