"""Sharing rules: what a node sends in a round, and how it mixes arriving payloads into its model."""

AMONG_EQUALS: dict[str, str] = {
    "full": "decentnode.sharing.full:Full",
    "ac": "decentnode.sharing.ac:AdaptiveConsensus",
    "beer": "decentnode.sharing.beer:Beer",
    "choco": "decentnode.sharing.choco:Choco",
    "clipped_gossip": "decentnode.sharing.clipped_gossip:ClippedGossip",
    "d2": "decentnode.sharing.d2:D2",
    "decentlam": "decentnode.sharing.decentlam:DecentLaM",
    "deepsqueeze": "decentnode.sharing.deepsqueeze:DeepSqueeze",
    "diloco": "decentnode.sharing.diloco:DiLoCo",
    "elastic": "decentnode.sharing.elastic:Elastic",
    "exact_diffusion": "decentnode.sharing.d2:D2",
    "fft": "decentnode.sharing.fft:FFT",
    "gradient_tracking": "decentnode.sharing.gradient_tracking:GradientTracking",
    "hierarchical": "decentnode.sharing.hierarchical:Hierarchical",
    "jwins": "decentnode.sharing.jwins:JWINS",
    "lead": "decentnode.sharing.lead:Lead",
    "leader": "decentnode.sharing.leader:Leader",
    "local_sgd": "decentnode.sharing.local_sgd:LocalSGD",
    "momentum_tracking": "decentnode.sharing.momentum_tracking:MomentumTracking",
    "moshpit": "decentnode.sharing.moshpit:Moshpit",
    "noloco": "decentnode.sharing.noloco:NoLoCo",
    "powergossip": "decentnode.sharing.powergossip:PowerGossip",
    "push_sum": "decentnode.sharing.push_sum:PushSum",
    "qg_momentum": "decentnode.sharing.qg_momentum:QuasiGlobalMomentum",
    "qsgd": "decentnode.sharing.qsgd:QSGDGossip",
    "relaysgd": "decentnode.sharing.relaysgd:RelaySGD",
    "secure_aggregation": "decentnode.sharing.secure_aggregation:SecureAggregation",
    "sign": "decentnode.sharing.sign:SignGossip",
    "slowmo": "decentnode.sharing.slowmo:SlowMo",
    "stc": "decentnode.sharing.stc:STC",
    "subsample": "decentnode.sharing.subsample:Subsample",
    "topk": "decentnode.sharing.topk:TopK",
    "trimmed_mean": "decentnode.sharing.trimmed_mean:TrimmedMean",
    "wavelet": "decentnode.sharing.wavelet:Wavelet",
}
"""Rules for peer-to-peer runs, in which all nodes have the same role."""
WITH_SERVERS: dict[str, str] = {
    "fedavg": "decentnode.sharing.federated.fedavg:FedAvg",
    "fedavgm": "decentnode.sharing.federated.fedavgm:FedAvgM",
    "fedprox": "decentnode.sharing.federated.fedprox:FedProx",
    "fedadam": "decentnode.sharing.federated.fedadam:FedAdam",
    "fedyogi": "decentnode.sharing.federated.fedyogi:FedYogi",
    "scaffold": "decentnode.sharing.federated.scaffold:Scaffold",
    "fedstc": "decentnode.sharing.federated.fedstc:FedSTC",
}
"""Rules for servers and their clients."""
SHARINGS: dict[str, str] = {**AMONG_EQUALS, **WITH_SERVERS}

FRAGMENTS: dict[str, str] = {
    "random": "decentnode.sharing.random_fragments:RandomFragments",
}
"""Ways to split the parameters into fragments that are exchanged separately."""
