"""What an annotation means for shapes: lengths, ways to split, parts, refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import AnnotationError
from shardwright.ops import Cut, Dimop, OperatorPart, Slice, even_cuts

PRODUCT = Dimop.parse("m k+, k+ n -> m n")


def test_lengths_and_outputs():
    inferred = PRODUCT.infer([(4, 6), (6, 8)])
    assert inferred.lengths == {"m": 4, "k": 6, "n": 8}
    assert inferred.outputs == ((4, 8),)


def test_brackets_take_keywords():
    split = Dimop.parse("(h t) k -> h t k")
    assert split.infer([(1024, 8)], h=8).outputs == ((8, 128, 8),)
    assert split.infer([(1024, 8)], t=128).lengths == {"h": 8, "t": 128, "k": 8}
    assert split.infer([(1024, 8)], h=8.0, scale=0.5).outputs == ((8, 128, 8),)
    assert Dimop.parse("(h t), h -> t").infer([(12,), (3,)]).outputs == ((4,),)


def test_stars_are_the_same_everywhere():
    inferred = Dimop.parse("* t -> a * t").infer([(2, 3, 4)], a=5)
    assert inferred.outputs == ((5, 2, 3, 4),)
    assert str(inferred.annotation) == "_0 _1 t -> a _0 _1 t"
    assert Dimop.parse("_0 * -> * _0").infer([(2, 3)]).lengths == {"_0": 2, "_1": 3}
    assert Dimop.parse("*, * -> *").infer([(), ()]).outputs == ((),)


def test_what_is_no_tensor_is_passed_over():
    scaled = Dimop.parse("?, a b -> a b, ?")
    assert scaled.infer([(2, 3)]).outputs == ((2, 3), None)
    assert scaled.infer([None, (2, 3)]).outputs == ((2, 3), None)
    assert scaled.algorithms([(2, 3)]) == [(1, 0), (1, 1)]
    assert scaled.partition([(2, 3)], idx=1, dim=0)[0].inputs == (None, Slice(((0, 1), (0, 3))))


def test_numbers_and_tensors_without_dimensions():
    assert Dimop.parse("a 3, () -> 3 a").infer([(2, 3), ()]).outputs == ((3, 2),)
    assert Dimop.parse("a+ -> ()").partition([(4,)], 0, 0, 2)[1].outputs == (Slice((), (1, 2)),)
    assert Dimop.parse("-> n").infer([], n=3).outputs == ((3,),)


@pytest.mark.parametrize(
    ("text", "shapes", "kwargs", "column", "message"),
    [
        ("m k -> m z", [(2, 3)], {}, 10, "no input gives the length of 'z'"),
        ("a b, b -> a", [(4, 5), (6,)], {}, 6, "'b' is 6; expected 5 \\(b = 5\\)"),
        ("a b -> a", [(4, 5, 6)], {}, 1, "of rank 3; expected rank 2"),
        ("a b -> a", [()], {}, 1, "of rank 0; expected rank 2"),
        ("a, b -> a", [(4,)], {}, None, "1 shapes given, but 'a, b -> a' has 2 input tensors"),
        ("a, b -> a", [(4,), None], {}, 4, "input 1 has no shape"),
        ("3 -> 3", [(4,)], {}, 1, "'3' is 4; expected 3"),
        ("(h t) -> h", [(8,)], {}, 2, "does not tell the lengths of h, t .* give h= or t="),
        ("(h t) -> h", [(8,)], {"h": 3}, 2, "is 8; expected a multiple of 3"),
        ("(h t) -> h", [(8,)], {"h": 2, "t": 3}, 2, "is 8; expected 6 \\(h = 2, t = 3\\)"),
        ("h -> h", [(8,)], {"h": 3}, 1, "'h' is 8; expected 3"),
        ("h -> h t", [(8,)], {"t": 2.5}, None, "t=2.5 gives the length of 't'; expected an int"),
        ("h -> h t", [(8,)], {"t": True}, None, "expected an int"),
        ("h -> h t", [(8,)], {"t": -1}, None, "expected an int"),
        ("* t k -> *", [(4,)], {}, 1, "'\\*' cannot expand: input 0 has shape \\(4\\), expected 2"),
        ("*, * -> *", [(4,), (5,)], {}, 4, "'\\*' cannot expand: it is \\(4\\) before and \\(5\\)"),
        ("t -> * t", [(4,)], {}, 6, "'\\*' cannot expand: no input has it"),
    ],
)
def test_shapes_that_do_not_fit(text, shapes, kwargs, column, message):
    with pytest.raises(AnnotationError, match=message) as caught:
        Dimop.parse(text).infer(shapes, **kwargs)
    assert caught.value.column == column


def test_ways_to_split():
    assert PRODUCT.algorithms([(4, 6), (6, 8)]) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert PRODUCT.algorithms([(1, 6), (6, 8)]) == [(0, 1), (1, 0), (1, 1)]
    assert Dimop.parse("a^ b 3 -> a^ b 3").algorithms([(4, 5, 3)]) == [(0, 1)]
    assert Dimop.parse("(h^ t) k -> h^ t k").algorithms([(8, 3)], h=4) == [(0, 1)]


def test_a_sum_is_partial():
    parts = PRODUCT.partition([(4, 6), (6, 8)], idx=0, dim=1, num=4)
    assert [part.inputs[0].ranges[1] for part in parts] == [(0, 2), (2, 4), (4, 5), (5, 6)]
    assert parts[3] == OperatorPart(
        inputs=(Slice(((0, 4), (5, 6))), Slice(((5, 6), (0, 8)))),
        outputs=(Slice(((0, 4), (0, 8)), (3, 4)),),
    )
    assert parts[3].inputs[1].shape == (1, 8)


def test_an_output_that_has_the_identifier_is_a_slice_beside_one_that_is_partial():
    first, second = Dimop.parse("a+ b -> b, a+ b").partition([(5, 3)], 0, 0, 2)
    assert first.outputs == (Slice(((0, 3),), (0, 2)), Slice(((0, 3), (0, 3))))
    assert second.outputs == (Slice(((0, 3),), (1, 2)), Slice(((3, 5), (0, 3))))


def test_a_bracket_is_split_by_its_outermost_identifier():
    parts = Dimop.parse("(h t) k -> h t k").partition([(20, 8)], idx=0, dim=0, num=2, h=5, x=1)
    assert [part.kwargs for part in parts] == [{"h": 3, "x": 1}, {"h": 2, "x": 1}]
    assert [part.inputs[0].ranges for part in parts] == [((0, 12), (0, 8)), ((12, 20), (0, 8))]
    assert parts[1].outputs[0].ranges == ((3, 5), (0, 4), (0, 8))


def test_an_identifier_behind_ones_is_outermost():
    joined = Dimop.parse("h t -> (h t)")
    assert joined.algorithms([(1, 6)]) == [(0, 1)]
    assert joined.partition([(1, 6)], 0, 1, 2)[1].outputs == (Slice(((3, 6),)),)


def test_dimensions_count_from_the_end_too():
    assert PRODUCT.partition([(4, 6), (6, 8)], 1, -1, 2) == PRODUCT.partition(
        [(4, 6), (6, 8)], 1, 1, 2
    )


@pytest.mark.parametrize(
    ("text", "shapes", "idx", "dim", "num", "message"),
    [
        ("m k, k n -> m n", [(4, 6), (6, 8)], 0, 1, 2, "'k' is not in the output 'm n'"),
        ("m k+, k+ n, n -> m n", [(4, 6), (6, 8), (8,)], 0, 1, 2, "input 2 \\('n'\\) has no 'k'"),
        ("m k+, k+ n, () -> m n", [(4, 6), (6, 8), ()], 0, 1, 2, "which every part would add"),
        ("m^ k -> m^ k", [(4, 6)], 0, 0, 2, "'m\\^' may not be split"),
        ("3 k -> 3 k", [(3, 6)], 0, 0, 3, "3 is a number, which is never split"),
        ("a a -> a", [(4, 4)], 0, 0, 2, "'a' stands twice in 'a a'"),
        ("a -> a a", [(4,)], 0, 0, 2, "off the diagonal"),
        ("a, (a a) -> a", [(4,), (16,)], 1, 0, 2, "'a' stands twice"),
        ("h t -> (h t)", [(4, 6)], 0, 1, 2, "'t' is not outermost in '\\(h t\\)'"),
        ("(h^ t) -> h^ t", [(12,)], 0, 0, 2, "'h\\^' may not be split"),
        ("a b -> a, a b", [(4, 6)], 0, 1, 2, "'b' is not in the output 'a'"),
        ("a -> a", [(4,)], 0, 0, 0, "num is 0; expected the number of parts, 1 or more"),
        ("a -> a", [(4,)], 0, 0, -2, "num is -2"),
        ("a -> a", [(4,)], 0, 0, 5, "a length of 4 does not give 5 parts"),
        ("a -> a", [(4,)], 1, 0, 2, "idx is 1; expected the number of an input"),
        ("a -> a", [(4,)], 0, 1, 2, "dim is 1; input 0 \\('a'\\) has 1 dimensions"),
        ("?, a -> a", [(4,)], 0, 0, 2, "input 0 is no tensor"),
    ],
)
def test_a_split_that_would_compute_something_else(text, shapes, idx, dim, num, message):
    dimop = Dimop.parse(text)
    kwargs = {"h": 4} if "h" in dimop.annotation.reductions() else {}
    with pytest.raises(AnnotationError, match=message):
        dimop.partition(shapes, idx, dim, num, **kwargs)
    assert num < 1 or num > 4 or (idx, dim) not in dimop.algorithms(shapes, **kwargs)


def test_an_input_that_is_known_not_to_be_added_is_shared():
    text, shapes = "l e^, h+ e^, e^ h+ -> l e^", [(4, 6), (8, 6), (6, 8)]
    with pytest.raises(AnnotationError, match="may be a term of the sum"):
        Dimop.parse(text).partition(shapes, 1, 0, 2)
    _, second = Dimop.parse(text, shared=[0]).partition(shapes, 1, 0, 2)
    assert second.inputs[0] == Slice(((0, 4), (0, 6)))


def test_an_input_that_is_known_to_be_added_is_partial():
    biased = Dimop.parse("m k+, k+ n, n -> m n", terms=[2])
    first, second = biased.partition([(4, 6), (6, 8), (8,)], 0, 1, 2)
    assert first.inputs[2] == Slice(((0, 8),), (0, 2))
    assert second.inputs[2] == Slice(((0, 8),), (1, 2))


def test_an_input_whose_own_identifier_is_summed_is_no_term():
    chain = Dimop.parse("a b+, b+ c+, c+ d -> a d")
    shapes = [(4, 5), (5, 6), (6, 7)]
    assert chain.partition(shapes, 0, 1, 2)[0].inputs[2] == Slice(((0, 6), (0, 7)))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.integers(1, 6), st.data())
def test_parts_cover_the_whole_once(m, k, n, num, data):
    idx, dim = data.draw(st.sampled_from([(0, 0), (0, 1), (1, 0), (1, 1)]))
    shapes = [(m, k), (k, n)]
    length = shapes[idx][dim]
    if length < num:
        with pytest.raises(AnnotationError):
            PRODUCT.partition(shapes, idx, dim, num)
        return
    parts = PRODUCT.partition(shapes, idx, dim, num)
    cut = [part.inputs[idx].ranges[dim] for part in parts]
    assert [i for start, end in cut for i in range(start, end)] == list(range(length))
    covered = sum(a * b for part in parts for a, b in [part.outputs[0].shape])
    assert covered == m * n * (num if (idx, dim) in {(0, 1), (1, 0)} else 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": "v"}, "dim is 'v'; expected a number"),
        ({"idx": 1.0}, "idx is 1.0; expected a number"),
        ({"num": "2"}, "num is '2'; expected the number of parts"),
    ],
    ids=str,
)
def test_a_split_is_asked_for_by_numbers(arguments, message: str) -> None:
    with pytest.raises(AnnotationError, match=message):
        Dimop.parse("a b -> a b").partition([(2, 4)], **{"idx": 0, "dim": 0, "num": 2, **arguments})


@given(st.integers(6, 100), st.integers(1, 6))
def test_cuts_are_even_and_join(length, num):
    cuts = even_cuts(length, num)
    assert [i for cut in cuts for i in range(cut.start, cut.end)] == list(range(length))
    lengths = [cut.length for cut in cuts]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] in (0, 1)
    assert [(cut.index, cut.num) for cut in cuts] == [(i, num) for i in range(num)]
    assert even_cuts(10, 1) == [Cut(0, 10, 0, 1)]


@pytest.mark.parametrize("num", [0, -1, 2.0, True, None])
def test_a_number_of_parts_is_a_whole_number_from_one(num):
    with pytest.raises(AnnotationError, match="expected the number of parts"):
        even_cuts(10, num)


@given(st.integers(12, 100), st.integers(1, 4), st.integers(1, 3))
def test_cuts_nest(length, outer, inner):
    cuts = [part for cut in even_cuts(length, outer) for part in cut.cut(inner)]
    assert [i for cut in cuts for i in range(cut.start, cut.end)] == list(range(length))
    assert [(cut.index, cut.num) for cut in cuts] == [(i, outer * inner) for i in range(len(cuts))]
