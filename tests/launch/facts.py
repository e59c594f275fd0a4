"""Facts of a run and the report of a finished node, as the tests of this folder use them."""

from __future__ import annotations

from decentnode.launch.children.messages import Facts, Finished
from decentnode.metrics.figures import LOSS, TaskMetrics
from decentnode.tasks.classification import ACCURACY

CLASSIFICATION = TaskMetrics("classification", (ACCURACY, LOSS))
FACTS = Facts(
    "ring", "abc", "runs", "", "", "", "", 10, 5, False, 60.0, 60.0, 0, [[0, 1], [2, 3, 5]], ["10.0.0.1", "10.0.0.2"],
    {"0": 1, "1": 1}, task=CLASSIFICATION.plain(),
)  # fmt: skip
FINISHED = Finished(0, {"uid": 0, "rounds": 10, "accuracy": 0.5}, False)
