"""The API server as the operator uses it: the Cluster protocol, and the one real client.

Objects are raw JSON, since typed models cost twice the time and memory (k8s.md 5). The client takes address, TLS and
credentials (with their refresh) from the official `kubernetes` package and sends our own requests through its session.
The trap: this module never retries; the work queue does, so that a flapping API server meets one back-off and not two.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlencode

import aiohttp
import msgspec
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.rest import RESTClientObject
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from prefill_operator.errors import (
    ClusterError,
    ClusterUnavailable,
    ObjectExists,
    ObjectMissing,
    QuotaDenied,
    RequestRejected,
    WriteConflict,
)
from prefill_operator.names import FIELD_MANAGER
from prefill_operator.resources import Json, Resource
from prefill_plan.errors import ConfigError

MAX_CONNECTIONS = 16
REQUEST_SECONDS = 30.0
PAGE_ITEMS = 250
"""Objects per page of a LIST: 250 pods are about 2 MB, so that a large cluster is never in memory as one answer."""

_DEFAULT_KUBECONFIG = "~/.kube/config"
_JSON = "application/json"
_MERGE = "application/merge-patch+json"
_STRATEGIC = "application/strategic-merge-patch+json"
_APPLY = "application/apply-patch+yaml"
_METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

RequestHook = Callable[[str, str, int], None]
"""Called after each request with verb, resource and HTTP code (0 = no answer)."""


class Cluster(Protocol):
    """Reads and writes, each one request (a LIST: one per page).

    All raise ClusterUnavailable when there is no usable answer, and RequestRejected when the request is not allowed.
    Writes that name a `uid` act on that object only and raise WriteConflict if another has taken its name.
    """

    def pages(
        self, resource: Resource, *, namespace: str = "", selector: str = "", metadata_only: bool = False
    ) -> AsyncIterator[list[Json]]:
        """All objects, page by page. No namespace: of the whole cluster. selector: labels. metadata_only: of each object its
        name, namespace, uid and resourceVersion."""

    async def find(self, resource: Resource, *, namespace: str, name: str) -> Json | None:
        """The object; None if there is none."""

    async def create(self, resource: Resource, body: Json) -> Json:
        """POST. Raises ObjectExists, QuotaDenied."""

    async def replace(self, resource: Resource, body: Json) -> Json:
        """PUT; the body's resourceVersion must be current, else WriteConflict."""

    async def apply(self, resource: Resource, body: Json, *, subresource: str = "") -> Json:
        """Server-side apply as our field manager, by force. A metadata.uid in the body is a precondition."""

    async def merge(self, resource: Resource, patch: Json, *, namespace: str, name: str, uid: str) -> Json:
        """Merge patch. Raises ObjectMissing, WriteConflict."""

    async def set_condition(self, resource: Resource, condition: Json, *, namespace: str, name: str, uid: str) -> Json:
        """Sets one of a built-in object's status.conditions, by its type. Raises ObjectMissing, WriteConflict."""

    async def delete(
        self, resource: Resource, *, namespace: str, name: str, uid: str, grace_seconds: int | None = None
    ) -> Json:
        """DELETE with UID precondition; the answer is the object on its way out, or a Status.

        Raises ObjectMissing, WriteConflict.
        """

    async def serves(self, resource: Resource) -> bool:
        """Whether the API server knows the resource."""


class _Status(msgspec.Struct):
    """The part of meta/v1 Status that we read."""

    reason: str = ""
    message: str = ""
    details: dict[str, Any] | None = None


class _Identity(msgspec.Struct, rename="camel"):
    name: str
    uid: str
    resource_version: str
    namespace: str = ""


class _Item(msgspec.Struct):
    metadata: _Identity


class _ListMetadata(msgspec.Struct):
    next_page: str = msgspec.field(name="continue", default="")


class _MetadataList(msgspec.Struct):
    """The part of meta/v1 PartialObjectMetadataList that we read: managedFields are most of it, and cost most to parse."""

    metadata: _ListMetadata = msgspec.field(default_factory=_ListMetadata)
    items: list[_Item] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """What another client (kopf's) needs to reach the same API server. Paths and token may be ""."""

    server: str
    ca_path: str
    certificate_path: str
    key_path: str
    is_verified: bool
    token: str


