"""Two ends of a TcpTransport on loopback, and the one thing that is served there."""

from prefill_engine.kv.transport.contract import PullOutcome, Source
from prefill_engine.kv.transport.tcp import TcpTransport
from prefill_plan.config import TlsConfig
from prefill_plan.kvd_config import TransportConfig

KEY = bytes(range(33))


DATA = b"abcdefgh"


SECONDS = 20.0


HELD: list[int] = []


def transport(tls: TlsConfig | None = None, *, port: int = 0, links: int = 32, out: int = 8) -> TcpTransport:
    config = TransportConfig(host="127.0.0.1", port=port, tls=tls or TlsConfig())
    return TcpTransport(config, max_links_per_peer=links, max_links_to_peer=out)


def find(key: bytes) -> Source | None:
    if key != KEY:
        return None
    HELD.append(1)
    return Source(view=memoryview(DATA), fd=-1, offset=0, release=HELD.pop)


async def pull(side: TcpTransport, endpoint: str, target: bytearray, *, seconds: float = SECONDS) -> PullOutcome:
    return await side.pull(endpoint, KEY, memoryview(target), deadline_seconds=seconds)
