from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decentnode.config.yaml_source import MAX_BYTES, assignments, merge, parse, problem, read, replace
from decentnode.errors import ConfigError


def parse_problems(text: str) -> str:
    """Asserts that `parse` refuses the text, and returns the text of its problems."""
    with pytest.raises(ConfigError) as caught:
        parse(text, "a.yaml")
    return "\n".join(caught.value.problems)


def test_every_value_has_the_line_and_column_of_its_text():
    tree = parse("a:\n  - 1\n  - {b: x}\n", "a.yaml")
    item = tree.get("a").get(1).get("b")
    assert (item.place.line, item.place.column, item.key.column) == (3, 9, 6)
    assert item.place.origin == "a.yaml:3"
    assert tree.plain() == {"a": [1, {"b": "x"}]}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: 1\nb: 2\na: 3\n", "a.yaml:3:1: duplicate key 'a', first given at line 1\n    a: 3\n    ^"),
        ("x:\n  a: 1\n  a: 1\n", "a.yaml:3:3: duplicate key 'a', first given at line 2"),
        ("a: 1\n\tb: 2\n", "YAML does not allow tabs for indentation: use spaces"),
        ("a: [1\n", "a.yaml:2:1: not valid YAML: "),
        ("a: b: c\n", "a.yaml:1:5: not valid YAML: mapping values are not allowed here"),
        ("a: *b\n", "a.yaml:1:4: not valid YAML: found undefined alias"),
        ("a: 1\n---\nb: 1\n", "expected a single document"),
        ("a: &a [*a]\n", "a.yaml:1:4: a value must not contain itself"),
        ("[" * 1000, "nested too deep"),
        ("a: !!python/object:os.system x\n", "the tag tag:yaml.org,2002:python/object:os.system is not allowed here"),
        ("a: !env X\n", "the tag !env is not allowed here"),
        ("a: !!set {x}\n", "is not allowed here"),
        ("a: 2024-13-45\n", "a.yaml:1:4: '2024-13-45' cannot be read\n    a: 2024-13-45\n       ^ quote the value"),
        ("a: !!bool x\n", "'x' cannot be read"),
        ("a: !!timestamp x\n", "'x' cannot be read"),
        ("a: 0x_\n", "'0x_' cannot be read"),
        ("a: 010\n", "a.yaml:1:4: YAML reads 010 as the number 8\n    a: 010\n       ^ write 8, or quote 010"),
        ("a: [-1:30]\n", "YAML reads -1:30 as the number -90"),
        ("a: 12:30:00\n", "YAML reads 12:30:00 as the number 45000"),
        ("on: 1\n", "a.yaml:1:1: a key must be text\n    on: 1\n    ^ YAML reads a bare on as true: quote it"),
        ("{[1]: 2}\n", "a key must be text"),
        ("? \n: 2\n", "a key must be text"),
        ("a: \x07\n", "a.yaml:1:4: character 7 is not allowed in YAML"),
        ('a: "\\UFFFFFFFF"\n', "not valid YAML"),
    ],
)
def test_text_that_is_no_plain_yaml_is_refused_at_its_place(text, part):
    assert part in parse_problems(text)


def test_all_problems_of_a_text_are_reported_at_once():
    assert parse_problems("a: 1\na: !x 2\non: 3\n").count("a.yaml:") == 3


def test_nested_aliases_that_multiply_are_refused():
    text = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
    for i in range(9):
        text += f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 10)}]\n"
    assert "must have at most 100000 values" in parse_problems(text)


def test_aliases_and_merge_keys_are_resolved():
    text = "base: &b {x: 1, y: 2}\nuse: {<<: *b, y: 3}\n"
    assert parse(text, "a.yaml").plain()["use"] == {"x": 1, "y": 3}


def test_integer_keys_become_text():
    assert parse("{1: a, 02: b}", "a").plain() == {"1": "a", "02": "b"}


def test_an_empty_text_has_no_value():
    assert parse("", "a").value is None
    assert parse("# only a comment\n", "a").value is None


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"a: 1\nb: \xff\xfe", ":2: must be UTF-8 text, got byte 0xff"),
        (b"a" * (MAX_BYTES + 1), "must be at most 1048576 bytes"),
        (None, "cannot be read: No such file"),
    ],
)
def test_unreadable_files_are_refused(tmp_path, data, part):
    path = tmp_path / "a.yaml"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        read(path, "a.yaml")
    assert part in str(caught.value)


