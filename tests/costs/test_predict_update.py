"""What the update of parameters takes once a step."""

import numpy as np
import pytest

from shardwright.clusters import DeviceModel
from shardwright.costs.predict import COPY_PASSES, update_seconds
from shardwright.costs.roofline import COMPUTING, STATE_PASSES, UPDATE_PASSES

DEVICE = DeviceModel("core", "cpu", 10**9, flops=1e9, bandwidth=1e6)
GRADIENTS, STATES = np.array([1e6, 0.0]), np.array([2e6, 0.0])
ADAM = UPDATE_PASSES + 2 * STATE_PASSES


def test_what_is_not_trained_is_not_updated():
    assert update_seconds(GRADIENTS, STATES, 1, DEVICE) == pytest.approx([ADAM, 0])


def test_an_optimizer_without_state_moves_none():
    assert update_seconds(GRADIENTS, 0 * STATES, 1, DEVICE) == pytest.approx([UPDATE_PASSES, 0])


def test_what_is_dealt_out_is_brought_together_again():
    found = update_seconds(GRADIENTS, STATES, 2, DEVICE)
    assert found == pytest.approx([ADAM / 2 + COPY_PASSES + COMPUTING, 0])


def test_ranks_may_have_different_numbers_of_slots():
    found = update_seconds(GRADIENTS[[0, 0]], STATES[[0, 0]], np.array([1, 2]), DEVICE)
    assert found[0] == pytest.approx(ADAM)
    assert found[1] == update_seconds(GRADIENTS, STATES, 2, DEVICE)[0]
