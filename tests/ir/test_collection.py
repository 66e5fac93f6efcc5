"""Garbage collection that waits."""

from __future__ import annotations

import gc

import pytest

from shardwright.ir.graph import without_collection


def test_collection_waits_and_goes_on() -> None:
    assert gc.isenabled()
    with without_collection():
        assert not gc.isenabled()
        with without_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_goes_on_after_an_error_and_stays_off_where_it_was_off() -> None:
    with pytest.raises(ValueError, match="inside"), without_collection():
        raise ValueError("inside")
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
