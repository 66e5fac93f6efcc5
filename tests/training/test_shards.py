from pathlib import Path

import pytest
import torch

from shardwright.engine.program import slot_program
from shardwright.engine.slot import LoadedSlot, wholes_of
from shardwright.errors import RunError
from shardwright.pipeline.schema import (
    Device,
    Document,
    Metadata,
    MetadataTensors,
    MetadataTensorSlices,
    ParamValue,
    StateOrigin,
    SuperTask,
    TensorInfo,
)
from shardwright.training.checkpoint import as_written, load_slot, owned, save_slot
from shardwright.training.dcp import write_index
from tests.runtime.sketch import chain

WHOLE = (4, 6)


def document(*slots: dict[str, tuple[str, tuple[tuple[int, int], ...]]]) -> Document:
    """A slot each, with constants by name: the whole's name and the part that it is."""
    tensors, tasks, devices = {}, {}, {}
    for number, constants in enumerate(slots):
        devices[f"d{number}"] = Device("cpu", number)
        for name, (whole, placements) in constants.items():
            shape = tuple(end - start for start, end in placements)
            if whole.startswith("optimizer."):
                origin = StateOrigin(whole, placements, WHOLE)
                tensors[name] = TensorInfo(shape, "f32", init="zeros", origin=origin)
            else:
                value = ParamValue("w", "safetensors", whole, "x", placements, WHOLE)
                tensors[name] = TensorInfo(shape, "f32", value)
        tasks[f"d{number}.0"] = SuperTask("FX", tuple(constants), (), f"d{number}", "")
    metadata = Metadata(MetadataTensors({}, {}), MetadataTensorSlices({}, {}))
    return Document("made", devices, tensors, tasks, metadata)


TOP, BOTTOM = ((0, 2), (0, 6)), ((2, 4), (0, 6))
LEFT, RIGHT = ((0, 4), (0, 3)), ((0, 4), (3, 6))
ALL = ((0, 4), (0, 6))


NO_PROGRAM = slot_program(chain(1), "d0")


def slot_of(found: Document, name: str, **contents: torch.Tensor) -> LoadedSlot:
    return LoadedSlot(
        name=name,
        rank=list(found.devices).index(name),
        device=torch.device("cpu"),
        program=NO_PROGRAM,
        tasks={},
        moves={},
        memberships={},
        constants=dict(contents),
        wholes=wholes_of(found, contents),
    )


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ([{"a": ("w", ALL)}, {"b": ("w", ALL)}], [["a"], []]),
        ([{"a": ("w", TOP)}, {"b": ("w", BOTTOM)}], [["a"], ["b"]]),
        ([{"a": ("w", TOP)}, {"b": ("w", ALL)}], [[], ["b"]]),
        ([{"a": ("w", TOP)}, {"b": ("w", BOTTOM)}, {"c": ("w", LEFT)}, {"d": ("w", RIGHT)}],
         [["a"], ["b"], [], []]),
        ([{"a": ("w", TOP), "b": ("w", BOTTOM)}, {"c": ("w", TOP)}], [["a", "b"], []]),
        ([{"a": ("w", ALL), "s": ("optimizer.w.exp_avg", TOP)},
          {"b": ("w", ALL), "t": ("optimizer.w.exp_avg", BOTTOM)}], [["a", "s"], ["t"]]),
        ([{"a": ("w", ((0, 0), (0, 6)))}, {"b": ("w", ALL)}], [[], ["b"]]),
    ],
    ids=["copies", "halves", "half and whole", "cut two ways", "parts", "split state", "nothing"],
)  # fmt: skip
def test_each_element_is_written_once(slots, expected) -> None:
    assert list(owned(document(*slots)).values()) == expected


def test_a_hole_is_an_error() -> None:
    with pytest.raises(RunError, match="12 of the 24 elements of 'w'"):
        owned(document({"a": ("w", TOP)}, {"b": ("w", TOP)}))


def test_state_moves_to_another_mesh(tmp_path: Path) -> None:
    whole, state = torch.randn(WHOLE), torch.randn(WHOLE)
    rows = document(
        {"a": ("w", TOP), "s": ("optimizer.w.exp_avg", ALL)},
        {"b": ("w", BOTTOM), "t": ("optimizer.w.exp_avg", ALL)},
    )
    slots = [
        slot_of(rows, "d0", a=whole[:2].clone(), s=state.clone()),
        slot_of(rows, "d1", b=whole[2:].clone(), t=torch.full(WHOLE, torch.nan)),
    ]
    arguments = {"directory": str(tmp_path), "tensors": owned(rows)}
    write_index(tmp_path, as_written([save_slot(slot, arguments, {}) for slot in slots]))
    columns = document({"c": ("w", LEFT)}, {"d": ("w", RIGHT), "u": ("optimizer.w.exp_avg", TOP)})
    left = slot_of(columns, "d0", c=torch.zeros(4, 3))
    right = slot_of(columns, "d1", d=torch.zeros(3, 4).t(), u=torch.zeros(2, 6))
    for slot in (left, right):
        load_slot(slot, {"directory": str(tmp_path)}, {})
    assert torch.equal(left.constants["c"], whole[:, :3])
    assert torch.equal(right.constants["d"], whole[:, 3:])
    assert torch.equal(right.constants["u"], state[:2])
