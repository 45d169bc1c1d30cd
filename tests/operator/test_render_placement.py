"""Where pods may run: placement, lost nodes, avoided nodes."""

from typing import Any

import pytest

from prefill_operator.pod_reading import read_pod
from prefill_operator.render_pod import render_pod
from prefill_testing.pools import OPEN_POLICY, PREFILL_BODY, create_of, plan_of, pod_of, pool_of

LOST = [
    {"key": f"node.kubernetes.io/{name}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
    for name in ("not-ready", "unreachable")
]
OWN = {"matchLabels": {"prefill.dev/kind": "PrefillPool", "prefill.dev/pool": "flash"}}


def _spec(scheduling: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = pod_of(pool_of(PREFILL_BODY, {"scheduling": scheduling}))["spec"]
    return spec


def test_pack_prefers_nodes_that_hold_pods_of_ours() -> None:
    (term,) = _spec({})["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]

    assert term["podAffinityTerm"] == {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": {"app.kubernetes.io/managed-by": "prefill-operator"}},
    }


def test_pack_switches_the_default_spread_off() -> None:
    (constraint,) = _spec({})["topologySpreadConstraints"]

    assert constraint["whenUnsatisfiable"] == "DoNotSchedule"
    assert constraint["maxSkew"] > 1024 + 256 + 256


def test_own_constraints_replace_that_of_pack() -> None:
    given = {"topologyKey": "zone", "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"}

    assert _spec({"topologySpreadConstraints": [given]})["topologySpreadConstraints"] == [given]


def test_spread_prefers_other_nodes() -> None:
    spec = _spec({"placement": "Spread"})
    (term,) = spec["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]

    assert term["podAffinityTerm"] == {"topologyKey": "kubernetes.io/hostname", "labelSelector": OWN}
    assert "topologySpreadConstraints" not in spec


def test_spread_required_forbids_two_on_a_node() -> None:
    affinity = _spec({"placement": "SpreadRequired"})["affinity"]

    assert affinity["podAntiAffinity"] == {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {"topologyKey": "kubernetes.io/hostname", "labelSelector": OWN}
        ]
    }


def test_lost_nodes_are_left_after_half_a_minute() -> None:
    assert _spec({})["tolerations"] == LOST


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"key": "gpu", "operator": "Exists"}, LOST),
        (
            {
                "key": "node.kubernetes.io/not-ready",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": 300,
            },
            LOST[1:],
        ),
        ({"key": "node.kubernetes.io/unreachable", "operator": "Exists"}, LOST[:1]),
        ({"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoSchedule"}, LOST),
    ],
    ids=["other", "not-ready", "any-effect", "other-effect"],
)
def test_tolerations_of_the_user_win(given: dict[str, Any], expected: list[dict[str, Any]]) -> None:
    assert _spec({"tolerations": [given]})["tolerations"] == [given, *expected]


def test_avoided_nodes_are_excluded_and_read_back() -> None:
    pool = pool_of(PREFILL_BODY)
    plan = plan_of(pool)
    pod = render_pod(pool, plan, create_of(pool, plan, avoid=("gpu-2", "gpu-1")), OPEN_POLICY)
    record = read_pod(pod)

    assert pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] == {
        "nodeSelectorTerms": [
            {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["gpu-1", "gpu-2"]}]}
        ]
    }
    assert record is not None
    assert record.observed.avoid_nodes == ("gpu-1", "gpu-2")


def test_avoided_nodes_hold_in_each_of_the_users_terms() -> None:
    terms = [{"matchExpressions": [{"key": "rack", "operator": "In", "values": [rack]}]} for rack in ("a", "b")]
    overlay = {
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    }
    pool = pool_of(PREFILL_BODY, {"podTemplate": {"spec": overlay}})
    plan = plan_of(pool)
    pod = render_pod(pool, plan, create_of(pool, plan, avoid=("gpu-1",)), OPEN_POLICY)
    merged = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]

    ours = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["gpu-1"]}
    assert [term["matchExpressions"] for term in merged["nodeSelectorTerms"]] == [
        [*term["matchExpressions"], ours] for term in terms
    ]


def test_record_of_a_rendered_pod_says_what_the_planner_asked_for() -> None:
    pool = pool_of(PREFILL_BODY)
    plan = plan_of(pool)
    record = read_pod(pod_of(pool))

    assert record is not None
    assert (record.observed.revision, record.observed.incarnation) == (plan.revision, 1)
    assert (record.observed.ep, record.observed.plan_hash) == (plan.ep, plan.hash)
    assert record.extended == {"nvidia.com/gpu": plan.gpus}
    assert record.controller_uid == pool.uid
