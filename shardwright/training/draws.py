"""Random numbers that follow from a seed and a place: a state in force while something draws."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class Draws:
    """The states of torch's, Python's and numpy's generators that numbers lead to.

    ``seed`` is the one that they were given.
    """

    def __init__(self, *numbers: int) -> None:
        self.seed = int(np.random.SeedSequence(list(map(abs, numbers))).generate_state(1)[0])
        self._states: tuple[Any, ...] | None = None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Draw from these states in the block, and go on where an earlier block ended."""
        before = _states()
        if self._states is None:
            torch.default_generator.manual_seed(self.seed)
            random.seed(self.seed)
            np.random.seed(self.seed)
        else:
            _restore(self._states)
        try:
            yield
        finally:
            self._states = _states()
            _restore(before)


def _states() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _restore(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
