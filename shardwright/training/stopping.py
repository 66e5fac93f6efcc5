"""Ending a run at Ctrl-C or SIGTERM, behind the step under way and with a last checkpoint.

In comes the first such signal; whoever goes through the steps asks ``requested`` between them, and
raises in the end what the signal stands for. A second one ends the process as it always does.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopping:
    """Takes the signals while it is entered; a context manager.

    It leaves them alone if not ``wanted``, where the program has handlers of its own or ignores
    them, and in threads that are not the main one, which gets no signals.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._signal: int | None = None
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._signal is not None

    def end(self) -> NoReturn:
        """Raise KeyboardInterrupt, or SystemExit for SIGTERM."""
        assert self._signal is not None, "a signal has come"
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self._signal)

    def __enter__(self) -> Self:
        if self._wanted and threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signal is None:
            self._signal = number
            return
        signal.signal(number, self._before[number])
        signal.raise_signal(number)
