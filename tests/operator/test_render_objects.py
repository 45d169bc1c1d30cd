"""Objects beside pods, and whether a live object still is what we would write."""

import copy
import json
from typing import Any

import pytest

from prefill_operator.children import desired_children
from prefill_operator.intent import read_intent
from prefill_operator.manifest import is_current
from prefill_operator.model import ChildKind
from prefill_operator.render_objects import render_object
from prefill_plan.model_spec import released_model_spec
from prefill_testing.kube_schema import check_object
from prefill_testing.pools import OPEN_POLICY, PREFILL_BODY, VE_BODY, plan_of, pool_of

MODEL = released_model_spec()
ALL_KINDS = frozenset(ChildKind)


def _object(kind: ChildKind, spec: dict[str, Any] | None = None, body: Any = PREFILL_BODY) -> dict[str, Any]:
    pool = pool_of(body, spec)
    return render_object(kind, pool, plan_of(pool), OPEN_POLICY, model=MODEL, freeze_scale_down=False)


@pytest.mark.parametrize("actuator", ["HPA", "KEDA"])
@pytest.mark.parametrize("body", [PREFILL_BODY, VE_BODY], ids=["prefill", "ve"])
def test_every_object_has_the_name_by_which_it_is_looked_for(body: Any, actuator: str) -> None:
    autoscaling: dict[str, Any] = {"actuator": actuator, "maxReplicas": 5}
    if body is PREFILL_BODY:
        autoscaling["metrics"] = [{"name": "RowsWaitingPerGPU", "target": 10}]
    pool = pool_of(body, {"autoscaling": autoscaling, "monitoring": {"podMonitor": True}})
    plan = plan_of(pool)
    desired = desired_children(read_intent(pool), plan, ALL_KINDS)
    rendered = [
        render_object(kind, pool, plan, OPEN_POLICY, model=MODEL, freeze_scale_down=False) for kind, _ in desired
    ]

    assert [(item["kind"], item["metadata"]["name"]) for item in rendered] == [(str(k), name) for k, name in desired]
    assert len(rendered) == 6
    for item in rendered:
        assert item["metadata"]["ownerReferences"][0]["uid"] == pool.uid
        assert item["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "prefill-operator"


@pytest.mark.parametrize(
    "kind",
    [ChildKind.CONFIG_MAP, ChildKind.SERVICE, ChildKind.DISRUPTION_BUDGET, ChildKind.HPA, ChildKind.NETWORK_POLICY],
)
def test_built_in_objects_are_what_kubernetes_knows(kind: ChildKind) -> None:
    spec = {
        "autoscaling": {
            "actuator": "HPA",
            "maxReplicas": 5,
            "metrics": [{"name": "BacklogMillisecondsPerPE", "target": 300}],
        }
    }
    for version in ("1.29.0", "1.36.0", "1.37.0"):
        check_object(_object(kind, spec), version)


def test_config_map_cannot_be_changed() -> None:
    pool = pool_of(PREFILL_BODY)
    item = _object(ChildKind.CONFIG_MAP)

    assert item["immutable"] is True
    assert item["metadata"]["labels"]["prefill.dev/revision"] == plan_of(pool).revision


def test_service_lists_ready_pods_only() -> None:
    spec = _object(ChildKind.SERVICE)["spec"]

    assert spec["clusterIP"] == "None"
    assert spec["publishNotReadyAddresses"] is False
    assert spec["selector"] == {"prefill.dev/kind": "PrefillPool", "prefill.dev/pool": "flash"}
    assert [(port["name"], port["port"]) for port in spec["ports"]] == [("grpc", 50051)]


def test_pools_of_two_kinds_and_one_name_do_not_meet() -> None:
    prefill, encoders = _object(ChildKind.SERVICE), _object(ChildKind.SERVICE, body=VE_BODY)

    assert (prefill["metadata"]["name"], encoders["metadata"]["name"]) == ("flash", "flash-ve")
    assert prefill["spec"]["selector"] != encoders["spec"]["selector"]


def test_router_finds_how_to_balance_at_the_service() -> None:
    item = _object(ChildKind.SERVICE, {"balancing": {"policy": "PowerOfTwoPatches"}}, VE_BODY)

    assert json.loads(item["metadata"]["annotations"]["prefill.dev/balancing"])["policy"] == "PowerOfTwoPatches"


@pytest.mark.parametrize("replicas", [0, 3])
def test_evictions_leave_the_replicas(replicas: int) -> None:
    spec = _object(ChildKind.DISRUPTION_BUDGET, {"replicas": replicas})["spec"]

    assert spec["minAvailable"] == replicas
    assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_pod_monitor_names_the_pool_of_each_series() -> None:
    monitoring = {"podMonitor": True, "intervalSeconds": 30, "labels": {"release": "prometheus"}}
    item = _object(ChildKind.POD_MONITOR, {"monitoring": monitoring})
    (endpoint,) = item["spec"]["podMetricsEndpoints"]

    assert item["metadata"]["labels"]["release"] == "prometheus"
    assert (endpoint["port"], endpoint["interval"]) == ("metrics", "30s")
    assert {"pool", "kind"} == {rule["targetLabel"] for rule in endpoint["relabelings"]}


def test_pod_monitor_reads_the_sidecar_too() -> None:
    monitoring = {"monitoring": {"podMonitor": True}, "kvd": {"enabled": True, "image": "kvd:1"}}
    endpoints = _object(ChildKind.POD_MONITOR, monitoring)["spec"]["podMetricsEndpoints"]

    assert [endpoint["port"] for endpoint in endpoints] == ["metrics", "kvd-metrics"]
    assert endpoints[0]["relabelings"] == endpoints[1]["relabelings"]


def test_user_labels_of_a_pod_monitor_do_not_hide_it_from_us() -> None:
    labels = {"app.kubernetes.io/managed-by": "me"}
    item = _object(ChildKind.POD_MONITOR, {"monitoring": {"podMonitor": True, "labels": labels}})

    assert item["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "prefill-operator"


def test_network_policy_opens_our_ports_to_pods() -> None:
    everybody, namespace = _object(ChildKind.NETWORK_POLICY)["spec"]["ingress"]

    assert everybody["from"] == [{"namespaceSelector": {}}]
    assert [port["port"] for port in everybody["ports"]] == ["grpc", "metrics", "probe"]
    # Of each of up to eight ranks; pushes go to and come from pods of this namespace.
    assert namespace["from"] == [{"podSelector": {}}]
    assert namespace["ports"] == [{"port": 50060, "endPort": 50067, "protocol": "TCP"}]


def test_network_policy_opens_kvd_to_its_peers() -> None:
    everybody, namespace = _object(ChildKind.NETWORK_POLICY, {"kvd": {"enabled": True, "image": "kvd:1"}})["spec"][
        "ingress"
    ]

    assert [port["port"] for port in everybody["ports"]] == ["grpc", "metrics", "probe", 50055, 50054]
    assert [port["port"] for port in namespace["ports"]] == [50060, 50056]


def _live(item: dict[str, Any]) -> dict[str, Any]:
    """As an API server would give it back: with fields of its own, without empty ones."""
    live = copy.deepcopy(item)
    live["metadata"] |= {"uid": "u", "resourceVersion": "7", "managedFields": []}
    live["metadata"]["labels"]["other"] = "x"
    live["status"] = {}
    live.get("spec", {}).pop("publishNotReadyAddresses", None)
    live.setdefault("spec", {})["sessionAffinity"] = "None"
    return live


@pytest.mark.parametrize("kind", [ChildKind.SERVICE, ChildKind.DISRUPTION_BUDGET, ChildKind.NETWORK_POLICY])
def test_what_the_api_server_adds_changes_nothing(kind: ChildKind) -> None:
    item = _object(kind)

    assert is_current(item, _live(item))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "minAvailable"), 1),
        (("spec", "selector", "matchLabels", "prefill.dev/pool"), "other"),
        (("spec", "unhealthyPodEvictionPolicy"), None),
        (("metadata", "labels", "prefill.dev/pool"), "other"),
        (("metadata", "ownerReferences"), []),
    ],
    ids=["number", "selector", "removed", "label", "owner"],
)
def test_an_edit_of_what_we_set_is_seen(path: tuple[str, ...], value: Any) -> None:
    item = _object(ChildKind.DISRUPTION_BUDGET)
    live = _live(item)
    node = live
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value

    assert not is_current(item, live)


