"""The CRDs against the structs (both directions), against the rules of a structural schema, and against themselves."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prefill_operator.api import parse_pool
from prefill_operator.api_rules import NAME_RULES, VE_RULES
from prefill_operator.crd import crd_path, find_drift, load_crd, object_schema
from prefill_operator.names import ConditionType, Kind
from prefill_operator.pool_rules import PREFILL_RULES
from prefill_testing.crd_cases import CASES_PATH, load_crd_cases

DATA = Path(__file__).parent / "data"
POOL, VE = Kind.PREFILL_POOL, Kind.VE_POOL
both_kinds = pytest.mark.parametrize("kind", list(Kind), ids=str)

# The size at which `kubectl apply` fails: all annotations of an object together, the last-applied copy among them.
MAX_ANNOTATION_BYTES = 262_144


def walk(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """A schema and all schemas below it, with their paths."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from walk(child, f"{path}.{name}")
    if "items" in schema:
        yield from walk(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from walk(schema["additionalProperties"], f"{path}{{}}")


def nodes(kind: Kind, part: str | None = None) -> list[tuple[str, dict[str, Any]]]:
    schema = object_schema(load_crd(kind))
    return list(walk(schema["properties"][part], part) if part else walk(dict(schema), ""))


def property_nodes(kind: Kind, part: str) -> list[tuple[str, dict[str, Any]]]:
    """Without items and values, whose parents are described."""
    return [(path, schema) for path, schema in nodes(kind, part) if not path.endswith(("[]", "{}"))]


def find_field(crd: dict[str, Any], path: str) -> dict[str, Any]:
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for name in path.split("."):
        schema = schema["properties"][name]
    return schema


@both_kinds
def test_crd_agrees_with_the_structs(kind: Kind) -> None:
    assert find_drift(kind, load_crd(kind)) == ()


@pytest.mark.parametrize(
    ("parent", "change", "expected"),
    [
        ("spec.rollout", lambda s: s["properties"].pop("partition"), "spec.rollout.partition: only in the struct"),
        (
            "spec.rollout",
            lambda s: s["properties"].update(new={"type": "integer"}),
            "spec.rollout.new: only in the CRD",
        ),
        ("spec.rollout.maxSurge", lambda s: s.update(default=2), "spec.rollout.maxSurge: default 2"),
        ("spec.rollout.maxSurge", lambda s: s.pop("default"), "spec.rollout.maxSurge: default None"),
        ("spec.rollout.maxSurge", lambda s: s.update(type="string"), "spec.rollout.maxSurge: string in the CRD"),
        ("spec.rollout.strategy", lambda s: s["enum"].pop(), "spec.rollout.strategy: enum"),
        ("spec.rollout", lambda s: s["default"].update(maxSurge=3), "spec.rollout: default"),
        ("spec.engine", lambda s: s["required"].append("args"), "spec.engine: required"),
        ("spec.model", lambda s: s["required"].remove("revision"), "spec.model: required"),
        ("spec.kvCache.hostPool", lambda s: s.update(default="1Gi"), "spec.kvCache.hostPool: default '1Gi'"),
        ("spec.kvCache.hostPool", lambda s: s.update(pattern="^a$"), "spec.kvCache.hostPool: int or string ^a$"),
        (
            "spec.autoscaling.metrics",
            lambda s: s["items"]["properties"].pop("target"),
            "spec.autoscaling.metrics[].target",
        ),
        ("status.plan", lambda s: s["properties"].pop("ep"), "status.plan.ep: only in the struct"),
        ("status.conditions", lambda s: s["items"]["required"].remove("reason"), "status.conditions[]: required"),
    ],
)
def test_find_drift_reports_a_changed_crd(parent: str, change: Any, expected: str) -> None:
    crd = load_crd(POOL)
    change(find_field(crd, parent))
    assert any(problem.startswith(expected) for problem in find_drift(POOL, crd)), find_drift(POOL, crd)


@both_kinds
def test_schema_is_structural(kind: Kind) -> None:
    """The rules of the API server that need no CEL: one type each, properties or additionalProperties, nothing unknown."""
    allowed = {
        "description",
        "type",
        "format",
        "properties",
        "additionalProperties",
        "items",
        "required",
        "default",
        "enum",
    }
    allowed |= {"minimum", "maximum", "minLength", "maxLength", "maxItems", "maxProperties", "pattern", "anyOf"}
    allowed |= {"x-kubernetes-validations", "x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields"}
    allowed |= {"x-kubernetes-list-type", "x-kubernetes-list-map-keys"}
    for path, schema in nodes(kind):
        assert set(schema) <= allowed, path
        assert ("type" in schema) != schema.get("x-kubernetes-int-or-string", False), path
        assert not {"properties", "additionalProperties"} <= set(schema), path
        assert set(schema.get("required", ())) <= set(schema.get("properties", ())), path
        assert (schema.get("type") == "array") == ("items" in schema), path
        for key in schema.get("x-kubernetes-list-map-keys", ()):
            assert key in schema["items"]["required"], path


@both_kinds
def test_every_list_map_and_text_has_a_maximum(kind: Kind) -> None:
    """Without them the cost estimate of CEL explodes (k8s.md 3.1 rule 6)."""
    for part in ("spec", "status"):
        for path, schema in nodes(kind, part):
            kinds = schema.get("type"), schema.get("x-kubernetes-preserve-unknown-fields")
            assert kinds[0] != "array" or ("maxItems" in schema and "x-kubernetes-list-type" in schema), path
            assert kinds[0] != "string" or "enum" in schema or "maxLength" in schema, path
            assert not (kinds[1] or "additionalProperties" in schema) or "maxProperties" in schema, path
            assert not schema.get("x-kubernetes-int-or-string") or "maxLength" in schema, path


@both_kinds
def test_every_number_of_the_spec_is_bounded(kind: Kind) -> None:
    for path, schema in nodes(kind, "spec"):
        if schema.get("type") == "integer":
            assert {"minimum", "maximum", "format"} <= set(schema), path


@both_kinds
def test_every_field_is_described(kind: Kind) -> None:
    for part in ("spec", "status"):
        for path, schema in nodes(kind, part):
            assert len(schema.get("description", "")) >= 12, path


@both_kinds
def test_descriptions_of_the_spec_name_default_and_example(kind: Kind) -> None:
    for path, schema in property_nodes(kind, "spec"):
        if "properties" in schema:
            continue
        description = schema["description"]
        assert "Default: " in description or "Required" in description, path
        assert "Example: " in description or path.endswith(".name"), path
        default = schema.get("default")
        if default not in (None, []):
            shown = str(default).lower() if isinstance(default, bool) else str(default)
            assert f"Default: {shown}." in description, path


@both_kinds
def test_crd_text_is_safe_in_a_chart_template(kind: Kind) -> None:
    text = crd_path(kind).read_text()
    assert "{{" not in text
    assert "}}" not in text


@both_kinds
def test_crd_can_be_applied_client_side(kind: Kind) -> None:
    assert len(json.dumps(load_crd(kind)).encode()) < 200_000 < MAX_ANNOTATION_BYTES


@both_kinds
def test_names_of_the_kind(kind: Kind) -> None:
    spec = load_crd(kind)["spec"]
    assert spec["names"]["kind"] == kind
    assert spec["names"]["plural"] == kind.plural
    assert spec["names"]["categories"] == ["prefill"]
    assert spec["names"]["shortNames"] == [{POOL: "pfp", VE: "vep"}[kind]]
    assert spec["scope"] == "Namespaced"


@both_kinds
def test_columns_and_scale_read_fields_that_exist(kind: Kind) -> None:
    (version,) = load_crd(kind)["spec"]["versions"]
    scale = version["subresources"]["scale"]
    columns = [column["jsonPath"] for column in version["additionalPrinterColumns"]]
    conditions = {path.split('"')[1] for path in columns if path.startswith(".status.conditions[?(@.type==")}
    assert conditions <= set(ConditionType)
    for path in (*scale.values(), *columns):
        if not path.startswith((".metadata.", ".status.conditions[")):
            assert find_field(load_crd(kind), path.removeprefix("."))["type"] in ("integer", "string")
    assert scale["statusReplicasPath"] == ".status.replicas"


def test_pool_columns_show_the_device() -> None:
    (version,) = load_crd(POOL)["spec"]["versions"]
    shown = [column["name"] for column in version["additionalPrinterColumns"] if not column.get("priority")]
    assert shown == ["Desired", "Ready", "Up-To-Date", "Spares", "EP", "Device", "Available", "Redundant", "Age"]


def cel_messages(kind: Kind) -> set[str]:
    return {rule["message"] for _, schema in nodes(kind) for rule in schema.get("x-kubernetes-validations", ())}


@pytest.mark.parametrize(("kind", "rules"), [(POOL, PREFILL_RULES), (VE, VE_RULES)], ids=["PrefillPool", "VEPool"])
def test_python_rules_are_the_cel_rules(kind: Kind, rules: tuple[Any, ...]) -> None:
    cel = {message for message in cel_messages(kind) if not message.endswith("is immutable")}
    assert {rule.message for rule in (*NAME_RULES, *rules)} == cel


@both_kinds
def test_every_cel_rule_has_a_case_that_breaks_it(kind: Kind) -> None:
    tried = [case.message for case in load_crd_cases() if case.body["kind"] == kind and not case.is_accepted]
    untried = {message for message in cel_messages(kind) if not any(text in message for text in tried if text)}
    assert untried == set()


def test_cases_have_unique_names_and_reasons() -> None:
    cases = load_crd_cases()
    assert len({case.name for case in cases}) == len(cases) >= 150, CASES_PATH
    assert all(case.is_accepted or case.message for case in cases)


@both_kinds
def test_defaults_of_a_minimal_object_are_golden(kind: Kind) -> None:
    """The file is what a real API server made of the minimal object; layer 5 compares it again."""
    golden = msgspec.yaml.decode((DATA / f"defaults_{kind.plural}.yaml").read_bytes())
    minimal = next(case.body for case in load_crd_cases() if case.body["kind"] == kind)
    assert parse_pool(golden).spec == parse_pool(minimal).spec
