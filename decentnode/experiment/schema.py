"""The JSON Schema of experiment files, for editors."""

from __future__ import annotations

import json
from typing import Any

from decentnode.config.key_docs import DocumentedSchema
from decentnode.config.run_files import DERIVED
from decentnode.experiment.derived import FINDERS
from decentnode.experiment.tree import Experiment


def schema_text() -> str:
    """Returns the JSON Schema of experiment files as text."""
    schema = Experiment.model_json_schema(by_alias=True, schema_generator=DocumentedSchema)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "decentnode experiment"
    schema["description"] = "One decentralized training run: one section per part."
    schema["properties"]["extends"] = {
        "type": "string",
        "description": "Path of a file, relative to this one, that this one is laid over.",
    }
    schema["properties"][DERIVED] = {
        "type": "array",
        "items": {"enum": list(FINDERS)},
        "description": "In resolved files: what follows from the rest, and is found anew when the file is loaded.",
    }
    needed = [key for key in schema.pop("required") if key != "name"]
    schema["anyOf"] = [{"required": ["extends"]}, {"required": needed}]
    return json.dumps(_with_shared_definitions(schema), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _with_shared_definitions(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the same schema, in which large alternatives that occur several times are moved to $defs."""
    found: dict[str, list[str]] = {}

    def walk(value: Any, name: str, change: bool) -> Any:
        if isinstance(value, list):
            return [walk(each, name, change) for each in value]
        if not isinstance(value, dict):
            return value
        choices = json.dumps(value["anyOf"], sort_keys=True) if isinstance(value.get("anyOf"), list) else ""
        if len(choices) > 2000:
            if not change:
                found.setdefault(choices, []).append(name)
            elif len(found[choices]) > 1:
                return {**value, "anyOf": [{"$ref": f"#/$defs/{found[choices][0]}"}]}
        return {key: walk(each, name if key in ("anyOf", "properties") else key, change)
                for key, each in value.items()}  # fmt: skip

    walk(schema, "", change=False)
    shared = {names[0]: {"anyOf": json.loads(choices)} for choices, names in found.items() if len(names) > 1}
    changed: dict[str, Any] = walk(schema, "", change=True)
    changed.setdefault("$defs", {}).update(shared)
    return changed
