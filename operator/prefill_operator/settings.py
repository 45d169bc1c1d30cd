"""OperatorSettings: what an installation decides once for all pools. The only reader of the environment.

Order: a YAML file, then `--set part.field=value`, then the identity of this process from the environment. Keys are camelCase,
as in the chart's values. Times that no user of a pool sets live here, and tests shorten them (C40).
"""

import math
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from prefill_operator.model import OperatorTimes
from prefill_plan.errors import ConfigError

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTimes:
    """Times of the leader's Lease (k8s.md 4.11). Take-over after a crash takes up to duration + retry."""

    duration_seconds: float = 15.0
    """Without a renewal for this long, others may take the Lease."""
    renew_deadline_seconds: float = 10.0
    """Without a renewal for this long, the leader stops writing and ends. Below the duration, or two could write."""
    retry_seconds: float = 2.0
    """Pause between two renewals, or two looks at somebody else's Lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSignals:
    """How nodes announce trouble. All are names that the cluster's own agents use."""

    maintenance_taints: tuple[str, ...] = ()
    """Taint keys that announce the end of a node, e.g. cloud.google.com/impending-node-termination."""
    fault_taints: tuple[str, ...] = ("prefill.dev/gpu-fault",)
    """Taint keys that say a GPU of the node is faulty."""
    fault_conditions: tuple[str, ...] = ("GPUUnhealthy", "GpuXidError")
    """Node condition types that are True while a GPU is faulty, as node health agents set them."""
    fault_annotations: tuple[str, ...] = ("prefill.dev/gpu-fault", "prefill.dev/xid")
    """Node annotations that hold the fault's text; empty or absent = no fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecuritySettings:
    """What users of pools may ask for (k8s.md 4.12)."""

    allowed_host_path_prefixes: tuple[str, ...] = ()
    """hostPath sources must lie below one of these; none = hostPath is refused."""
    allow_privileged_features: bool = False
    """hostNetwork, Shared mounts and privileged containers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RbacParts:
    """Optional parts of the rule list; the chart's values under `rbac`."""

    nodes: bool = True
    """Read nodes (cluster scope). Without it, rules about nodes are off and the status says so (C35)."""
    autoscaling: bool = True
    """HorizontalPodAutoscalers."""
    keda: bool = False
    """ScaledObjects of keda.sh."""
    prometheus_operator: bool = False
    """PodMonitors of monitoring.coreos.com."""
    network_policies: bool = False
    """NetworkPolicies of networking.k8s.io."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    """Defaults are those of the chart."""

    identity: str = "local"
    """Holder name in the Lease: the pod's name, or host name and process id."""
    namespace: str = "default"
    """Where this operator runs and keeps its Lease."""
    namespaces: tuple[str, ...] = ()
    """Namespaces it serves; none = the whole cluster."""
    kubeconfig: str = ""
    """Path; "" = the pod's service account, else kubectl's default file."""
    log_level: str = "INFO"
    host: str = "0.0.0.0"
    port: int = 8080
    """/metrics, /healthz and /readyz; 0 = any free port, -1 = none."""
    workers: int = 8
    """Pools reconciled at the same time."""
    resync_seconds: float = 60.0
    """Pause between two comparisons of the cache with the API server; plus up to 20 % jitter."""
    status_seconds: float = 2.0
    """Least pause between two status writes of one pool."""
    readiness_gate: bool = False
    """Pods carry the gate prefill.dev/accepting. Off for installs with one replica: nobody would open it while it is down."""
    prometheus_address: str = ""
    """Prometheus that KEDA shall ask, e.g. http://prometheus.monitoring:9090 (C30)."""
    lease: LeaseTimes = LeaseTimes()
    signals: NodeSignals = NodeSignals()
    security: SecuritySettings = SecuritySettings()
    rbac: RbacParts = RbacParts()
    times: OperatorTimes = field(default_factory=OperatorTimes)


