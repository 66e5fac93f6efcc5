from __future__ import annotations

import pytest
import torch

from shardwright.engine.generator import Generator
from shardwright.errors import InputError
from shardwright.ir.structure import describe_arguments, describe_result
from shardwright.pipeline import Pipeline, Structure
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
