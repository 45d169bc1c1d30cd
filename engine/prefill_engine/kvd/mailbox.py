"""Brings what I/O threads found to the event loop: one wake-up for many messages, in order."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

logger = logging.getLogger(__name__)


class Mailbox:
    """Callables posted from any thread run on `loop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._messages: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._is_woken = False

    def post(self, message: Callable[[], None]) -> None:
        self._messages.append(message)
        with self._lock:
            if self._is_woken:
                return
            self._is_woken = True
        with suppress(RuntimeError):  # the loop has ended, and with it everybody who would care
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            self._is_woken = False
        while self._messages:
            try:
                self._messages.popleft()()
            except Exception:  # others must not wait for the next post, which may never come
                logger.exception("message of an I/O thread failed; the others are delivered")
