"""The JSON schema is up to date, and accepts and refuses what `load` does (by a validator of 40 lines in this file)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from decentnode.cli import main
from decentnode.experiment import Experiment

CONFIGS = Path(__file__).parents[2] / "configs"
SUPPORTED_KEYWORDS = {
    "$defs", "$ref", "$schema", "additionalProperties", "anyOf", "const", "default", "description", "enum",
    "exclusiveMaximum", "exclusiveMinimum", "format", "items", "maxItems", "maxLength", "maximum", "minItems",
    "minLength", "minimum", "oneOf", "pattern", "prefixItems", "properties", "propertyNames", "required", "title",
    "type",
}  # fmt: skip
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool}


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((CONFIGS / "schema.json").read_text())
    return loaded


def is_valid(value: Any, rule: Any, root: dict[str, Any]) -> bool:
    if isinstance(rule, bool):
        return rule
    assert set(rule) <= SUPPORTED_KEYWORDS, set(rule) - SUPPORTED_KEYWORDS
    if "$ref" in rule:
        return is_valid(value, root["$defs"][rule["$ref"].rpartition("/")[2]], root)
    if "anyOf" in rule and not any(is_valid(value, each, root) for each in rule["anyOf"]):
        return False
    if value != rule.get("const", value) or value not in rule.get("enum", [value]):
        return False
    kind = rule.get("type")
    if kind == "null":
        return value is None
    if kind and (not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return False
    if isinstance(value, dict):
        return _is_valid_object(value, rule, root)
    if isinstance(value, list):
        return all(is_valid(each, rule.get("items", True), root) for each in value)
    if isinstance(value, str):
        return re.search(rule.get("pattern", ""), value) is not None
    if isinstance(value, int | float) and not isinstance(value, bool):
        above = value >= rule.get("minimum", value) and value > rule.get("exclusiveMinimum", value - 1)
        return above and value <= rule.get("maximum", value) and value < rule.get("exclusiveMaximum", value + 1)
    return True


def _is_valid_object(value: dict[str, Any], rule: dict[str, Any], root: dict[str, Any]) -> bool:
    if not set(rule.get("required", [])) <= set(value):
        return False
    others = rule.get("additionalProperties", True)
    properties = rule.get("properties", {})
    return all(is_valid(each, properties.get(key, others), root) for key, each in value.items())


def test_the_schema_in_configs_is_up_to_date():
    """Run `decentnode schema -o configs/schema.json` after changing a Config or a table."""
    assert CliRunner().invoke(main, ["schema"], catch_exceptions=False).stdout == (CONFIGS / "schema.json").read_text()


@pytest.mark.slow
def test_the_schema_is_written_to_a_file(tmp_path):
    path = tmp_path / "schema.json"
    assert CliRunner().invoke(main, ["schema", "-o", str(path)]).exit_code == 0
    assert json.loads(path.read_text())["title"] == "decentnode experiment"
    assert CliRunner().invoke(main, ["schema", "-o", str(tmp_path / "no" / "x.json")]).exit_code == 3


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_the_schema_accepts_every_config(schema, path):
    assert is_valid(yaml.safe_load(path.read_text()), schema, schema)


@pytest.mark.parametrize(
    "change",
    [
        {"sede": 1}, {"seed": -1}, {"seed": "x"}, {"graph": {"name": "rnig"}}, {"graph": {"name": "ring", "node": 3}},
        {"graph": {"nodes": 4}}, {"model": {"name": "mlp", "hidden": ["x"]}}, {"node": {"rounds": "x"}},
        {"training": {"name": "supervised", "batch_sise": 1}}, {"data": None}, {"sharing": "fulll"},
        {"derived": ["seed"]},
    ],
    ids=str,
)  # fmt: skip
def test_the_schema_refuses_what_load_refuses(schema, change):
    tree = yaml.safe_load((CONFIGS / "quickstart.yaml").read_text()) | change
    assert not is_valid(tree, schema, schema)


@pytest.mark.parametrize(
    "change",
    [
        {"graph": {"file": "a.edges"}}, {"sharing": "full"}, {"extends": "a.yaml"}, {"weights": None},
        {"sharing": {"name": "my.rules:Rule", "anything": 1}}, {"training": {"batch_size": 3}},
        {"derived": ["sharing.step_size"]},
    ],
    ids=str,
)  # fmt: skip
def test_the_schema_accepts_what_load_accepts(schema, change):
    tree = yaml.safe_load((CONFIGS / "quickstart.yaml").read_text()) | change
    assert is_valid(tree, schema, schema)


def test_every_key_of_the_schema_has_a_description(schema):
    assert set(schema["properties"]) == {*Experiment.model_fields, "extends", "derived"}
    bare = []

    def walk(rule: Any, path: str) -> None:
        for key, each in (rule.get("properties") or {}).items():
            if not each.get("description") and "$ref" not in each and key != "name":
                bare.append(f"{path}.{key}")
            walk(each, f"{path}.{key}")
        for each in rule.get("anyOf", []):
            walk(each, f"{path}:{each.get('title', '')}")

    walk(schema, "")
    for name, rule in schema.get("$defs", {}).items():
        walk(rule, name)
    assert not bare
