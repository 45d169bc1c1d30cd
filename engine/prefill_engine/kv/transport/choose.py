"""Builds the transport that the configuration names. What is asked for and not there is an error, never another transport.

Called by kvd at start. The trap (kv.md 0.10): libraries that fall back to TCP by themselves; so require_rdma is checked against
the devices of this machine before anything is built.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from prefill_engine.kv.transport.contract import Transport
from prefill_engine.kv.transport.nixl import NixlTransport
from prefill_engine.kv.transport.nixl_agent import load_library
from prefill_engine.kv.transport.rdma import DEVICE_ROOT, find_devices
from prefill_engine.kv.transport.tcp import TcpTransport
from prefill_plan.errors import ConfigError
from prefill_plan.kvd_config import TransportConfig, TransportKind

logger = logging.getLogger(__name__)


def build_transport(
    config: TransportConfig,
    *,
    pod_ip: str = "",
    regions: Sequence[memoryview] = (),
    device_root: Path = DEVICE_ROOT,
) -> Transport:
    """The configured transport, not yet listening.

    Args:
        pod_ip: what peers are told when config.advertise is empty.
        regions: memory that transfers will touch, registered once (nixl); other memory is registered when it is first used.
        device_root: where the kernel lists RDMA devices.

    Raises:
        ConfigError: require_rdma without an active RDMA device or with a transport that has none; nixl not installed;
            unusable TLS files.
    """
    devices = find_devices(device_root)
    if config.require_rdma and config.kind is TransportKind.TCP:
        raise ConfigError(
            "transport.require_rdma is set with transport.kind tcp, which never uses RDMA; expected kind nixl"
        )
    if config.require_rdma and not devices:
        raise ConfigError(
            f"transport.require_rdma is set, but {device_root} lists no RDMA device with an active port: "
            "expected one in this pod (device plugin resource, IPC_LOCK); not falling back to TCP"
        )
    if config.kind is TransportKind.TCP:
        return TcpTransport(config, pod_ip=pod_ip)
    if not devices:
        # Fit for trying it out. Over UCX's tcp an owner that stood still and finds its reader gone is aborted by UCX (1.5.1).
        logger.warning("nixl without an RDMA device: UCX over tcp; transport.kind tcp is faster and sturdier here")
    return NixlTransport(config, library=load_library(), pod_ip=pod_ip, rdma_devices=devices, regions=regions)
