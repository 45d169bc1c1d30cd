"""RDMA devices of this machine as the kernel lists them, and what UCX may use below NIXL. Called by choose.py.

The traps: a device whose ports are all down carries nothing; and UCX chooses by itself, and tcp is among its choices unless
UCX_TLS leaves it out. It reads that when an agent is made.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path

from prefill_plan.errors import ConfigError

DEVICE_ROOT = Path("/sys/class/infiniband")
UCX_TLS = "UCX_TLS"
RDMA_ONLY = "rc,ud,dc"
"""UCX's names (docs/source/faq.md of openucx/ucx): reliable connections, datagrams for their bootstrap, dynamic connections.
Without a device that has one of them no agent can be made."""
_ACTIVE = "ACTIVE"
_NETWORK = frozenset(f"{family}{kind}" for family in ("rc", "ud", "dc") for kind in ("", "_x", "_v", "_verbs", "_mlx5"))
# They never leave this machine.
_LOCAL = frozenset({"self", "sm", "shm", "cma", "posix", "sysv", "cuda", "cuda_copy", "cuda_ipc", "gdr_copy"})


class Fabric(StrEnum):
    """What UCX moves bytes between machines with: the end of a nixl transport's kind."""

    RDMA = "rdma"
    """Nothing but RDMA was left to it."""
    ANY = "any"
    """There is a device, and nobody asked UCX what it chose."""
    TCP = "tcp"


def find_devices(root: Path = DEVICE_ROOT) -> tuple[str, ...]:
    """Names of devices with at least one active port; () where there are none or the kernel has no RDMA."""
    found = []
    for device in sorted(root.glob("*")):
        states = [state.read_text() for state in device.glob("ports/*/state")]
        if any(_ACTIVE in state for state in states):
            found.append(device.name)
    return tuple(found)


def plan_fabric(
    *, require_rdma: bool, devices: Sequence[str], environ: Mapping[str, str]
) -> tuple[Fabric, dict[str, str]]:
    """What UCX will use, and the variables to set before its library is loaded. A UCX_TLS of the pod's own stays as it is.

    Raises:
        ConfigError: RDMA is required and UCX_TLS leaves something else to choose.
    """
    chosen = environ.get(UCX_TLS)
    is_proven = chosen is not None and _is_rdma_only(chosen)
    if not require_rdma:
        if not devices:
            return Fabric.TCP, {}
        return (Fabric.RDMA if is_proven else Fabric.ANY), {}
    if chosen is None:
        return Fabric.RDMA, {UCX_TLS: RDMA_ONLY}
    if not is_proven:
        raise ConfigError(
            f"transport.require_rdma is set, but {UCX_TLS}={chosen} leaves UCX other transports than RDMA: expected a list like "
            f"{RDMA_ONLY}, or no {UCX_TLS}, which is then set to that"
        )
    return Fabric.RDMA, {}


def rdma_label(kind: str) -> str:
    """For kv_transport_info, of a Transport's kind: true, false, or unproven."""
    _, _, fabric = kind.partition("-ucx-")
    return {"": "false", Fabric.RDMA: "true", Fabric.ANY: "unproven", Fabric.TCP: "false"}[fabric]


def _is_rdma_only(transports: str) -> bool:
    # "ud:aux" is ud for the bootstrap alone.
    names = {name.strip().partition(":")[0] for name in transports.split(",")}
    return names <= _NETWORK | _LOCAL and bool(names & _NETWORK)
