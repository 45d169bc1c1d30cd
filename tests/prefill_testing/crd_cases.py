"""The accept and reject cases of the CRDs, from tests/operator/data/crd_cases.yaml (its head says what the keys mean)."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

CASES_PATH = Path(__file__).parents[1] / "operator/data/crd_cases.yaml"


class CaseRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One case as the file holds it."""

    name: str
    base: str
    expect: str
    message: str = ""
    set: dict[str, Any] = {}
    remove: list[str] = []
    then: dict[str, Any] = {}


class CaseFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    bases: dict[str, dict[str, Any]]
    cases: list[CaseRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class CrdCase:
    """`body` is to be created; with `update`, the created object is then replaced by it, and that is what counts."""

    name: str
    body: Mapping[str, Any]
    update: Mapping[str, Any] | None
    is_accepted: bool
    message: str


def load_crd_cases() -> tuple[CrdCase, ...]:
    file = msgspec.yaml.decode(CASES_PATH.read_bytes(), type=CaseFile)
    return tuple(_build_case(record, file.bases[record.base]) for record in file.cases)


def _build_case(record: CaseRecord, base: Mapping[str, Any]) -> CrdCase:
    assert record.expect in ("accept", "reject"), record.name
    body = _changed(base, record.set, record.remove)
    return CrdCase(
        name=record.name,
        body=body,
        update=_changed(body, record.then, ()) if record.then else None,
        is_accepted=record.expect == "accept",
        message=record.message,
    )


def _changed(base: Mapping[str, Any], changes: Mapping[str, Any], removed: list[str] | tuple[()]) -> dict[str, Any]:
    body = copy.deepcopy(dict(base))
    for path in removed:
        *parents, last = path.split(".")
        del _descend(body, parents)[last]
    for path, value in changes.items():
        *parents, last = path.split(".")
        _descend(body, parents)[last] = copy.deepcopy(value)
    return body


def _descend(body: dict[str, Any], names: list[str]) -> dict[str, Any]:
    for name in names:
        body = body.setdefault(name, {})
    return body