def load_settings(
    path: Path | None, overrides: Sequence[str] = (), *, environ: Mapping[str, str] = os.environ
) -> OperatorSettings:
    """File, then overrides, then the environment for identity, namespace and kubeconfig where they are not set.

    An override's value is read as YAML: `lease.durationSeconds=4`, `namespaces=[a, b]`.

    Raises:
        ConfigError: unreadable file, malformed override, unknown key, wrong type, or times that contradict each other.
    """
    tree: dict[str, Any] = _read(path) if path is not None else {}
    for override in overrides:
        _apply(tree, override)
    source = str(path) if path is not None else "--set"
    plain = _checked_keys(tree, OperatorSettings, source)
    for name, value in _environment(environ).items():
        plain.setdefault(name, value)
    try:
        settings = msgspec.convert(plain, OperatorSettings)
    except msgspec.ValidationError as error:
        text, _, place = str(error).replace("`", "").partition(" - at $.")
        raise ConfigError(f"{source}: {_camel(place)}: {text[:1].lower()}{text[1:]}") from error
    _check(settings, source)
    return settings


def _check(settings: OperatorSettings, source: str) -> None:
    """What no type says: an operator must not start and then do nothing, or end in the middle of a pass."""
    lease, level = settings.lease, settings.log_level
    if level not in LOG_LEVELS:
        raise ConfigError(f"{source}: logLevel is {level}: expected one of {', '.join(LOG_LEVELS)}")
    if not -1 <= settings.port <= 65_535:
        raise ConfigError(f"{source}: port is {settings.port}: expected 0 to 65535, or -1 for none")
    if settings.workers < 1:
        raise ConfigError(f"{source}: workers is {settings.workers}: expected 1 or more")
    for name, seconds in (("resyncSeconds", settings.resync_seconds), ("statusSeconds", settings.status_seconds)):
        if not 0 < seconds < math.inf:
            raise ConfigError(f"{source}: {name} is {seconds:g}: expected more than 0")
    for name, amount in asdict(settings.times).items():
        if not 0 <= amount < math.inf:
            raise ConfigError(f"{source}: times.{_camel(name)} is {amount:g}: expected 0 or more")
    if not 0 < lease.retry_seconds < lease.renew_deadline_seconds < lease.duration_seconds:
        raise ConfigError(
            f"{source}: lease.retrySeconds is {lease.retry_seconds:g}, renewDeadlineSeconds {lease.renew_deadline_seconds:g}, "
            f"durationSeconds {lease.duration_seconds:g}: expected 0 < retry < renewDeadline < duration"
        )


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    namespace = environ.get("POD_NAMESPACE", "")
    if not namespace and _NAMESPACE_FILE.exists():
        namespace = _NAMESPACE_FILE.read_text().strip()
    return {
        "identity": environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}",
        "namespace": namespace or "default",
        "kubeconfig": environ.get("KUBECONFIG", ""),
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = msgspec.yaml.decode(path.read_bytes()) or {}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected an object, found {type(tree).__name__}")
    return tree


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {override}: expected part.field=value")
    node = tree
    for part in parts[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {override}: {part} is a value, not a part of the settings")
    try:
        node[parts[-1]] = msgspec.yaml.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--set {override}: the value is not YAML: {error}") from error


def _checked_keys(tree: Mapping[str, Any], record: type, source: str, path: str = "") -> dict[str, Any]:
    """The tree with our field names; msgspec ignores unknown keys of dataclasses, and a typo must not pass in silence."""
    types = get_type_hints(record)
    known = {_camel(item.name): item.name for item in fields(record)}
    plain: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in known:
            raise ConfigError(f"{source}: unknown key {path}{key}, expected one of {', '.join(sorted(known))}")
        inner = types[known[key]]
        nested = is_dataclass(inner) and isinstance(value, dict)
        plain[known[key]] = _checked_keys(value, inner, source, f"{path}{key}.") if nested else value
    return plain


def _camel(name: str) -> str:
    return re.sub(r"_([a-z])", lambda match: match[1].upper(), name)
