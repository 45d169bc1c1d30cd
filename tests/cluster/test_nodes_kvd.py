"""Layer 6: pools whose pods run kvd, on real nodes, through what may happen to the sidecar, its memory and its store (C32).

Every prefill is taken over by the decode probe, which computes the next token from the handed bytes alone: wrong bytes fail it.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prefill_bed.api import Json, is_ready
from prefill_bed.cluster import Cluster
from prefill_bed.engine_pod import IMAGE, SITE_PACKAGES
from prefill_bed.installation import Release, merged
from prefill_bed.kvd_pool import HIT, PROMPT, KvdPool, Prefill
from prefill_bed.pools import PoolView, cpu_pool, expect
from prefill_bed.waiting import until

Figure = Callable[[str], None]
SLOW = 400

Start = Callable[..., KvdPool]


@pytest.fixture
def start(
    release: Release, new_namespace: Callable[[Cluster], str], checkpoint: Path, tmp_path: Path, store: Path
) -> Start:
    """A pool with one pod and kvd on the store's directory; keywords are fields of its spec."""
    site = {"name": "site", "mountPath": "/opt/site", "readOnly": True}
    spec = {
        "replicas": 1,
        "quota": {"redundancy": {"mode": "None"}},
        "kvCache": {"tokensPerGPU": 4096},
        "scheduling": {"nodeSelector": {"kubernetes.io/hostname": "node-1"}},
        "kvd": {
            "enabled": True,
            "image": IMAGE,
            "store": "file",
            "path": "/kv",
            "volume": {"hostPath": {"path": str(store)}},
            "poolSize": "64Mi",
            "cpu": "50m",
            "memory": "512Mi",
            "startupTimeoutSeconds": 10,
        },
    }

    def make(**changes: object) -> KvdPool:
        view = PoolView(release.cluster, new_namespace(release.cluster), "tiny")
        pool = cpu_pool("tiny", checkpoint, **merged(spec, changes))
        pool["spec"]["podTemplate"]["spec"]["initContainers"] = [{"name": "kvd", "volumeMounts": [site]}]
        view.create(pool)
        return KvdPool(view, checkpoint, tmp_path)

    return make


@contextlib.contextmanager
def filled(shm: Path) -> Iterator[None]:
    """Takes all room of a file system, also what becomes free later: an engine holds a pool's pages while it maps it."""
    stop = threading.Event()
    path = shm / "filler"

    def fill() -> None:
        with path.open("wb") as file:
            while not stop.wait(0.02):
                room = os.statvfs(shm)
                if free := room.f_bavail * room.f_frsize:
                    with contextlib.suppress(OSError):
                        os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free)

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        path.unlink()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A directory of this machine, hence of every node, that kvd's user may write."""
    path = tmp_path / "kv"
    path.mkdir()
    path.chmod(0o777)
    return path


@pytest.fixture
def small_store(nodes: Cluster, store: Path) -> Iterator[Path]:
    """On node-1 a file system of 4 MiB lies there."""
    nodes.run_on_node(1, "mount", "-t", "tmpfs", "-o", "size=4m,mode=0777", "kv", str(store))
    yield store
    nodes.run_on_node(1, "umount", "--lazy", str(store))


def test_hit_comes_through_kvd(start: Start, figure: Figure) -> None:
    """A pool with kvd becomes Ready and answers; a repeated prompt that the engine itself has forgotten is a hit through kvd."""
    pool = start()
    pool.view.wait_settled(1, seconds=SLOW)
    pod = pool.pod()
    first = pool.right(pod, 1)
    assert (first.cached_tokens, first.computed_tokens) == (0, PROMPT)
    pool.forget(pod)
    assert pool.metric(pod, 'kv_swapin_bytes_total{src="shm"}') == 0
    second = pool.right(pod, 1)
    assert (second.cached_tokens, second.computed_tokens) == (HIT, PROMPT - HIT)
    swapped = pool.metric(pod, 'kv_swapin_bytes_total{src="shm"}')
    assert swapped > 0
    assert pool.metric(pod, "kv_store_up") == 1
    assert pool.metric(pod, 'kv_transport_info{kind="tcp",rdma="false"}') == 1
    uids = {
        path: os.stat(f"/proc/{pool.view.cluster.sidecar_processes(pod, 'kvd')[0]}/root{path}").st_uid
        for path in ("/run/kvd/kvd.sock", f"/dev/shm/kvd.{pod['metadata']['name']}")
    }
    assert set(uids.values()) == {10001}, uids
    figure(f"{second.cached_tokens} of {PROMPT} tokens through kvd, {swapped:.0f} bytes")


