"""The API server as plain JSON over HTTP: what the cases read and write where a user's kubectl is not the point."""

import json
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import urllib3
import yaml

Json = dict[str, Any]

_GROUPS = {
    "/api/v1": "configmaps events namespaces nodes persistentvolumes pods resourcequotas secrets serviceaccounts services",
    "/apis/apps/v1": "deployments replicasets statefulsets",
    "/apis/apiextensions.k8s.io/v1": "customresourcedefinitions",
    "/apis/apiregistration.k8s.io/v1": "apiservices",
    "/apis/autoscaling/v2": "horizontalpodautoscalers",
    "/apis/coordination.k8s.io/v1": "leases",
    "/apis/discovery.k8s.io/v1": "endpointslices",
    "/apis/keda.sh/v1alpha1": "scaledobjects",
    "/apis/leaderworkerset.x-k8s.io/v1": "leaderworkersets",
    "/apis/policy/v1": "poddisruptionbudgets",
    "/apis/prefill.dev/v1alpha1": "prefillpools vepools",
    "/apis/rbac.authorization.k8s.io/v1": "clusterroles clusterrolebindings roles rolebindings",
    "/apis/scheduling.k8s.io/v1": "priorityclasses",
}
PREFIX = {resource: prefix for prefix, names in _GROUPS.items() for resource in names.split()}
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"


class ApiError(Exception):
    """An answer of 400 or more. `status` is the HTTP code, `message` the API server's sentence."""

    def __init__(self, status: int, body: str, request: str) -> None:
        try:
            self.message: str = json.loads(body)["message"]
        except (ValueError, KeyError, TypeError):
            self.message = body
        self.status = status
        super().__init__(f"{request}: {status} {self.message}")


