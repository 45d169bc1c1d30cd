"""Raw objects as the planner sees them: prefill_operator.pod_reading, node_reading and observe."""

import json
from typing import Any

import pytest

from prefill_operator.model import PodPhase
from prefill_operator.names import ACCEPTING_GATE, Kind, pod_labels
from prefill_operator.node_reading import read_node
from prefill_operator.observe import is_foreign_pod
from prefill_operator.pod_reading import PodRecord, parse_time, read_pod
from prefill_operator.resources import Json
from prefill_operator.settings import NodeSignals
from prefill_testing.in_loop import in_loop
from prefill_testing.operator_rig import KEY, OperatorRig

T0 = 1_700_000_000.0
"""2023-11-14T22:13:20Z"""


def _stamp(seconds: int) -> str:
    return f"2023-11-14T22:13:{20 + seconds:02d}Z"


def _read(
    *, name: str = "flash-0a1b2c3d-7", metadata: Json | None = None, spec: Json | None = None, **status: Any
) -> PodRecord:
    labels = pod_labels(Kind.PREFILL_POOL, "flash", "0a1b2c3d")
    base = {"name": name, "namespace": "ns", "uid": "u1", "labels": labels, "creationTimestamp": _stamp(0)}
    record = read_pod({"metadata": {**base, **(metadata or {})}, "spec": spec or {}, "status": status})
    assert record is not None
    return record


def _container(restarts: int = 0, name: str = "engine", **states: Any) -> Json:
    return {"name": name, "restartCount": restarts, **states}


def test_name_tells_revision_and_incarnation() -> None:
    observed = _read().observed

    assert (observed.revision, observed.incarnation, observed.created_at) == ("0a1b2c3d", 7, T0)
    assert observed.phase is PodPhase.PENDING


@pytest.mark.parametrize(
    "labels", [{}, {"prefill.dev/pool": "flash"}, {"prefill.dev/kind": "Other", "prefill.dev/pool": "x"}]
)
def test_pod_of_no_pool_is_left_out(labels: Json) -> None:
    assert read_pod({"metadata": {"name": "x", "labels": labels}}) is None


def test_pod_of_nulls_raises_nothing() -> None:
    metadata = {"annotations": None, "ownerReferences": None, "creationTimestamp": None}
    spec = dict.fromkeys(("containers", "affinity", "readinessGates"))
    record = _read(metadata=metadata, spec=spec, conditions=None, containerStatuses=None, initContainerStatuses=None)

    assert (record.observed.created_at, record.extended, record.address) == (0.0, {}, "")


def test_conditions_give_times_and_reasons() -> None:
    observed = _read(
        conditions=[
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": _stamp(1)},
            {"type": "Ready", "status": "True", "lastTransitionTime": _stamp(9)},
            {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"},
        ],
        phase="Running",
    ).observed

    assert (observed.scheduled_at, observed.ready, observed.ready_changed_at) == (T0 + 1, True, T0 + 9)
    assert observed.disruption_target == "DeletionByTaintManager"
    assert observed.unschedulable_since is None


def test_unschedulable_pod_keeps_the_schedulers_words() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/4 nodes"}
    observed = _read(conditions=[{**condition, "lastTransitionTime": _stamp(3)}]).observed

    assert (observed.unschedulable_since, observed.unschedulable_message) == (T0 + 3, "0/4 nodes")
    assert observed.scheduled_at is None


def test_deletion_began_before_its_grace_ended() -> None:
    metadata = {"deletionTimestamp": _stamp(39), "deletionGracePeriodSeconds": 30}

    assert _read(metadata=metadata).observed.terminating_since == T0 + 9


@pytest.mark.parametrize(
    ("status", "reason", "at"),
    [
        ({"reason": "UnexpectedAdmissionError"}, "UnexpectedAdmissionError", T0),
        ({"conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": _stamp(4)}]}, "Failed", T0 + 4),
        ({"containerStatuses": [_container(state={"terminated": {"finishedAt": _stamp(6)}})]}, "Failed", T0 + 6),
    ],
    ids=["reason", "condition", "container"],
)
def test_failed_pod_has_a_reason_and_a_time(status: Json, reason: str, at: float) -> None:
    observed = _read(phase="Failed", **status).observed

    assert (observed.phase, observed.failed_reason, observed.failed_at) == (PodPhase.FAILED, reason, at)


