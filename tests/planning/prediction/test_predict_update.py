"""What the update of parameters takes once a step."""

import numpy as np
import pytest

from shardwright.clusters import DeviceModel
from shardwright.costs.operations import UPDATE_PASSES
from shardwright.costs.worker_time import COMPUTING
from shardwright.planning.prediction.update import COPY_PASSES, update_seconds

DEVICE = DeviceModel("core", "cpu", 10**9, flops=1e9, bandwidth=1e6)
GRADIENTS = np.array([1e6, 0.0])


def test_what_is_not_trained_is_not_updated():
    assert update_seconds(GRADIENTS, 1, DEVICE) == pytest.approx([UPDATE_PASSES, 0])


def test_what_is_dealt_out_is_brought_together_again():
    found = update_seconds(GRADIENTS, 2, DEVICE)
    assert found == pytest.approx([UPDATE_PASSES / 2 + COPY_PASSES + COMPUTING, 0])


def test_ranks_may_have_different_numbers_of_slots():
    found = update_seconds(np.array([1e6, 1e6]), np.array([1, 2]), DEVICE)
    assert found[0] == pytest.approx(UPDATE_PASSES)
    assert found[1] == update_seconds(GRADIENTS, 2, DEVICE)[0]
