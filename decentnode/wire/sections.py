"""Short digests of an experiment's sections, which a hello has in its text about the software: whoever refuses it for
its digest can name the sections that differ. Nothing is decided by them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

DIGITS = 3
"""Of a section's digest. Two sections that differ look alike once in 4,096 times; sixteen sections and the versions of
three packages fit into the 128 characters that a hello has."""
MARK = "sections "


def told(sections: Mapping[str, str]) -> str:
    """Returns the text for the sections (name -> digest in hex), empty for none. It begins with what stands for their
    names, which are other ones in another version of decentnode."""
    if not sections:
        return ""
    names = hashlib.blake2b("\n".join(sections).encode(), digest_size=8).hexdigest()
    return f"{MARK}{''.join(each[:DIGITS] for each in (names, *sections.values()))}; "


def differing(own: Mapping[str, str], software: str) -> list[str]:
    """Returns the names of own sections that are others in a hello's `software`; none where it does not tell of the
    same sections."""
    mine, theirs = told(own), software.partition("; ")[0] + "; "
    first = len(MARK) + DIGITS
    if not mine or len(mine) != len(theirs) or mine[:first] != theirs[:first]:
        return []
    at = {name: slice(first + place * DIGITS, first + (place + 1) * DIGITS) for place, name in enumerate(own)}
    return [name for name, piece in at.items() if mine[piece] != theirs[piece]]
