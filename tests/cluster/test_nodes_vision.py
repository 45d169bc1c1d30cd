"""Layer 6: a VEPool whose pods really encode, beside PE pods that name it in their own spec (CPU profile)."""

import json
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from prefill_bed.api import is_ready
from prefill_bed.cluster import ROOT, Cluster
from prefill_bed.engine_pod import GRPC_PORT, run_engine
from prefill_bed.image_load import PicturePrompts
from prefill_bed.installation import Release
from prefill_bed.load import Load
from prefill_bed.pools import PoolView, ReadyWatch, cpu_encoder_pool, cpu_pool, expect

Figure = Callable[[str], None]
SLOW = 400
PICTURES = ROOT / "tests" / "golden" / "tiny_vision" / "images"
PLACEHOLDER = 500
"""Of the tiny checkpoint."""
TOKENS = 120
"""Of text in a prompt, beside two images of 50."""
IN_FLIGHT = 4
VISION = {"mode": "Remote", "vePoolRef": {"name": "eyes"}, "rowsPool": "64Mi", "imageSeconds": 120}


@pytest.fixture
def pools(
    release: Release, new_namespace: Callable[[Cluster], str], checkpoint: Path, figure: Figure
) -> tuple[PoolView, PoolView]:
    """Two encoders, and one engine that has its images encoded by them; the engine's pool is made first."""
    namespace = new_namespace(release.cluster)
    view, eyes = (
        PoolView(release.cluster, namespace, "tiny"),
        PoolView(release.cluster, namespace, "eyes", resource="vepools"),
    )
    begin = time.monotonic()
    quota = {"redundancy": {"mode": "None"}}
    view.create(cpu_pool("tiny", checkpoint, replicas=1, quota=quota, vision=VISION))
    missing = view.wait("the missing VEPool to be said", lambda: ready_message(view, "VEPool eyes does not exist"))
    assert missing
    eyes.create(cpu_encoder_pool("eyes", checkpoint))
    eyes.wait_settled(2, seconds=SLOW)
    view.wait("an engine", lambda: expect(len(view.ready()) == 1, view.status()), seconds=SLOW)
    view.wait("no complaint about the VEPool", lambda: expect("eyes" not in message(view), message(view)), seconds=60)
    figure(f"two encoders and an engine Ready after {time.monotonic() - begin:.0f} s")
    return view, eyes


def message(view: PoolView) -> str:
    return str(view.condition("Ready").get("message", ""))


def ready_message(view: PoolView, words: str) -> str:
    found = message(view)
    assert words in found, found
    return found


def ask(endpoint: str, checkpoint: Path, work: Path, picture: Path, *, seed: int) -> subprocess.CompletedProcess[str]:
    """A prompt with one image, the hand-off taken over by the decode probe."""
    ids = work / f"tokens-{seed}.json"
    text = [5 + (7 * index + 31 * seed) % 400 for index in range(200)]
    ids.write_text(json.dumps([*text[:90], PLACEHOLDER, *text[90:]]))
    words = ("--token-ids", str(ids), "--image", str(picture), "--model", str(checkpoint), "--probe")
    return run_engine("request", "--endpoint", endpoint, *words, seconds=300)


def test_images_while_an_encoder_is_killed(
    pools: tuple[PoolView, PoolView], checkpoint: Path, tmp_path: Path, figure: Figure
) -> None:
    """A PE pod answers prompts with images through two VE pods, every probe right, while one of them is deleted."""
    view, eyes = pools
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
    eyes.cluster.kubectl("delete", "pod", victim, "-n", eyes.namespace, "--grace-period=0", "--force", "--wait=false")
    sender.join(timeout=900)
    assert [answer.returncode for answer in answers] == [0, 0, 0, 0], [answer.stderr[-500:] for answer in answers]

    def replaced() -> None:
        names = {pod["metadata"]["name"] for pod in eyes.pods() if is_ready(pod)}
        assert victim not in names, names
        assert len(names) == 2, eyes.names()

    eyes.wait("a replacement", replaced, seconds=SLOW)
    figure(f"4 images answered with an encoder deleted meanwhile, {len(answers)} probes right")


def test_images_while_encoders_are_drained(pools: tuple[PoolView, PoolView], checkpoint: Path, figure: Figure) -> None:
    """Prompts with images through a PE while VEs are drained by a scale-down and by `kubectl drain`: each one is answered.

    Never is there no ready VE.
    """
    view, eyes = pools
    with Load(view, PicturePrompts(checkpoint, TOKENS)) as load, ReadyWatch(eyes) as watch:

        def answered(more: int) -> None:
            goal = load.outcome.completed + more
            eyes.wait("answers", lambda: expect(load.outcome.completed >= goal, load.outcome), seconds=SLOW)

        load.keep(IN_FLIGHT)
        answered(10)
        begin = time.monotonic()
        eyes.change(replicas=1)
        eyes.wait_settled(1, seconds=SLOW)
        figure(f"scaled down to one encoder in {time.monotonic() - begin:.0f} s")
        answered(10)
        eyes.change(replicas=2)
        eyes.wait_settled(2, seconds=SLOW)
        answered(10)
        # Not the engine's: it would be drained as well, and send its prompts back. A case before may have left a third node.
        (engine,) = {pod["spec"]["nodeName"] for pod in view.live()}
        victims = {pod["spec"]["nodeName"] for pod in eyes.live()} - {engine}
        assert victims, "both encoders are beside the engine"
        victim = min(victims)
        begin = time.monotonic()
        try:
            eyes.cluster.kubectl(
                "drain", victim, f"--pod-selector=prefill.dev/pool={eyes.name}", "--delete-emptydir-data", "--force",
                f"--timeout={SLOW}s",
            )  # fmt: skip
            figure(f"node drained in {time.monotonic() - begin:.0f} s")
            eyes.wait_settled(2, seconds=SLOW)
            assert victim not in {pod["spec"]["nodeName"] for pod in eyes.live()}
            answered(10)
        finally:
            eyes.cluster.kubectl("uncordon", victim)
        assert watch.lowest >= 1
    outcome = load.outcome
    figure(f"{outcome.completed} prompts with {PicturePrompts.IMAGES} images each answered, none sent back")
    assert not outcome.lost, outcome.lost
