"""Golden hashes of a dozen specs, two of them with all defaults as a real API server stored them under the first CRDs.

A change that comes without a new TEMPLATE_VERSION would restart every pool of every user.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from prefill_operator.api import parse_pool
from prefill_operator.api_parts import OverlayMetadata, PodOverlay, RolloutSpec, SchedulingSpec
from prefill_operator.pool_api import (
    AvailabilitySpec,
    EngineSpec,
    GpuSpec,
    KvCacheSpec,
    KvdSpec,
    KvdTransport,
    KvdTransportKind,
    PrefillPoolSpec,
    QuotaSpec,
    RedundancyMode,
    RedundancySpec,
    TlsSecretRef,
)
from prefill_operator.revision import (
    FIRST_DEFAULTS,
    TEMPLATE_VERSION,
    ChangeClass,
    change_class,
    revision_hash,
    rolling_intent,
)
from prefill_operator.ve_api import BalancingSpec, BatchingSpec, VEPoolSpec
from prefill_testing.planner_pools import make_spec, make_ve_spec

GOLDEN = json.loads((Path(__file__).parent / "data" / "revisions.json").read_text())
SPEC = make_spec()


def hash_of(spec: PrefillPoolSpec | VEPoolSpec) -> str:
    return revision_hash(spec, ep=2, engram="", degraded="")


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_revision_golden(case: dict[str, object]) -> None:
    body = {"apiVersion": "prefill.dev/v1alpha1", "metadata": {"name": "flash"}, **case["object"]}
    spec = parse_pool(body).spec
    plan = case["plan"]
    assert revision_hash(spec, **plan) == case["revision"]


def test_revision_golden_file_is_of_this_template_version() -> None:
    assert GOLDEN["templateVersion"] == TEMPLATE_VERSION
    assert len(GOLDEN["cases"]) >= 10
    assert len({case["revision"] for case in GOLDEN["cases"]}) == len(GOLDEN["cases"])


def fields_of(kind: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    for info in msgspec.structs.fields(kind):
        yield f"{prefix}{info.name}"


@pytest.mark.parametrize("kind", [PrefillPoolSpec, VEPoolSpec])
def test_change_class_knows_every_block(kind: type[msgspec.Struct]) -> None:
    assert all(change_class(path) for path in fields_of(kind))


def test_change_class_refuses_a_field_nobody_classified() -> None:
    with pytest.raises(ValueError, match="color has no change class"):
        change_class("color")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("model.revision", ChangeClass.ROLL),
        ("gpu.memory", ChangeClass.ROLL),
        ("expert_parallel.max", ChangeClass.ROLL),
        ("expert_parallel.oom_escalation.failures", ChangeClass.AT_ONCE),
        ("scheduling.placement", ChangeClass.NEXT_POD),
        ("scheduling.runtime_class_name", ChangeClass.ROLL),
        ("lifecycle.load_timeout_seconds", ChangeClass.NEXT_POD),
        ("lifecycle.drain_timeout_seconds", ChangeClass.AT_ONCE),
        ("rollout.max_surge", ChangeClass.AT_ONCE),
        ("replicas", ChangeClass.AT_ONCE),
        ("pod_template.spec", ChangeClass.ROLL),
        ("kvd.directory_address", ChangeClass.ROLL),
        ("kvd.transport.require_rdma", ChangeClass.ROLL),
        ("kvd.transport.tls_secret_ref.name", ChangeClass.ROLL),
    ],
)
def test_change_class_by_the_table(path: str, expected: ChangeClass) -> None:
    """k8s.md 3.1 rule 7."""
    assert change_class(path) is expected


@pytest.mark.parametrize(
    "changes",
    [
        {"replicas": 100},
        {"paused": True},
        {"rollout": RolloutSpec(max_surge=4, partition=2)},
        {"lifecycle": replace(SPEC.lifecycle, load_timeout_seconds=9)},
        {"scheduling": SchedulingSpec(node_selector={"zone": "b"}, priority_class_name="high")},
        {
            "quota": QuotaSpec(
                max_pes=9,
                redundancy=RedundancySpec(
                    mode=RedundancyMode.AVAILABILITY, availability=AvailabilitySpec(pe_mtbf_seconds=600)
                ),
            )
        },
        {
            "expert_parallel": replace(
                SPEC.expert_parallel, oom_escalation=replace(SPEC.expert_parallel.oom_escalation, failures=5)
            )
        },
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_revision_ignores_what_must_not_roll(changes: dict[str, object]) -> None:
    assert hash_of(replace(SPEC, **changes)) == hash_of(SPEC)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": replace(SPEC.model, revision="2")},
        {"engine": replace(SPEC.engine, image="engine:2")},
        {"engine": replace(SPEC.engine, args=("--x",))},
        {"gpu": GpuSpec(memory="80G")},
        {"kvd": KvdSpec(enabled=True, image="kvd:1")},
        {"kvd": KvdSpec(directory_address="directory:50061")},
        {"kvd": KvdSpec(transport=KvdTransport(kind=KvdTransportKind.NIXL))},
        {"kvd": KvdSpec(transport=KvdTransport(tls_secret_ref=TlsSecretRef(name="kv-tls")))},
        {"kv_cache": KvCacheSpec(host_pool="1Gi")},
        {"scheduling": SchedulingSpec(runtime_class_name="nvidia")},
        {"pod_template": PodOverlay(metadata=OverlayMetadata(labels={"a": "b"}))},
    ],
    ids=[
        "revision",
        "image",
        "args",
        "gpu",
        "kvd",
        "directory",
        "transport",
        "tls",
        "hostPool",
        "runtimeClass",
        "overlay",
    ],
)
def test_revision_changes_with_what_rolls(changes: dict[str, object]) -> None:
    assert hash_of(replace(SPEC, **changes)) != hash_of(SPEC)


def test_revision_ignores_defaults_that_are_written_out() -> None:
    """An operator that brings new fields of kvd rolls nobody; what it renders anew (ports, kvd's user) is for new revisions."""
    written = KvdSpec(
        transport=KvdTransport(kind=KvdTransportKind.TCP, require_rdma=False, tls_secret_ref=None),
        directory_address=None,
    )
    assert hash_of(replace(SPEC, kvd=written)) == hash_of(SPEC)


@pytest.mark.parametrize(
    "changes",
    [
        {"batching": BatchingSpec()},
        {"balancing": BalancingSpec()},
        {"balancing": BalancingSpec(max_pending_patches_per_ve=65_536)},
    ],
    ids=["delay", "queue-left-out", "queue"],
)
def test_revision_changes_from_a_default_of_old_to_todays(changes: dict[str, object]) -> None:
    """What the first CRD stored counts as not written, so that its pools stay; left out is another value today."""
    old = {path.rpartition(".")[2]: value for path, value in FIRST_DEFAULTS.items()}
    stored = replace(
        make_ve_spec(),
        batching=BatchingSpec(max_delay_milliseconds=old["max_delay_milliseconds"]),
        balancing=BalancingSpec(max_pending_patches_per_ve=old["max_pending_patches_per_ve"]),
    )
    assert not {path for path in rolling_intent(stored) if path.startswith(("batching", "balancing"))}
    assert hash_of(replace(stored, **changes)) != hash_of(stored)


def test_revision_changes_with_the_plan() -> None:
    hashes = {
        revision_hash(SPEC, ep=ep, engram=engram, degraded=tier)
        for ep, engram, tier in ((2, "GPU", ""), (4, "GPU", ""), (4, "Host", ""), (4, "Host", "C8k"))
    }
    assert len(hashes) == 4


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"kv_cache": KvCacheSpec(host_pool="1Gi")}, {"kv_cache": KvCacheSpec(host_pool="1024Mi")}),
        ({"kv_cache": KvCacheSpec(host_pool="64Gi")}, {}),
        ({"gpu": GpuSpec(memory=150_100_000_000)}, {"gpu": GpuSpec(memory="150100M")}),
        (
            {"expert_parallel": replace(SPEC.expert_parallel, size="4")},
            {"expert_parallel": replace(SPEC.expert_parallel, size=4)},
        ),
    ],
    ids=["Gi and Mi", "default written out", "number and text", "size"],
)
def test_revision_is_the_same_for_two_spellings_of_one_intent(one: dict[str, object], other: dict[str, object]) -> None:
    assert hash_of(replace(SPEC, **one)) == hash_of(replace(SPEC, **other))


def test_revision_of_both_kinds_covers_only_its_own_spec() -> None:
    assert hash_of(make_ve_spec(replicas=5)) == hash_of(make_ve_spec())
    assert hash_of(make_ve_spec(image="encoder:2")) != hash_of(make_ve_spec())


def test_rolling_intent_holds_only_what_was_written() -> None:
    spec = PrefillPoolSpec(model=SPEC.model, engine=EngineSpec(image="engine:1"))
    assert set(rolling_intent(spec)) == {
        "model.name",
        "model.revision",
        "model.source.pvc.claim_name",
        "model.architecture",
        "engine.image",
    }
