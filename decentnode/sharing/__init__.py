"""Sharing rules: what leaves a node and how arrivals are mixed."""

SHARINGS: dict[str, str] = {
    "full": "decentnode.sharing.full:Full",
    "ac": "decentnode.sharing.adaptive:AdaptiveConsensus",
    "d2": "decentnode.sharing.corrected:D2",
    "decentlam": "decentnode.sharing.corrected:DecentLaM",
    "diloco": "decentnode.sharing.infrequent:DiLoCo",
    "elastic": "decentnode.sharing.adaptive:Elastic",
    "exact_diffusion": "decentnode.sharing.corrected:D2",
    "gradient_tracking": "decentnode.sharing.corrected:GradientTracking",
    "leader": "decentnode.sharing.adaptive:Leader",
    "local_sgd": "decentnode.sharing.infrequent:LocalSGD",
    "momentum_tracking": "decentnode.sharing.corrected:MomentumTracking",
    "moshpit": "decentnode.sharing.adaptive:Moshpit",
    "noloco": "decentnode.sharing.infrequent:NoLoCo",
    "push_sum": "decentnode.sharing.push_sum:PushSum",
    "qg_momentum": "decentnode.sharing.corrected:QuasiGlobalMomentum",
    "relaysgd": "decentnode.sharing.relaysgd:RelaySGD",
    "slowmo": "decentnode.sharing.infrequent:SlowMo",
}
