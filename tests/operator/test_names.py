"""Names: the frozen ones against a golden file, pod names and back, reasons of conditions."""

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_operator import names
from prefill_operator.names import CONDITION_REASONS, ConditionType, EventReason, Kind, PodIdentity, Reason

GOLDEN = msgspec.yaml.decode((Path(__file__).parent / "data/names.yaml").read_bytes())
IDENTITY = PodIdentity(revision="4f2a9c01", incarnation=7)
both_kinds = pytest.mark.parametrize(("kind", "word"), [(Kind.PREFILL_POOL, "pool"), (Kind.VE_POOL, "encoder")])

pool_names = st.from_regex(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", fullmatch=True)
identities = st.builds(
    PodIdentity, revision=st.text("0123456789abcdef", min_size=8, max_size=8), incarnation=st.integers(0, 999_999_999)
)


@both_kinds
def test_frozen_names(kind: Kind, word: str) -> None:
    assert names.pod_labels(kind, "flash", "4f2a9c01") == GOLDEN[f"{word}_labels"]
    assert names.selector_text(kind, "flash") == GOLDEN[f"{word}_selector"]
    assert names.pod_name(kind, "flash", IDENTITY) == GOLDEN[f"{word}_pod"]
    assert names.config_map_name(kind, "flash", "4f2a9c01") == GOLDEN[f"{word}_config_map"]
    assert names.object_base(kind, "flash") == GOLDEN[f"{word}_base"]


def test_frozen_annotations() -> None:
    assert GOLDEN["annotations"] == [
        names.EP_FLOOR_ANNOTATION,
        names.LEDGER_ANNOTATION,
        names.POOL_UID_ANNOTATION,
        names.PLAN_HASH_ANNOTATION,
        names.EP_ANNOTATION,
        names.DRAINING_SINCE_ANNOTATION,
        names.KV_STORE_ANNOTATION,
    ]
    assert GOLDEN["readiness_gate"] == names.ACCEPTING_GATE


def test_selector_is_a_part_of_the_labels() -> None:
    labels = names.pod_labels(Kind.PREFILL_POOL, "flash", "4f2a9c01")
    assert names.selector_labels(Kind.PREFILL_POOL, "flash").items() <= labels.items()


@given(st.sampled_from(Kind), pool_names, identities)
def test_pod_name_is_a_dns_label_and_reads_back(kind: Kind, pool: str, identity: PodIdentity) -> None:
    name = names.pod_name(kind, pool, identity)
    assert len(name) <= 63
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert names.parse_pod_name(kind, pool, name) == identity


@pytest.mark.parametrize(
    "name",
    [
        "flash",
        "flash-4f2a9c01",
        "flash-4f2a9c01-",
        "flash-4F2A9C01-1",
        "flash-4f2a9c01-01",
        "flash-4f2a9c01-1-1",
        "flash-4f2a9c01-1\n",
        "flash2-4f2a9c01-1",
        "xflash-4f2a9c01-1",
        "flash-ve-4f2a9c01-1",
    ],
)
def test_foreign_pod_names_are_not_ours(name: str) -> None:
    assert names.parse_pod_name(Kind.PREFILL_POOL, "flash", name) is None


def test_pools_of_both_kinds_can_share_a_name() -> None:
    ours = {names.object_base(kind, "flash") for kind in Kind}
    assert len(ours) == 2


def test_every_condition_has_reasons_and_every_reason_a_condition() -> None:
    assert set(CONDITION_REASONS) == set(ConditionType)
    assert set().union(*CONDITION_REASONS.values()) == set(Reason)


@pytest.mark.parametrize("reason", [*Reason, *EventReason], ids=str)
def test_reasons_have_the_form_kubernetes_wants(reason: str) -> None:
    assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", reason)
