"""Attacks: what Byzantine nodes send, or train on, to harm the others. For experiments with robust sharing rules."""

ATTACKS: dict[str, str] = {
    "alie": "decentnode.sharing.attacks.alie:Alie",
    "dissensus": "decentnode.sharing.attacks.dissensus:Dissensus",
    "ipm": "decentnode.sharing.attacks.ipm:InnerProductManipulation",
    "label_flip": "decentnode.sharing.attacks.label_flip:LabelFlip",
    "noise": "decentnode.sharing.attacks.noise:Noise",
    "sign_flip": "decentnode.sharing.attacks.sign_flip:SignFlip",
    "spectral": "decentnode.sharing.attacks.spectral:Spectral",
}