class KubernetesCluster:
    """The real client. Build it with `connect` inside the loop that uses it; `close` it there."""

    def __init__(
        self, configuration: Configuration, *, on_request: RequestHook, request_seconds: float = REQUEST_SECONDS
    ) -> None:
        self._configuration = configuration
        self._rest = RESTClientObject(configuration)
        self._on_request = on_request
        self._timeout = aiohttp.ClientTimeout(total=request_seconds)

    @classmethod
    async def connect(
        cls, kubeconfig: str, *, on_request: RequestHook, request_seconds: float = REQUEST_SECONDS
    ) -> "KubernetesCluster":
        """With this kubeconfig, or else the pod's service account, or else kubectl's default file. Sends nothing yet.

        Raises:
            ConfigError: none of them can be used.
        """
        configuration = Configuration()
        if kubeconfig and not any(Path(name).is_file() for name in kubeconfig.split(":")):
            raise ConfigError(f"no way to reach an API server: kubeconfig {kubeconfig} does not exist")
        try:
            if kubeconfig:
                await load_kube_config(  # type: ignore[no-untyped-call]
                    config_file=kubeconfig, client_configuration=configuration, persist_config=False
                )
            else:
                await _load_default(configuration)
        except (ConfigException, OSError) as error:
            raise ConfigError(f"no way to reach an API server: {error}") from error
        configuration.connection_pool_maxsize = MAX_CONNECTIONS
        configuration.retries = None
        # With trust_env, aiohttp looks for a netrc file in a thread, twice per request.
        configuration.client_session_kwargs = {"trust_env": False}
        return cls(configuration, on_request=on_request, request_seconds=request_seconds)

    async def close(self) -> None:
        await self._rest.close()

    async def connection(self) -> Connection:
        """Current address and credentials."""
        configuration = self._configuration
        return Connection(
            server=configuration.host,
            ca_path=configuration.ssl_ca_cert or "",
            certificate_path=configuration.cert_file or "",
            key_path=configuration.key_file or "",
            is_verified=bool(configuration.verify_ssl),
            token=(await self._authorization()).partition(" ")[2].strip(),
        )

    async def pages(
        self, resource: Resource, *, namespace: str = "", selector: str = "", metadata_only: bool = False
    ) -> AsyncIterator[list[Json]]:
        query = {"limit": str(PAGE_ITEMS)} | ({"labelSelector": selector} if selector else {})
        accept = f"{_METADATA_LIST},{_JSON}" if metadata_only else _JSON
        path = resource.path(namespace=namespace)
        while True:
            struct = _MetadataList if metadata_only else None
            answer = await self._request("GET", path, "list", resource, query=query, accept=accept, struct=struct)
            yield answer.get("items") or []
            query["continue"] = answer.get("metadata", {}).get("continue", "")
            if not query["continue"]:
                return

    async def find(self, resource: Resource, *, namespace: str, name: str) -> Json | None:
        with suppress(ObjectMissing):
            return await self._request("GET", resource.path(namespace=namespace, name=name), "get", resource)
        return None

    async def create(self, resource: Resource, body: Json) -> Json:
        path = resource.path(namespace=_namespace(body))
        return await self._request("POST", path, "create", resource, body=body, query=_manager())

    async def replace(self, resource: Resource, body: Json) -> Json:
        path = resource.path(namespace=_namespace(body), name=body["metadata"]["name"])
        return await self._request("PUT", path, "update", resource, body=body, query=_manager())

    async def apply(self, resource: Resource, body: Json, *, subresource: str = "") -> Json:
        path = resource.path(namespace=_namespace(body), name=body["metadata"]["name"], subresource=subresource)
        query = {**_manager(), "force": "true"}
        return await self._request("PATCH", path, "apply", resource, body=body, query=query, content_type=_APPLY)

    async def merge(self, resource: Resource, patch: Json, *, namespace: str, name: str, uid: str) -> Json:
        path = resource.path(namespace=namespace, name=name)
        body = {**patch, "metadata": {**patch.get("metadata", {}), "uid": uid}}
        return await self._request("PATCH", path, "patch", resource, body=body, query=_manager(), content_type=_MERGE)

    async def set_condition(self, resource: Resource, condition: Json, *, namespace: str, name: str, uid: str) -> Json:
        # A plain merge patch would replace the whole list, and with it what the kubelet wrote meanwhile.
        path = resource.path(namespace=namespace, name=name, subresource="status")
        body = {"metadata": {"uid": uid}, "status": {"conditions": [condition]}}
        return await self._request(
            "PATCH", path, "patch", resource, body=body, query=_manager(), content_type=_STRATEGIC
        )

    async def delete(
        self, resource: Resource, *, namespace: str, name: str, uid: str, grace_seconds: int | None = None
    ) -> Json:
        options: Json = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        path = resource.path(namespace=namespace, name=name)
        return await self._request("DELETE", path, "delete", resource, body=options)

    async def serves(self, resource: Resource) -> bool:
        try:
            answer = await self._request("GET", resource.group_path, "discover", resource)
        except ObjectMissing:
            return False
        return any(item.get("name") == resource.plural for item in answer.get("resources", []))

    async def _request(
        self,
        method: str,
        path: str,
        verb: str,
        resource: Resource,
        *,
        body: Json | None = None,
        query: Mapping[str, str] | None = None,
        content_type: str = _JSON,
        accept: str = _JSON,
        struct: type[msgspec.Struct] | None = None,
    ) -> Json:
        url = self._configuration.host + path + ("?" + urlencode(query) if query else "")
        what = f"{verb} {path}"
        headers = {"Accept": accept, "Content-Type": content_type, "User-Agent": FIELD_MANAGER}
        code, text = 0, b""
        try:
            headers["Authorization"] = await self._authorization()
            answer = await self._rest.request(  # type: ignore[no-untyped-call]
                method, url, headers={k: v for k, v in headers.items() if v}, body=body, _request_timeout=self._timeout
            )
            text = await answer.read()
            code, retry_after = answer.status, answer.headers.get("Retry-After", "")
        except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError, ConfigException, OSError) as error:
            raise ClusterUnavailable(f"{what}: no answer: {error or type(error).__name__}", status=0) from error
        finally:
            self._on_request(verb, resource.plural, code)
        if code >= 400:
            raise translate_error(what, verb, code, text, retry_after=retry_after)
        return _parsed(text, what, struct)

    async def _authorization(self) -> str:
        """The bearer token, read again when its file changed; "" with client certificates."""
        settings = await self._configuration.auth_settings()
        bearer = settings.get("BearerToken")
        return str(bearer["value"]) if bearer and bearer.get("value") else ""


