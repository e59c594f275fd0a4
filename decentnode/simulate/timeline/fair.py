"""Max-min fair rates of flows (transfers or computations) that share resources.

A flow is an amount of work (bytes, CPU seconds) that passes all its resources at the same time. The rates are those of
progressive filling (Bertsekas and Gallager, Data Networks, 6.5.2).
"""

from __future__ import annotations

import numpy as np

EQUAL = 1e-9
"""Relative difference below which two rates or two times are treated as equal."""
def fair_rates(uses: np.ndarray, capacity: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Returns the max-min fair rate of each flow [F].

    uses: [F, K] int, the resources of each flow; -1 for none. capacity: [R]. most: [F], the rate that a flow cannot
    exceed by itself. Capacities and `most` may be infinite.
    """
    flows, resources = uses.shape[0], capacity.size
    rates = np.full(flows, np.inf)
    left = np.append(capacity.astype(float), np.inf)  # index -1 stands for no resource
    open_flows = np.arange(flows)
    while open_flows.size:
        taken = uses[open_flows]
        count = np.bincount((taken + 1).ravel(), minlength=resources + 1)[1:]
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.append(np.where(count > 0, left[:-1] / count, np.inf), np.inf)
        limit = np.minimum(most[open_flows], share[taken].min(axis=1, initial=np.inf))
        # If a resource is the bottleneck of all its flows, their rates are final, wherever it is in
        # the order of progressive filling. So are the rates of flows that no resource slows down.
        least = np.full(resources + 1, np.inf)
        for column in range(taken.shape[1]):
            np.minimum.at(least, taken[:, column], limit)
        final = (least >= share * (1 - EQUAL)) & np.isfinite(share)
        fixed = final[taken].any(axis=1) | (limit >= most[open_flows] * (1 - EQUAL)) | np.isinf(limit)
        rate = limit[fixed]
        rates[open_flows[fixed]] = rate
        finite = np.where(np.isfinite(rate), rate, 0.0)
        for column in range(taken.shape[1]):
            left[:-1] -= np.bincount(taken[fixed, column] + 1, finite, resources + 1)[1:]
        np.maximum(left, 0.0, out=left)
        open_flows = open_flows[~fixed]
    return rates
