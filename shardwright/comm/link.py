"""A link from this process to another one of its host: records by socket, content by memory.

A record says that a message has come and where its content is in the sender's arena. The socket
puts it behind the bytes it tells of on every kind of processor, wakes who sleeps, and says at once
when the process at the other end is gone.

What always holds: nothing here waits. Records that a full socket does not take are kept and sent
later, in their order, by `attend`.
"""

from __future__ import annotations

import socket
import struct
import time
from collections import deque
from contextlib import suppress

from shardwright.comm.arena import Window
from shardwright.comm.post import Address, Sent
from shardwright.errors import WorkerError

NOWHERE = -1
"""The offset of a message without content."""

_RECORD = struct.Struct("=qqqqd")
"""Tag, call, round, offset of the content, when the sender began."""
_GOODBYE = _RECORD.pack(-1, 0, 0, NOWHERE, 0.0)


class Link:
    """One end of a pair of sockets, and the window on the other rank's arena.

    ``arrived`` are the messages not taken yet: offset, and when the sender began. ``lost`` is why
    no more will come.
    """

    def __init__(self, rank: int, connection: socket.socket, window: Window) -> None:
        connection.setblocking(False)
        self.rank = rank
        self.window = window
        self.descriptor = connection.fileno()
        self.arrived: dict[Address, tuple[int, float]] = {}
        self.lost: WorkerError | None = None
        self._socket = connection
        self._late: deque[tuple[bytes, Sent]] = deque()

    @property
    def is_late(self) -> bool:
        """Whether records are kept that the socket did not take."""
        return bool(self._late)

    def send(self, address: Address, offset: int, start: float) -> Sent:
        """Tell of a message. Raises WorkerError where the other end is gone."""
        return self._send(_RECORD.pack(*address, offset, start), Sent(start))

    def say_goodbye(self) -> None:
        """Tell that no more messages will come. Raises WorkerError."""
        self._send(_GOODBYE, Sent(0.0))

    def receive(self) -> bool:
        """Take the next record, if there is one. False where there is none, or `lost`."""
        if self.lost is not None:
            return False
        try:
            record = self._socket.recv(_RECORD.size)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True  # Said once, where the other end closed without reading all.
        except OSError as error:
            self._lose(str(error))
            return False
        self._take(record)
        return True

    def catch_up(self) -> None:
        """Send what is late, as far as the socket takes it."""
        while self._late:
            record, sent = self._late[0]
            try:
                if not self._takes(record):
                    return
                sent.end = time.monotonic()
            except WorkerError as error:
                sent.error = error
            self._late.popleft()

    def close(self) -> None:
        """End the connection: both ends find the other gone. Any thread may do so."""
        with suppress(OSError):  # The other end may have been faster.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send(self, record: bytes, sent: Sent) -> Sent:
        self.catch_up()
        if self._late or not self._takes(record):
            self._late.append((record, sent))
        else:
            sent.end = time.monotonic()
        return sent

    def _takes(self, record: bytes) -> bool:
        """Whether the socket takes a record. Raises WorkerError where the other end is gone."""
        try:
            self._socket.send(record)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._lose(str(error)) from None
        return True

    def _take(self, record: bytes) -> None:
        if not record:
            self._lose("its process has ended")
        elif record == _GOODBYE:
            self._lose("it has ended its run")
        else:
            tag, call, turn, offset, start = _RECORD.unpack(record)
            self.arrived[Address(tag, call, turn)] = (offset, start)

    def _lose(self, reason: str) -> WorkerError:
        """Note that the other end is gone; the first reason stands."""
        if self.lost is None:
            self.lost = WorkerError(f"rank {self.rank} is gone: {reason}", lost=True)
        return self.lost
