"""The overlay of pods: what is allowed and how it is merged; what is refused and with which words (k8s.md 4.12)."""

from typing import Any

import pytest

from prefill_operator.errors import PoolInvalid
from prefill_operator.render_policy import RenderPolicy
from prefill_testing.kube_schema import check_object
from prefill_testing.pools import OPEN_POLICY, PREFILL_BODY, STRICT_POLICY, VE_BODY, container_of, pod_of, pool_of

KVD = {"enabled": True, "image": "kvd:1"}


def _overlaid(spec: dict[str, Any], policy: RenderPolicy = STRICT_POLICY, **parts: Any) -> dict[str, Any]:
    return pod_of(pool_of(PREFILL_BODY, {"podTemplate": {"spec": spec, **parts}}), policy)


def _engine(spec: dict[str, Any], policy: RenderPolicy = STRICT_POLICY) -> dict[str, Any]:
    return container_of(_overlaid({"containers": [{"name": "engine", **spec}]}, policy), "engine")


def test_labels_and_annotations_are_added() -> None:
    metadata = _overlaid({}, metadata={"labels": {"team": "search"}, "annotations": {"example.com/cost": "1"}})[
        "metadata"
    ]

    assert metadata["labels"]["team"] == "search"
    assert metadata["labels"]["prefill.dev/pool"] == "flash"
    assert metadata["annotations"]["example.com/cost"] == "1"
    assert "prefill.dev/plan-hash" in metadata["annotations"]


@pytest.mark.parametrize("part", ["labels", "annotations"])
@pytest.mark.parametrize("key", ["prefill.dev/pool", "prefill.dev/anything", "app.kubernetes.io/managed-by"])
def test_keys_of_the_operator_are_refused(part: str, key: str) -> None:
    with pytest.raises(PoolInvalid, match="belongs to the operator") as refusal:
        _overlaid({}, metadata={part: {key: "x"}})

    assert refusal.value.path == f"spec.podTemplate.metadata.{part}"


def test_every_allowed_part_reaches_the_pod() -> None:
    spec = {
        "containers": [
            {
                "name": "engine",
                "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
                "envFrom": [{"configMapRef": {"name": "more"}}],
                "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
                "securityContext": {"readOnlyRootFilesystem": False},
            }
        ],
        "volumes": [{"name": "scratch", "emptyDir": {}}],
        "imagePullSecrets": [{"name": "registry"}],
        "serviceAccountName": "engines",
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["store"]}],
        "dnsConfig": {"options": [{"name": "ndots", "value": "1"}]},
        "securityContext": {"runAsUser": 2000, "supplementalGroups": [44]},
    }
    pod = _overlaid(spec)
    rendered, engine = pod["spec"], container_of(pod, "engine")

    check_object(pod, "1.36.0")
    assert {"name": "NCCL_DEBUG", "value": "INFO"} in engine["env"]
    assert engine["envFrom"] == spec["containers"][0]["envFrom"]  # type: ignore[index]
    assert {"name": "scratch", "mountPath": "/scratch"} in engine["volumeMounts"]
    assert engine["securityContext"]["readOnlyRootFilesystem"] is False
    assert engine["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert {"name": "scratch", "emptyDir": {}} in rendered["volumes"]
    assert rendered["tolerations"][0] == {"key": "gpu", "operator": "Exists"}
    assert rendered["securityContext"]["runAsUser"] == 2000
    assert rendered["securityContext"]["runAsNonRoot"] is True
    for field in ("imagePullSecrets", "serviceAccountName", "hostAliases", "dnsConfig"):
        assert rendered[field] == spec[field]


def test_a_named_account_brings_its_token() -> None:
    assert "automountServiceAccountToken" not in _overlaid({"serviceAccountName": "engines"})["spec"]


def test_a_variable_of_the_user_replaces_ours() -> None:
    env = _engine({"env": [{"name": "HOME", "value": "/scratch"}]})["env"]

    assert [item for item in env if item["name"] == "HOME"] == [{"name": "HOME", "value": "/scratch"}]


def test_affinity_is_joined_with_ours() -> None:
    term = {"weight": 1, "podAffinityTerm": {"topologyKey": "rack"}}
    affinity = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}}
    merged = _overlaid({"affinity": affinity})["spec"]["affinity"]["podAffinity"]

    assert len(merged["preferredDuringSchedulingIgnoredDuringExecution"]) == 2
    assert merged["preferredDuringSchedulingIgnoredDuringExecution"][1] == term


def test_lost_node_tolerations_of_the_overlay_win() -> None:
    given = {
        "key": "node.kubernetes.io/not-ready",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": 5,
    }
    tolerations = _overlaid({"tolerations": [given]})["spec"]["tolerations"]

    assert [item for item in tolerations if item["key"] == "node.kubernetes.io/not-ready"] == [given]
    assert len(tolerations) == 2


def test_kvd_can_be_overlaid_where_it_runs() -> None:
    overlay = {"initContainers": [{"name": "kvd", "env": [{"name": "A", "value": "b"}]}]}
    pod = pod_of(pool_of(PREFILL_BODY, {"kvd": KVD, "podTemplate": {"spec": overlay}}))

    assert {"name": "A", "value": "b"} in container_of(pod, "kvd")["env"]


def test_encoder_is_the_container_of_a_vepool() -> None:
    overlay = {"containers": [{"name": "encoder", "env": [{"name": "A", "value": "b"}]}]}
    pod = pod_of(pool_of(VE_BODY, {"podTemplate": {"spec": overlay}}))

    assert {"name": "A", "value": "b"} in container_of(pod, "encoder")["env"]


