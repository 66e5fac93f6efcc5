"""Annotations found by running."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks.discovery import outcome
from shardwright.errors import AnnotationError
from shardwright.ops import Dimop, infer_annotation
from tests.ops.calls import CASES


def random(*shape):
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("function", "example", "annotation"),
    [
        (torch.matmul, [random(4, 5), random(5, 6)], "a b+, b+ c -> a c"),
        (F.linear, [random(3, 5), random(5, 5)], "a b+, c b+ -> a c"),
        (lambda x: x.softmax(1), [random(3, 4, 5)], "a c^ b -> a c^ b"),
        (lambda x, y: x + y, [random(3, 4), random(4)], "a b, b -> a b"),
        (lambda x: (x.sum(0), x * 2), [random(3, 4)], "a+ b -> b, a+ b"),
        (lambda x, h: x.reshape(h, -1, 5), [random(12, 5), 4], "(h 3) a^ -> h 3 a^"),
        (lambda x: x.reshape(-1, 6), [random(4, 3, 2)], "a 3 2 -> a 6"),
        (lambda x: x.flip(0), [random(4, 3)], "b^ a -> b^ a"),
        (lambda x: x @ x, [random(4, 4)], "a^ a^ -> a^ a^"),
    ],
)
def test_an_annotation_is_found(function, example, annotation):
    found = infer_annotation(function, *example)
    shapes = [tuple(x.shape) for x in example if isinstance(x, torch.Tensor)]
    kwargs = {"h": 4} if "h" in annotation else {}
    expected = Dimop.parse(annotation)
    assert found.algorithms(shapes, **kwargs) == expected.algorithms(shapes, **kwargs)
    for idx, dim in expected.algorithms(shapes, **kwargs):
        assert found.partition(shapes, idx, dim, 2, **kwargs) == expected.partition(
            shapes, idx, dim, 2, **kwargs
        )


def test_a_bias_is_found_to_be_a_term_of_the_sum():
    found = infer_annotation(F.linear, random(3, 4), random(5, 4), random(5))
    assert str(found) == "a b+, c b+, c -> a c"
    assert found.terms == {2}


def test_a_found_annotation_can_be_printed_and_parsed():
    found = infer_annotation(F.scaled_dot_product_attention, *[random(2, 3, 4, 5)] * 3)
    assert Dimop.parse(str(found)).annotation == found.annotation


@pytest.mark.parametrize(
    ("function", "example", "message"),
    [
        (torch.matmul, [random(4, 5), random(4, 5)], "does not run on the example: RuntimeError"),
        (lambda x: 3, [random(4)], "gives something else than tensors"),
        (torch.rand_like, [random(4)], "gives other results each time"),
        (lambda h, x: x, [2, random(4)], "gives tensors first"),
    ],
)
def test_what_has_no_annotation(function, example, message):
    with pytest.raises(AnnotationError, match=message):
        infer_annotation(function, *example)


def test_rows_of_the_catalog_are_found_without_it():
    sample = [outcome(case) for case in CASES[::12]]
    missed = [found.case.op for found in sample if not found.reproduced]
    assert len(missed) <= 0.05 * len(sample), missed
