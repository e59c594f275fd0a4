import torch
from decentnode.sharing.attacks.base import Attack

class Zeros(Attack):
    """Sends zeros."""

    def forged(self, model, received, view):
        return torch.zeros_like(model)