MESSAGE = {
    "v": 1,
    "code": "CudaOom",
    "exit": 12,
    "phase": "warmup",
    "planHash": "abc",
    "rank": 3,
    "wantBytes": 5,
    "freeBytes": 2,
    "foreignBytes": 0,
    "xid": None,
    "detail": "out of memory",
}


def _ended(message: str = "", **more: Any) -> Json:
    return {"exitCode": 12, "reason": "Error", "finishedAt": _stamp(8), "message": message, **more}


@pytest.mark.parametrize(
    ("states", "restarts", "end"),
    [
        ({"state": {"terminated": _ended()}}, 2, 2),
        ({"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": _ended()}}, 2, 2),
        ({"state": {"running": {}}, "lastState": {"terminated": _ended()}}, 3, 2),
    ],
    ids=["ended", "waiting", "running again"],
)
def test_one_end_has_one_number_however_it_is_seen(states: Json, restarts: int, end: int) -> None:
    observed = _read(containerStatuses=[_container(restarts, **states)]).observed

    assert observed.termination is not None
    assert (observed.termination.restart_count, observed.termination.exit_code) == (end, 12)
    assert observed.termination.at == T0 + 8


def test_termination_message_is_read() -> None:
    observed = _read(containerStatuses=[_container(state={"terminated": _ended(json.dumps(MESSAGE))})]).observed

    end = observed.termination
    assert end is not None
    assert (end.code, end.phase, end.plan_hash, end.detail) == ("CudaOom", "warmup", "abc", "out of memory")
    assert (end.want_bytes, end.free_bytes, end.foreign_bytes) == (5, 2, 0)


@pytest.mark.parametrize("text", ["Killed", '{"code": "Cud', '{"wantBytes": "many"}', "[]", ""])
def test_message_that_is_no_json_is_the_detail(text: str) -> None:
    end = _read(containerStatuses=[_container(state={"terminated": _ended(text)})]).observed.termination

    assert end is not None
    assert (end.detail, end.code) == (text, "")


def test_of_a_log_the_last_words_are_the_detail() -> None:
    """The kubelet gives the end of the log where a container wrote no message: what it died of comes last."""
    text = '{"msg": "pool ready"}\n' * 60 + "Traceback (most recent call last):\n  File x\nMemoryError: no 3 GB left\n"
    end = _read(containerStatuses=[_container(state={"terminated": _ended(text)})]).observed.termination

    assert end is not None
    assert end.detail.startswith("... ")
    assert end.detail.endswith("Traceback (most recent call last): File x MemoryError: no 3 GB left")
    assert len(end.detail) == 504


@pytest.mark.parametrize(("value", "degraded"), [("degraded", True), ("", False), (None, False)])
def test_lost_kv_store_is_read_from_the_annotation(value: str | None, degraded: bool) -> None:
    annotations = {} if value is None else {"prefill.dev/kv-store": value}

    assert _read(metadata={"annotations": annotations}).observed.is_store_degraded == degraded


@pytest.mark.parametrize(
    ("engine", "init", "reason"),
    [
        ("ImagePullBackOff", "", "ImagePullBackOff"),
        ("PodInitializing", "CrashLoopBackOff", "CrashLoopBackOff"),
        ("PodInitializing", "", "PodInitializing"),
        ("ErrImagePull", "CrashLoopBackOff", "ErrImagePull"),
        ("", "", ""),
    ],
)
def test_pod_waits_for_what_really_holds_it(engine: str, init: str, reason: str) -> None:
    def waiting(text: str) -> Json:
        return {"waiting": {"reason": text, "message": f"why {text}"}} if text else {"running": {}}

    observed = _read(
        containerStatuses=[_container(state=waiting(engine))],
        initContainerStatuses=[_container(name="kvd", state=waiting(init))],
        conditions=[{"type": "PodScheduled", "status": "True", "lastTransitionTime": _stamp(2)}],
    ).observed

    assert observed.waiting_reason == reason
    assert observed.waiting_message == (f"why {reason}" if reason else "")
    assert observed.waiting_since == (T0 + 2 if reason else None)


