"""All vision encoders of a PE: found by name, watched, and picked for images. Owner of the peers; one event loop's.

The trap: a name may stand for many pods, and pods come and go, so names are looked up again and again; a peer that is no longer
named ends only after its images have.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Collection, Sequence

from prefill_engine.vision_client.choose import choose_encoder
from prefill_engine.vision_client.encoder_peer import EncoderPeer

logger = logging.getLogger(__name__)

LOOK_UP_SECONDS = 2.0


class EncoderSet:
    """endpoints: gives them as host:port. digest, columns: as EncoderPeer's. Run `run` as a task."""

    def __init__(
        self, endpoints: Callable[[], Sequence[str]], *, digest: bytes, columns: int, clock: Callable[[], float]
    ) -> None:
        self._endpoints = endpoints
        self._digest = digest
        self._columns = columns
        self._clock = clock
        self._peers: dict[str, EncoderPeer] = {}
        self._names: dict[str, str] = {}
        self._missing: set[str] = set()
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Keeps the peers what the names say, without end."""
        try:
            while True:
                await self._look_up()
                await asyncio.sleep(LOOK_UP_SECONDS)
        finally:
            for address in list(self._peers):
                await self._drop(address)

    def peer(self, address: str) -> EncoderPeer | None:
        """The encoder behind an address, or behind a configured name of one; None if it is not one of ours."""
        return self._peers.get(self._names.get(address, address))

    @property
    def num_usable(self) -> int:
        return sum(1 for peer in self._peers.values() if peer.load() is not None)

    @property
    def num_known(self) -> int:
        return len(self._peers)

    def describe(self) -> str:
        """Why none is usable, for an operator."""
        return "; ".join(f"{p.address}: {p.refusal}" for p in self._peers.values() if p.load() is None) or "none known"

    async def pick(self, patches: int, *, avoid: Collection[str]) -> EncoderPeer:
        """The encoder that would be done first with so many patches; waits until there is one. avoid: only if there is no
        other."""
        while True:
            loads = [load for peer in self._peers.values() if (load := peer.load()) is not None]
            address = choose_encoder(loads, patches=patches, avoid=avoid)
            if address is not None:
                return self._peers[address]
            await self._changed.wait()

    async def _look_up(self) -> None:
        found: set[str] = set()
        failed = False
        for endpoint in self._endpoints():
            host, _, port = endpoint.rpartition(":")
            try:
                answers = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
            except OSError as error:
                if endpoint not in self._missing:
                    logger.warning("encoder name not found", extra={"encoder": endpoint, "detail": str(error)})
                self._missing.add(endpoint)
                failed = True
                continue
            self._missing.discard(endpoint)
            addresses = {_join(str(answer[4][0]), int(answer[4][1])) for answer in answers}
            if len(addresses) == 1:
                self._names[endpoint] = next(iter(addresses))
            found |= addresses
        for address in found - self._peers.keys():
            self._add(address)
        for address, peer in list(self._peers.items()):
            # A name server that fails is no reason to lose encoders that are known.
            peer.is_named = failed or address in found
            if not peer.is_named and not peer.num_images:
                await self._drop(address)

    def _add(self, address: str) -> None:
        peer = EncoderPeer(
            address, digest=self._digest, columns=self._columns, clock=self._clock, changed=self._note_change
        )
        self._peers[address] = peer
        self._watches[address] = asyncio.create_task(peer.watch())

    async def _drop(self, address: str) -> None:
        peer, watch = self._peers.pop(address), self._watches.pop(address)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await peer.close()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
