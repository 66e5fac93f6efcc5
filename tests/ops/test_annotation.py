"""The language: text to annotation and back, and errors that point."""

import keyword

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import AnnotationError
from shardwright.ops.annotation import STAR, Annotation, Dim, Factor, TensorDims, parse

NAMES = ["a", "b", "kd", "h_1", "ß", "_0", *keyword.kwlist[:1]]


@st.composite
def annotations(draw):
    reductions = {name: draw(st.sampled_from(["", "+", "^"])) for name in [*NAMES, STAR]}

    def named(names):
        return st.sampled_from(names).map(lambda name: Factor(name, reductions[name]))

    factors = named(NAMES) | st.integers(0, 99).map(lambda number: Factor(number, "^"))
    dims = st.lists(factors, min_size=1, max_size=3).map(lambda found: Dim(tuple(found)))
    star = named([STAR]).map(lambda factor: [Dim((factor,))])

    def tensor():
        if draw(st.booleans()) and draw(st.booleans()):
            return TensorDims(None)
        found = draw(st.lists(dims, max_size=3))
        place = draw(st.integers(0, len(found)))
        found[place:place] = draw(st.just([]) | star)
        return TensorDims(tuple(found))

    inputs = tuple(tensor() for _ in range(draw(st.integers(0, 3))))
    return Annotation(inputs, tuple(tensor() for _ in range(draw(st.integers(1, 2)))))


@given(annotations())
def test_printing_and_parsing_round_trip(annotation):
    assert parse(str(annotation)) == annotation


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("m^ kd+, kd+ n -> m^ n", "m^ kd+, kd+ n -> m^ n"),
        ("(h^ m^)  kd+,kd+ n->h^ m^ n", "(h^ m^) kd+, kd+ n -> h^ m^ n"),
        ("* t -> a * t", "* t -> a * t"),
        ("?, (a) 3^ -> a", "?, a 3 -> a"),
        ("a+\tb+ -> ()", "a+ b+ -> ()"),
        ("->n", "-> n"),
        ("٣ 07 a -> a", "3 7 a -> a"),
    ],
)
def test_a_text_is_printed_in_one_way(text, printed):
    assert str(parse(text)) == printed


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("m ,, n -> m", 4, "expected the dimensions of a tensor"),
        ("m, -> m", 4, "expected the dimensions of a tensor"),
        ("m ->", 5, "found the end: expected the dimensions"),
        ("", 1, "found the end"),
        ("m n", 4, "expected ',' or '->'"),
        ("a -> b -> c", 8, "'->' stands once"),
        ("m k+, k n -> m n", 7, "'k' has two reductions: 'k\\+' at column 3 and 'k' here"),
        ("*+ a, * -> a", 7, "'\\*' has two reductions"),
        ("m# -> m", 2, "unknown reduction '#'; expected '\\+', '\\^' or a space"),
        ("m++ -> m", 2, "unknown reduction '\\+\\+'"),
        ("m k^+ -> m", 4, "unknown reduction '\\^\\+'"),
        ("a -> a-b", 7, "unknown reduction '-b'"),
        ("+ -> a", 1, "empty dimension; expected an identifier before"),
        ("m () -> m", 3, "empty dimension; expected identifiers in the brackets"),
        ("() m -> m", 4, "a tensor without dimensions and stands alone"),
        ("a ? -> a", 3, "expected an identifier"),
        ("? a -> a", 3, "'\\?' is no tensor and stands alone"),
        ("?+ -> a", 1, "expected an identifier"),
        ("2a -> 2a", 1, "expected an identifier, a number"),
        ("3+ -> 3", 2, "a number is never split"),
        ("(m -> m", 1, "this bracket is not closed"),
        ("m) -> m", 2, "this bracket was not opened"),
        ("(a (b c)) -> a", 4, "brackets do not nest"),
        ("(a b)+ -> a b", 6, "a reduction follows each identifier in the brackets"),
        ("(a b)c -> a", 6, "expected a space after '\\)'"),
        ("c(a b) -> a", 2, "expected a space before '\\('"),
        ("(a *) -> a", 4, "'\\*' stands outside brackets"),
        ("* a * -> a", 5, "a second '\\*' in one tensor"),
    ],
)
def test_an_error_points_at_its_column(text, column, message):
    with pytest.raises(AnnotationError, match=message) as caught:
        parse(text)
    assert caught.value.column == column
    assert str(caught.value).startswith(f"column {column}: ")
    caret = str(caught.value).splitlines()[-1]
    assert caret.index("^", 4) == 4 + column - 1


def test_what_is_no_text_is_refused():
    with pytest.raises(AnnotationError, match="an annotation is a text"):
        parse(3)