@pytest.mark.parametrize(
    ("state", "started", "down"),
    [
        ({"running": {}}, True, None),
        ({"running": {}}, False, False),
        ({"waiting": {"reason": "CrashLoopBackOff"}}, False, True),
        ({"terminated": {"exitCode": 10, "reason": "Error", "finishedAt": _stamp(3)}}, False, False),
    ],
    ids=["up again", "starting", "back-off", "ended"],
)
def test_sidecar_that_ended_is_down_until_it_has_started(state: Json, started: bool, down: bool | None) -> None:
    text = '{"code": "ConfigError", "phase": "start", "detail": "make /dev/shm larger"}'
    last = {"terminated": {"exitCode": 10, "reason": "Error", "finishedAt": _stamp(3), "message": text}}
    kvd = _container(name="kvd", state=state, lastState=last, started=started, restartCount=2)
    sidecar = _read(containerStatuses=[_container(state={"running": {}})], initContainerStatuses=[kvd]).observed.sidecar

    assert (sidecar and sidecar.is_waiting) == down
    if sidecar is not None:
        assert (sidecar.name, sidecar.end.exit_code, sidecar.end.at) == ("kvd", 10, T0 + 3)
        assert sidecar.end.detail == ("" if "terminated" in state else "make /dev/shm larger")


def test_sidecar_that_starts_for_the_first_time_is_not_down() -> None:
    kvd = _container(name="kvd", state={"running": {}}, started=False)

    assert _read(initContainerStatuses=[kvd]).observed.sidecar is None


def test_withdrawn_devices_are_listed() -> None:
    devices = [{"resourceID": "gpu-3", "health": "Unhealthy"}, {"resourceID": "gpu-4", "health": "Healthy"}]
    status = _container(allocatedResourcesStatus=[{"name": "nvidia.com/gpu", "resources": devices}])

    assert _read(containerStatuses=[status]).observed.unhealthy_devices == ("nvidia.com/gpu/gpu-3",)


def test_avoided_nodes_are_read_from_the_affinity() -> None:
    rule = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["n1", "n2"]}
    other = {"key": "zone", "operator": "NotIn", "values": ["z"]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [rule, other]}, {"matchExpressions": [rule]}]}
    spec = {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}}

    assert _read(spec=spec).observed.avoid_nodes == ("n1", "n2")


@pytest.mark.parametrize(
    ("ip", "address"), [("10.0.0.7", "10.0.0.7:50051"), ("fd00::7", "[fd00::7]:50051"), (None, "")]
)
def test_address_is_the_grpc_port_of_the_pod(ip: str | None, address: str) -> None:
    ports = [{"name": "probe", "containerPort": 50052}, {"name": "grpc", "containerPort": 50051}]

    assert _read(spec={"containers": [{"name": "engine", "ports": ports}]}, podIP=ip).address == address


def test_devices_of_all_containers_are_counted() -> None:
    def container(**limits: str) -> Json:
        return {
            "resources": {"limits": {"cpu": "3", **{name.replace("_", "/"): value for name, value in limits.items()}}}
        }

    spec = {"containers": [container(**{"nvidia.com_gpu": "4"})], "initContainers": [container(**{"rdma_hca": "1"})]}

    assert _read(spec=spec).extended == {"nvidia.com/gpu": 4, "rdma/hca": 1}


@pytest.mark.parametrize(("word", "gate"), [("True", True), ("False", False), (None, None)])
def test_gate_is_unset_open_or_shut(word: str | None, gate: bool | None) -> None:
    conditions = [{"type": ACCEPTING_GATE, "status": word}] if word else []
    spec = {"readinessGates": [{"conditionType": ACCEPTING_GATE}]}

    record = _read(spec=spec, conditions=conditions)
    assert (record.has_gate, record.observed.gate) == (True, gate)