def test_kvd_killed(start: Start, figure: Figure) -> None:
    """kill -9 of kvd under a serving engine: the engine answers all the time and never ends; kvd is back, and so are hits."""
    pool = start()
    pool.view.wait_settled(1, seconds=SLOW)
    pod = pool.pod()
    name = pod["metadata"]["name"]
    pool.right(pod, 1)
    pool.forget(pod)
    begin = time.monotonic()
    pool.kill_kvd(pod)
    during = pool.right(pod, 1)

    def restarted() -> None:
        kvd = pool.kvd(name)
        assert kvd["restartCount"] == 1, kvd
        assert kvd.get("started"), kvd
        assert is_ready(pool.named(name)), "not Ready"

    pool.view.wait("kvd to be back", restarted, seconds=SLOW)
    took = time.monotonic() - begin

    def hit() -> Prefill:
        answer = pool.right(pod, 1)
        assert answer.cached_tokens == HIT, answer
        return answer

    pool.view.wait("hits", hit, seconds=120)
    pool.forget(pod)
    after = pool.right(pod, 1)
    assert after.cached_tokens == HIT
    assert (
        pool.metric(pod, 'kv_swapin_bytes_total{src="shm"}') + pool.metric(pod, 'kv_swapin_bytes_total{src="fs"}') > 0
    )
    assert pool.named(name)["status"]["containerStatuses"][0]["restartCount"] == 0
    pool.view.wait_settled(1, seconds=60)
    figure(
        f"kvd back after {took:.1f} s; cached while it was away {during.cached_tokens}, afterwards {after.cached_tokens}"
    )


def test_shared_memory_too_small(start: Start, figure: Figure) -> None:
    """/dev/shm has no room for the pool: the pool says so in kvd's words, kvd is tried with growing pauses, and heals by itself.

    Pods of ours have room by construction; here somebody fills it while kvd is dead, and its file is lost. The engine maps the
    lost pool until the next one is there, so both and the lease journal must have room (64 + 64 + 2 MiB).
    """
    pool = start(engine={"extraShm": "80Mi"})
    pool.view.wait_settled(1, seconds=SLOW)
    pod = pool.pod()
    name = pod["metadata"]["name"]
    shm = Path(f"/proc/{pool.view.cluster.engine_processes(pod)[0]}/root/dev/shm")
    pool.kill_kvd(pod)
    with filled(shm):
        (shm / f"kvd.{name}").unlink()

        def told() -> str:
            found = pool.view.condition("Stalled")
            assert (found.get("status"), found.get("reason")) == ("True", "ConfigRejected"), found
            assert "kvd: " in found["message"], found
            assert "make /dev/shm larger" in found["message"], found
            return str(found["message"])

        message = pool.view.wait("the condition", told, seconds=SLOW)
        assert "make /dev/shm larger" in pool.view.condition("Ready")["message"]
        answer = pool.right(pod, 1)
        seen = pool.kvd(name)["restartCount"]
        until("another try", lambda: expect(pool.kvd(name)["restartCount"] > seen, pool.kvd(name)), seconds=120)
        assert pool.kvd(name)["restartCount"] <= 5, "a crash storm"
        assert pool.view.names() == [name], "replaced, though another pod would say the same"
    pool.view.wait_settled(1, seconds=SLOW)
    assert pool.named(name)["status"]["containerStatuses"][0]["restartCount"] == 0
    figure(f"said: {message[:240]}; meanwhile answered with {answer.cached_tokens} cached")


@pytest.mark.parametrize("how", ["read-only", "full"])
def test_store_refuses_writes(start: Start, nodes: Cluster, small_store: Path, how: str, figure: Figure) -> None:
    """The store is read-only, or full: engines serve, hits come from kvd's memory, and kvd says what is wrong."""
    pool = start()
    pool.view.wait_settled(1, seconds=SLOW)
    pod = pool.pod()
    pool.right(pod, 1)
    assert pool.metric(pod, "kv_store_up") == 1
    if how == "read-only":
        nodes.run_on_node(1, "mount", "-o", "remount,ro", str(small_store))
    else:
        nodes.run_on_node(1, "sh", "-c", f"cat /dev/zero > {small_store}/filler || true")
    for seed in range(2, 6):
        assert pool.right(pod, seed).cached_tokens == 0

    def visible() -> float:
        dropped = pool.metric(pod, "kv_writeback_dropped_total")
        assert dropped > 0, "nothing was dropped"
        assert pool.metric(pod, "kv_store_up") == 0, "the store counts as up"
        return dropped

    dropped = pool.view.wait("the store to be seen as failing", visible, seconds=60)
    pool.forget(pod)
    assert pool.right(pod, 2).cached_tokens == HIT, "hits from kvd's memory"
    assert "blocks not stored" in pool.log(pod)
    assert pool.view.condition("Ready")["status"] == "True"
    pool.view.wait("the lost store to be told by the pool", lambda: expect_store(pool, pod, is_lost=True), seconds=180)
    if how == "read-only":
        nodes.run_on_node(1, "mount", "-o", "remount,rw", str(small_store))
    else:
        nodes.run_on_node(1, "rm", f"{small_store}/filler")

    def works_again() -> None:
        pool.right(pod, int(time.monotonic() * 10) % 8000 + 10)
        assert pool.metric(pod, "kv_store_up") == 1

    pool.view.wait("the store to be used again", works_again, seconds=120)
    pool.view.wait("the pool to have its store again", lambda: expect_store(pool, pod, is_lost=False), seconds=180)
    figure(f"{dropped:.0f} blocks not stored, hits from memory all the time, used again afterwards")


