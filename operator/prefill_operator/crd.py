"""The CRDs as files: where they are, what they say, and whether the structs still agree with them.

`prefill-operator crd` prints them; the drift test calls find_drift. The YAML is the source of truth (decision 3).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import msgspec.inspect as mi

from prefill_operator.api_status import PoolStatus, VEPoolStatus
from prefill_operator.names import Kind
from prefill_operator.pool_api import PrefillPoolSpec
from prefill_operator.ve_api import VEPoolSpec

Schema = Mapping[str, Any]

_SPECS: Mapping[Kind, type[msgspec.Struct]] = {Kind.PREFILL_POOL: PrefillPoolSpec, Kind.VE_POOL: VEPoolSpec}
_STATUSES: Mapping[Kind, type[msgspec.Struct]] = {Kind.PREFILL_POOL: PoolStatus, Kind.VE_POOL: VEPoolStatus}


def crd_path(kind: Kind) -> Path:
    """The YAML file of a kind: inside the installed package, or at the root of a source checkout."""
    package = Path(__file__).parent
    folder = package / "crds" if (package / "crds").is_dir() else package.parents[1] / "crds"
    return folder / f"{kind.plural}.yaml"


def load_crd(kind: Kind) -> dict[str, Any]:
    """The CustomResourceDefinition of a kind."""
    return msgspec.yaml.decode(crd_path(kind).read_bytes(), type=dict[str, Any])


def object_schema(crd: Schema) -> Schema:
    """The OpenAPI schema of the one version."""
    (version,) = crd["spec"]["versions"]
    schema: Schema = version["schema"]["openAPIV3Schema"]
    return schema


def find_drift(kind: Kind, crd: Schema) -> tuple[str, ...]:
    """Every difference of field names, types, defaults, enums and required fields between a CRD and the structs."""
    properties = object_schema(crd)["properties"]
    spec, status = _SPECS[kind], _STATUSES[kind]
    return (
        *_compare(properties["spec"], mi.type_info(spec), "spec", has_defaults=True),
        # A status has no defaults in the schema: the operator writes every field.
        *_compare(properties["status"], mi.type_info(status), "status", has_defaults=False),
    )


def _compare(schema: Schema, info: mi.Type, path: str, *, has_defaults: bool) -> Iterator[str]:
    info = _without_none(info)
    if isinstance(info, mi.StructType):
        yield from _compare_struct(schema, info, path, has_defaults=has_defaults)
    elif isinstance(info, mi.EnumType):
        members = [member.value for member in info.cls]
        if schema.get("enum") != members:
            yield f"{path}: enum {schema.get('enum')} in the CRD, {members} in the struct"
    elif isinstance(info, mi.VarTupleType):
        if schema.get("type") != "array":
            yield f"{path}: {schema.get('type')} in the CRD, array in the struct"
        else:
            yield from _compare(schema["items"], info.item_type, f"{path}[]", has_defaults=has_defaults)
    elif isinstance(info, mi.DictType) and "additionalProperties" in schema:
        yield from _compare(schema["additionalProperties"], info.value_type, f"{path}{{}}", has_defaults=has_defaults)
    elif _schema_type(schema) != (wanted := _struct_type(info)):
        yield f"{path}: {_schema_type(schema)} in the CRD, {wanted} in the struct"


def _compare_struct(schema: Schema, info: mi.StructType, path: str, *, has_defaults: bool) -> Iterator[str]:
    if schema.get("type") != "object":
        yield f"{path}: {schema.get('type')} in the CRD, object in the struct"
        return
    properties: Mapping[str, Schema] = schema["properties"]
    fields = {field.encode_name: field for field in info.fields}
    for name in sorted(properties.keys() - fields.keys()):
        yield f"{path}.{name}: only in the CRD"
    for name in sorted(fields.keys() - properties.keys()):
        yield f"{path}.{name}: only in the struct"
    required = {name for name, field in fields.items() if field.required}
    if required != set(schema.get("required", ())):
        yield f"{path}: required {sorted(schema.get('required', ()))} in the CRD, {sorted(required)} in the struct"
    for name in sorted(properties.keys() & fields.keys()):
        field, property_schema = fields[name], properties[name]
        if has_defaults and not field.required:
            yield from _compare_default(property_schema, field, f"{path}.{name}")
        yield from _compare(property_schema, field.type, f"{path}.{name}", has_defaults=has_defaults)


def _compare_default(schema: Schema, field: mi.Field, path: str) -> Iterator[str]:
    factory = field.default_factory
    ours = _as_json(field.default if factory is msgspec.NODEFAULT else factory())
    theirs = schema.get("default")
    info = _without_none(field.type)
    if isinstance(info, mi.StructType) and theirs is not None:
        # The API server fills the rest of a block from the defaults of its fields, as the struct does.
        theirs = _as_json(msgspec.convert(theirs, info.cls))
    if theirs is None and _is_empty(ours):
        return
    if ours != theirs:
        yield f"{path}: default {theirs!r} in the CRD, {ours!r} in the struct"


def _as_json(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


def _is_empty(value: Any) -> bool:
    """None, {}, [] and blocks of nothing else: the same as an absent field."""
    if isinstance(value, dict):
        return all(_is_empty(item) for item in value.values())
    return value is None or value == []


def _without_none(info: mi.Type) -> mi.Type:
    """Optional[T] -> T; a union of several types stays one."""
    if not isinstance(info, mi.UnionType):
        return info
    kept = tuple(member for member in info.types if not isinstance(member, mi.NoneType))
    return kept[0] if len(kept) == 1 else mi.UnionType(kept)


def _schema_type(schema: Schema) -> str:
    if schema.get("x-kubernetes-int-or-string"):
        return f"int or string {schema.get('pattern', '')}"
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return "anything"
    return str(schema.get("type"))


def _struct_type(info: mi.Type) -> str:
    match info:
        case mi.IntType():
            return "integer"
        case mi.BoolType():
            return "boolean"
        case mi.StrType():
            return "string"
        case mi.DictType(value_type=mi.AnyType()):
            return "anything"
        case mi.UnionType(types=(mi.IntType(), mi.StrType() as text)):
            return f"int or string {text.pattern or ''}"
    return type(info).__name__
