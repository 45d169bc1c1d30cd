"""The peers that a transport asks: their connections by endpoint, and one question to one of them. Used on the transport's loop.

Owned by a transport (tcp.py, nixl.py), which decides what follows the answer. The trap: a peer that restarted has closed the idle
connections to its former life, which is seen only when one is used; so a question that found it closed is asked once more.
"""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from prefill_engine.kv.transport.frame import Frame
from prefill_engine.kv.transport.link import Link, LinkLost
from prefill_engine.kv.transport.peer import Peer, ask

MAX_LINKS_TO_PEER = 8


@dataclass(slots=True)
class Exchange:
    """One question under way. question: as it was sent. in_order: set when the connection is fit for another exchange."""

    link: Link
    question: Frame
    answer: Frame
    in_order: bool = False


class Peers:
    """Owner of the connections to peers. context: for TLS. max_links: to each. num_reconnects: questions asked again."""

    def __init__(self, *, context: ssl.SSLContext | None, max_links: int = MAX_LINKS_TO_PEER) -> None:
        self.num_reconnects = 0
        self._context = context
        self._max_links = max_links
        self._peers: dict[str, Peer] = {}

    @asynccontextmanager
    async def exchange(self, endpoint: str, question: Frame, *, deadline_seconds: float) -> AsyncIterator[Exchange]:
        """Asks; the connection is released, or closed unless in_order, at the end of the block.

        Raises:
            LinkLost, FrameError: no connection, or no answer to this question.
        """
        peer = self._peers.get(endpoint)
        if peer is None:
            peer = self._peers[endpoint] = Peer(endpoint, context=self._context, max_links=self._max_links)
        peer.users += 1
        try:
            exchange = await self._ask(peer, replace(question, patience_ms=max(1, round(deadline_seconds * 1e3))))
            try:
                yield exchange
            finally:
                peer.release(exchange.link, in_order=exchange.in_order)
        finally:
            peer.users -= 1
            # Peers restart on other ports: what nobody uses and nothing connects is forgotten.
            if peer.users == 0 and not peer.has_links() and self._peers.get(endpoint) is peer:
                del self._peers[endpoint]

    def close(self, endpoint: str) -> None:
        """Ends every connection to a peer; exchanges on them fail. Unknown ones are fine."""
        peer = self._peers.pop(endpoint, None)
        if peer is not None:
            peer.close()

    def endpoints(self) -> list[str]:
        return list(self._peers)

    async def _ask(self, peer: Peer, question: Frame) -> Exchange:
        while True:
            link, is_older = await peer.acquire()
            asked = replace(question, exchange=peer.next_exchange())
            try:
                return Exchange(link, asked, await ask(link, asked))
            except LinkLost:
                peer.release(link, in_order=False)
                if not is_older or peer.is_closed:
                    raise
                self.num_reconnects += 1
            except BaseException:
                peer.release(link, in_order=False)
                raise
