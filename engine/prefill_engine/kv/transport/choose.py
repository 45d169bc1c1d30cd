"""Builds the transport that the configuration names. What is asked for and not there is an error, never another transport.

Called by kvd and ranks at start, and by decode peers of ours. The trap (kv.md 0.10): libraries that fall back to TCP by
themselves; so require_rdma is checked against the devices of this machine before anything is built, and UCX is left nothing but
RDMA.
"""

import logging
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from prefill_engine.kv.transport.contract import Transport
from prefill_engine.kv.transport.nixl import NixlTransport, StagingSize
from prefill_engine.kv.transport.nixl_agent import load_library
from prefill_engine.kv.transport.rdma import DEVICE_ROOT, UCX_TLS, find_devices, plan_fabric
from prefill_engine.kv.transport.tcp import TcpTransport
from prefill_engine.settings import environment_of_libraries
from prefill_plan.config import TransportKind
from prefill_plan.errors import ConfigError
from prefill_plan.kvd_config import TransportConfig

logger = logging.getLogger(__name__)


def build_transport(
    config: TransportConfig,
    *,
    pod_ip: str = "",
    regions: Sequence[memoryview] = (),
    staging: StagingSize | None = None,
    device_root: Path = DEVICE_ROOT,
    environ: MutableMapping[str, str] | None = None,
) -> Transport:
    """The configured transport, not yet listening.

    Args:
        pod_ip: what peers are told when config.advertise is empty.
        regions: memory that transfers will touch, registered once (nixl); other memory is registered when it is first used.
        staging: what is served and pushed is copied there instead (nixl).
        device_root: where the kernel lists RDMA devices.
        environ: what UCX reads, None = the process's own; with require_rdma it gets UCX_TLS.

    Raises:
        ConfigError: require_rdma without an active RDMA device or with a transport that has none, or with another
            UCX_TLS; nixl not installed; unusable TLS files.
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
    environ = environment_of_libraries() if environ is None else environ
    fabric, settings = plan_fabric(require_rdma=config.require_rdma, devices=devices, environ=environ)
    environ.update(settings)
    logger.info(
        "UCX below nixl", extra={"fabric": str(fabric), "devices": devices, "ucx_tls": environ.get(UCX_TLS, "")}
    )
    return NixlTransport(config, library=load_library(), pod_ip=pod_ip, fabric=fabric, regions=regions, staging=staging)
