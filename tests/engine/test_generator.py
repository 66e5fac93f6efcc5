"""Calls and batches cut for slots, and outputs put together."""

from __future__ import annotations

import pytest
import torch

from shardwright.engine.generator import Generator, InputRows
from shardwright.engine.program import Microbatching
from shardwright.errors import InputError
from shardwright.ir.structure import describe_arguments, describe_result
from shardwright.pipeline import Pipeline, Structure
from tests.runtime.linear_step import ROWS, WIDTH, linear_step
from tests.runtime.sketch import Sketch, chain, identity

X, Y = torch.arange(12.0).reshape(4, 3), torch.arange(4)


def sliced() -> Pipeline:
    """Halves of x on two slots, a whole y on both, two outputs of which one is in halves."""
    sketch = Sketch(2)
    for i in range(2):
        rows = ((2 * i, 2 * i + 2), (0, 3))
        sketch.input(f"x{i}", (2, 3), f"d{i}", part=("x", rows))
        sketch.input(f"y{i}", (4,), f"d{i}", "i64", part=("y", ((0, 4),)))
        sketch.fx(f"d{i}.0", f"d{i}", [f"x{i}"], [f"u{i}"], identity)
    sketch.fx("d1.1", "d1", ["y1"], ["v"], identity)
    sketch.fx("d0.1", "d0", ["y0"], ["unused"], identity)
    parts = {f"u{i}": ("u", ((2 * i, 2 * i + 2), (0, 3))) for i in range(2)}
    return sketch.finish(["u0", "u1", "v"], parts=parts)


def test_cut() -> None:
    slots = Generator(sliced()).cut((X,), {"y": Y})
    assert {slot: sorted(tensors) for slot, tensors in slots.items()} == {
        "d0": ["x0", "y0"],
        "d1": ["x1", "y1"],
    }
    assert torch.equal(slots["d1"]["x1"], X[2:])
    assert torch.equal(slots["d1"]["y1"], Y)


def test_results_without_a_structure_are_a_dict_by_name() -> None:
    found = Generator(sliced()).join({"u0": X[:2], "u1": X[2:], "v": Y})
    assert list(found) == ["u", "v"]
    assert torch.equal(found["u"], X)
    assert found["v"] is Y


def test_cut_and_join_with_a_structure() -> None:
    def model(x, *, options, y):
        return None

    arguments, _ = describe_arguments(model, (X,), {"options": ["fast", None], "y": Y})
    tree, _ = describe_result({"u": X, "more": [{"v": Y}, 3]})
    pipeline = sliced()
    pipeline.metadata.structure = Structure(arguments, tree)
    outputs = pipeline.metadata.tensors.outputs
    outputs["more_0_v"] = outputs.pop("v")
    pipeline.metadata.tensor_slices.outputs["v"].origin = "more_0_v"
    generator = Generator(pipeline)
    slots = generator.cut((X,), {"y": Y, "options": ["fast", None]})
    assert torch.equal(slots["d0"]["x0"], X[:2])
    found = generator.join({"u0": X[:2], "u1": X[2:], "v": Y})
    assert torch.equal(found["u"], X)
    assert found["more"] == [{"v": Y}, 3]
    with pytest.raises(InputError, match="'slow', but the graph was captured with 'fast'"):
        generator.cut((X,), {"y": Y, "options": ["slow", None]})


def test_a_number_that_was_captured_is_told_to_be_given_as_a_tensor() -> None:
    """As the time step of a denoiser, which is another one at each call."""

    def model(x, timestep):
        return None

    arguments, _ = describe_arguments(model, (X, 10), {})
    pipeline = sliced()
    pipeline.metadata.structure = Structure(arguments, describe_result(X)[0])
    with pytest.raises(
        InputError,
        match=r"timestep is 11, .* with 10, .*capture with a tensor \(torch.tensor\(10\)\)",
    ):
        Generator(pipeline).cut((X, 11), {})


def test_slices_have_the_layout_that_the_pipeline_declares() -> None:
    slots = Generator(sliced()).cut((X.t().contiguous().t(), Y.repeat(2)[::2]), {})
    assert slots["d0"]["x0"].stride() == (3, 1)
    assert slots["d0"]["y0"].stride() == (1,)


