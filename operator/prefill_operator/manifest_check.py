"""Checks a manifest against the schema of its CRD as `kubectl apply` would: names, types, bounds, enums, patterns.

For the CLI, which has no API server at hand. The rules across fields are in api_rules and pool_rules; parse_pool checks them.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from prefill_operator.crd import Schema, object_schema
from prefill_operator.errors import PoolInvalid


def check_manifest(body: Mapping[str, Any], crd: Schema) -> None:
    """Raises PoolInvalid for the first field that the schema refuses, unknown fields included."""
    schema = object_schema(crd)
    for name in ("spec", "status"):
        if name in body:
            for problem in _problems(body[name], schema["properties"][name], name):
                raise problem


def _problems(value: Any, schema: Schema, path: str) -> Iterator[PoolInvalid]:
    if (rule := _broken_type(value, schema)) or (rule := _broken_bound(value, schema)):
        yield PoolInvalid(path, value=value, rule=rule)
    elif isinstance(value, list):
        yield from _list_problems(value, schema, path)
    elif isinstance(value, dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        yield from _object_problems(value, schema, path)


def _broken_type(value: Any, schema: Schema) -> str | None:
    if schema.get("x-kubernetes-int-or-string"):
        return None if _is_type(value, "integer") or isinstance(value, str) else "must be a number or text"
    return None if _is_type(value, schema["type"]) else f"must be of type {schema['type']}"


def _is_type(value: Any, name: str) -> bool:
    match name:
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "boolean":
            return isinstance(value, bool)
        case "string":
            return isinstance(value, str)
        case "array":
            return isinstance(value, list)
    return isinstance(value, dict)


def _broken_bound(value: Any, schema: Schema) -> str | None:
    if "enum" in schema and value not in schema["enum"]:
        return f"must be one of {', '.join(schema['enum'])}"
    if isinstance(value, int):
        low, high = schema.get("minimum"), schema.get("maximum")
        if (low is not None and value < low) or (high is not None and value > high):
            return f"must be from {low} to {'any' if high is None else high}"
        return None
    noun = "Length" if isinstance(value, str) else "Items" if isinstance(value, list) else "Properties"
    low, high = schema.get(f"min{noun}", 0), schema.get(f"max{noun}", len(value))
    if not low <= len(value) <= high:
        return f"must have {low} to {high} {'characters' if noun == 'Length' else 'entries'}, has {len(value)}"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        return f"must match {schema['pattern']}{_example(schema)}"
    return None


def _example(schema: Schema) -> str:
    """Fields are described with one, and it says more than a pattern."""
    found = re.search(r"Example: (.*?)\.?$", schema.get("description", ""), re.DOTALL)
    return f", e.g. {' '.join(found[1].split())}" if found else ""


def _list_problems(value: list[Any], schema: Schema, path: str) -> Iterator[PoolInvalid]:
    keys = schema.get("x-kubernetes-list-map-keys")
    if schema.get("x-kubernetes-list-type") in ("set", "map"):
        identities = [[item.get(key) for key in keys] if keys and isinstance(item, dict) else item for item in value]
        for index, identity in enumerate(identities):
            if identity in identities[:index]:
                yield PoolInvalid(f"{path}[{index}]", value=identity, rule="must not occur twice")
    for index, item in enumerate(value):
        yield from _problems(item, schema["items"], f"{path}[{index}]")


def _object_problems(value: dict[str, Any], schema: Schema, path: str) -> Iterator[PoolInvalid]:
    properties: Mapping[str, Schema] = schema.get("properties", {})
    for name in schema.get("required", ()):
        if value.get(name) is None:
            yield PoolInvalid(f"{path}.{name}", value=None, rule="is required")
    for name, item in value.items():
        if "additionalProperties" in schema:
            yield from _problems(item, schema["additionalProperties"], f"{path}.{name}")
        elif name not in properties:
            near = difflib.get_close_matches(name, properties, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(properties)}"
            yield PoolInvalid(f"{path}.{name}", value=None, rule=f"unknown field{hint}")
        elif item is not None:
            yield from _problems(item, properties[name], f"{path}.{name}")
