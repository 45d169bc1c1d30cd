"""Reading pools: the accept and reject cases by the structs, error texts, tolerance, quantities, status."""

import copy
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_operator.api import parse_pool
from prefill_operator.api_parts import api_name
from prefill_operator.api_rules import NAME_RULES, VE_RULES
from prefill_operator.api_status import (
    Condition,
    ConditionStatus,
    LoadStatus,
    PlannedEngram,
    PlanSource,
    PlanStatus,
    PoolStatus,
    RedundancyStatus,
    UnhealthyPE,
    VEPoolStatus,
    status_body,
)
from prefill_operator.crd import load_crd
from prefill_operator.errors import PoolInvalid
from prefill_operator.manifest_check import check_manifest
from prefill_operator.names import Kind
from prefill_operator.pool_api import PrefillPoolSpec
from prefill_operator.pool_rules import PREFILL_RULES
from prefill_operator.quantity import quantity_bytes, quantity_value
from prefill_operator.ve_api import VEPoolSpec
from prefill_plan.config import Device
from prefill_testing.crd_cases import CrdCase, load_crd_cases

CASES = load_crd_cases()
CREATED = [case for case in CASES if case.update is None]
UPDATED = [case for case in CASES if case.update is not None]
CRDS = {kind: load_crd(kind) for kind in Kind}
RULES = {rule.message for rules in (NAME_RULES, PREFILL_RULES, VE_RULES) for rule in rules}


def minimal(**spec: Any) -> dict[str, Any]:
    """The minimal pool with some blocks of the spec replaced."""
    body = copy.deepcopy(dict(CASES[0].body))
    body["spec"] |= spec
    return body


def judge(body: Any) -> None:
    """What the CLI does with a manifest."""
    check_manifest(body, CRDS[Kind(body["kind"])])
    parse_pool(body)


@pytest.mark.parametrize("case", [case for case in CREATED if case.is_accepted], ids=lambda case: case.name)
def test_case_is_accepted(case: CrdCase) -> None:
    judge(case.body)


@pytest.mark.parametrize("case", [case for case in CREATED if not case.is_accepted], ids=lambda case: case.name)
def test_case_is_refused_for_its_reason(case: CrdCase) -> None:
    with pytest.raises(PoolInvalid) as refusal:
        judge(case.body)
    wanted = {message for message in RULES if case.message in message}
    assert not wanted or refusal.value.rule in wanted


@pytest.mark.parametrize("case", UPDATED, ids=lambda case: case.name)
def test_both_sides_of_an_update_are_valid_alone(case: CrdCase) -> None:
    """So it is the comparison with the old object that the API server refuses."""
    judge(case.body)
    judge(case.update)


@pytest.mark.parametrize(
    ("body", "path", "text"),
    [
        (
            {"apiVersion": "prefill.dev/v1"},
            "apiVersion",
            "apiVersion is 'prefill.dev/v1': must be prefill.dev/v1alpha1",
        ),
        (minimal() | {"kind": "Pool"}, "kind", "kind is 'Pool': must be PrefillPool or VEPool"),
        (minimal() | {"spec": None}, "spec", "spec: must be an object"),
        (minimal(replicas="3"), "spec.replicas", "spec.replicas is '3': expected `int`, got `str`"),
        (minimal(engine={}), "spec.engine", "spec.engine: object missing required field `image`"),
        (
            minimal(gpu={"memory": "80 GB"}),
            "spec.gpu.memory",
            "spec.gpu.memory is '80 GB': expected `str` matching regex",
        ),
        (
            minimal(engine={"image": "x", "args": ["a", 3]}),
            "spec.engine.args[1]",
            "spec.engine.args[1] is 3: expected `str`, got `int`",
        ),
        (
            minimal(rollout={"strategy": "Recreate"}),
            "spec.rollout.strategy",
            "spec.rollout.strategy is 'Recreate': invalid enum value 'Recreate'",
        ),
        (
            minimal(replicas=5, quota={"maxPEs": 4}),
            "spec.replicas",
            "spec.replicas is 5: replicas must not exceed quota.maxPEs",
        ),
        (minimal() | {"metadata": {"name": 7}}, "metadata.name", "metadata.name is 7: expected `str`, got `int`"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_refusal_names_path_value_and_rule(body: Any, path: str, text: str) -> None:
    with pytest.raises(PoolInvalid) as refusal:
        parse_pool(body)
    assert refusal.value.path == path
    assert str(refusal.value).startswith(text)


def test_long_values_are_cut_in_the_message() -> None:
    with pytest.raises(PoolInvalid) as refusal:
        parse_pool(minimal(replicas="9" * 1000))
    assert len(str(refusal.value)) < 200


def test_a_misspelt_field_is_refused_with_a_suggestion() -> None:
    with pytest.raises(PoolInvalid, match=r"spec\.rollout\.maxsurge: unknown field; did you mean maxSurge\?"):
        check_manifest(minimal(rollout={"maxsurge": 1}), CRDS[Kind.PREFILL_POOL])


def test_unknown_fields_of_a_newer_crd_are_ignored() -> None:
    body = minimal(brandNew={"a": 1})
    body["status"] = {"brandNew": True, "readyPEs": 2}
    pool = parse_pool(body)
    assert pool.spec == parse_pool(minimal()).spec
    assert pool.status == PoolStatus(ready_pes=2)


def test_null_means_absent() -> None:
    assert parse_pool(minimal(autoscaling=None, replicas=None)).spec.replicas == 1


@pytest.mark.parametrize("status", [{"readyPEs": "two"}, None, {"conditions": [{"type": "Ready"}]}])
def test_a_status_that_cannot_be_read_counts_as_empty(status: Any) -> None:
    assert parse_pool(minimal() | {"status": status}).status == PoolStatus()


def test_metadata_of_a_live_object() -> None:
    metadata = {
        "name": "flash",
        "namespace": "prod",
        "uid": "u1",
        "generation": 3,
        "resourceVersion": "77",
        "annotations": {"prefill.dev/ep-floor": "4@ab"},
        "deletionTimestamp": "2026-11-29T20:00:00Z",
    }
    pool = parse_pool(minimal() | {"metadata": metadata})
    assert (pool.kind, pool.name, pool.namespace, pool.uid) == (Kind.PREFILL_POOL, "flash", "prod", "u1")
    assert (pool.generation, pool.resource_version, pool.is_deleting) == (3, "77", True)
    assert pool.annotations == {"prefill.dev/ep-floor": "4@ab"}


def test_kind_selects_the_structs() -> None:
    bodies = {case.name: case.body for case in CASES}
    pool, encoder = parse_pool(bodies["pool minimal"]), parse_pool(bodies["encoder minimal"])
    assert isinstance(pool.spec, PrefillPoolSpec)
    assert isinstance(pool.status, PoolStatus)
    assert isinstance(encoder.spec, VEPoolSpec)
    assert isinstance(encoder.status, VEPoolStatus)


@pytest.mark.parametrize(("size", "fixed"), [("auto", None), (4, 4), ("8", 8)])
def test_fixed_size_reads_numbers_and_text(size: Any, fixed: int | None) -> None:
    spec = parse_pool(minimal(expertParallel={"size": size})).spec
    assert isinstance(spec, PrefillPoolSpec)
    assert spec.expert_parallel.fixed_size == fixed


@pytest.mark.parametrize(
    ("quantity", "value"),
    [
        (0, 0),
        ("143771Mi", 143_771 * 2**20),
        ("2500M", 2_500_000_000),
        ("64Gi", 64 * 2**30),
        ("1.5Ki", 1536),
        ("3k", 3000),
        ("500m", Fraction(1, 2)),
        ("1E", 10**18),
        ("1Ei", 2**60),
        (150_100_000_000, 150_100_000_000),
    ],
)
def test_quantity_value(quantity: int | str, value: int | Fraction) -> None:
    assert quantity_value(quantity) == value


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "-1", "+1", "1e3", "1KiB", "1.", ".5", "1n", "0x10", "1Gi\n"])
def test_quantity_refuses_what_the_crd_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="is no quantity"):
        quantity_value(text)