def test_gradients_stay_outside() -> None:
    slots = Generator(sliced()).cut((X.clone().requires_grad_(), Y), {})
    assert not slots["d0"]["x0"].requires_grad


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((X,), {}, "input 'y' must be given"),
        ((X, Y, Y), {}, "the inputs are: x, y"),
        ((X,), {"z": Y}, "the inputs are: x, y"),
        ((X,), {"x": X, "y": Y}, "the inputs are: x, y"),
        ((X, 3), {}, "input 'y' must be given, as a tensor"),
        ((X[:3], Y), {}, r"'x' is torch.float32\[3, 3\], but .* takes torch.float32\[4, 3\]"),
        ((X.double(), Y), {}, r"input 'x' is torch.float64\[4, 3\]"),
        ((X.to(torch.uint16), Y), {}, r"torch.uint16\[4, 3\]"),
    ],
)
def test_wrong_arguments(args, kwargs, message) -> None:
    with pytest.raises(InputError, match=message):
        Generator(sliced()).cut(args, kwargs)


def test_one_output_is_no_tuple() -> None:
    output = X.t()[:, :4]
    assert Generator(chain(2)).join({"y1": output}) is output


BATCH = torch.arange(float(ROWS * WIDTH)).double().reshape(ROWS, WIDTH)
TARGET = -BATCH


def test_each_slot_gets_its_rows_of_each_microbatch() -> None:
    generator = Generator(linear_step("gpipe", microbatches=2, data=2))
    cut = generator.cut((BATCH, TARGET), {"lr": 0.5})
    assert list(cut) == ["d0", "d1", "d2", "d3"]
    assert torch.equal(cut["d1"]["x.1"], torch.stack([BATCH[2:4], BATCH[6:8]]))
    assert torch.equal(cut["d2"]["target.0"], torch.stack([TARGET[0:2], TARGET[4:6]]))
    assert cut["d3"].keys() == {"target.1", "lr.1.1"}
    assert torch.equal(cut["d3"]["lr.1.1"], torch.tensor(0.5).double())


def test_outputs_come_together() -> None:
    generator = Generator(linear_step("gpipe", microbatches=2, data=2))
    outputs = {
        "h2.0": torch.stack([BATCH[0:2], BATCH[4:6]]),
        "h2.1": torch.stack([BATCH[2:4], BATCH[6:8]]),
    }
    found = generator.join({"loss": torch.tensor(3.0).double(), **outputs})
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "loss": 3.0,
        "y": BATCH.tolist(),
    }


def test_an_output_of_one_microbatch_need_not_be_cut() -> None:
    pipeline = linear_step(microbatches=1)
    assert pipeline.training is not None
    assert pipeline.training.microbatches is not None
    del pipeline.training.microbatches.dim["y"]
    assert Microbatching.of(pipeline).outputs == {"h2.0": None}
    found = Generator(pipeline).join({"loss": torch.zeros(()).double(), "h2.0": BATCH[None]})
    assert torch.equal(found["y"], BATCH)


def test_a_model_is_not_cut() -> None:
    assert Microbatching.of(chain(2)) == Microbatching(1, {}, {})


@pytest.mark.parametrize(
    ("slot", "x", "target"),
    [
        ("d0", ((0, 2), (4, 6)), ()),
        ("d1", ((2, 4), (6, 8)), ()),
        ("d3", (), ((2, 4), (6, 8))),
    ],
)
def test_the_rows_that_a_slot_reads(slot: str, x: tuple, target: tuple) -> None:
    pipeline = linear_step("gpipe", microbatches=2, data=2)
    generator = Generator(pipeline, slot)
    rows = generator.own_rows(slot)
    assert rows == {"x": InputRows(0, x), "target": InputRows(0, target)}
    own = [
        torch.cat([tensor[start:end] for start, end in found.ranges] or [tensor[:0]])
        for tensor, found in zip((BATCH, TARGET), rows.values(), strict=True)
    ]
    cut, whole = generator.cut(own, {"lr": 1.0}), generator.cut((BATCH, TARGET), {"lr": 1.0})
    assert cut[slot].keys() == whole[slot].keys()
    assert all(torch.equal(cut[slot][name], tensor) for name, tensor in whole[slot].items())
    with pytest.raises(InputError, match=r"or the \d rows of it that this rank reads"):
        generator.cut((BATCH[:3], TARGET), {"lr": 1.0})


def test_rows_that_touch_are_one_range() -> None:
    generator = Generator(linear_step(microbatches=4))
    assert generator.own_rows("d0")["x"] == InputRows(0, ((0, ROWS),))