def test_gate_of_a_pod_without_one_does_not_count() -> None:
    record = _read(conditions=[{"type": ACCEPTING_GATE, "status": "True"}])

    assert (record.has_gate, record.observed.gate) == (False, None)


@pytest.mark.parametrize("text", [None, 5, "", "yesterday", "2023-13-01T00:00:00Z"])
def test_time_that_is_none_reads_as_none(text: object) -> None:
    assert parse_time(text) is None


def test_times_of_all_precisions_are_read() -> None:
    assert parse_time("2023-11-14T22:13:20Z") == T0
    assert parse_time("2023-11-14T22:13:20.250000Z") == T0 + 0.25


def _node(*, taints: tuple[str, ...] = (), annotations: Json | None = None, **status: Any) -> Json:
    metadata = {"name": "n1", "labels": {"nvidia.com/gpu.product": "NVIDIA-H200"}, "annotations": annotations}
    return {
        "metadata": {**metadata, "creationTimestamp": _stamp(0)},
        "spec": {"unschedulable": True, "taints": [{"key": key, "effect": "NoSchedule"} for key in taints]},
        "status": {"capacity": {"nvidia.com/gpu": "8"}, "allocatable": {"nvidia.com/gpu": "7"}, **status},
    }


SIGNALS = NodeSignals(maintenance_taints=("cloud/ending",))


def test_node_is_read() -> None:
    ready = {"type": "Ready", "status": "False", "lastTransitionTime": _stamp(5)}
    node = read_node(_node(conditions=[ready], taints=("a", "cloud/ending")), SIGNALS).view("nvidia.com/gpu", taken=2)

    assert (node.ready, node.ready_changed_at, node.cordoned) == (False, T0 + 5, True)
    assert (node.taints, node.maintenance_taint) == (("a", "cloud/ending"), "cloud/ending")
    assert (node.gpu_product, node.gpu_capacity, node.gpu_allocatable, node.gpu_free) == ("NVIDIA-H200", 8, 7, 5)


def test_gpus_of_another_resource_are_not_counted() -> None:
    node = read_node(_node(), SIGNALS).view("amd.com/gpu", taken=0)

    assert (node.gpu_capacity, node.gpu_free) == (0, 0)


@pytest.mark.parametrize(
    ("node", "fault"),
    [
        (
            _node(conditions=[{"type": "GPUUnhealthy", "status": "True", "message": "Xid 79"}]),
            "condition GPUUnhealthy: Xid 79",
        ),
        (_node(conditions=[{"type": "GPUUnhealthy", "status": "False", "message": "fine"}]), ""),
        (_node(annotations={"prefill.dev/xid": "94"}), "annotation prefill.dev/xid: 94"),
        (_node(annotations={"prefill.dev/xid": ""}), ""),
        (_node(taints=("prefill.dev/gpu-fault",)), "taint prefill.dev/gpu-fault"),
        (_node(taints=("other",)), ""),
    ],
    ids=["condition", "no condition", "annotation", "empty annotation", "taint", "other taint"],
)
def test_fault_of_a_node_is_told_by_any_signal(node: Json, fault: str) -> None:
    assert read_node(node, SIGNALS).observed.gpu_fault == fault


@in_loop
async def test_ours_are_pods_of_the_pool_alone() -> None:
    rig = await OperatorRig.start()
    uid = rig.create_pool()["metadata"]["uid"]
    await rig.settle()
    record = rig.leader.cache.pool(KEY)
    assert record is not None
    pool = record.pool
    assert pool is not None
    note = {"annotations": {"prefill.dev/pool-uid": uid}}

    def owner(owner_uid: str) -> Json:
        return {"ownerReferences": [{"uid": owner_uid, "controller": True}]}

    assert not is_foreign_pod(_read(metadata=owner(uid)), pool)
    assert is_foreign_pod(_read(metadata=owner("other")), pool)
    assert not is_foreign_pod(_read(metadata=note), pool), "an orphan of ours"
    assert is_foreign_pod(_read(), pool), "an orphan that names no pool"
    assert is_foreign_pod(_read(metadata=owner(uid), name="flash-by-hand"), pool), "not a name of ours"
