"""Slices in states: names, loading, and joining."""

from __future__ import annotations

from copy import deepcopy
from typing import ClassVar, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shardwright.codegenerate.gpipe import wiring_of
from shardwright.codegenerate.support.exchanges import Slots
from shardwright.codegenerate.support.slices import (
    Piece,
    Slices,
    SplitStage,
    join_state_dicts,
    piece_of,
)
from shardwright.errors import InputError

names = st.from_regex(r"[a-z_]+(\.[a-z0-9_]+)*", fullmatch=True)
ranges = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 5)).map(lambda pair: (pair[0], sum(pair))),
    min_size=1,
    max_size=3,
).map(tuple)


@given(names, ranges)
def test_keys_are_read_back(name: str, spans: tuple[tuple[int, int], ...]) -> None:
    piece = Piece(name, spans)
    assert piece_of(piece.key) == piece
    known = piece._replace(shape=tuple(end + 1 for _, end in spans))
    assert piece_of(known.key) == known
    assert piece_of(name) == Piece(name, ())


@given(st.data())
def test_slices_join_to_the_whole(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    at = data.draw(st.integers(0, shape[dim]))
    spans = [(0, size) for size in shape]
    parts = [
        Piece("w", (*spans[:dim], span, *spans[dim + 1 :]), tuple(shape))
        for span in ((0, at), (at, shape[dim]))
    ]
    states = [{part.key: part.of(whole), "b": torch.ones(2)} for part in parts]
    joined = join_state_dicts(states)
    assert torch.equal(joined["w"], whole)
    assert joined.keys() == {"w", "b"}


def test_a_missing_slice_is_named() -> None:
    with pytest.raises(ValueError, match=r"'w' has missing slices, found w\[2:4\]"):
        join_state_dicts([{"w[2:4]": torch.ones(2)}])


@pytest.mark.parametrize("slots", [(0,), (1,), (0, 1), (0, 2), (1, 2)])
def test_every_missing_slot_is_noticed(slots: tuple[int, ...]) -> None:
    whole = torch.arange(6.0)
    parts = [Piece("w", ((start, start + 2),), (6,)) for start in (0, 2, 4)]
    with pytest.raises(ValueError, match="missing slices"):
        join_state_dicts([{parts[slot].key: parts[slot].of(whole)} for slot in slots])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"w": torch.ones(2)}, {"w": torch.tensor([1.0, 2.0])}),
        ({"w[0:2] of [3]": torch.ones(2)}, {"w[1:3] of [3]": torch.zeros(2)}),
        ({"w[0:2] of [3]": torch.ones(2)}, {"w": torch.zeros(3)}),
        ({"w": torch.tensor(1.0)}, {"w": torch.tensor(torch.nan)}),
    ],
)
def test_states_that_differ_are_named(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match="states 0 and 2 differ in 'w'"):
        join_state_dicts([one, {"b": torch.ones(1)}, other])


def test_states_of_two_models_are_named() -> None:
    with pytest.raises(ValueError, match=r"'w' has the shapes \[3\] of state 0, \[4\] of state 1"):
        join_state_dicts([{"w[0:2] of [3]": torch.ones(2)}, {"w": torch.ones(4)}])
    with pytest.raises(ValueError, match=r"'w' of state 1 is torch\.float64"):
        join_state_dicts([{"w": torch.ones(2)}, {"w": torch.ones(2).double()}])


def test_what_is_no_number_is_equal_to_itself() -> None:
    state = {"w": torch.tensor([1.0, torch.nan])}
    assert join_state_dicts([state, state])["w"].isnan().tolist() == [False, True]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 2)
        self.qkv_0, self.qkv_1 = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))


class Stage(SplitStage):
    slices: ClassVar[Slices] = {
        "layers.*.up.weight": ("layers.*.up.weight", (4, 3), ("[0:2, 0:3]", "[2:4, 0:3]")),
        "layers.*.qkv_0": ("layers.*.qkv", (4,), ("[0:1]", "[1:2]")),
        "layers.*.qkv_1": ("layers.*.qkv", (4,), ("[2:3]", "[3:4]")),
    }

    def __init__(self, slot: int) -> None:
        super().__init__(Slots({"tensor": 2}, slot=slot))
        self.layers = nn.ModuleDict({"4": Layer(), "5": Layer()})


def whole_state() -> dict[str, Tensor]:
    return {
        f"layers.{number}.{name}": tensor
        for number in (4, 5)
        for name, tensor in {
            "up.weight": torch.randn(4, 3),
            "up.bias": torch.randn(2),
            "qkv": torch.randn(4),
        }.items()
    }


def test_pieces_by_path() -> None:
    stage = Stage(1)
    assert list(stage.state_dict()) == [
        f"layers.{i}.{key}"
        for i in (4, 5)
        for key in (
            "qkv[1:2] of [4]",
            "qkv[3:4] of [4]",
            "up.weight[2:4, 0:3] of [4, 3]",
            "up.bias",
        )
    ]


