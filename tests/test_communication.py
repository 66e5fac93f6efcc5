"""The rows of communication, and what follows from one."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from shardwright.clusters import SHARED
from shardwright.clusters.links import COLLECTIVES, KINDS
from shardwright.comm import Operation, TensorSpec, combine, nccl
from shardwright.communication import COMMUNICATION, CommunicationKind, CommunicationRow


def test_every_kind_has_a_row_a_price_and_a_call_of_nccl() -> None:
    assert [*COMMUNICATION] == [*get_args(CommunicationKind)]
    assert {kind for kind, row in COMMUNICATION.items() if row.priced_as is None} == {
        "send",
        *COLLECTIVES,
    }
    for kind in COMMUNICATION:
        assert SHARED.seconds(kind, 4, 1 << 20) > 0  # type: ignore[arg-type]
    assert {"send", *nccl._KINDS} == set(KINDS)


def test_a_new_row_is_all_that_its_rounds_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scatter and a gather, which no file has today."""
    table = {
        **COMMUNICATION,
        "scatter": CommunicationRow((0, 1), root="src", cut="dim", priced_as="send"),
        "gather": CommunicationRow((1, 0), root="dst", join="dim", priced_as="send"),
    }
    monkeypatch.setattr("shardwright.comm.transport.COMMUNICATION", table)
    whole = torch.arange(10.0).reshape(2, 5)
    pieces = list(whole.split([2, 2, 1], 1))
    specs = tuple(TensorSpec(tuple(piece.shape), torch.float32) for piece in pieces)
    at_root = (None, TensorSpec((2, 5), torch.float32), None)
    members = ((0, 1, 2), ("a", "b", "c"))
    scatter = Operation("scatter", "g", 0, *members, at_root, specs, {"dim": 1, "src": "b"}, 1)
    for found, piece in zip(combine(scatter, [None, whole, None]), pieces, strict=True):
        assert torch.equal(found, piece)
    gather = Operation("gather", "g", 0, *members, specs, at_root, {"dim": 1, "dst": "b"}, 1)
    found = combine(gather, pieces)
    assert torch.equal(found[1], whole)
    assert (found[0], found[2]) == (None, None)
