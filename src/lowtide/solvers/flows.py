"""Minimum cuts in small networks, by scipy."""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_array  # type: ignore[import-untyped]
from scipy.sparse.csgraph import breadth_first_order, maximum_flow  # type: ignore[import-untyped]


def minimum_cut(num_nodes: int, tails: np.ndarray, heads: np.ndarray, capacities: np.ndarray) -> tuple[int, list[int]]:
    """The value of a minimum cut between nodes 0 and 1, and the nodes on the side of 0.

    One entry for each pair of nodes, in the order of a sparse matrix; capacities are integers of 32 bits.
    """
    starts = np.searchsorted(tails, np.arange(num_nodes + 1)).astype(np.int32)
    network = csr_array((capacities, heads.astype(np.int32), starts), shape=(num_nodes, num_nodes))
    found = maximum_flow(network, 0, 1)
    left = network - found.flow
    left.data = np.maximum(left.data, 0)
    left.eliminate_zeros()
    reached = breadth_first_order(left, 0, directed=True, return_predecessors=False).tolist()
    return int(found.flow_value), reached