class Api:
    """One identity's view of one API server. Paths are built from resource names; every call is bounded by a timeout.

    Connections are kept, so that the harness costs the API server as little as it can. A server that is away is an OSError.
    """

    def __init__(self, server: str, token: str, ca: Path) -> None:
        self.server, self._token, self._ca = server, token, ca
        self._pool = urllib3.PoolManager(maxsize=16, ca_certs=str(ca), retries=False)

    @classmethod
    def from_kubeconfig(cls, path: Path) -> "Api":
        config = yaml.safe_load(path.read_text())
        cluster = config["clusters"][0]["cluster"]
        return cls(cluster["server"], config["users"][0]["user"]["token"], Path(cluster["certificate-authority"]))

    def as_user(self, token: str) -> "Api":
        return Api(self.server, token, self._ca)

    def write_kubeconfig(self, path: Path, *, namespace: str = "default") -> Path:
        """A kubeconfig with this identity, for a process under test."""
        cluster = {"server": self.server, "certificate-authority": str(self._ca)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "bed", "cluster": cluster}],
            "users": [{"name": "me", "user": {"token": self._token}}],
            "contexts": [{"name": "bed", "context": {"cluster": "bed", "user": "me", "namespace": namespace}}],
            "current-context": "bed",
        }
        path.write_text(yaml.safe_dump(config))
        return path

    def request(
        self, method: str, path: str, body: Any = None, *, content_type: str = "application/json", timeout: float = 30.0
    ) -> Any:
        """One request. JSON answers are parsed, others (logs, metrics) returned as text. Raises ApiError on 400 and more."""
        data = None if body is None else (body if isinstance(body, bytes) else json.dumps(body).encode())
        headers = {"Authorization": f"Bearer {self._token}", "Accept": "application/json", "Content-Type": content_type}
        try:
            answer = self._pool.request(method, self.server + path, body=data, headers=headers, timeout=timeout)
        except urllib3.exceptions.HTTPError as error:
            raise ConnectionError(f"{method} {path}: {error}") from error
        text = answer.data.decode()
        if answer.status >= 400:
            raise ApiError(answer.status, text, f"{method} {path}")
        return json.loads(text) if "json" in answer.headers.get("Content-Type", "") else text

    def watch(
        self, resource: str, namespace: str, labels: str = "", *, seconds: int = 600
    ) -> Iterator[tuple[str, Json]]:
        """The objects that are there as ("ADDED", object), then each change, until the server ends the stream."""
        listed = self.request("GET", self.path(resource, namespace, labelSelector=labels))
        yield from (("ADDED", item) for item in listed["items"])
        query = {"labelSelector": labels, "watch": "1", "timeoutSeconds": str(seconds)}
        query["resourceVersion"] = listed["metadata"]["resourceVersion"]
        headers = {"Authorization": f"Bearer {self._token}"}
        url = self.server + self.path(resource, namespace, **query)
        answer = self._pool.request("GET", url, headers=headers, timeout=seconds + 30, preload_content=False)
        try:
            for line in answer:
                event = json.loads(line)
                yield event["type"], event["object"]
        except urllib3.exceptions.HTTPError as error:
            raise ConnectionError(f"watch of {resource}: {error}") from error
        finally:
            answer.close()

    def path(self, resource: str, namespace: str | None, name: str | None = None, **query: str) -> str:
        """`resource` may carry a subresource: "pods/eviction"."""
        kind, _, sub = resource.partition("/")
        path = PREFIX[kind] + (f"/namespaces/{namespace}" if namespace else "") + f"/{kind}"
        path += (f"/{name}" if name else "") + (f"/{sub}" if sub else "")
        return path + ("?" + urllib.parse.urlencode(query) if query else "")

    def get(self, resource: str, namespace: str | None, name: str) -> Json:
        found: Json = self.request("GET", self.path(resource, namespace, name))
        return found

    def find(self, resource: str, namespace: str | None, name: str) -> Json | None:
        """As get, but None where there is no such object."""
        try:
            return self.get(resource, namespace, name)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def list(self, resource: str, namespace: str | None = None, *, labels: str = "", fields: str = "") -> list[Json]:
        query = {key: text for key, text in (("labelSelector", labels), ("fieldSelector", fields)) if text}
        items: list[Json] = self.request("GET", self.path(resource, namespace, **query))["items"]
        return items

    def create(
        self, resource: str, namespace: str | None, body: Json, *, name: str | None = None, **query: str
    ) -> Json:
        made: Json = self.request("POST", self.path(resource, namespace, name, **query), body)
        return made

    def patch(
        self, resource: str, namespace: str | None, name: str, body: Any, *, content_type: str = MERGE, **query: str
    ) -> Json:
        changed: Json = self.request(
            "PATCH", self.path(resource, namespace, name, **query), body, content_type=content_type
        )
        return changed

    def delete(self, resource: str, namespace: str | None, name: str, **options: Any) -> None:
        """Deletes, with DeleteOptions as keywords (gracePeriodSeconds=0). A missing object is fine."""
        try:
            self.request("DELETE", self.path(resource, namespace, name), options or None)
        except ApiError as error:
            if error.status != 404:
                raise

    def logs(self, namespace: str, pod: str, container: str, *, previous: bool = False, lines: int = 80) -> str:
        query = {"container": container, "tailLines": str(lines), "previous": str(previous).lower()}
        text: Any = self.request("GET", self.path("pods/log", namespace, pod, **query))
        return text if isinstance(text, str) else json.dumps(text)


def conditions(obj: Mapping[str, Any]) -> dict[str, Json]:
    """Conditions of an object by type."""
    return {condition["type"]: condition for condition in obj.get("status", {}).get("conditions", [])}


def is_ready(pod: Mapping[str, Any]) -> bool:
    """A pod that takes traffic: Ready and not on its way out."""
    return conditions(pod).get("Ready", {}).get("status") == "True" and "deletionTimestamp" not in pod["metadata"]


def documents(path: Path) -> Iterator[Json]:
    """The objects of a YAML file."""
    yield from (document for document in yaml.safe_load_all(path.read_text()) if document)
