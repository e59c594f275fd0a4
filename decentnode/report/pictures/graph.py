"""Draws graphs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decentnode.errors import EnvironmentFault
from decentnode.graph.topology import Topology
from decentnode.report.pictures.plots import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_PANELS = 8
MAX_LABELLED = 128
"""A graph with more nodes is drawn without their numbers, for lack of space."""
POINTS = 72
"""Typographic points per inch."""
SMALLEST_PANEL, LARGEST_PANEL, LARGEST_OF_SEVERAL = 4.6, 11.0, 7.0
"""Side lengths of a panel, in inches."""
INCHES_PER_NODE = 0.125
"""Side length of a panel per node, so that numbers on a circle can be read."""
MAX_DIAMETER = 26.0
"""Maximum diameter of a node, in points."""
NODE_SHARE = 0.8
"""Diameter of a node as a fraction of the distance between two nodes."""
FONT_SHARE = 0.46
"""Font size of a node's number as a fraction of the node's diameter."""

Places = dict[int, tuple[float, float]]


def draw_graph(graph: Topology, path: Path) -> None:
    """Writes a picture of a graph to a file, a panel per round of its period. Raises EnvironmentFault if it cannot be
    written."""
    try:
        figure_of(graph).savefig(path, dpi=130)
    except OSError as error:
        raise EnvironmentFault(f"{path}: {error.strerror}") from error


def figure_of(graph: Topology) -> Figure:
    """Returns a picture of a graph, a panel per round of its period. pyplot does not manage the figure."""
    panels = min(graph.period or MAX_PANELS, MAX_PANELS)
    columns = min(panels, 4)
    rows = math.ceil(panels / columns)
    largest = LARGEST_PANEL if panels == 1 else LARGEST_OF_SEVERAL
    side = min(max(SMALLEST_PANEL, INCHES_PER_NODE * graph.num_nodes), largest)
    figure = new_figure(side * columns, side * rows + 0.5)
    axes = figure.subplots(rows, columns, squeeze=False)
    places = _places(graph)
    for index, axis in enumerate(axes.flat):
        axis.set_axis_off()
        if index < panels:
            _draw(axis, graph, index, places, side)
            if panels > 1:
                axis.set_title(f"round {index}", fontsize=11)
    name = getattr(graph.config, "name", "") or "graph"
    title = f"{graph.config.file.name}" if name == "file" else name.replace("_", " ")  # type: ignore[attr-defined]
    figure.suptitle(f"{title}, {graph.num_nodes} nodes", fontsize=13)
    return figure


def _draw(axis: Axes, graph: Topology, round: int, places: Places, side: float) -> None:
    import networkx

    kind = networkx.DiGraph if graph.directed else networkx.Graph
    drawn = kind((i, j) for i, targets in enumerate(graph.lists(round)) for j in targets)
    drawn.add_nodes_from(range(graph.num_nodes))
    diameter = _diameter(graph, side)
    many = graph.num_nodes > 32
    style: dict[str, Any] = {"ax": axis, "edge_color": "#7488a0", "width": 0.7 if many else 1.1,
                             "alpha": 0.75 if many else 1.0, "node_size": diameter**2}  # fmt: skip
    wrapped = _wrap_around_edges(graph, list(drawn.edges))
    networkx.draw_networkx_edges(drawn, places, edgelist=[e for e in drawn.edges if e not in wrapped], **style)
    if wrapped:  # wrap-around edges of a torus, curved to pass the nodes between their ends
        networkx.draw_networkx_edges(drawn, places, edgelist=sorted(wrapped), arrows=True, arrowstyle="-",
                                     connectionstyle="arc3,rad=0.09", **style)  # fmt: skip
    networkx.draw_networkx_nodes(drawn, places, ax=axis, node_color="#1f5fa8", node_size=diameter**2)
    if graph.num_nodes <= MAX_LABELLED:
        networkx.draw_networkx_labels(drawn, places, ax=axis, font_color="white", font_size=FONT_SHARE * diameter)
    axis.set_aspect("equal")
    axis.set_xlim(-1.12, 1.12)
    axis.set_ylim(-1.12, 1.12)


def _grid(graph: Topology) -> tuple[int, int] | None:
    """Returns (rows, columns) of a graph that is drawn as a grid; None for others, which are drawn in a circle."""
    found: tuple[int, int] | None = getattr(graph, "grid", None)
    return found if found is not None and min(found) > 2 else None


def _places(graph: Topology) -> Places:
    """Returns the position of every node, within [-1, 1]."""
    n, grid = graph.num_nodes, _grid(graph)
    if grid is None:
        return {u: (math.cos(2 * math.pi * u / n), math.sin(2 * math.pi * u / n)) for u in range(n)}
    step = 2 / (max(grid) - 1)
    rows, columns = grid
    return {
        u: (step * (u % columns - (columns - 1) / 2), -step * (u // columns - (rows - 1) / 2)) for u in range(n)
    }


def _wrap_around_edges(graph: Topology, edges: list[tuple[int, int]]) -> set[tuple[int, int]]:
    """Returns the wrap-around edges of a grid, which lead from one border to the opposite one."""
    grid = _grid(graph)
    if grid is None:
        return set()
    columns = grid[1]
    return {(i, j) for i, j in edges if abs(i % columns - j % columns) > 1 or abs(i // columns - j // columns) > 1}


def _diameter(graph: Topology, side: float) -> float:
    """Returns the diameter of a node in points, the largest that keeps neighboring nodes apart."""
    radius = POINTS * side / 2 / 1.12
    grid = _grid(graph)
    distance = 2 * radius / (max(grid) - 1) if grid else 2 * radius * math.sin(math.pi / max(graph.num_nodes, 2))
    return min(MAX_DIAMETER, NODE_SHARE * distance)
