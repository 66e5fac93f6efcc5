"""What products depend on beside their numbers, and what to do about it."""

import os
import sys

import pytest
import torch

from shardwright.runtime.verify import Rounding, _differs, _matrices, _placed, remedy, rounding

PROBE = sys.modules[rounding.__module__]
ALIKE = Rounding(by_alignment=False, by_layout=False)


def test_the_probe_draws_nothing_and_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.get_rng_state()
    rounding.cache_clear()
    found = rounding()
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr(PROBE, "_differs", lambda place: pytest.fail("it was made again"))
    assert rounding() is found


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch is built without MKL")
def test_alignment_counts_for_nothing_where_mkl_was_told_so() -> None:
    assert os.environ["MKL_CBWR"]
    assert not rounding().by_alignment


@pytest.mark.parametrize("offset", [0, 1, 5])
@pytest.mark.parametrize("wider", [0, 3])
def test_a_matrix_is_placed_where_it_is_wanted(offset: int, wider: int) -> None:
    for matrix in next(_matrices()):
        placed = _placed(matrix, offset=offset, wider=wider)
        assert torch.equal(placed, matrix)
        assert placed.data_ptr() % 64 == 4 * offset
        assert placed.stride() == (matrix.shape[1] + wider, 1)


def test_products_of_equal_calls_are_equal_and_of_other_numbers_are_not() -> None:
    assert not _differs(_placed)
    assert _differs(lambda matrix: _placed(matrix * (1 + 2**-20)))


@pytest.mark.parametrize(
    ("largest", "found", "said"),
    [
        (5e-7, Rounding(True, False), "lie: set MKL_CBWR=AUTO before Python starts, or give toler"),
        (5e-7, Rounding(False, True), "round by how their arrays are laid out: give tolerance=1e-"),
        (5e-7, Rounding(True, True), "lie and by how their arrays are laid out: set MKL_CBWR=AUTO"),
        (5e-7, Rounding(True, True), "starts, and where that is not enough, give tolerance=1e-06"),
        (5e-6, Rounding(False, True), "give tolerance=1e-05"),
    ],
)
def test_a_remedy_of_rounding(largest: float, found: Rounding, said: str) -> None:
    assert said in remedy(largest, found)


@pytest.mark.parametrize("found", [ALIKE, Rounding(True, True)])
def test_there_is_none_of_more_than_rounding(found: Rounding) -> None:
    assert remedy(2e-5, found) == remedy(float("inf"), found) == ""
    assert (remedy(1e-7, found) == "") == (found == ALIKE)