@given(st.integers(0, 10**15), st.sampled_from(["", "m", "k", "M", "G", "Ki", "Mi", "Gi"]))
def test_quantity_bytes_round_up_to_whole_bytes(number: int, suffix: str) -> None:
    value = quantity_value(f"{number}{suffix}")
    assert value <= quantity_bytes(f"{number}{suffix}") < value + 1


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("replicas", "replicas"),
        ("gpu", "gpu"),
        ("gpus", "gpus"),
        ("three_fs", "threeFS"),
        ("max_pes", "maxPEs"),
        ("max_gpus", "maxGPUs"),
        ("pe_mtbf_seconds", "peMTBFSeconds"),
        ("manifest_sha256", "manifestSHA256"),
        ("kv_tokens_per_gpu", "kvTokensPerGPU"),
        ("cluster_id", "clusterID"),
        ("max_pending_patches_per_ve", "maxPendingPatchesPerVE"),
        ("unhealthy_pes", "unhealthyPEs"),
    ],
)
def test_api_name(field: str, name: str) -> None:
    assert api_name(field) == name


READY = Condition(
    type="Ready",
    status=ConditionStatus.TRUE,
    reason="AllReady",
    message="16/16 ready",
    last_transition_time="2026-11-29T20:00:00Z",
    observed_generation=4,
)
POOL_STATUS = PoolStatus(
    observed_generation=4,
    device=Device.CPU,
    replicas=2,
    redundancy=RedundancyStatus(desired=1, expected_availability="0.999067"),
    plan=PlanStatus(ep=4, source=PlanSource.PLANNER, hash="ab12", engram=PlannedEngram.HOST, memory_per_gpu="93.4G"),
    conditions=(READY,),
    unhealthy_pes=(UnhealthyPE(name="flash-00000000-1", reason="CrashLoop", ep=4),),
    not_watched=("nodes",),
)


def test_status_is_written_and_read_back() -> None:
    body = minimal() | {"status": status_body(POOL_STATUS)}
    check_manifest(body, CRDS[Kind.PREFILL_POOL])
    assert parse_pool(body).status == POOL_STATUS


def test_encoder_status_is_written_and_read_back() -> None:
    status = VEPoolStatus(ready_ves=2, load=LoadStatus(imbalance="1.25"), conditions=(READY,))
    encoder = next(case.body for case in CASES if case.body["kind"] == "VEPool")
    body = {**encoder, "status": status_body(status)}
    check_manifest(body, CRDS[Kind.VE_POOL])
    assert parse_pool(body).status == status


def test_status_body_keeps_zeros_and_drops_what_is_unknown() -> None:
    body = status_body(PoolStatus())
    counts = ["replicas", "totalPEs", "readyPEs", "updatedPEs", "loadingPEs", "drainingPEs", "gpus"]
    assert [body[name] for name in counts] == [0] * 7
    assert "plan" not in body
    assert body["redundancy"] == {"desired": 0, "ready": 0}
