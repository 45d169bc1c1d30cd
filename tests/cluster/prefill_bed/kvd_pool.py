"""A pool whose pods run kvd, as its user sees it: prompts through the decode probe, kvd's state and figures, its kill."""

import asyncio
import json
import os
import random
import re
import signal
import urllib.request
import uuid
from pathlib import Path

import msgspec

from prefill_bed.api import Json
from prefill_bed.engine_pod import GRPC_PORT, run_engine
from prefill_bed.pools import PoolView
from prefill_engine.client import PrefillClient, PrefillOptions
from prefill_operator.ports import KVD_METRICS_PORT

BLOCK, PROMPT, FILLER = 128, 600, 3900
"""Tokens. Two fillers push everything else out of an engine's own pool of 4,096."""
HIT = PROMPT // BLOCK * BLOCK
_FILL = PrefillOptions(handoff=False, store="skip")
_FILL_SECONDS = 400


class Prefill(msgspec.Struct):
    """What came of one prompt. failure: "" = computed, taken over and found right by the probe."""

    failure: str
    cached_tokens: int = 0
    computed_tokens: int = 0


class KvdPool:
    """A pool with kvd; prompts are named by a seed."""

    def __init__(self, view: PoolView, checkpoint: Path, work: Path) -> None:
        self.view, self._checkpoint, self._work = view, checkpoint, work

    def pod(self) -> Json:
        ready = self.view.ready()
        assert ready, "no pod is Ready"
        return ready[0]

    def named(self, name: str) -> Json:
        return self.view.cluster.api.get("pods", self.view.namespace, name)

    def prefill(self, pod: Json, seed: int, *, tokens: int = PROMPT) -> Prefill:
        ids = self._work / "tokens.json"
        ids.write_text(json.dumps([5 + (7 * index + 31 * seed * (index % 11 + 1)) % 400 for index in range(tokens)]))
        endpoint = f"{pod['status']['podIP']}:{GRPC_PORT}"
        probe = ("--handoff", "pull", "--probe", "--model", str(self._checkpoint), "--json")
        done = run_engine("request", "--endpoint", endpoint, "--token-ids", str(ids), *probe)
        try:
            report = json.loads(done.stdout)
        except json.JSONDecodeError:
            return Prefill(failure=done.stdout[-500:] + done.stderr[-1500:] or "no answer")
        usages = [event["body"]["usage"] for event in report["attempt"]["events"] if "usage" in event["body"]]
        if not report["ok"] or not usages:
            return Prefill(failure=report["error"] or "no usage")
        return Prefill(
            failure="", cached_tokens=usages[0]["cached_tokens"], computed_tokens=usages[0]["computed_tokens"]
        )

    def right(self, pod: Json, seed: int, *, tokens: int = PROMPT) -> Prefill:
        answer = self.prefill(pod, seed, tokens=tokens)
        assert not answer.failure, answer.failure
        return answer

    def forget(self, pod: Json) -> None:
        """Pushes everything out of the engine's own pool, so that hits can only come through kvd."""

        async def fill() -> None:
            async with PrefillClient(f"{pod['status']['podIP']}:{GRPC_PORT}") as client:
                for _ in range(2):
                    prompt = random.choices(range(5, 400), k=FILLER)
                    await client.prefill(
                        prompt, _FILL, request_id=uuid.uuid4().hex, timeout_seconds=_FILL_SECONDS
                    ).finish()

        asyncio.run(fill())

    def metric(self, pod: Json, name: str) -> float:
        """Of kvd; 0 where the series is absent."""
        url = f"http://{pod['status']['podIP']}:{KVD_METRICS_PORT}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def kvd(self, pod_name: str) -> Json:
        """Status of the sidecar."""
        statuses = self.named(pod_name)["status"]["initContainerStatuses"]
        return next(one for one in statuses if one["name"] == "kvd")

    def kill_kvd(self, pod: Json) -> None:
        processes = self.view.cluster.sidecar_processes(pod, "kvd")
        assert processes, "no kvd process found"
        os.kill(processes[0], signal.SIGKILL)

    def log(self, pod: Json) -> str:
        return self.view.cluster.api.logs(self.view.namespace, pod["metadata"]["name"], "kvd", lines=2000)
