"""What a run wrote down of its calls: by whom each was made, in the order in which they returned.

A call has its number and kind from when it was bound. Whoever makes the call reads them off it,
not off the plan: the native loop in runtime.cpp for its calls, `segments` for those of torch.
"""

from __future__ import annotations

from typing import NamedTuple


class Logged(NamedTuple):
    """One call that returned: the number and kind it was bound with, and how long it took."""

    number: int
    kind_id: int
    native: bool
    seconds: float


CallLog = list[Logged]
