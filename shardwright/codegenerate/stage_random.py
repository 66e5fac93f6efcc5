"""Random numbers of operators that run in several threads at one time, the same in every run.

The CPU has one generator for the whole process: threads that draw from it get what is left, by
chance. In a block of `OwnDraws` operators draw from a generator of the block instead. It follows
from a seed and a place, so that a call draws the same whatever the threads do, and draws it again
where activations are computed a second time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from shardwright.torch_internals import OpOverload, TorchDispatchMode, schema_of

_SEEDED = torch.Tag.nondeterministic_seeded
_default_generator = threading.Lock()
"""Held while operators that take no generator draw from the process's."""


class OwnDraws(TorchDispatchMode):
    """Lets operators of the CPU draw from a generator that begins with what ``numbers`` lead to.

    ``drew`` is whether any has.
    """

    def __init__(self, *numbers: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        seed = np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]
        self._generator = torch.Generator().manual_seed(int(seed))
        self.drew = False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator; one that draws, with this generator."""
        given = dict(kwargs or {})
        if _SEEDED not in func.tags:
            return func(*args, **given)
        self.drew = True
        names = [argument.name for argument in schema_of(func).arguments]
        if "generator" in names:
            if names.index("generator") >= len(args) and given.get("generator") is None:
                given["generator"] = self._generator
            return func(*args, **given)
        return self._with_default(lambda: func(*args, **given))

    def _with_default(self, draw: Callable[[], Any]) -> Any:
        """Let the process's generator have this one's state for a draw."""
        with _default_generator:
            before = torch.get_rng_state()
            torch.set_rng_state(self._generator.get_state())
            try:
                return draw()
            finally:
                self._generator.set_state(torch.get_rng_state())
                torch.set_rng_state(before)