def expect_store(pool: KvdPool, pod: Json, *, is_lost: bool) -> None:
    """What the operator says of the pod's store, on the pod and in the pool's words."""
    notes = pool.named(pod["metadata"]["name"])["metadata"]["annotations"]
    message = pool.view.condition("Ready")["message"]
    assert notes.get("prefill.dev/kv-store") == ("degraded" if is_lost else None), notes
    assert ("1 without KV store" in message) == is_lost, message


def test_store_outlives_the_pod(start: Start, store: Path, figure: Figure) -> None:
    """A deleted pod drains: the engine ends, then kvd, whose write-back is on the store; the next pod has the hit from there."""
    pool = start()
    pool.view.wait_settled(1, seconds=SLOW)
    pod = pool.pod()
    name, cluster = pod["metadata"]["name"], pool.view.cluster
    processes = {
        "engine": cluster.engine_processes(pod)[0],
        "kvd": cluster.sidecar_processes(pod, "kvd")[0],
    }
    pool.right(pod, 1)
    cluster.kubectl("delete", "pod", name, "-n", pool.view.namespace, "--wait=false")
    ended: dict[str, float] = {}

    def both_ended() -> None:
        for who, process in processes.items():
            if who not in ended and not Path(f"/proc/{process}").exists():
                ended[who] = time.monotonic()
        assert len(ended) == 2, ended

    until("engine and kvd to end", both_ended, seconds=120, interval=0.02)
    assert ended["engine"] < ended["kvd"], ended
    segments = list(store.rglob("*.seg"))
    assert segments, "nothing is on the store"
    pool.view.wait("another pod", lambda: expect(name not in pool.view.names(), pool.view.names()), seconds=SLOW)
    pool.view.wait_settled(1, seconds=SLOW)
    fresh = pool.pod()

    def hit() -> Prefill:
        answer = pool.right(fresh, 1)
        assert answer.cached_tokens == HIT, answer
        return answer

    pool.view.wait("the hit from the store", hit, seconds=60)
    read = pool.metric(fresh, 'kv_swapin_bytes_total{src="fs"}')
    assert read > 0
    figure(
        f"kvd ended {ended['kvd'] - ended['engine']:.1f} s after the engine; {read:.0f} bytes from {len(segments)} segments"
    )


def directory_pod(namespace: str) -> Json:
    """`prefill-engine directory serve` in the light image."""
    container = {
        "name": "directory",
        "image": IMAGE,
        "command": ["prefill-engine", "directory", "serve"],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "site", "mountPath": "/opt/site", "readOnly": True}],
    }
    volumes = [{"name": "site", "hostPath": {"path": str(SITE_PACKAGES), "type": "Directory"}}]
    metadata = {"name": "directory", "namespace": namespace}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"containers": [container], "volumes": volumes},
    }


def test_nodes_share_through_the_directory(start: Start, nodes: Cluster, figure: Figure) -> None:
    """Two PEs on two nodes with one store and a directory: what one computed, the other takes from store and peer."""
    pool = start(paused=True, replicas=2, scheduling={"nodeSelector": None, "placement": "SpreadRequired"})
    namespace = pool.view.namespace
    nodes.apply(directory_pod(namespace))

    def address() -> str:
        pod = nodes.api.get("pods", namespace, "directory")
        assert is_ready(pod), pod["status"]
        return f"{pod['status']['podIP']}:50061"

    kvd = {"directoryAddress": until("the directory", address, seconds=60)}
    pool.view.change(kvd=kvd, paused=False)
    pool.view.wait_settled(2, seconds=SLOW)
    first, second = pool.view.ready()
    assert first["spec"]["nodeName"] != second["spec"]["nodeName"]
    seeds = range(1, 5)
    for seed in seeds:
        assert pool.right(first, seed).cached_tokens == 0
    answers = [pool.right(second, seed) for seed in seeds]
    assert [answer.cached_tokens for answer in answers] == [HIT] * len(seeds)
    assert pool.metric(second, 'kv_swapin_bytes_total{src="fs"}') > 0
    pulled = pool.metric(second, "kv_swa_pull_seconds_count")
    assert pulled > 0, "no snapshot came from the peer"
    figure(f"{len(seeds)} hits on the other node, {pulled:.0f} snapshots pulled from its peer")
