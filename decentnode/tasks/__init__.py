"""Tasks: what a model learns, the default loss, and the metrics that are measured."""

from __future__ import annotations

TASKS: dict[str, str] = {
    "classification": "decentnode.tasks.classification:Classification",
    "next_token": "decentnode.tasks.next_token:NextToken",
    "rating": "decentnode.tasks.rating:Rating",
    "regression": "decentnode.tasks.regression:Regression",
    "translation": "decentnode.tasks.translation:Translation",
}
