"""Layer 6: a VEPool whose pods really encode, beside a PE pod that asks them (CPU profile)."""

import json
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from prefill_bed.api import Json, is_ready
from prefill_bed.cluster import ROOT, Cluster
from prefill_bed.engine_pod import GRPC_PORT, IMAGE, SITE_PACKAGES, run_engine
from prefill_bed.installation import Release
from prefill_bed.pools import API_VERSION, PoolView, cpu_pool, expect

Figure = Callable[[str], None]
SLOW = 400
PICTURES = ROOT / "tests" / "golden" / "tiny_vision" / "images"
PLACEHOLDER = 500
"""Of the tiny checkpoint."""


def encoder_pool(checkpoint: Path) -> Json:
    """Two encoders on CPUs, third-party packages from this machine."""
    spec = {
        "replicas": 2,
        "model": {"name": "tiny", "revision": "r1", "source": {"hostPath": {"path": str(checkpoint)}}},
        "quota": {"spares": 0},
        "lifecycle": {"drainTimeoutSeconds": 15, "loadTimeoutSeconds": 300, "nodeLostGraceSeconds": 5},
        "encoder": {"image": IMAGE, "imagePullPolicy": "IfNotPresent", "device": "cpu", "cpu": "50m", "memory": "3Gi"},
        "podTemplate": {
            "spec": {
                "volumes": [{"name": "site", "hostPath": {"path": str(SITE_PACKAGES), "type": "Directory"}}],
                "containers": [
                    {
                        "name": "encoder",
                        "volumeMounts": [{"name": "site", "mountPath": "/opt/site", "readOnly": True}],
                    }
                ],
            }
        },
    }
    return {"apiVersion": API_VERSION, "kind": "VEPool", "metadata": {"name": "eyes"}, "spec": spec}


def asking_pool(checkpoint: Path) -> Json:
    """One engine that has its images encoded by the pool above."""
    settings = ("vision.mode=remote", 'vision.endpoints=["eyes-ve:50051"]', "vision.rows_bytes=67108864")
    arguments = [word for setting in settings for word in ("--set", setting)]
    return cpu_pool("tiny", checkpoint, replicas=1, quota={"redundancy": {"mode": "None"}}, engine={"args": arguments})


def ask(endpoint: str, checkpoint: Path, work: Path, picture: Path, *, seed: int) -> subprocess.CompletedProcess[str]:
    """A prompt with one image, the hand-off taken over by the decode probe."""
    ids = work / f"tokens-{seed}.json"
    text = [5 + (7 * index + 31 * seed) % 400 for index in range(200)]
    ids.write_text(json.dumps([*text[:90], PLACEHOLDER, *text[90:]]))
    words = ("--token-ids", str(ids), "--image", str(picture), "--model", str(checkpoint), "--probe")
    return run_engine("request", "--endpoint", endpoint, *words, seconds=300)


def test_images_while_an_encoder_is_killed(
    release: Release, new_namespace: Callable[[Cluster], str], checkpoint: Path, tmp_path: Path, figure: Figure
) -> None:
    """Encoders become Ready by their health; requests with images are answered, also while one encoder of two is deleted."""
    namespace = new_namespace(release.cluster)
    eyes = PoolView(release.cluster, namespace, "eyes", resource="vepools")
    view = PoolView(release.cluster, namespace, "tiny")
    begin = time.monotonic()
    eyes.create(encoder_pool(checkpoint))
    view.create(asking_pool(checkpoint))
    eyes.wait("two encoders", lambda: expect(len(eyes.ready()) == 2, eyes.status()), seconds=SLOW)
    eyes.wait_condition("Available", "True", seconds=SLOW)
    view.wait("an engine", lambda: expect(len(view.ready()) == 1, view.status()), seconds=SLOW)
    figure(f"two encoders and an engine Ready after {time.monotonic() - begin:.0f} s")

    endpoint = f"{view.ready()[0]['status']['podIP']}:{GRPC_PORT}"
    first = ask(endpoint, checkpoint, tmp_path, PICTURES / "pad_rows.png", seed=1)
    assert first.returncode == 0, first.stdout[-1500:] + first.stderr[-1500:]

    victim = eyes.ready()[0]["metadata"]["name"]
    answers: list[subprocess.CompletedProcess[str]] = []

    def send() -> None:
        for seed, name in enumerate(("identity", "tiny", "phone", "row"), start=2):
            answers.append(ask(endpoint, checkpoint, tmp_path, PICTURES / f"{name}.png", seed=seed))

    sender = threading.Thread(target=send)
    sender.start()
    release.cluster.kubectl("delete", "pod", victim, "-n", namespace, "--grace-period=0", "--force", "--wait=false")
    sender.join(timeout=900)
    assert [answer.returncode for answer in answers] == [0, 0, 0, 0], [answer.stderr[-500:] for answer in answers]

    def replaced() -> None:
        names = {pod["metadata"]["name"] for pod in eyes.pods() if is_ready(pod)}
        assert victim not in names, names
        assert len(names) == 2, eyes.names()

    eyes.wait("a replacement", replaced, seconds=SLOW)
    figure(f"4 images answered with an encoder deleted meanwhile, {len(answers)} probes right")