async def _load_default(configuration: Configuration) -> None:
    if Path("/var/run/secrets/kubernetes.io/serviceaccount/token").exists():
        load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    elif not Path(_DEFAULT_KUBECONFIG).expanduser().is_file():
        text = f"no service account is mounted and {_DEFAULT_KUBECONFIG} does not exist; set KUBECONFIG"
        raise ConfigException(text)
    else:
        await load_kube_config(client_configuration=configuration, persist_config=False)  # type: ignore[no-untyped-call]


def _namespace(body: Json) -> str:
    return str(body["metadata"].get("namespace", ""))


def _manager() -> dict[str, str]:
    return {"fieldManager": FIELD_MANAGER}


def _parsed(text: bytes, what: str, struct: type[msgspec.Struct] | None) -> Json:
    """struct: what is wanted of the answer; None = all of it."""
    try:
        answer = msgspec.json.decode(text) if struct is None else msgspec.json.decode(text, type=struct)
    except msgspec.DecodeError as error:
        raise ClusterUnavailable(f"{what}: the answer cannot be read: {error}", status=0) from error
    answer = answer if struct is None else msgspec.to_builtins(answer)
    if not isinstance(answer, dict):
        raise ClusterUnavailable(f"{what}: the answer is no object", status=0)
    return answer


def translate_error(what: str, verb: str, code: int, text: bytes, *, retry_after: str = "") -> ClusterError:
    """The answer of the API server as one of our errors; `what` opens its message."""
    try:
        status = msgspec.json.decode(text, type=_Status)
    except msgspec.DecodeError:
        status = _Status(message=text[:300].decode(errors="replace"))
    message = f"{what}: {code} {status.message}"
    reason = status.reason
    if code == 404:
        return ObjectMissing(message, status=code, reason=reason)
    if code == 409 and (reason == "AlreadyExists" or (verb == "create" and not reason)):
        return ObjectExists(message, status=code, reason=reason)
    if code == 409 or (code == 422 and "metadata.uid" in status.message):
        # A patch that names another object's uid tries to change an immutable field.
        return WriteConflict(message, status=code, reason=reason)
    if code == 403 and "exceeded quota" in status.message:
        return QuotaDenied(message, status=code, reason=reason)
    if code in (401, 408, 410, 429) or code >= 500:
        seconds = _seconds(retry_after) or _seconds((status.details or {}).get("retryAfterSeconds", ""))
        return ClusterUnavailable(message, status=code, reason=reason, retry_after_seconds=seconds)
    return RequestRejected(message, status=code, reason=reason)


def _seconds(text: object) -> float:
    try:
        return max(0.0, float(str(text)))
    except ValueError:
        return 0.0
