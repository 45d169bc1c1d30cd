"""The chart's roles against the operator's own list of what it does, and against what must never be in them."""

from typing import Any

import pytest

from prefill_operator.names import LEASE_NAME
from prefill_operator.rbac import home_rules, node_rules, rbac_rules
from prefill_operator.settings import RbacParts
from prefill_testing.chart import EVERYTHING, NAMESPACE, NAMESPACED, Json, by_kind, merged, render

NONE: dict[str, Any] = {"rbac": {"nodes": False, "autoscaling": False}}
ALL: dict[str, Any] = {"rbac": {"keda": True, "prometheusOperator": True, "networkPolicies": True}}
PARTS = {
    "defaults": ({}, RbacParts()),
    "least": (NONE, RbacParts(nodes=False, autoscaling=False)),
    "most": (ALL, RbacParts(keda=True, prometheus_operator=True, network_policies=True)),
}


def _comparable(rules: list[Json]) -> list[Json]:
    return sorted(({key: sorted(rule[key]) for key in rule} for rule in rules), key=str)


@pytest.mark.parametrize("name", PARTS)
def test_cluster_role_is_the_operators_own_list(name: str) -> None:
    values, parts = PARTS[name]
    role = by_kind(render(values), "ClusterRole")["prefill"]

    assert _comparable(role["rules"]) == _comparable(rbac_rules(parts, is_cluster_wide=True))


@pytest.mark.parametrize("name", PARTS)
def test_namespaced_roles_are_the_operators_own_list(name: str) -> None:
    values, parts = PARTS[name]
    objects = render(merged(values, NAMESPACED))
    roles = by_kind(objects, "Role")

    for namespace in ("team-a", "team-b"):
        role = roles[f"{namespace}/prefill"]
        assert _comparable(role["rules"]) == _comparable(rbac_rules(parts, is_cluster_wide=False))
    cluster_role = by_kind(objects, "ClusterRole").get(f"{NAMESPACE}-prefill", {"rules": []})
    assert _comparable(cluster_role["rules"]) == _comparable(node_rules(parts))


@pytest.mark.parametrize("values", [{}, NAMESPACED], ids=["cluster-wide", "namespaced"])
def test_lease_rights_end_at_the_own_namespace(values: dict[str, Any]) -> None:
    objects = render(values)
    roles = [item for item in objects if item["kind"] in ("Role", "ClusterRole") and not _is_hook(item)]
    (with_leases,) = (role for role in roles if any("leases" in rule["resources"] for rule in role["rules"]))

    assert with_leases["kind"] == "Role"
    assert with_leases["metadata"]["namespace"] == NAMESPACE
    assert _comparable(with_leases["rules"]) == _comparable(home_rules())


def _is_hook(item: Json) -> bool:
    return "helm.sh/hook" in item["metadata"].get("annotations", {})


@pytest.mark.parametrize("values", [EVERYTHING, merged(EVERYTHING, NAMESPACED)], ids=["cluster-wide", "namespaced"])
def test_no_role_has_wildcards_secrets_or_crds(values: dict[str, Any]) -> None:
    roles = [item for item in render(values) if item["kind"] in ("Role", "ClusterRole")]
    words = {word for role in roles for rule in role["rules"] for part in rule.values() for word in part}

    assert words.isdisjoint({"*", "secrets", "customresourcedefinitions", "roles", "clusterroles", "bind", "escalate"})


@pytest.mark.parametrize("values", [{}, NAMESPACED], ids=["cluster-wide", "namespaced"])
def test_every_role_is_bound_to_the_operator_once(values: dict[str, Any]) -> None:
    objects = [item for item in render(values) if not _is_hook(item)]
    roles = {
        (item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"])
        for item in objects
        if item["kind"] in ("Role", "ClusterRole") and "-pools-" not in item["metadata"]["name"]
    }
    bindings = [item for item in objects if item["kind"] in ("RoleBinding", "ClusterRoleBinding")]

    assert {
        (item["roleRef"]["kind"], item["metadata"].get("namespace"), item["roleRef"]["name"]) for item in bindings
    } == roles
    assert len(bindings) == len(roles)
    subject = {"kind": "ServiceAccount", "name": "prefill", "namespace": NAMESPACE}
    assert all(item["subjects"] == [subject] for item in bindings)


def test_namespaced_mode_can_do_without_cluster_scoped_objects() -> None:
    values = {
        "scope": {"namespaced": True},
        "crds": {"install": False},
        "rbac": {"nodes": False, "aggregateToUserRoles": False},
    }

    kinds = {item["kind"] for item in render(values)}
    assert kinds.isdisjoint({"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"})
    assert by_kind(render(values), "Role")["prefill"]["metadata"]["namespace"] == NAMESPACE


def test_roles_can_be_somebody_elses() -> None:
    own = [item for item in render({"rbac": {"create": False}}) if not _is_hook(item)]

    assert not [item for item in own if item["kind"].endswith(("Role", "Binding"))]


def test_users_get_pools_by_the_roles_they_have() -> None:
    roles = by_kind(render({}), "ClusterRole")
    view, edit = roles["prefill-pools-view"], roles["prefill-pools-edit"]
    aggregate = "rbac.authorization.k8s.io/aggregate-to-"

    assert {key for key in view["metadata"]["labels"] if key.startswith(aggregate)} == {
        f"{aggregate}{role}" for role in ("view", "edit", "admin")
    }
    assert {key for key in edit["metadata"]["labels"] if key.startswith(aggregate)} == {
        f"{aggregate}{role}" for role in ("edit", "admin")
    }
    assert {verb for rule in view["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}
    assert any("prefillpools/scale" in rule["resources"] for rule in edit["rules"])


def test_helm_test_may_create_pools_and_read_one_lease_only() -> None:
    hooks = [item for item in render({}) if _is_hook(item) and item["kind"] == "Role"]
    rules = [rule for role in hooks for rule in role["rules"]]

    assert rules == [
        {"apiGroups": ["prefill.dev"], "resources": ["prefillpools"], "verbs": ["create"]},
        {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "resourceNames": [LEASE_NAME],
            "verbs": ["get"],
        },
    ]
