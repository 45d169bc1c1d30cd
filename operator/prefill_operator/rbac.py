"""What the operator may do, as data: the rules of its Role or ClusterRole (k8s.md 4.12). The chart renders the same list.

Two lists: `rbac_rules` holds where the pools are, `home_rules` in the operator's own namespace. No wildcard, no Secrets, no
writes to CustomResourceDefinitions. `get` stands beside `list` and `watch` since names are looked up before they are taken.
"""

from collections.abc import Iterable
from typing import Any, TypeAlias

from prefill_operator.names import API_GROUP, Kind
from prefill_operator.settings import RbacParts

Rule: TypeAlias = dict[str, Any]

_READ = ("get", "list", "watch")
_OWN = (*_READ, "create", "patch", "delete")


def rbac_rules(parts: RbacParts, *, is_cluster_wide: bool) -> list[Rule]:
    """Rules for the namespaces that are served. In namespaced mode, `node_rules` need a ClusterRole of their own."""
    plurals = [kind.plural for kind in Kind]
    rules = [
        _rule(API_GROUP, plurals, (*_READ, "patch")),
        _rule(API_GROUP, [f"{plural}/status" for plural in plurals], ("patch",)),
        # Needed for ownerReferences with blockOwnerDeletion where that admission plugin is on, e.g. OpenShift.
        _rule(API_GROUP, [f"{plural}/finalizers" for plural in plurals], ("update",)),
        _rule("", ["pods"], _OWN),
        _rule("", ["pods/status"], ("patch",)),
        _rule("", ["configmaps", "services"], _OWN),
        _rule("policy", ["poddisruptionbudgets"], _OWN),
        _rule("", ["events"], ("create",)),
    ]
    if parts.autoscaling:
        rules.append(_rule("autoscaling", ["horizontalpodautoscalers"], _OWN))
    if parts.keda:
        rules.append(_rule("keda.sh", ["scaledobjects"], _OWN))
    if parts.prometheus_operator:
        rules.append(_rule("monitoring.coreos.com", ["podmonitors"], _OWN))
    if parts.network_policies:
        rules.append(_rule("networking.k8s.io", ["networkpolicies"], _OWN))
    return rules + (node_rules(parts) if is_cluster_wide else [])


def node_rules(parts: RbacParts) -> list[Rule]:
    """Nodes have no namespace; without these the rules about nodes are off (C35)."""
    return [_rule("", ["nodes"], _READ)] if parts.nodes else []


def home_rules() -> list[Rule]:
    """The Lease, in the operator's own namespace."""
    return [_rule("coordination.k8s.io", ["leases"], ("get", "create", "update"))]


def _rule(group: str, resources: Iterable[str], verbs: Iterable[str]) -> Rule:
    return {"apiGroups": [group], "resources": list(resources), "verbs": list(verbs)}
