from pathlib import Path

import pytest
import torch

from shardwright.cli.tensors import as_call, outputs_by_name, random_inputs, read_inputs
from shardwright.errors import InputError
from shardwright.ir.structure import describe_arguments, describe_result
from shardwright.pipeline.schema import (
    Document,
    Metadata,
    MetadataTensor,
    MetadataTensors,
    MetadataTensorSlices,
    Structure,
)


def function(ids: torch.Tensor, masks: list[torch.Tensor], scale: float = 2.0) -> object: ...


@pytest.fixture
def document() -> Document:
    arguments, _ = describe_arguments(
        function, (torch.zeros(2, 3, dtype=torch.int64), [torch.zeros(2), torch.zeros(3)]), {}
    )
    tree, _ = describe_result(torch.zeros(1))
    inputs = {
        "masks_1": MetadataTensor((3,), "bool", 2),
        "ids": MetadataTensor((2, 3), "i64", 0),
        "masks_0": MetadataTensor((2,), "bf16", 1),
    }
    metadata = Metadata(
        MetadataTensors(inputs, {}), MetadataTensorSlices({}, {}), Structure(arguments, tree)
    )
    return Document("small", {}, {}, {}, metadata)


def test_random_inputs_have_the_shapes_and_types_of_the_file(document: Document) -> None:
    tensors = random_inputs(document, seed=3)
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
        "ids": ((2, 3), torch.int64),
        "masks_0": ((2,), torch.bfloat16),
        "masks_1": ((3,), torch.bool),
    }
    again = random_inputs(document, seed=3)
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)


def test_named_tensors_become_the_captured_call(document: Document) -> None:
    tensors = random_inputs(document)
    args, kwargs = as_call(document, tensors)
    assert args[0] is tensors["ids"]
    assert args[1][0] is tensors["masks_0"]
    assert args[1][1] is tensors["masks_1"]
    assert {**kwargs, **dict(zip(("ids", "masks", "scale"), args, strict=False))}["scale"] == 2.0


def test_without_a_structure_the_names_are_the_keywords(document: Document) -> None:
    document.metadata.structure = None
    assert set(as_call(document, random_inputs(document)).kwargs) == {"ids", "masks_0", "masks_1"}


def test_other_names_than_the_inputs_are_refused(document: Document) -> None:
    tensors = random_inputs(document)
    del tensors["ids"]
    with pytest.raises(InputError, match="the inputs are ids, masks_0, masks_1; found masks_1, ma"):
        as_call(document, tensors)


def test_outputs_are_named_as_in_the_metadata() -> None:
    logits, state = torch.zeros(2), torch.zeros(3)
    assert outputs_by_name({"logits": logits, "states": [state, logits]}) == {
        "logits": logits,
        "states_0": state,
        "states_1": logits,
    }
    assert outputs_by_name(logits) == {"output": logits}


def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "inputs.safetensors").write_bytes(b"nothing")
    with pytest.raises(InputError, match="cannot be read"):
        read_inputs(tmp_path / "inputs.safetensors")
    with pytest.raises(InputError, match="cannot be read"):
        read_inputs(tmp_path / "missing.safetensors")
