"""What other threads hand to a host's loop, and the bell that wakes it.

The bell is one end of a pair of sockets, so that the loop can sleep until it rings or something
comes over a transport's own sockets. What always holds: what was put before a ring is there
after it.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from queue import SimpleQueue
from typing import NamedTuple

from shardwright.launch.host import Item

_RINGS = 1 << 12
"""How many rings are forgotten at once, a byte each."""


class End(NamedTuple):
    """Nothing more will be asked."""


class Inbox:
    """Any thread may put and ring; one takes."""

    def __init__(self) -> None:
        self._items: SimpleQueue[Item | End] = SimpleQueue()
        self._bell, self._rope = socket.socketpair()
        self._bell.setblocking(False)
        self._rope.setblocking(False)

    @property
    def bell(self) -> int:
        """The descriptor that is readable once the bell has rung, until it is quieted."""
        return self._bell.fileno()

    def put(self, item: Item | End) -> None:
        """Hand an item over, and ring."""
        self._items.put(item)
        self.ring()

    def ring(self) -> None:
        """Wake whoever waits for the bell."""
        with suppress(BlockingIOError):  # It has rung often enough.
            self._rope.send(b"\0")

    def take(self) -> Item | End | None:
        """The next item, None where there is none."""
        return None if self._items.empty() else self._items.get()

    def quiet(self) -> None:
        """Forget that the bell has rung, however often; a ring from now on is another one."""
        with suppress(BlockingIOError):
            while len(self._bell.recv(_RINGS)) == _RINGS:
                pass  # There may be more.

    def __del__(self) -> None:
        self._bell.close()
        self._rope.close()
