"""What the owner of the cluster lets users of pools have: host paths and privileged parts of pods (k8s.md 4.12).

Whoever may create a pool gets pods made by the operator, so the operator must not lend rights that its user lacks.
"""

from dataclasses import dataclass

from prefill_operator.errors import PoolInvalid
from prefill_operator.settings import OperatorSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderPolicy:
    """Settings of the installation that rendering depends on; none of them is part of a revision."""

    allowed_host_paths: tuple[str, ...] = ()
    """Node directories below which hostPath volumes may lie; "/" allows all."""
    allow_privileged: bool = False
    """hostNetwork, shared mounts, root and privileged containers."""
    readiness_gate: bool = True
    """Pods get the gate prefill.dev/accepting, which only the operator sets (k8s.md 4.7)."""
    prometheus_address: str = ""
    """For KEDA's triggers, e.g. http://prometheus.monitoring:9090."""

    @classmethod
    def of(cls, settings: OperatorSettings) -> "RenderPolicy":
        """What an installation's settings allow."""
        return cls(
            allowed_host_paths=settings.security.allowed_host_path_prefixes,
            allow_privileged=settings.security.allow_privileged_features,
            readiness_gate=settings.readiness_gate,
            prometheus_address=settings.prometheus_address,
        )

    def check_host_path(self, host_path: object, *, field: str) -> None:
        """Raises PoolInvalid if the node's directory is not below an allowed one. `field` is where the user wrote it."""
        if not isinstance(host_path, str) or not host_path.startswith("/") or ".." in host_path.split("/"):
            raise PoolInvalid(field, value=host_path, rule="must be an absolute path without ..")
        if any(_is_below(host_path, prefix) for prefix in self.allowed_host_paths):
            return
        allowed = ", ".join(self.allowed_host_paths) or "none"
        raise PoolInvalid(
            field,
            value=host_path,
            rule=f"not below a directory the cluster owner allows ({allowed}; chart value security.allowedHostPathPrefixes)",
        )

    def check_privileged(self, field: str, *, value: object, what: str) -> None:
        """Raises PoolInvalid unless privileged features are allowed. `what` says what is privileged about it."""
        if not self.allow_privileged:
            rule = f"{what}; the cluster owner does not allow that (chart value security.allowPrivilegedFeatures)"
            raise PoolInvalid(field, value=value, rule=rule)


def _is_below(path: str, prefix: str) -> bool:
    directory = prefix.rstrip("/")
    return path == directory or path.startswith(f"{directory}/")
