"""Directory's plain values <-> protobuf messages, and its TLS files. Used by both ends; the only border to the messages.

The trap: what comes in is a peer's word. Lengths are checked by the service, run lengths here, since a run may claim anything.
"""

from collections.abc import Iterable, Sequence

import grpc

from prefill_engine.kv.directory import Holder, SnapshotLocation
from prefill_engine.kv.segments import BlockLocation, SegmentInfo
from prefill_engine.rpc import directory_pb2 as pb
from prefill_plan.block_keys import BlockKey
from prefill_plan.config import TlsConfig
from prefill_plan.errors import ConfigError

KEY_BYTES = 32
"""Of a block key; snapshot keys are longer by their namespace."""
SNAPSHOT_KEY_BYTES = 33
MAX_KEYS = 8192
"""Keys per message; a prompt of a million tokens has 8,192 blocks."""


def read_tls(config: TlsConfig) -> tuple[bytes, bytes, bytes] | None:
    """Certificate, key, authority as PEM; None when no file is named. Raises ConfigError."""
    names = (config.certificate, config.key, config.authority)
    if not any(names):
        return None
    contents = []
    for name in names:
        try:
            with open(name, "rb") as file:
                contents.append(file.read())
        except OSError as error:
            raise ConfigError(f"tls {names}: {name or 'one of them'}: {error.strerror}; expected PEM files") from error
    return contents[0], contents[1], contents[2]


def channel_credentials(config: TlsConfig) -> grpc.ChannelCredentials | None:
    """A holder's side. Raises ConfigError."""
    files = read_tls(config)
    if files is None:
        return None
    certificate, key, authority = files
    return grpc.ssl_channel_credentials(authority, key, certificate)


def server_credentials(config: TlsConfig) -> grpc.ServerCredentials | None:
    """The directory's side; holders must show a certificate of the same authority. Raises ConfigError."""
    files = read_tls(config)
    if files is None:
        return None
    certificate, key, authority = files
    return grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)


def split_keys(joined: bytes) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(joined[start : start + KEY_BYTES]) for start in range(0, len(joined), KEY_BYTES))


def block_runs(locations: Sequence[BlockLocation]) -> list[pb.BlockRun]:
    """Neighbours in one segment as one run."""
    runs: list[pb.BlockRun] = []
    for one in locations:
        last = runs[-1] if runs else None
        if last is not None and (last.segment, last.first_record + last.num_records) == (one.segment, one.record):
            last.num_records += 1
        else:
            runs.append(pb.BlockRun(segment=one.segment, first_record=one.record, num_records=1))
    return runs


def runs_to_locations(runs: Iterable[pb.BlockRun], *, limit: int) -> tuple[BlockLocation, ...]:
    """At most `limit`: as many as keys were asked for."""
    found: list[BlockLocation] = []
    for run in runs:
        count = min(run.num_records, limit - len(found))
        found += [BlockLocation(segment=run.segment, record=run.first_record + index) for index in range(count)]
    return tuple(found)


def segment_message(info: SegmentInfo) -> pb.Segment:
    return pb.Segment(name=info.name, layout_id=info.layout_id, keys=b"".join(info.keys))


def segment_info(message: pb.Segment) -> SegmentInfo:
    """Its size in bytes does not travel."""
    return SegmentInfo(name=message.name, layout_id=message.layout_id, keys=split_keys(message.keys), num_bytes=0)


def holder_message(holder: Holder) -> pb.Holder:
    return pb.Holder(
        holder_id=holder.holder_id,
        epoch=holder.epoch,
        endpoint=holder.endpoint,
        zone=holder.zone,
        transports=holder.transports,
    )


def holder_of(message: pb.Holder) -> Holder:
    return Holder(
        holder_id=message.holder_id,
        epoch=message.epoch,
        endpoint=message.endpoint,
        zone=message.zone,
        transports=tuple(message.transports),
    )


def snapshot_message(location: SnapshotLocation) -> pb.SnapshotLocation:
    return pb.SnapshotLocation(key=location.key, holder=holder_message(location.holder))


def snapshot_location(message: pb.SnapshotLocation) -> SnapshotLocation:
    return SnapshotLocation(key=message.key, holder=holder_of(message.holder))
