"""What a unit of a program took when it was run alone: how it is known, and kept for later runs.

A unit is a node, or the nodes of a block. Seconds are medians of calls after some to warm up; bytes
are the most that were alive at once beyond what was there before, and so count neither the unit's
inputs nor its parameters.

Its key is made of all that decides how long it takes, and of nothing else: operators, attributes,
shapes, dtypes, strides, which inputs want gradients, and how calls are wired. Names and contents do
not count. `Cache` keeps timings by machine and key, as JSON in the user's cache directory, or where
the caller wants it. Invariant: that file is whole or not there at all; what other processes have
added is kept; what failed is never in it; what does not read is an error that says to delete it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from shardwright.atomic import replacing
from shardwright.costs.roofline import NodeWork, Work
from shardwright.errors import ProfileError
from shardwright.ir import IRGraph, IRNode, IRValue


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


# --- when two calls are the same ------------------------------------------------------------------


def call_key(graph: IRGraph, node: IRNode, wanted: Collection[int]) -> str:
    """The key of one call: ``aten.linear.default:<digest>:ms-``.

    The digest is of the call alone. The letters say of each input whether it wants a gradient, as
    a value that a node made or as a stored one.
    """
    first = {value_id: i for i, value_id in reversed(list(enumerate(node.inputs)))}
    inputs = [(first[value_id], _kind(graph.values[value_id])) for value_id in node.inputs]
    outputs = [_kind(graph.values[value_id]) for value_id in node.outputs]
    digest = _digest((inputs, outputs, repr(node.attrs), node.absent))
    letters = "".join(_want(graph.values[value_id], wanted) for value_id in node.inputs)
    return f"{node.op}:{digest}:{letters}"


def forward_key(key: str) -> str:
    """What of a call's key its forward depends on."""
    return key.rpartition(":")[0]


def wants_gradients(key: str) -> bool:
    """Whether an input of the call wants a gradient."""
    return bool(key.rpartition(":")[2].strip("-"))


def unit_key(graph: IRGraph, wanted: Collection[int]) -> str:
    """The key of a unit's graph: a digest of its calls' keys and of how they are wired."""
    places: dict[int, int] = {}
    for node in graph.nodes:
        for value_id in (*node.inputs, *node.outputs):
            places.setdefault(value_id, len(places))
    calls = [
        (call_key(graph, node, wanted), [places[v] for v in (*node.inputs, *node.outputs)])
        for node in graph.nodes
    ]
    return _digest((calls, [places[value_id] for value_id in graph.outputs]))


def _kind(value: IRValue) -> object:
    return value.shape, value.dtype, value.strides


def _want(value: IRValue, wanted: Collection[int]) -> str:
    if value.id not in wanted:
        return "-"
    return "s" if value.is_stored else "m"


def _digest(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:24]


# --- measurements kept from one run to the next ---------------------------------------------------


FILE = Path("shardwright") / "timings.json"


class _CacheFile(msgspec.Struct, forbid_unknown_fields=True):
    """What is in the file: by machine, then by key."""

    version: Literal[1]
    timings: dict[str, dict[str, Timing]]


class Cache:
    """The timings of one machine in one file; ``path`` None keeps them in this object alone."""

    def __init__(self, path: Path | None, machine: str) -> None:
        self.path = path
        self._machine = machine
        self._known = _read(path).timings.get(machine, {})
        self._new: dict[str, Timing] = {}

    @classmethod
    def of(cls, wanted: bool | str | Path, machine: str) -> Cache:
        """The cache that a user asks for: True for the usual place, False for none, or a path.

        Raises ProfileError where the file is there but does not read.
        """
        if isinstance(wanted, bool):
            return cls(usual_path() if wanted else None, machine)
        return cls(Path(wanted), machine)

    def find(self, key: str, samples: int) -> Timing | None:
        """The timing of a unit, if it was measured with ``samples`` samples or more."""
        found = self._new.get(key) or self._known.get(key)
        return found if found is not None and found.samples >= samples else None

    def add(self, key: str, timing: Timing) -> None:
        """Take in a timing; `save` writes it."""
        self._new[key] = timing

    def save(self) -> None:
        """Add what is new to the file. Raises ProfileError where it cannot be written."""
        if self.path is None or not self._new:
            return
        content = _read(self.path)
        content.timings.setdefault(self._machine, {}).update(self._new)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as temporary:
                temporary.write_bytes(msgspec.json.encode(content))
        except OSError as error:
            raise ProfileError(_elsewhere(self.path, "written", error)) from error


def usual_path() -> Path:
    """The file in the user's cache directory: ``$XDG_CACHE_HOME``, else ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / FILE


def _read(path: Path | None) -> _CacheFile:
    """What is in a file; nothing where there is none. Raises ProfileError."""
    try:
        content = path.read_bytes() if path is not None else None
    except FileNotFoundError:
        content = None
    except OSError as error:
        raise ProfileError(_elsewhere(path, "read", error)) from error
    if content is None:
        return _CacheFile(1, {})
    try:
        return msgspec.json.decode(content, type=_CacheFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProfileError(
            f"the cache of measurements {path} is broken ({error}); delete this file, and what is "
            "needed is measured again"
        ) from None


def _elsewhere(path: Path | None, done: str, error: OSError) -> str:
    return (
        f"the cache of measurements {path} cannot be {done}: {error.strerror}; give another file "
        "(cache=path), or none (cache=False)"
    )
