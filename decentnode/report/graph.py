"""Pictures of graphs."""

from __future__ import annotations

import math
from pathlib import Path

from decentnode.errors import EnvironmentFault
from decentnode.graph.topology import Topology

MAX_PANELS = 8


def draw_graph(graph: Topology, path: Path) -> None:
    """One panel per round of the period. Raises EnvironmentFault when the file cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import networkx

    panels = min(graph.period or MAX_PANELS, MAX_PANELS)
    columns = min(panels, 4)
    rows = math.ceil(panels / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.6 * columns, 4.6 * rows), squeeze=False)
    for index, axis in enumerate(axes.flat):
        axis.set_axis_off()
        if index >= panels:
            continue
        kind = networkx.DiGraph if graph.directed else networkx.Graph
        drawn = kind((i, j) for i, targets in enumerate(graph.lists(index)) for j in targets)
        drawn.add_nodes_from(range(graph.num_nodes))
        places = networkx.circular_layout(sorted(drawn.nodes))
        size = max(20, 5200 / max(graph.num_nodes, 12))
        networkx.draw_networkx_edges(drawn, places, ax=axis, edge_color="#8a9bb0", width=1.1, node_size=size)
        networkx.draw_networkx_nodes(drawn, places, ax=axis, node_color="#1f5fa8", node_size=size)
        if graph.num_nodes <= 64:
            networkx.draw_networkx_labels(drawn, places, ax=axis, font_color="white", font_size=8)
        if panels > 1:
            axis.set_title(f"round {index}", fontsize=11)
    name = getattr(graph.config, "name", "") or "graph"
    title = f"{graph.config.file.name}" if name == "file" else name.replace("_", " ")  # type: ignore[attr-defined]
    figure.suptitle(f"{title}, {graph.num_nodes} nodes", fontsize=13)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise EnvironmentFault(f"{path}: {error.strerror}") from error
    finally:
        plt.close(figure)
