from __future__ import annotations

import pytest

from decentnode.wire.control_tree import FAN_OUT, ControlTree


@pytest.mark.parametrize("n", [1, 2, 9, 10, 73, 74, 600])
def test_trees_span_all_nodes_with_bounded_fan_out(n: int) -> None:
    trees = [ControlTree.of(u, n) for u in range(n)]
    assert sorted(c for t in trees for c in t.children) == list(range(1, n))
    assert all(u in trees[t.parent].children for u, t in enumerate(trees) if t.parent is not None)
    assert all(len(t.children) <= FAN_OUT for t in trees)


@pytest.mark.parametrize("n", [1, 2, 9, 10, 73, 74, 600])
def test_a_node_knows_the_depth_below_it_and_the_longest_path_of_a_mean(n: int) -> None:
    trees = [ControlTree.of(u, n) for u in range(n)]
    for tree in trees:
        children = [trees[child] for child in tree.children]
        assert tree.levels_below == (1 + max(child.levels_below for child in children) if children else 0)
        above = 0 if tree.parent is None else trees[tree.parent].links_around - trees[0].levels_below + 1
        assert tree.links_around == trees[0].levels_below + above


def test_a_tree_among_members_has_the_lowest_as_its_root() -> None:
    members = (3, 4, 7, 11, 12, 20)
    trees = {uid: ControlTree.among(uid, members, fan_out=2) for uid in members}
    assert trees[3] == ControlTree(None, (4, 7), 2, 2)
    assert trees[4] == ControlTree(3, (11, 12), 1, 3)
    assert trees[20].links == (7,)
    assert all(uid in trees[tree.parent].children for uid, tree in trees.items() if tree.parent is not None)
