"""Small models, made by name and initialized as torch does under the caller's seed."""

from __future__ import annotations

MODELS: dict[str, str] = {
    "mlp": "decentnode.models.mlp:Mlp",
    "logistic": "decentnode.models.logistic:Logistic",
    "gn_lenet": "decentnode.models.gn_lenet:GnLenet",
    "cnn": "decentnode.models.cnn:Cnn",
}
