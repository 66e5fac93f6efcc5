"""Capture once, replay often: what a replay takes from its feed.

A replay takes what is of the options' ``copy_roles``, and of the rest nothing: in training weights,
state and step go on from where they are, whatever is fed. A warm-up leaves the tensors that a run
writes, and the random numbers, as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from shardwright.compiler.feeds import check_feed, check_tensor
from shardwright.errors import ExecError, InputError
from shardwright.ir import IRValue
from shardwright.ir.values import STORED_ROLES, Role
from shardwright.kernels.lowered import ValueSpec

Mode = Literal["inference", "train"]
MODES: tuple[Mode, ...] = ("inference", "train")

BOUND = 8
"""How many captures a program keeps where nobody says."""


@dataclass(frozen=True, slots=True)
class Replaying:
    """Options of capturing a program and replaying it.

    mode
        ``train`` if a run changes its stored values, else ``inference``; None for the mode of the
        program.
    static_roles
        Roles of values that keep their addresses from one replay to the next.
    copy_roles
        Roles of values that each replay reads from its feed; other values in the feed are ignored.
    bound
        Number of captures kept: one for each set of shapes.
    warm_up
        Number of runs before a capture; None for the number that the device needs.

    Roles may be given in any collection. Raises ExecError for invalid combinations.
    """

    mode: Mode | None = None
    static_roles: AbstractSet[Role] = frozenset(STORED_ROLES)
    copy_roles: AbstractSet[Role] = frozenset({"input"})
    bound: int = BOUND
    warm_up: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in (None, *MODES):
            raise ExecError(f"replay mode {self.mode!r}; it is one of {', '.join(MODES)}")
        check_count("bound", self.bound, 1)
        if self.warm_up is not None:
            check_count("warm_up", self.warm_up, 0)
        for name in ("static_roles", "copy_roles"):
            object.__setattr__(self, name, _roles(name, getattr(self, name)))
        if "input" not in self.copy_roles:
            raise ExecError("copy_roles lacks 'input': a replay takes its inputs from the feed")
        if self.mode == "train" and (fed := self.copy_roles - {"input"}):
            raise ExecError(
                f"copy_roles has {sorted(fed)} in training, where each replay would set back what "
                "the one before it learned; a training replay takes inputs alone"
            )

    def of_mode(self, mode: Mode) -> Replaying:
        """The same for a program of this mode. Raises ExecError where it was meant for another."""
        if self.mode not in (None, mode):
            raise ExecError(
                f"replay mode {self.mode!r}, but the program is for {mode}: a module is compiled "
                "for inference, a function that runs a step for training; leave the mode out"
            )
        return replace(self, mode=mode)

    @property
    def fixed(self) -> AbstractSet[Role]:
        """Roles of stored values whose contents may become part of the plan."""
        return self.static_roles - self.copy_roles


def check_count(name: str, count: object, least: int) -> None:
    """Raise ExecError where an option is no whole number from ``least`` up."""
    if not isinstance(count, int) or isinstance(count, bool) or count < least:
        raise ExecError(f"{name}={count!r}; it is a whole number from {least} up")


def _roles(name: str, given: object) -> frozenset[Role]:
    """The roles of an option. Raises ExecError for what is no role of a feed's value."""
    known = "input", *STORED_ROLES
    if isinstance(given, str) or not isinstance(given, Collection):
        raise ExecError(f"{name}={given!r}; it is a set of roles, such as {{'input', 'param'}}")
    if unknown := [role for role in given if role not in known]:
        raise ExecError(
            f"{name} has {unknown}; a feed holds inputs, or values that are stored "
            f"({', '.join(STORED_ROLES)})"
        )
    return frozenset(given)


def take_feed(
    feed: Mapping[str, Tensor],
    known: Mapping[str, ValueSpec | IRValue],
    replaying: Replaying,
    device: torch.device,
    *,
    optional: Collection[str] = (),
) -> dict[str, Tensor]:
    """What a replay takes of a feed, in the order of ``known``; shapes are not looked at.

    ``optional`` inputs may be left out. Raises InputError for what is no feed, a name that there is
    not, an input that is missing, another dtype, or another device.
    """
    check_feed(feed)
    if unknown := sorted(feed.keys() - known.keys()):
        inputs = [name for name, value in known.items() if value.role == "input"]
        raise InputError(
            f"the feed has {unknown[0]!r}, which the program does not know; its inputs are "
            f"{', '.join(inputs) or 'none'}"
        )
    found = {}
    for name, value in known.items():
        if value.role not in replaying.copy_roles:
            continue
        if name in feed:
            check_tensor(name, feed[name], value, device, static=value.role != "input")
            found[name] = feed[name]
        elif value.role == "input" and name not in optional:
            raise InputError(f"input {name!r} is not in the feed, which has {sorted(feed)}")
    return found


@contextmanager
def as_before(written: Sequence[Tensor], device: torch.device) -> Iterator[None]:
    """What is run inside leaves these tensors, and the random numbers, as they were."""
    before = [tensor.detach().clone() for tensor in written]
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, content in zip(written, before, strict=True):
                    tensor.copy_(content)


def warm_up(
    run: Callable[[], object], times: int, written: Sequence[Tensor], device: torch.device
) -> None:
    """Run so many times, and leave what a run writes, and the random numbers, as they were."""
    if times:
        with as_before(written, device):
            for _ in range(times):
                run()
