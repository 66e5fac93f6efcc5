"""Wholes joined of the slots' parts, and cut into them."""

from __future__ import annotations

import pytest
import torch

from shardwright.compiler.tasks import compile_slot
from shardwright.engine.program import constants_of
from shardwright.errors import WeightError
from shardwright.pipeline import Pipeline, StateOrigin, TensorInfo
from shardwright.runtime.contents import READ, WRITE, Contents, write
from tests.runtime.sketch import Sketch, identity

WHOLE = torch.arange(12.0).reshape(4, 3)


def halves() -> Pipeline:
    """Three slots: two have halves of ``w``, the third all of it and a state's last column."""
    sketch = Sketch(3)
    parts = {"a": ((0, 2), (0, 3)), "b": ((2, 4), (0, 3)), "c": ((0, 4), (0, 3))}
    for k, (name, placements) in enumerate(parts.items()):
        content = WHOLE[placements[0][0] : placements[0][1]]
        sketch.constant(name, content)
        sketch.fx(f"d{k}.0", f"d{k}", [name], [f"y{k}"], identity)
        value = sketch.tensors[name].value
        assert value is not None
        value.name, value.placements, value.shape = "w", placements, (4, 3)
    origin = StateOrigin("momentum", ((0, 4), (2, 3)), (4, 3))
    sketch.tensors["m"] = TensorInfo((4, 1), "f32", init="zeros", origin=origin)
    sketch.tensors["unnamed"] = TensorInfo((4,), "f32", init="zeros")
    sketch.fx("d2.1", "d2", ["m"], ["z"], identity)
    sketch.fx("d2.2", "d2", ["unnamed"], ["u"], identity)
    pipeline = sketch.finish(["y0", "y1", "y2", "z", "u"])
    pipeline.weights.put("weights", "w", WHOLE)
    return pipeline


def test_each_part_is_asked_for_once() -> None:
    contents = Contents(halves())
    assert contents.wanted(None) == {"d0": ["a"], "d1": ["b"], "d2": ["c", "m"]}
    assert contents.wanted(["momentum"]) == {"d0": [], "d1": [], "d2": ["m"]}
    with pytest.raises(WeightError, match="no state named 'v'"):
        contents.wanted(["v"])


def test_parts_are_joined() -> None:
    contents = Contents(halves())
    found = contents.join({"d0": {"a": WHOLE[:2]}, "d1": {"b": WHOLE[2:]}})
    assert list(found) == ["w"]
    assert torch.equal(found["w"], WHOLE)


def test_wholes_are_cut_for_all_who_have_a_part() -> None:
    cut = Contents(halves()).cut({"w": WHOLE + 1, "momentum": -WHOLE})
    assert {slot: list(tensors) for slot, tensors in cut.items()} == {
        "d0": ["a"], "d1": ["b"], "d2": ["c", "m"],
    }  # fmt: skip
    assert torch.equal(cut["d1"]["b"], WHOLE[2:] + 1)
    assert torch.equal(cut["d2"]["m"], -WHOLE[:, 2:])
    with pytest.raises(WeightError, match=r"'w' is torch.float32\[2, 3\], the pipeline has"):
        Contents(halves()).cut({"w": WHOLE[:2]})


def test_contents_are_written_where_they_are() -> None:
    pipeline = halves()
    slot = compile_slot(pipeline, "d0", pipeline.weights.load(constants_of(pipeline, "d0")))
    before = slot.constants["a"]
    write(slot, None, {"a": torch.zeros(2, 3)})
    assert slot.constants["a"] is before
    assert before.sum() == 0
    assert (f"{write.__module__}:read", f"{write.__module__}:write") == (READ, WRITE)
