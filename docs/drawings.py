"""Draws the pictures of the documentation as SVG, without any library.

python docs/drawings.py FOLDER writes what Sphinx's build writes to docs/drawings.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

INK, MUTED, LINE = "#1f2328", "#57606a", "#8b949e"
BLUE, ORANGE, GREEN, GRAY, PINK = "#cfe3f5", "#fbdcc4", "#cdeadd", "#eceff2", "#f3d9e8"
"""Fills; text on them is INK."""
SIZE = 13
"""Of text, in pixels."""


class Picture:
    """Shapes in pixels from the top left, on white, so that it can be read on a dark page too."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, text: str = "", fill: str = GRAY, size: int = SIZE,
    ) -> None:
        """A rectangle with lines of text in its middle."""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{fill}" stroke="{LINE}"/>'
        )
        lines = text.split("\n") if text else []
        for number, line in enumerate(lines):
            below = y + height / 2 + (number - (len(lines) - 1) / 2) * (size + 4) + size * 0.35
            self.text(x + width / 2, below, line, anchor="middle", size=size)

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", color: str = INK, size: int = SIZE,
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{color}" font-size="{size}"{weight}>'
            f"{escape(text)}</text>"
        )

    def line(
        self, points: Sequence[tuple[float, float]], arrow: bool = True, dashed: bool = False, color: str = MUTED,
        width: float = 1.4,
    ) -> None:
        places = " ".join(f"{x},{y}" for x, y in points)
        end = ' marker-end="url(#arrow)"' if arrow else ""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="{width}"{end}{dash}/>'
        )

    def cross(self, x: float, y: float, size: float = 7) -> None:
        for slope in (1, -1):
            ends = [(x - size, y - slope * size), (x + size, y + slope * size)]
            self.line(ends, arrow=False, color="#cf222e", width=2.5)

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" font-family="sans-serif">\n'
            '<defs><marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0,0 L10,5 L0,10 z" fill="{MUTED}"/></marker></defs>\n'
            f'<rect width="{self.width}" height="{self.height}" rx="6" fill="#ffffff"/>\n'
        )
        return head + "\n".join(self._parts) + "\n</svg>\n"


def paths() -> Picture:
    """How an edge gets its path: questions from top to bottom, the first yes decides."""
    questions = [
        ("edges names the pair?", "what it names", GRAY),
        ("both models on one GPU?", "CUDA IPC", PINK),
        ("both in host memory of one machine?", "shared memory", GREEN),
        ("both in one clique?", "torch.distributed (gloo, NCCL)", ORANGE),
        ("on one machine?", "shared memory, through pinned memory", GREEN),
    ]
    picture = Picture(700, 70 + 62 * len(questions))
    for number, (question, answer, fill) in enumerate(questions):
        y = 20 + 62 * number
        picture.box(30, y, 300, 38, question)
        picture.line([(330, y + 19), (420, y + 19)])
        picture.text(375, y + 13, "yes", anchor="middle", color=MUTED, size=12)
        picture.box(420, y, 250, 38, answer, fill)
        picture.line([(180, y + 38), (180, y + 62)])
        picture.text(190, y + 54, "no", color=MUTED, size=12)
    picture.box(30, 20 + 62 * len(questions), 300, 38, "ZeroMQ: Unix socket or tcp", BLUE)
    return picture


def membership() -> Picture:
    """One change of members as messages over time."""
    columns = {"node 0 (leads)": 130, "node 1": 340, "node 2": 520, "node 3": 660}
    picture = Picture(760, 520)
    for name, x in columns.items():
        picture.box(x - 60, 14, 120, 30, name, PINK if name == "node 3" else BLUE)
        end = 86 if name == "node 3" else 500
        picture.line([(x, 44), (x, end)], arrow=False, color=LINE)
    leader, one, two, three = columns.values()
    picture.cross(three, 92)
    picture.text(three + 14, 96, "dies", color=MUTED)
    rows = [
        (two, leader, 120, "Suspect: node 3"),
        (leader, one, 165, "Prepare (5, a1f3...)"), (leader, two, 190, ""),
        (one, leader, 220, "Promise: 17 rounds over"), (two, leader, 245, "18 rounds over"),
        (leader, one, 300, "Commit: {0, 1, 2}, round 18"), (leader, two, 325, ""),
        (one, leader, 385, "Ready"), (two, leader, 405, ""),
        (leader, one, 445, "Go"), (leader, two, 465, ""),
    ]
    for start, end, y, words in rows:
        picture.line([(start, y), (end, y + 12)])
        if words:
            middle = (leader + one) / 2 if one in (start, end) else (one + two) / 2
            picture.text(middle, y - 3, words, anchor="middle", size=12)
    for x in (one, two):
        picture.box(x - 52, 342, 104, 30, "put away", GRAY, size=12)
    picture.box(leader - 52, 342, 104, 30, "put away", GRAY, size=12)
    for x in (leader, one, two):
        picture.box(x - 52, 484, 104, 26, "round 18", GREEN, size=12)
    picture.text(16, 172, "no further", color=MUTED, size=11)
    picture.text(16, 186, "round begins", color=MUTED, size=11)
    return picture