def test_host_path_below_an_allowed_directory() -> None:
    volume = {"name": "site", "hostPath": {"path": "/mnt/models/site-packages"}}

    assert volume in _overlaid({"volumes": [volume]}, OPEN_POLICY)["spec"]["volumes"]


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("host-pid", {"hostPID": True}, "hostPID", "is not allowed; allowed are containers"),
    ("host-network", {"hostNetwork": True}, "hostNetwork", "set spec.network.hostNetwork"),
    ("selector", {"nodeSelector": {"a": "b"}}, "nodeSelector", "set spec.scheduling.nodeSelector"),
    ("grace", {"terminationGracePeriodSeconds": 1}, "terminationGracePeriodSeconds", "spec.lifecycle.drainTimeoutSec"),
    ("node", {"nodeName": "x"}, "nodeName", "is not allowed"),
    ("restart", {"restartPolicy": "Never"}, "restartPolicy", "is not allowed"),
    ("more", {"containers": [{"name": "miner", "image": "x"}]}, "containers[0].name", "no further containers"),
    ("init", {"initContainers": [{"name": "setup", "image": "x"}]}, "initContainers[0].name", "no further containers"),
    ("no-kvd", {"initContainers": [{"name": "kvd"}]}, "initContainers[0].name", "only none can be changed"),
    ("image", {"containers": [{"name": "engine", "image": "x"}]}, "containers[0].image", "set spec.engine.image"),
    ("command", {"containers": [{"name": "engine", "command": ["sh"]}]}, "containers[0].command", "is not allowed"),
    (
        "privileged",
        {"containers": [{"name": "engine", "securityContext": {"privileged": True}}]},
        "containers[0].securityContext.privileged",
        "is not allowed; allowed are runAsUser",
    ),
    (
        "capabilities",
        {"containers": [{"name": "engine", "securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}]},
        "containers[0].securityContext.capabilities",
        "is not allowed",
    ),
    ("root", {"securityContext": {"runAsUser": 0}}, "securityContext.runAsUser", "is root"),
    (
        "engine-root",
        {"containers": [{"name": "engine", "securityContext": {"runAsUser": 0}}]},
        "containers[0].securityContext.runAsUser",
        "is root",
    ),
    ("sysctls", {"securityContext": {"sysctls": []}}, "securityContext.sysctls", "is not allowed"),
    ("non-root", {"securityContext": {"runAsNonRoot": False}}, "securityContext.runAsNonRoot", "is not allowed"),
    (
        "host-path",
        {"volumes": [{"name": "etc", "hostPath": {"path": "/etc"}}]},
        "volumes[0].hostPath.path",
        "not below a directory the cluster owner allows (none",
    ),
    (
        "host-path-dots",
        {"volumes": [{"name": "etc", "hostPath": {"path": "/mnt/models/../../etc"}}]},
        "volumes[0].hostPath.path",
        "absolute path without ..",
    ),
    ("host-path-none", {"volumes": [{"name": "etc", "hostPath": {}}]}, "volumes[0].hostPath.path", "absolute path"),
    ("our-volume", {"volumes": [{"name": "shm", "emptyDir": {}}]}, "volumes[0].name", "is a volume of the operator"),
    (
        "twice",
        {"volumes": [{"name": "a", "emptyDir": {}}, {"name": "a", "emptyDir": {}}]},
        "volumes[1].name",
        "or named twice",
    ),
    (
        "our-mount",
        {"containers": [{"name": "engine", "volumeMounts": [{"name": "a", "mountPath": "/dev/shm/"}]}]},
        "containers[0].volumeMounts[0].mountPath",
        "is where the operator mounts shm",
    ),
    (
        "propagation",
        {
            "containers": [
                {
                    "name": "engine",
                    "volumeMounts": [{"name": "a", "mountPath": "/a", "mountPropagation": "Bidirectional"}],
                }
            ]
        },
        "containers[0].volumeMounts[0].mountPropagation",
        "only HostToContainer",
    ),
    (
        "identity",
        {"containers": [{"name": "engine", "env": [{"name": "PLAN_HASH", "value": "x"}]}]},
        "containers[0].env[0].name",
        "is set by the operator",
    ),
    ("env-type", {"containers": [{"name": "engine", "env": {"A": "b"}}]}, "containers[0].env", "must be a list"),
    ("env-name", {"containers": [{"name": "engine", "env": [{}]}]}, "containers[0].env[0].name", "is required"),
    ("containers-type", {"containers": {"name": "engine"}}, "containers", "must be a list"),
    ("container-type", {"containers": ["engine"]}, "containers[0]", "must be an object"),
    ("affinity-kind", {"affinity": {"podAfinity": {}}}, "affinity.podAfinity", "is unknown"),
    ("affinity-when", {"affinity": {"podAffinity": {"soon": []}}}, "affinity.podAffinity.soon", "is unknown"),
    (
        "affinity-terms",
        {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {}}}},
        "nodeSelectorTerms",
        "must be a list",
    ),
]


@pytest.mark.parametrize(("spec", "path", "words"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_everything_else_is_refused(spec: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(PoolInvalid) as refusal:
        _overlaid(spec)

    assert refusal.value.path.endswith(path)
    assert refusal.value.path.startswith("spec.podTemplate.spec.")
    assert words in refusal.value.message
    assert "\n" not in refusal.value.message


def test_root_is_possible_where_the_cluster_owner_allows_it() -> None:
    security = _overlaid({"securityContext": {"runAsUser": 0}}, OPEN_POLICY)["spec"]["securityContext"]

    assert (security["runAsUser"], security["runAsNonRoot"]) == (0, False)