@pytest.mark.parametrize("strict", [True, False])
def test_wholes_are_loaded_and_joined(strict: bool) -> None:
    whole = whole_state()
    states = []
    for slot in (0, 1):
        stage = Stage(slot)
        stage.load_state_dict(whole, strict=strict)
        states.append(stage.state_dict())
    joined = join_state_dicts(states)
    assert joined.keys() == whole.keys()
    assert all(torch.equal(joined[key], tensor) for key, tensor in whole.items())


def test_slices_are_loaded() -> None:
    one, other = Stage(1), Stage(1)
    one.load_state_dict(whole_state())
    other.load_state_dict(one.state_dict())
    assert all(map(torch.equal, one.parameters(), other.parameters()))


def test_stages_inside_of_others_save_and_load() -> None:
    stage = Stage(0)
    stage.load_state_dict(whole_state())
    averaged = torch.optim.swa_utils.AveragedModel(stage)
    assert "module.layers.4.up.weight[0:2, 0:3] of [4, 3]" in averaged.state_dict()
    again = torch.optim.swa_utils.AveragedModel(Stage(0))
    again.load_state_dict(averaged.state_dict())
    assert all(map(torch.equal, again.module.parameters(), stage.parameters()))


def test_strict_loading_says_what_is_missing_and_too_much() -> None:
    state = whole_state()
    del state["layers.4.qkv"]
    state["layers.9.up.weight"] = torch.zeros(4, 3)
    with pytest.raises(RuntimeError, match=r"(?s)qkv_0.*layers\.9\.up\.weight") as raised:
        Stage(0).load_state_dict(state)
    assert "size mismatch" not in str(raised.value)
    found = Stage(0).load_state_dict(state, strict=False)
    assert found.missing_keys == ["layers.4.qkv_0", "layers.4.qkv_1"]
    assert found.unexpected_keys == ["layers.9.up.weight"]


def test_tensors_of_other_shapes_are_refused() -> None:
    state = whole_state() | {"layers.4.up.weight": torch.zeros(5, 3)}
    with pytest.raises(RuntimeError, match=r"size mismatch for layers\.4\.up\.weight"):
        Stage(0).load_state_dict(state)


@pytest.mark.parametrize("strict", [True, False])
def test_another_slots_tensors_are_refused_under_plain_names(strict: bool) -> None:
    local = dict(Stage(1).named_parameters())
    with pytest.raises(RuntimeError, match=r"(?s)layers\.4\.up\.weight.*layers\.4\.qkv_0"):
        Stage(0).load_state_dict(local, strict=strict)


def test_copies_have_their_own_parameters_and_the_same_slots() -> None:
    stage = Stage(1)
    copy = deepcopy(stage)
    copy.load_state_dict(whole_state())
    assert copy.slots is stage.slots
    assert not torch.equal(
        copy.state_dict()["layers.4.up.weight[2:4, 0:3] of [4, 3]"], stage.layers["4"].up.weight
    )


def test_slots_know_their_place() -> None:
    slots = Slots({"data": 2, "tensor": 3}, slot=4)
    assert (slots["data"].index, slots["data"].members) == (1, (1, 4))
    assert (slots["tensor"].index, slots["tensor"].members) == (1, (3, 4, 5))
    with pytest.raises(ValueError, match="slots 0 to 5, found 6"):
        Slots({"data": 2, "tensor": 3}, slot=6)
    with pytest.raises(RuntimeError, match="give slot=0 to 5"):
        Slots({"data": 2, "tensor": 3})


def test_stages_with_other_slices_under_one_name_are_refused() -> None:
    class Columns(Stage):
        slices: ClassVar[Slices] = {
            **Stage.slices,
            "layers.*.up.weight": ("layers.*.up.weight", (2, 6), ("[0:2, 0:3]", "[0:2, 3:6]")),
        }

    ports = [{"inputs": [name], "outputs": [f"{name}{name}"]} for name in ("x", "xx")]
    stages = [port | {"model": kind(0)} for port, kind in zip(ports, (Stage, Columns), strict=True)]
    configuration = {"model inputs": ["x"], "model outputs": ["xxxx"]} | dict(enumerate(stages))
    with pytest.raises(InputError, match=r"stage 0 has .*\[0:2, 0:3\].*trained apart"):
        wiring_of(configuration)


def test_processes_of_equal_ranks_are_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[int]] = []

    def new_group(ranks: list[int], **_: object) -> object:
        made.append(ranks)
        return object()

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1, 2, 3])
    for axes in ({"data": 2, "tensor": 2}, {"data": 2, "sequence": 2}):
        slots = Slots(axes, cast(dist.ProcessGroup, object()), slot=3)
        assert all(slots[name].group is slots[name].group for name in axes)
    assert made == [[1, 3], [2, 3]]
