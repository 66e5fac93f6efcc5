"""What one unit of a program took when it was run alone.

A unit is a node, or the nodes of a block. Seconds are medians of calls after some to warm up; bytes
are the most that were alive at once beyond what was there before, and so count neither the unit's
inputs nor its parameters.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from shardwright.costs.roofline import NodeWork, Work


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds and bytes of one unit; all zeros for what is not needed.

    forward
        Seconds of a call that keeps nothing for a backward.
    backward, weight
        Seconds of the gradients of what nodes made, and of those of parameters. Their sum is the
        time of a backward that gives both.
    memory
        Bytes of a call that keeps nothing for a backward.
    memory_kept
        Bytes of a call that keeps what its backward needs.
    memory_backward
        Bytes of a backward, beyond those that the forward left.
    memory_again
        Bytes of a backward that runs the forward first, because nothing was kept for it.
    samples
        Of how many the seconds are medians.
    """

    forward: float
    backward: float = 0.0
    weight: float = 0.0
    memory: int = 0
    memory_kept: int = 0
    memory_backward: int = 0
    memory_again: int = 0
    samples: int = 1


class Measurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `Timing`, and what was done in it.

    calls
        The keys of its calls, in order.
    work
        Of a single call, what a device is given to do in it, as the roofline sees it.
    """

    timing: Timing
    calls: tuple[str, ...]
    work: NodeWork | None = None

    def observations(self) -> Iterator[tuple[Work, float]]:
        """Work and the seconds that it took, of what took any."""
        timing = self.timing
        seconds = (timing.forward, timing.backward, timing.weight)
        for work, taken in zip(self.work or (), seconds, strict=False):
            if taken > 0 and work.calls:
                yield work, taken
