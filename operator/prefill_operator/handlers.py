"""kopf as the source of events, and nothing else (k8s.md 5): five kinds of `on.event` that fill the cache and the queue.

kopf keeps the watches alive: list, watch, bookmarks, reconnects, 410. It keeps nothing on our objects: no finalizers, no
annotations, no change handlers, indexes, daemons or timers. Everything is registered in a registry of our own, so that no
global state is left behind. The trap: kopf says nothing about objects that vanished while a watch was down; `Resync` finds those.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Any

import kopf

from prefill_operator.cluster import Connection, KubernetesCluster
from prefill_operator.event_sink import EventSink
from prefill_operator.resources import Resource, selector_of

_WATCH_SECONDS = 300
_PAGE_ITEMS = 250
# Between two tries of a request; kopf's own grow to 21 s, in which the resync would call missed what is only late. About a minute
# in all, long after the Lease is lost.
_TRY_PAUSES = (1.0, 1.0, *(2.0,) * 30)


class _NoStorage(kopf.DiffBaseStorage):
    """kopf would copy every object to find differences that only change handlers use; that copy is half of its time."""

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:  # noqa: ARG002
        return None

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:  # noqa: ARG002
        return kopf.BodyEssence()

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Never called without change handlers."""


async def run_kopf(
    sink: EventSink,
    resources: Collection[Resource],
    cluster: KubernetesCluster,
    *,
    namespaces: Collection[str],
    identity: str,
    on_start: Callable[[], None],
) -> None:
    """Watches until cancelled; ends with an error if a watch cannot go on.

    Args:
        namespaces: those to watch; none = the whole cluster.
        identity: ours, as in the Lease. Left to itself kopf asks for the user's name, and a container's user may have none.
        on_start: called once kopf has installed its signal handlers, so that the caller's can be put back.
    """
    older = asyncio.all_tasks()
    tasks = await kopf.spawn_tasks(
        registry=build_registry(sink, resources, cluster),
        standalone=True,
        identity=identity,  # type: ignore[arg-type]  # a NewType of str that kopf does not export
        clusterwide=not namespaces,
        namespaces=list(namespaces),
    )
    on_start()
    await kopf.run_tasks(tasks, ignored=older)


def build_registry(
    sink: EventSink, resources: Collection[Resource], cluster: KubernetesCluster
) -> kopf.OperatorRegistry:
    """Handlers of all resources, in a registry of their own."""
    registry = kopf.OperatorRegistry()
    for resource in resources:
        _register(registry, sink, resource)

    @kopf.on.startup(registry=registry)
    async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure_kopf(settings, resources)

    @kopf.on.login(registry=registry)
    async def log_in(**_: Any) -> kopf.ConnectionInfo:
        return kopf_connection(await cluster.connection())

    return registry


def configure_kopf(settings: kopf.OperatorSettings, resources: Collection[Resource]) -> None:
    """The settings of k8s.md 5; scanning is off always (C35)."""
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.server_timeout = _WATCH_SECONDS
    settings.watching.chunk_size = _PAGE_ITEMS
    settings.networking.request_timeout = 30
    settings.networking.error_backoffs = _TRY_PAUSES
    settings.process.ultimate_exiting_timeout = 20
    settings.queueing.idle_timeout = 0.1  # an idle worker of kopf holds on to its last object
    settings.persistence.diffbase_storage = _NoStorage()
    for resource in resources:
        if selector := selector_of(resource):
            name = (resource.group, resource.version, resource.plural)
            settings.watching.label_selectors[name] = selector


def kopf_connection(connection: Connection) -> kopf.ConnectionInfo:
    """Our own way to the API server, so that kopf imports no client of its own. kopf asks again after a 401."""
    return kopf.ConnectionInfo(
        server=connection.server,
        ca_path=connection.ca_path or None,
        certificate_path=connection.certificate_path or None,
        private_key_path=connection.key_path or None,
        insecure=not connection.is_verified,
        token=connection.token or None,
    )


def _register(registry: kopf.OperatorRegistry, sink: EventSink, resource: Resource) -> None:
    @kopf.on.event(resource.group, resource.version, resource.plural, registry=registry, id=resource.plural)
    async def pass_on(event: Mapping[str, Any], **_: Any) -> None:
        sink.take(resource, event["type"], event["object"])