def round_() -> Picture:
    """Timelines of one round by schedule; lengths as behind a link as slow as the training."""
    picture = Picture(760, 330)
    left, unit = 190, 60.0

    def row(y: float, name: str, spans: Sequence[tuple[float, float, str, str]]) -> None:
        picture.text(16, y + 20, name)
        picture.line([(left, y - 4), (left, y + 34)], arrow=False, dashed=True)
        for start, length, words, fill in spans:
            picture.box(left + unit * start, y, unit * length, 30, words, fill, size=12)

    picture.text(16, 30, "sequential", bold=True)
    row(40, "training thread", [(0, 3, "train", BLUE), (3, 2.6, "wait", GRAY), (5.6, 0.7, "mix", GREEN)])
    row(74, "network", [(3, 2.6, "x - u", ORANGE)])
    picture.text(16, 132, "overlapped", bold=True)
    row(142, "training thread", [(0, 3, "train", BLUE), (3, 1.1, "mix, add u", GREEN)])
    row(176, "network", [(0, 2.6, "x", ORANGE)])
    picture.text(16, 234, "overlapped, mixing in the background", bold=True)
    row(244, "training thread", [(0, 3, "train", BLUE), (3, 0.7, "add u", GREEN)])
    row(278, "network", [(0, 2.6, "x", ORANGE)])
    picture.box(left + unit * 0.5, 312 - 4, unit * 2.3, 16, "second thread mixes", GREEN, size=11)
    return picture


def daemon() -> Picture:
    """The processes of a run on two machines."""
    picture = Picture(760, 330)
    for machine, x in enumerate((20, 400)):
        picture.box(x, 40, 340, 270, "", "#ffffff")
        picture.text(x + 12, 62, f"machine {machine}", bold=True)
        picture.box(x + 80, 76, 180, 36, "supervisor", GRAY)
        for rank in range(2):
            left = x + 20 + 160 * rank
            picture.box(left, 150, 140, 96, "", BLUE)
            picture.text(left + 70, 168, f"node {2 * machine + rank}", anchor="middle", bold=True)
            for number, words in enumerate(("training thread", "I/O thread", "(mixing thread)")):
                picture.text(left + 70, 190 + 18 * number, words, anchor="middle", size=12)
            picture.line([(x + 170, 112), (left + 70, 150)])
        picture.box(x + 60, 262, 220, 34, "publish buffers (shared memory)", GREEN, size=12)
        for rank in range(2):
            picture.line([(x + 90 + 160 * rank, 246), (x + 90 + 160 * rank, 262)])
    for start, end, y in ((341, 419, 200), (419, 341, 214)):
        picture.line([(start, y), (end, y)])
    picture.text(380, 26, "ZeroMQ: control and models, every node with its neighbors", anchor="middle", size=12)
    picture.line([(380, 32), (380, 196)], arrow=False, dashed=True)
    return picture


def script() -> Picture:
    """DecentralizedDataParallel in a rank's own training loop."""
    picture = Picture(760, 210)
    steps = [("forward", BLUE, 130), ("backward", BLUE, 150), ("mix x(t)", GREEN, 100), ("step", GREEN, 80),
             ("launch x(t+1)", ORANGE, 120)]  # fmt: skip
    x = 40.0
    picture.text(16, 30, "one rank, step t", bold=True)
    for words, fill, width in steps:
        picture.box(x, 44, width, 40, words, fill)
        x += width + 8
    picture.box(40, 110, 288, 34, "exchange of x(t) with the neighbors of round t", ORANGE, size=12)
    picture.line([(328, 127), (385, 127), (385, 86)])
    for y, words in (
        (178, "Mixing, step and launch happen at the end of backward(), bucket by bucket: through shared"),
        (196, "memory on one host, torch.distributed elsewhere. There is no optimizer.step() in the script."),
    ):
        picture.text(16, y, words, size=12, color=MUTED)
    return picture


def in_process() -> Picture:
    """All nodes of a run in one process."""
    picture = Picture(760, 170)
    picture.box(20, 20, 720, 130, "", "#ffffff")
    picture.text(34, 42, "one process, one thread", bold=True)
    for uid in range(4):
        picture.box(40 + 150 * uid, 60, 120, 40, f"node {uid}", BLUE)
        if uid < 3:
            picture.line([(160 + 150 * uid, 80), (190 + 150 * uid, 80)])
    picture.text(628, 84, "... next phase", size=12)
    words = "Nodes are stepped in the order of their uids; payloads are handed over as copies. Same bits as in a run."
    picture.text(40, 130, words, size=12, color=MUTED)
    return picture


PICTURES = {
    "paths": paths, "membership": membership, "round": round_, "daemon": daemon, "script": script,
    "in_process": in_process,
}  # fmt: skip


def write_all(folder: Path) -> None:
    """Blocking. Pictures that have not changed are left alone, so that Sphinx builds only what is new."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        path, text = folder / f"{name}.svg", draw().svg()
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
