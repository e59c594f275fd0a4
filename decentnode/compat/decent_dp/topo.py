"""Decent-DP's module `topo`."""

from decentnode.compat.decent_dp.topologies import (
    AlternatingExpRingTopology,
    CompleteTopology,
    Edge,
    OnePeerExpTopology,
    RingTopology,
    Topology,
    TopologyReg,
)

__all__ = ["AlternatingExpRingTopology", "CompleteTopology", "Edge", "OnePeerExpTopology", "RingTopology", "Topology",
           "TopologyReg"]  # fmt: skip
