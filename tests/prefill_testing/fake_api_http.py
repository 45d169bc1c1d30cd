"""A FakeApi over plain HTTP, watches included: what the real client and kopf talk to in tests of HTTP faults."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import yaml
from aiohttp import web

from prefill_operator.resources import Json, Resource
from prefill_testing.fake_api import FakeApi, has_labels, parse_path


class FakeApiServer:
    """One server on a free port of this machine."""

    def __init__(self, api: FakeApi) -> None:
        self.api = api
        self.port = 0
        self.num_watches = 0
        """Watch requests so far."""
        self.is_mute = False
        """Watches stay open and tell nothing: the zombie watch."""
        self._drop = asyncio.Event()
        self._changes = asyncio.Condition()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def drop_watches(self) -> None:
        """Breaks every open watch."""
        self._drop.set()
        self._drop = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("watch") == "true":
            return await self._watch(request)
        body = await request.json() if request.can_read_body else None
        hang = next((fault.hang_seconds for fault in self.api.faults if fault.times > 0), 0.0)
        try:
            status, answer = self.api.handle(request.method, request.path, request.query, body, request.content_type)
        except ConnectionError:
            _abort(request)
            return web.Response()
        await asyncio.sleep(hang)
        headers = {}
        if seconds := answer.get("details", {}).get("retryAfterSeconds") if answer.get("kind") == "Status" else 0:
            headers["Retry-After"] = str(seconds)
        if "PartialObjectMetadataList" in request.headers.get("Accept", "") and "items" in answer:
            answer["items"] = [{"metadata": item["metadata"]} for item in answer["items"]]
        return web.json_response(answer, status=status, headers=headers)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        place = parse_path(request.path)
        assert place is not None
        self.num_watches += 1
        resource, namespace = place[0], place[1]
        seen = int(request.query.get("resourceVersion") or 0)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if seen < self.api.oldest_version:
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            await response.write(_line("ERROR", gone))
            return response
        drop = self._drop
        while not drop.is_set():
            if not self.is_mute:
                for version, kind, body in self._events_since(seen, resource, namespace, request.query):
                    seen = version
                    await response.write(_line(kind, body))
            changed = self.api.changed
            waits = [asyncio.ensure_future(changed.wait()), asyncio.ensure_future(drop.wait())]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED, timeout=0.2)
            for wait in waits:
                wait.cancel()
            changed.clear()
        _abort(request)
        return response

    def _events_since(
        self, seen: int, resource: Resource, namespace: str, query: Mapping[str, str]
    ) -> list[tuple[int, str, Json]]:
        wanted = dict(part.split("=", 1) for part in query.get("labelSelector", "").split(",") if part)
        return [
            (version, kind, body)
            for version, about, kind, body in self.api.history
            if version > seen
            and about == resource
            and namespace in ("", body["metadata"].get("namespace"))
            and has_labels(body, wanted)
        ]


@asynccontextmanager
async def serve_fake_api(api: FakeApi) -> AsyncIterator[FakeApiServer]:
    """Runs while the block does."""
    server = FakeApiServer(api)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.port = int(runner.addresses[0][1])
    try:
        yield server
    finally:
        server.drop_watches()
        await runner.cleanup()


def write_kubeconfig(path: Path, url: str) -> Path:
    """A kubeconfig with a token for this server."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "fake", "cluster": {"server": url}}],
        "users": [{"name": "me", "user": {"token": "secret"}}],
        "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "me"}}],
        "current-context": "fake",
    }
    path.write_text(yaml.safe_dump(config))
    return path


def _line(kind: str, body: Json) -> bytes:
    return json.dumps({"type": kind, "object": body}).encode() + b"\n"


def _abort(request: web.Request) -> None:
    """Breaks the connection, if the other side has not."""
    if request.transport is not None:
        request.transport.abort()
