"""The engine image on real nodes, without the operator: what the operator's pods must be able to rely on."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from prefill_bed.api import Json, is_ready
from prefill_bed.bed import Bed
from prefill_bed.cluster import Cluster
from prefill_bed.engine_pod import GRPC_PORT, ask, engine_config, engine_objects
from prefill_bed.waiting import until


def ready_pod(cluster: Cluster, namespace: str, name: str) -> Json:
    """The pod, once Ready; a crash ends the wait at once."""

    def check() -> Json:
        pod = cluster.api.get("pods", namespace, name)
        assert is_ready(pod), cluster.describe(namespace)[-1500:]
        return pod

    return until(f"pod {name} to be Ready", check, seconds=300, interval=1)


def ended_container(cluster: Cluster, namespace: str, name: str) -> Json:
    """The terminated state of the engine container, once there is one."""

    def check() -> Json:
        status = cluster.api.get("pods", namespace, name)["status"].get("containerStatuses", [{}])[0]
        end: Json | None = status.get("state", {}).get("terminated") or status.get("lastState", {}).get("terminated")
        assert end, status
        return end

    return until(f"the engine of {name} to end", check, seconds=240, interval=0.5)


@pytest.mark.short
def test_engine_answers(
    nodes: Cluster,
    new_namespace: Callable[[Cluster], str],
    checkpoint: Path,
    tmp_path: Path,
    figure: Callable[[str], None],
) -> None:
    """An engine pod becomes Ready as a non-root user and answers a real prefill, checked by the decode probe."""
    namespace = new_namespace(nodes)
    nodes.apply(*engine_objects("engine", namespace, checkpoint))
    pod = ready_pod(nodes, namespace, "engine")
    answer = ask(f"{pod['status']['podIP']}:{GRPC_PORT}", checkpoint, tmp_path)
    assert answer.ok, answer.text
    lines = [
        line.split(maxsplit=1)[1] for line in answer.text.splitlines() if line.lstrip().startswith(("TTFT", "probe"))
    ]
    figure("; ".join(lines))


def test_engine_drains_on_deletion(nodes: Cluster, new_namespace: Callable[[Cluster], str], checkpoint: Path) -> None:
    """A deleted engine pod drains by its preStop hook and is gone long before its grace ends."""
    namespace = new_namespace(nodes)
    nodes.apply(*engine_objects("engine", namespace, checkpoint))
    ready_pod(nodes, namespace, "engine")
    nodes.api.delete("pods", namespace, "engine")

    def gone() -> None:
        assert nodes.api.find("pods", namespace, "engine") is None, "still there"

    until("the pod to be gone", gone, seconds=40)


@pytest.mark.parametrize(
    ("config", "exit_code"),
    [({"replay": {"keep_tokens": 3}}, 10), ({"model": {"path": "/models/none", "name": "tiny"}}, 11)],
    ids=["configuration", "checkpoint"],
)
def test_engine_refuses(
    nodes: Cluster, new_namespace: Callable[[Cluster], str], checkpoint: Path, config: Json, exit_code: int
) -> None:
    """A bad configuration ends with exit 10, a missing checkpoint with 11, and the termination message says why."""
    namespace = new_namespace(nodes)
    objects = engine_objects(
        "engine", namespace, checkpoint, config={**engine_config(), **config}, restartPolicy="Never"
    )
    nodes.apply(*objects)
    end = ended_container(nodes, namespace, "engine")
    assert end["exitCode"] == exit_code, end
    message = json.loads(end["message"])
    assert message["exit"] == exit_code
    assert message["detail"]


def test_engine_oom_kill(nodes: Cluster, new_namespace: Callable[[Cluster], str], checkpoint: Path) -> None:
    """A memory limit below the engine's needs ends as OOMKilled: 137, or 16 where only the rank was killed (cgroup v1)."""
    namespace = new_namespace(nodes)
    config_map, pod = engine_objects("engine", namespace, checkpoint, restartPolicy="Never")
    pod["spec"]["containers"][0]["resources"] = {"limits": {"memory": "200Mi"}, "requests": {"memory": "100Mi"}}
    nodes.apply(config_map, pod)
    end = ended_container(nodes, namespace, "engine")
    assert end["reason"] == "OOMKilled", end
    assert end["exitCode"] in (16, 137), end


def test_device_fault_is_visible(nodes: Cluster, bed: Bed) -> None:
    """A device that its plug-in reports faulty leaves the node's allocatable."""

    def allocatable(count: int) -> Callable[[], None]:
        def check() -> None:
            seen = nodes.api.get("nodes", None, "node-2")["status"]["allocatable"].get("nvidia.com/gpu")
            assert seen == str(count), f"{seen} allocatable"

        return check

    nodes.device_faults(2, [3])
    until("7 GPUs", allocatable(7), seconds=60)
    nodes.device_faults(2, [])
    until("8 GPUs", allocatable(8), seconds=60)
