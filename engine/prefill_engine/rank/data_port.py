"""Opens the transport of a rank's data port as the configuration names it: by it decode peers pull and are pushed to.

Called by the rank's courier on its own loop. The trap (kv.md 7.6): with one-sided access a peer can read all that is registered,
so nixl gets a staging area for copies of single pieces, and never the KV cache.
"""

from pathlib import Path

from prefill_engine.handoff_pieces import PIECE_BYTES
from prefill_engine.kv.transport.choose import build_transport
from prefill_engine.kv.transport.contract import Transport
from prefill_engine.kv.transport.nixl import StagingSize
from prefill_engine.kv.transport.rdma import DEVICE_ROOT
from prefill_plan.config import EngineConfig, TransportKind
from prefill_plan.errors import ConfigError
from prefill_plan.kvd_config import TransportConfig


def open_data_transport(config: EngineConfig, *, dp_rank: int, device_root: Path = DEVICE_ROOT) -> Transport:
    """Not yet listening. device_root: where the kernel lists RDMA devices.

    Raises:
        ConfigError: as build_transport; staging_bytes without room for one piece.
    """
    handoff = config.handoff
    if handoff.transport is TransportKind.NIXL and handoff.staging_bytes < PIECE_BYTES:
        raise ConfigError(f"handoff.staging_bytes {handoff.staging_bytes}, expected at least {PIECE_BYTES} (one piece)")
    wanted = TransportConfig(
        kind=handoff.transport,
        host=config.server.host,
        port=handoff.data_port + dp_rank if handoff.data_port else 0,
        require_rdma=handoff.require_rdma,
        tls=handoff.tls,
    )
    staging = StagingSize(num_bytes=handoff.staging_bytes, window_bytes=PIECE_BYTES)
    try:
        return build_transport(wanted, staging=staging, device_root=device_root)
    except ConfigError as error:
        raise ConfigError(
            f"handoff.transport {handoff.transport}, require_rdma {handoff.require_rdma}: {error}"
        ) from error
