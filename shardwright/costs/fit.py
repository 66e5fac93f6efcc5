"""What was measured, as numbers of a model: of a device, and of what links devices.

`fit` moves the rates of a device to where the roofline gives the times that nodes took, by least
squares of the logarithms, so that a time twice too long weighs as one twice too short, and a few
that are far off weigh little. `fit_links` finds latencies and bandwidths of the alpha-beta model,
by least squares of the relative errors; the model is linear in them.

Invariant: what no measurement depends on stays as it was, and no number becomes negative.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from shardwright.clusters import DeviceModel, Link, Links
from shardwright.clusters.links import KINDS, OPTIONAL, Kind, messages
from shardwright.costs.roofline import Work, node_work, seconds
from shardwright.errors import ProfileError
from shardwright.ir import IRGraph, IRNode

RATES = ("flops", "bandwidth", "overhead", "half_flops")
SMALLEST_OVERHEAD = 1e-9
"""Seconds that the overhead starts from where a device has none: a logarithm needs some."""
REACH = math.log(1e3)
"""A rate is looked for within a thousandth and a thousand times what it was."""
USUAL_ERROR = 0.1
"""Relative errors up to about this count by their squares, larger ones less."""
FASTEST = 1e15
"""Bytes a second of a link that takes no longer for more bytes, as far as could be measured."""
PREFERENCE = 1e-4
"""How much a collective's start counts as an error: what rounds explain is not called a start."""


class FitPoint(NamedTuple):
    """What was done, and the seconds it took."""

    work: Work
    seconds: float

    @classmethod
    def of_forward(cls, graph: IRGraph, node: IRNode, seconds: float) -> FitPoint:
        """The forward of a node."""
        return cls(node_work(graph, node, ()).forward, seconds)


class LinkTime(msgspec.Struct, frozen=True):
    """The seconds of one communication; ``nbytes`` are as in `Links.seconds`."""

    kind: Kind
    members: int
    nbytes: int
    seconds: float


def fit(device: DeviceModel, measurements: Sequence[FitPoint]) -> DeviceModel:
    """The device with the rates that explain the measurements best.

    Raises ProfileError where a measured time is not positive.
    """
    from scipy.optimize import least_squares

    for found in measurements:
        _check_time(found.seconds, str(found.work))
    used = [found for found in measurements if found.work.calls]
    start = msgspec.structs.replace(device, overhead=max(device.overhead, SMALLEST_OVERHEAD))
    names = [name for name in RATES if _depends(start, name, used)]
    if not names:
        return device
    at = np.log([getattr(start, name) for name in names])

    def errors(logarithms: np.ndarray) -> list[float]:
        model = _with_rates(start, names, logarithms)
        return [math.log(seconds(model, found.work) / found.seconds) for found in used]

    found = least_squares(
        errors, at, bounds=(at - REACH, at + REACH), loss="soft_l1", f_scale=USUAL_ERROR
    )
    fitted = _with_rates(device, names, found.x)
    rates = {name: _to_three_digits(getattr(fitted, name)) for name in names}
    return msgspec.structs.replace(fitted, **rates)


def _depends(device: DeviceModel, name: str, measurements: Sequence[FitPoint]) -> bool:
    """Whether any of the measurements has something to say of a rate."""
    works = [found.work for found in measurements]
    if name == "half_flops":
        return device.half_flops is not None and any(w.half and w.operations for w in works)
    if name == "flops":
        halves = device.half_flops is not None
        return any(w.elements or (w.operations and not (w.half and halves)) for w in works)
    return any(w.nbytes if name == "bandwidth" else w.calls for w in works)


def _with_rates(device: DeviceModel, names: Sequence[str], logarithms: np.ndarray) -> DeviceModel:
    rates = zip(names, np.exp(logarithms).tolist(), strict=True)
    return msgspec.structs.replace(device, **dict(rates))


def _to_three_digits(number: float) -> float:
    """No measurement has more; below a nanosecond there is nothing but noise."""
    return float(f"{number:.3g}") if number >= 1e-9 else 0.0


def fit_links(times: Sequence[LinkTime]) -> Links:
    """The links that explain the times best; each kind needs two sizes or more.

    Those in `OPTIONAL` may be missing.

    Raises ProfileError where a kind was not measured, or a time is not positive.
    """
    from scipy.optimize import nnls

    for time in times:
        _check_time(time.seconds, f"{time.kind} of {time.nbytes} bytes")
    found_kinds = {time.kind for time in times}
    kinds = [kind for kind in KINDS if kind in found_kinds or kind not in OPTIONAL]
    for kind in kinds:
        if len({time.nbytes for time in times if time.kind == kind}) < 2:
            raise ProfileError(f"{kind} was not measured with two sizes; measure all of {KINDS}")
    columns = 1 + 2 * len(kinds)
    rows = [_row(time, kinds) / time.seconds for time in times]
    preference = np.zeros(columns)
    preference[0] = PREFERENCE / min(time.seconds for time in times)
    found, _ = nnls(np.array([*rows, preference]), np.array([1.0] * len(rows) + [0.0]))
    start, *numbers = map(_to_three_digits, found.tolist())
    links = {
        kind: Link(latency, _to_three_digits(1 / max(seconds_a_byte, 1 / FASTEST)))
        for kind, latency, seconds_a_byte in zip(kinds, numbers[::2], found[2::2], strict=True)
    }
    return Links(**links, start=start)


def _row(time: LinkTime, kinds: Sequence[str]) -> np.ndarray:
    """What a time is a sum of: one start, latencies, and seconds a byte."""
    row = np.zeros(1 + 2 * len(kinds))
    at = 1 + 2 * kinds.index(time.kind)
    if time.kind == "send":
        row[at], row[at + 1] = 1, time.nbytes
        return row
    rounds = messages(time.kind, time.members)
    row[0], row[at], row[at + 1] = 1, rounds, rounds * time.nbytes / time.members
    return row


def _check_time(found: float, what: str) -> None:
    if not (found > 0 and math.isfinite(found)):
        raise ProfileError(f"{what} took {found} s, expected a positive time; measure it again")
