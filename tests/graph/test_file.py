"""Graph files: edges and adjacency lists."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decentnode.errors import GraphError
from decentnode.graph.file import format_adjacency, format_edges, read, write
from tests.graph.contract import make

EDGES = "3\n0 1\n0 2\n1 0\n1 2\n2 0\n2 1\n"
ADJACENCY = "3\n1 2\n0 2\n0 1\n"


def test_files_have_the_expected_bytes() -> None:
    triangle = make("ring", nodes=3).lists(0)
    assert format_edges(triangle) == EDGES
    assert format_adjacency(triangle) == ADJACENCY


@pytest.mark.parametrize("suffix", [".edges", ".adj"])
def test_a_written_graph_is_read_back(tmp_path: Path, suffix: str) -> None:
    lists = make("regular", nodes=16, degree=4).lists(0)
    write(lists, tmp_path / f"g{suffix}")
    assert read(tmp_path / f"g{suffix}") == list(lists)
    assert [p.name for p in tmp_path.iterdir()] == [f"g{suffix}"]


def test_an_edge_may_be_given_once_and_blank_lines_may_end_the_file(tmp_path: Path) -> None:
    path = tmp_path / "g.edges"
    path.write_text("3\n0 1\n2 1\n\n\n")
    assert read(path) == [(1,), (0, 2), (1,)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("g.edges", "", "is empty"), ("g.edges", "\n\n", "is empty"), ("g.edges", "x\n0 1\n", ":1: must be the number"),
        ("g.edges", "0\n", ":1: must be the number"), ("g.edges", "2\n0 1 2\n", ":2: must be two node numbers"),
        ("g.edges", "2\n0 1\n\n0 1\n", ":3: must be two"), ("g.edges", "2\n0 -1\n", ":2: must be node numbers"),
        ("g.edges", "2\n0 2\n", ":2: node 2 is out of range"),
        ("g.edges", "2\n0 1\n1 1\n", ":3: node 1 is joined to it"),
        ("g.edges", "4\n0 1\n2 3\n", "not connected: it has 2 parts; node 2"),
        ("g.edges", "2\n0 \u0661\n", ":2: must be node numbers"), ("g.edges", "99999999999\n", ":1:"),
        ("g.adj", "2\n1\n", ":2: node 0 has node 1 as neighbor, but line 3"),
        ("g.adj", "3\n2 1\n0\n1\n", ":2: node 0 has node 2 as neighbor, but line 4 does not have node 0"),
        ("g.adj", "2\n1\n0\n1\n", "2 lines after"),
        ("g.adj", "2\n1 1\n0\n", ":2: node 0 names a neighbor twice"), ("g.adj", "2\n0\n0\n", ":2: node 0 is joined"),
    ],
)  # fmt: skip
def test_errors_in_files_name_the_path_and_the_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(GraphError, match=message) as raised:
        read(path)
    assert str(path) in str(raised.value)


def test_missing_and_binary_files_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="No such file"):
        read(tmp_path / "none.edges")
    (tmp_path / "b.edges").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(GraphError, match="not a text file"):
        read(tmp_path / "b.edges")
    with pytest.raises(GraphError):
        write([()], tmp_path / "no" / "folder.edges")


@given(st.text(alphabet="0123456789 \n-x", max_size=60), st.sampled_from([".edges", ".adj"]))
@settings(max_examples=150, deadline=None)
@pytest.mark.slow
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str, suffix: str) -> None:
    path = tmp_path_factory.getbasetemp() / f"fuzz{suffix}"  # a folder for each example would be slow
    path.write_text(text)
    try:
        lists = read(path)
    except GraphError:
        return
    assert all(i in lists[j] for i, neighbors in enumerate(lists) for j in neighbors)


def test_shipped_graph_files_have_the_number_of_nodes_in_their_names() -> None:
    folder = Path(__file__).parents[2] / "graphs"
    files = sorted(folder.iterdir())
    assert files
    for path in files:
        assert f"_{len(read(path))}" in path.name
