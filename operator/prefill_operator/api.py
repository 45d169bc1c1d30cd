"""parse_pool: the one way from an object of the API server, or a manifest, to our structs.

Used by every part of the operator and by the CLI. The structs are in pool_api, ve_api, api_parts and api_status.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from prefill_operator.api_parts import ApiStruct
from prefill_operator.api_rules import NAME_RULES, VE_RULES, check_rules
from prefill_operator.api_status import PoolStatus, VEPoolStatus
from prefill_operator.errors import PoolInvalid
from prefill_operator.names import API_VERSION, Kind
from prefill_operator.pool_api import PrefillPoolSpec
from prefill_operator.pool_rules import PREFILL_RULES
from prefill_operator.ve_api import VEPoolSpec

__all__ = ["Kind", "Pool", "PoolStatus", "PrefillPoolSpec", "VEPoolSpec", "VEPoolStatus", "parse_pool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """One custom resource, parsed."""

    kind: Kind
    name: str
    namespace: str
    uid: str
    generation: int
    resource_version: str
    annotations: Mapping[str, str]
    is_deleting: bool
    spec: PrefillPoolSpec | VEPoolSpec
    status: PoolStatus | VEPoolStatus


def parse_pool(body: Mapping[str, Any]) -> Pool:
    """A PrefillPool or VEPool from JSON or YAML.

    Unknown fields are ignored. A status that cannot be read counts as empty: it is rebuilt from the cluster anyway.
    Absent metadata (a manifest that was never sent to a cluster) reads as "" and 0.

    Raises:
        PoolInvalid: with the path of the field, what stands there and what must hold.
    """
    kind = _parse_kind(body)
    metadata = _parse_metadata(body)
    check_rules(metadata.name, NAME_RULES)
    spec: PrefillPoolSpec | VEPoolSpec
    status: PoolStatus | VEPoolStatus
    if kind is Kind.PREFILL_POOL:
        spec = _parse_spec(body, PrefillPoolSpec)
        check_rules(spec, PREFILL_RULES)
        status = _parse_status(body, PoolStatus)
    else:
        spec = _parse_spec(body, VEPoolSpec)
        check_rules(spec, VE_RULES)
        status = _parse_status(body, VEPoolStatus)
    return Pool(
        kind=kind,
        name=metadata.name,
        namespace=metadata.namespace,
        uid=metadata.uid,
        generation=metadata.generation,
        resource_version=metadata.resource_version,
        annotations=metadata.annotations,
        is_deleting=metadata.deletion_timestamp is not None,
        spec=spec,
        status=status,
    )


class _Metadata(ApiStruct):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    annotations: dict[str, str] = msgspec.field(default_factory=dict)
    deletion_timestamp: str | None = None


_S = TypeVar("_S", bound=msgspec.Struct)


def _parse_kind(body: Mapping[str, Any]) -> Kind:
    version, kind = body.get("apiVersion"), body.get("kind")
    if version != API_VERSION:
        raise PoolInvalid("apiVersion", value=version, rule=f"must be {API_VERSION}")
    if kind not in tuple(Kind):
        raise PoolInvalid("kind", value=kind, rule=f"must be {' or '.join(Kind)}")
    return Kind(kind)


def _parse_metadata(body: Mapping[str, Any]) -> _Metadata:
    return _convert(body.get("metadata", {}), _Metadata, path="metadata")


def _parse_spec(body: Mapping[str, Any], struct: type[_S]) -> _S:
    if not isinstance(body.get("spec"), dict):
        raise PoolInvalid("spec", value=body.get("spec"), rule="must be an object")
    return _convert(body["spec"], struct, path="spec")


def _parse_status(body: Mapping[str, Any], struct: type[_S]) -> _S:
    try:
        return _convert(body.get("status") or {}, struct, path="status")
    except PoolInvalid:
        return struct()


def _convert(value: Any, struct: type[_S], *, path: str) -> _S:
    value = _without_null(value)
    try:
        return msgspec.convert(value, struct)
    except msgspec.ValidationError as error:
        text, _, place = str(error).removesuffix("`").partition(" - at `$")
        raise PoolInvalid(path + place, value=_value_at(value, place), rule=_lower_first(text)) from error


def _without_null(value: Any) -> Any:
    """Null means absent, as on the API server."""
    if isinstance(value, dict):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    return value


def _value_at(value: Any, place: str) -> Any:
    """What stands at a msgspec place such as ".kvd.mgmtdAddresses[0]"; None for whole objects, which say nothing."""
    for name, index in re.findall(r"\.([A-Za-z0-9]+)|\[([0-9]+)\]", place):
        value = value[name] if name else value[int(index)]
    return None if isinstance(value, dict) else value


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
