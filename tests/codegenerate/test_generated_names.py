"""Names in generated code."""

import builtins
from keyword import iskeyword

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.codegenerate.writing.names import (
    IMPORTED,
    class_stem,
    identifier,
    item_name,
    stem,
    unused_class,
)


@given(st.text(max_size=12))
def test_any_text_gives_a_name_that_hides_nothing(text: str) -> None:
    name = identifier(text)
    assert name.isidentifier()
    assert not iskeyword(name)
    assert not hasattr(builtins, name)
    assert name not in (*IMPORTED, "self")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("linear__3", "linear"),
        ("transformer.h.5/add_1", "add"),
        ("conv2d", "conv2d"),
        ("max", "max_"),
        ("scaled_dot_product_attention__2", "attention"),
        ("__1", "x"),
    ],
)
def test_stems_have_no_module_and_no_number(name: str, expected: str) -> None:
    assert stem(name) == expected


@pytest.mark.parametrize(
    ("qualified", "path", "expected"),
    [
        ("transformers.models.gpt2.modeling_gpt2.GPT2Block", "h.0", "GPT2Block"),
        ("tests.test_x.test_y.<locals>.Net", "net", "Net"),
        ("", "transformer.wte", "Wte"),
        ("", "transformer.layers.3", "LayersItem"),
        ("", "lm_head", "LmHead"),
        ("tests.Tensor", "x", "Tensor_"),
    ],
)
def test_classes_have_the_programs_names(qualified: str, path: str, expected: str) -> None:
    assert class_stem(qualified, path) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("GPT2Block", "block"), ("BertLayer", "layer"), ("MLP", "mlp"), ("Block_2", "block")],
)
def test_a_module_in_a_loop_is_called_as_its_class(name: str, expected: str) -> None:
    assert item_name(name) == expected


def test_the_second_class_of_a_name_gets_a_number() -> None:
    wanted, taken = ["Block", "Block", "Block", "Stage0", "Conv2", "Conv2"], {"Stage0"}
    expected = ["Block", "Block2", "Block3", "Stage0_2", "Conv2", "Conv2_2"]
    assert [unused_class(name, taken) for name in wanted] == expected
