"""The rounds of all members run against each other, without a transport."""

from __future__ import annotations

import pytest
from torch import Tensor

from shardwright.comm.rounds import exchange
from shardwright.comm.wire import conform, pack, unpack
from tests.comm.cases import Case, given, operation, same, table, wanted


def run_all(case: Case, inputs: list[Tensor | None]) -> tuple[list[Tensor | None], list[int]]:
    """What each member gets, and how many bytes each sends."""
    members = [exchange(operation(case), i, tensor) for i, tensor in enumerate(inputs)]
    results: list[Tensor | None] = [None] * case.size
    sent = [0] * case.size
    received: dict[int, dict[int, Tensor] | None] = dict.fromkeys(range(case.size))
    while received:
        rounds = {}
        for i in list(received):
            try:
                rounds[i] = members[i].send(received[i])
            except StopIteration as stop:
                results[i] = stop.value
        received = {i: {} for i in rounds}
        for i, turn in rounds.items():
            for parcel in turn.outgoing:
                for peer in parcel.to:
                    spec = rounds[peer].incoming[i]
                    assert spec == parcel.spec, "both ends know the same spec"
                    sent[i] += spec.nbytes
                    content = pack(conform(parcel.tensor, spec), spec)
                    received[peer][i] = unpack(content.clone(), spec)
    return results, sent


@pytest.mark.parametrize("case", table(), ids=lambda case: f"{case.kind}-{case.dtype}")
def test_table(case: Case) -> None:
    inputs = given(case)
    results, _ = run_all(case, inputs)
    for found, expected in zip(results, wanted(case, inputs), strict=True):
        assert expected is None or same(found, expected)


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        ("all_reduce", 2 * 3 / 4),
        ("reduce_scatter", 3 / 4),
        ("all_to_all", 3 / 4),
        ("all_gather", 3),
    ],
)
def test_no_member_sends_more_than_it_must(kind: str, share: float) -> None:
    ranks, sizes = (0, 1, 2, 3), (2, 2, 2, 2)
    case = Case(kind, shape=(8, 8), ranks=ranks, sizes=sizes, src_sizes=sizes)
    inputs = given(case)
    _, sent = run_all(case, inputs)
    assert sent == [share * tensor.numel() * 4 for tensor in inputs if tensor is not None]


def test_two_members_reduce_in_one_round() -> None:
    case = Case("all_reduce", shape=(8,))
    inputs = given(case)
    rounds = exchange(operation(case), 0, inputs[0])
    next(rounds)
    with pytest.raises(StopIteration):
        rounds.send({1: inputs[1]})
