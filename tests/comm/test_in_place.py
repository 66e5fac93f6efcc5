"""Two members in a buffer, run against each other by hand; `test_shared` runs the whole table."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from shardwright.comm import shared_memory
from shardwright.comm.rounds import Exchange, Message, Round
from shardwright.comm.shared_memory import exchange_in_place
from shardwright.comm.transport import TensorSpec
from tests.comm.cases import Case, given, operation, wanted


def buffer(to: Sequence[int], spec: TensorSpec) -> Message:
    return Message(torch.full(spec.shape, -99, dtype=spec.dtype), spec, to)


def members(case: Case) -> list[Exchange]:
    op = operation(case)
    return [exchange_in_place(op, i, tensor, buffer) for i, tensor in enumerate(given(case))]


def ended(member: Exchange, received: dict[int, Tensor]) -> Tensor:
    with pytest.raises(StopIteration) as stop:
        member.send(received)
    return stop.value.value


def nbytes(turn: Round) -> int:
    return sum(parcel.spec.nbytes for parcel in turn.outgoing)


def test_all_get_the_room_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "LARGE", 1)
    case = Case("all_gather", shape=(4, 6), sizes=(3, 1))
    first, second = members(case)
    offer = next(first)
    assert next(second).incoming.keys() == {0}
    whole = offer.outgoing[0].tensor
    done = [first.send({}), second.send({0: whole})]
    assert [nbytes(turn) for turn in done] == [0, 0], "what is said then has no content"
    nothing = torch.empty(0, dtype=torch.uint8)
    results = [ended(first, {1: nothing}), ended(second, {0: nothing})]
    assert all(result.data_ptr() == whole.data_ptr() for result in results)
    assert torch.equal(results[0], wanted(case, given(case))[0])


def test_each_reduces_one_part_in_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "LARGE", 1)
    case = Case("all_reduce", shape=(5, 3))
    first, second = members(case)
    offer, given_by_second = next(first), next(second)
    whole = offer.outgoing[0].tensor
    (part,) = given_by_second.outgoing
    assert part.spec.shape == (8,), "the larger part is the first member's to reduce"
    first.send({1: part.tensor})
    second.send({0: whole})
    nothing = torch.empty(0, dtype=torch.uint8)
    results = [ended(first, {1: nothing}), ended(second, {0: nothing})]
    assert all(result.data_ptr() == whole.data_ptr() for result in results)
    assert torch.equal(results[1], wanted(case, given(case))[1])


@pytest.mark.parametrize("kind", ["all_gather", "all_reduce"])
def test_small_tensors_take_one_round(kind: str) -> None:
    case = Case(kind, ranks=(0, 1, 2), shape=(6, 2), sizes=(2, 2, 2))
    parts = members(case)
    turns = [next(member) for member in parts]
    for i, member in enumerate(parts):
        received = {j: turns[j].outgoing[0].tensor for j in turns[i].incoming}
        assert torch.equal(ended(member, received), wanted(case, given(case))[i])
