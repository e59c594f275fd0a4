"""What the tests of this folder tell of a run."""

from __future__ import annotations

from decentnode.launch.messages import Facts, Finished

FACTS = Facts(
    "ring", "abc", "runs", "", "", "", "", 10, 5, False, 60.0, 60.0, 0, [[0, 1], [2, 3, 5]], ["10.0.0.1", "10.0.0.2"],
    {"0": 1, "1": 1},
)  # fmt: skip
FINISHED = Finished(0, {"uid": 0, "rounds": 10, "accuracy": 0.5}, False)
