"""RDMA devices of this machine, as the kernel lists them. The trap: a device whose ports are all down carries nothing."""

from pathlib import Path

DEVICE_ROOT = Path("/sys/class/infiniband")
_ACTIVE = "ACTIVE"


def find_devices(root: Path = DEVICE_ROOT) -> tuple[str, ...]:
    """Names of devices with at least one active port; () where there are none or the kernel has no RDMA."""
    found = []
    for device in sorted(root.glob("*")):
        states = [state.read_text() for state in device.glob("ports/*/state")]
        if any(_ACTIVE in state for state in states):
            found.append(device.name)
    return tuple(found)
