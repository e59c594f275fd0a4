"""What a run's figures are told to while it goes on: each tracker in a process of its own, which reads what the nodes
have recorded. The run never waits for one before its own end."""

from __future__ import annotations

TRACKERS: dict[str, str] = {
    "csv": "decentnode.trackers.csv:CSV",
    "tensorboard": "decentnode.trackers.tensorboard:TensorBoard",
    "wandb": "decentnode.trackers.wandb:WandB",
    "mlflow": "decentnode.trackers.mlflow:MLflow",
    "prometheus": "decentnode.trackers.prometheus:Prometheus",
}
