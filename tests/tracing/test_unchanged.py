"""What Python and torch keep outside of tensors is put back, and only where it changed."""

import random
from collections import deque
from typing import Any

import numpy
import pytest
import torch

from shardwright.tracing.closures import find_closure, unchanged

calls: list[int] = []
level = 0


def step(history: Any = calls) -> None:
    global level
    level += 1
    history.append(level)


def test_globals_and_containers() -> None:
    with unchanged(find_closure(step)):
        step()
        assert (calls, level) == ([1], 1)
    assert (calls, level) == ([], 0)


def test_containers_keep_their_identity_and_order() -> None:
    held = {"list": [1, 2], "set": {1}, "dict": {"b": 1, "a": 2}, "deque": deque([1], maxlen=1)}

    def change() -> None:
        held["list"].reverse()
        held["set"].clear()
        held["dict"].update(c=3)
        held["deque"].append(2)
        held["new"] = []

    before = dict(held)
    with unchanged(find_closure(change)):
        change()
    assert held == {"list": [1, 2], "set": {1}, "dict": {"b": 1, "a": 2}, "deque": deque([1])}
    assert all(held[key] is before[key] for key in before)


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(numpy.random.rand())


def failing() -> None:
    draw()
    torch.set_grad_enabled(False)
    raise ValueError("on the way")


def run_unchanged() -> None:
    with unchanged(find_closure(failing)):
        failing()


def test_random_numbers_and_settings_on_every_path() -> None:
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    expected = draw()
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])
    with pytest.raises(ValueError, match="on the way"):
        run_unchanged()
    assert torch.is_grad_enabled()
    assert draw() == expected
