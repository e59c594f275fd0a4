"""Sends a run's figures to trackers while it is in progress. Each tracker runs in its own process, which reads the
nodes' records from their files. The run waits for trackers only at its end."""

from __future__ import annotations

TRACKERS: dict[str, str] = {
    "csv": "decentnode.trackers.csv:CSV",
    "tensorboard": "decentnode.trackers.tensorboard:TensorBoard",
    "wandb": "decentnode.trackers.wandb:WandB",
    "mlflow": "decentnode.trackers.mlflow:MLflow",
    "prometheus": "decentnode.trackers.prometheus:Prometheus",
}