def test_a_further_owner_is_none_of_our_business() -> None:
    item = _object(ChildKind.SERVICE)
    live = _live(item)
    live["metadata"]["ownerReferences"].insert(0, {"kind": "Other", "uid": "u2"})

    assert is_current(item, live)


def test_a_list_of_another_length_is_an_edit() -> None:
    item = _object(ChildKind.SERVICE)
    live = _live(item)
    live["spec"]["ports"].append({"name": "more", "port": 1})

    assert not is_current(item, live)


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        ("12000", "12k", True),
        ("300", "300", True),
        ("1Gi", 1 << 30, True),
        ("300", "301", False),
        (1, True, False),
        ("x", "y", False),
        (True, 1, False),
        (False, None, True),
        (True, None, False),
        ("", None, True),
        (0, None, False),
        ({}, None, True),
        ([], None, True),
    ],
)
def test_values_are_compared_by_meaning(ours: Any, theirs: Any, same: bool) -> None:
    assert is_current({"value": ours}, {"value": theirs}) is same


def test_an_immutable_config_map_is_current_whatever_it_holds() -> None:
    """A newer operator may write other bytes for the same revision; running pods keep theirs."""
    item = _object(ChildKind.CONFIG_MAP)
    live = _live(item)
    live["data"] = {"engine.json": "{}"}

    assert is_current(item, live)
