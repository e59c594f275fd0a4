"""python -m tests.failed MOST: prints the tests that failed last; exits with 1 if there are none, or more than MOST."""

from __future__ import annotations

import json
import sys
from pathlib import Path

CACHE = Path(__file__).parent.parent / ".pytest_cache/v/cache/lastfailed"


def main(most: int) -> int:
    failed = sorted(json.loads(CACHE.read_text())) if CACHE.exists() else []
    if not 0 < len(failed) <= most or not all(name.startswith("tests/") for name in failed):
        return 1  # a worker that failed to start is listed as a test; without any name pytest would run all tests again
    print(f"run again alone, as {len(failed)} failed beside the others (a test that passes now must be fixed):")
    print("\n".join(f"  {name}" for name in failed), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