def test_a_folder_is_refused_and_a_byte_order_mark_is_skipped(tmp_path):
    with pytest.raises(ConfigError, match="Is a directory"):
        read(tmp_path, "x")
    (tmp_path / "b.yaml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert parse(read(tmp_path / "b.yaml", "b"), "b").plain() == {"a": 1}


MERGES = [
    ("a: {x: 1, y: 2}", "a: {y: 3}", {"a": {"x": 1, "y": 3}}),
    ("a: {name: p, x: 1}", "a: {name: q}", {"a": {"name": "q"}}),
    ("a: {name: p, x: 1}", "a: {name: p, y: 1}", {"a": {"name": "p", "x": 1, "y": 1}}),
    ("a: {x: 1}", "a: {name: q}", {"a": {"name": "q"}}),
    ("mapping: {x: 1}", "mapping: {name: linear}", {"mapping": {"x": 1, "name": "linear"}}),
    ("a: p", "a: {x: 1}", {"a": {"name": "p", "x": 1}}),
    ("a: {name: p, x: 1}", "a: q", {"a": "q"}),
    ("a: [1, 2]", "a: [3]", {"a": [3]}),
    ("name: one\na: {x: 1}", "name: two", {"name": "two", "a": {"x": 1}}),
    ("a: {o: {name: p, x: 1}, y: 1}", "a: {o: {name: q}}", {"a": {"o": {"name": "q"}, "y": 1}}),
]


@pytest.mark.parametrize(("parent", "child", "expected"), MERGES)
def test_merging_a_child_into_its_parent(parent, child, expected):
    assert merge(parse(parent, "p"), parse(child, "c"), {"mapping": "linear"}).plain() == expected


SETS = [
    ("a: {x: 1}", "a.x=2", {"a": {"x": 2}}),
    ("a: {x: 1}", "a.y=[1, 2]", {"a": {"x": 1, "y": [1, 2]}}),
    ("a: {x: 1}", "a={y: 3}", {"a": {"y": 3}}),
    ("a: {x: 1}", "b.c.d=1e-3", {"a": {"x": 1}, "b": {"c": {"d": "1e-3"}}}),
    ("a: p", "a.x=1", {"a": {"name": "p", "x": 1}}),
    ("a: [1, {b: 2}]", "a.1.b=3", {"a": [1, {"b": 3}]}),
    ("a: 1", "a=", {"a": None}),
    ("a: 1", "a=x=y", {"a": "x=y"}),
]


@pytest.mark.parametrize(("text", "override", "expected"), SETS)
def test_set(text, override, expected):
    tree = parse(text, "a")
    for keys, item in assignments([override], {}):
        tree = replace(tree, keys, item)
    assert tree.plain() == expected


def test_environment_comes_before_the_command_line():
    found = assignments(["a=2"], {"DECENTNODE__A": "1", "DECENTNODE__B__C": "x", "OTHER": "y"})
    assert [(keys, item.value) for keys, item in found] == [(["a"], 1), (["b", "c"], "x"), (["a"], 2)]
    assert [item.place.origin for _, item in found] == ["env", "env", "--set"]
    assert str(found[1][1].place) == "environment DECENTNODE__B__C"


@pytest.mark.parametrize("override", ["a", "=1", "a..b=1", "a=[", "a={x: 1, x: 2}", ".=1"])
def test_bad_assignments_name_themselves(override):
    with pytest.raises(ConfigError) as caught:
        assignments([override, override], {})
    assert len(caught.value.problems) == 2
    assert all(p.startswith(f"--set {override}: ") for p in caught.value.problems)


def test_problem_without_a_line():
    assert problem("a.yaml", "is empty", "fill it") == "a.yaml: is empty\n    fill it"


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=st.sampled_from("ab:- \n\t[]{}&*!|>'\"%@`#,?<=01.e\\~\x00é\U0001f600"), max_size=40))
def test_any_text_is_a_tree_or_a_config_error(text):
    try:
        parse(text, "a.yaml").plain()
    except ConfigError as error:
        assert all(p.startswith("a.yaml") for p in error.problems)
