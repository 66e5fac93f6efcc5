from contextlib import suppress

import pytest
import torch

from shardwright.errors import GraphError
from shardwright.ir import Builder, parse_graph

GOOD = """\
graph g
input %x: f32[2, 3]
param %w: f32[3] = "w", "tied" [0:3]

in a:A
  %y: f32[2, 3] = aten.add.Tensor(%x, %w, alpha=1)  # m.py:3
  %v: f32[3], %i!: i64[3] = aten.max.dim(%y, dim=0, keepdim=False)
  %z!: f32[2, 3] = aten.index_put.default(%y, %y, indices=[None, %i], accumulate=True)
return %i, %z
update %w = %v
"""


def test_a_text_written_by_hand_reads():
    graph = parse_graph(GOOD)
    y, m, _ = graph.nodes
    names = {value.name: value for value in graph.values.values()}
    assert names["w"].names == ("w", "tied")
    assert names["w"].placements == ((0, 3),)
    assert (y.scope, y.source) == ("a", ("m.py", 3))
    assert m.attrs == {"dim": 0, "keepdim": False}
    assert [names["i"].role, names["v"].role] == ["output", "tmp"]
    assert graph.updates == {names["w"].id: names["v"].id}
    assert parse_graph(str(graph)) == graph


def test_spaces_and_line_ends_do_not_matter():
    loose = GOOD.replace(", ", " ,  ").replace("(%", "( %").replace("\n", "  \r\n")
    assert parse_graph(loose.replace("  %y", "%y")) == parse_graph(GOOD)


@pytest.mark.parametrize("value", [1e-05, 1e22, -0.5, 5e-324, 1e16, 0.1])
def test_floats_read_back_exactly(value: float):
    builder = Builder("g")
    x = builder.input("x", (2,))
    graph = builder.finish(builder.call("aten.mul.Scalar", x, value))
    assert parse_graph(str(graph)).nodes[0].attrs == {"other": value}


def test_complex_and_non_finite_numbers_read_back():
    builder = Builder("g")
    x = builder.input("x", (2,), "c64")
    for number in (complex(1, -2.5), complex(-0.0, float("inf")), float("nan"), float("-inf")):
        x = builder.call("aten.mul.Scalar", x, number)
    graph = builder.finish(x)
    again = parse_graph(str(graph))
    assert [repr(node.attrs) for node in again.nodes] == [repr(node.attrs) for node in graph.nodes]


def test_attributes_whose_names_look_like_values():
    builder = Builder("g")
    x = builder.input("x", (2,))
    graph = builder.finish(builder.call("aten.nan_to_num.default", x, nan=0.0))
    assert "nan=0.0, posinf=None" in str(graph)
    assert parse_graph(str(graph)) == graph


def test_a_string_that_looks_like_a_source_line():
    builder = Builder("g")
    x = builder.input("x", (2, 2))
    emitted = builder.emit(
        "Marker", [x], {"text": "  # not.py:1", "dtype": torch.float32}, outputs=[x_like(builder)]
    )
    graph = builder.finish(emitted)
    again = parse_graph(str(graph))
    assert again == graph
    assert again.nodes[0].source is None


def x_like(builder: Builder):
    return builder.value("made", (2, 2))


BROKEN = {
    "": "line 1, column 1: expected 'graph NAME', found an empty text",
    "grape g": "line 1, column 1: expected 'graph NAME', found 'grape g'",
    "graph": "line 1, column 6: expected the graph's name, found the end of the line",
    'graph "g': "line 1, column 7: expected the graph's name, found '\"g'",
    'graph "\\x"': "line 1, column 7: the string does not read .Invalid",
    "graph g h": "line 1, column 9: expected the end of the line, found 'h'",
    "input x": "line 2, column 7: expected a value's name, found 'x'",
    "input %x f32": "line 2, column 10: expected ':', found 'f32'",
    "input %x: f31[2]": "line 2, column 11: expected one of the dtypes f64, .*, found 'f31.2.'",
    "input %x: f32": "line 2, column 14: expected '\\[', found the end of the line",
    "input %x: f32[2": "line 2, column 16: expected ',' or ']', found the end of the line",
    "input %x: f32[2 3]": "line 2, column 17: expected ',' or ']', found '3]'",
    "input %x: f32[2.5]": "line 2, column 15: expected a size, an integer, found '2.5]'",
    "input %x: f32[a]": "line 2, column 15: expected a size, found 'a]'",
    "input %x: f32[-2]": "value %x has the shape .-2,.; sizes are integers from 0 up",
    "input %x: f32[2]{1, 2}": "line 2, column 18: expected 1 strides, as many as sizes",
    "input %x: f32[2]@": "line 2, column 18: expected a device",
    "input %x: f32[2] junk": "line 2, column 18: expected the end of the line, found 'junk'",
    "input %x: f32[2]\ninput %x: f32[2]": "line 3, column 7: the value %x is declared twice",
    "param %w: f32[2]": "line 2, column 17: expected '=', found the end of the line",
    "param %w: f32[2] = w": "line 2, column 20: expected a quoted name, found 'w'",
    'param %w: f32[2] = "w" [0-2]': "line 2, column 26: expected ':', found '-2]'",
    'param %w: f32[2] = "w" [0:3]': "%w: placements ..0, 3.,. do not give .2,.",
    "in a": "line 2, column 4: expected a module's path and class, PATH:CLASS, found 'a'",
    "in a:A >": "line 2, column 9: expected a module's path and class",
    "in a:A b:B": "line 2, column 8: expected the end of the line, found 'b:B'",
    "%y: f32[2] aten.relu.default(%x)": "line 2, column 12: expected ',' or '=', found 'aten.relu",
    "%y: f32[2] = 3": "line 2, column 14: expected an operator's name, found '3'",
    "%y: f32[2] = os.system(%y)": "line 2, column 14: operator 'os.system': namespace 'os' is not",
    "%y: f32[2] = aten.relu.default": "line 2, column 31: expected '\\(', found the end",
    "%y: f32[2] = aten.relu.default(%x)": "line 2, column 32: no value named %x stands before this",
    "%y: f32[2], __ = aten.relu.default(%y)": "line 2, column 16: expected '\\('",
    "%y: f32[2] = aten.relu.default(7)": "line 2, column 32: expected a value's name, found '7.'",
    "Marker(a=1 b=2)": "line 2, column 12: expected ',' or '\\)', found 'b=2\\)'",
    "Marker(a=1, a=2)": "line 2, column 13: the attribute a is given twice, found 'a=2.'",
    "Marker(a=wrong)": "line 2, column 10: expected an attribute's value, found 'wrong.'",
    "Marker(a=1.)": "line 2, column 11: expected ',' or '\\)', found '..'",
    "Marker(a=complex(1, None))": "line 2, column 17: expected two numbers in parentheses",
    'Marker(a="\\q")': "line 2, column 10: the string does not read .Invalid .escape",
    "Marker(a=[1, 2)": "line 2, column 15: expected ',' or ']', found '\\)'",
    "Marker() # nowhere": "line 2, column 10: expected a source line, '# FILE:LINE', found '# no",
    "Marker() more": "line 2, column 10: expected the end of the line, found 'more'",
    "return x": "line 2, column 8: expected the end of the line, found 'x'",
    "return %x": "line 2, column 8: no value named %x stands before this, found '%x'",
    "update %x": "line 2, column 8: no value named %x",
    'arguments {"parameters": 3}': "line 2, column 11: the structure does not read .Expected `arr",
    'result {"type": "set"}': "line 2, column 8: the structure does not read .Invalid value 'set'",
    "something else": "line 2, column 11: expected '\\(', found 'else'",
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), BROKEN.items())
def test_broken_texts_name_line_and_column(text: str, message: str):
    if text and not text.startswith("gra"):
        text = f"graph g\n{text}"
    with pytest.raises(GraphError, match=message):
        parse_graph(text)


def test_every_text_cut_short_is_one_clear_error_or_a_graph():
    for end in range(len(GOOD)):
        with suppress(GraphError):
            parse_graph(GOOD[:end])


def test_lines_that_are_right_one_by_one_are_validated_together():
    with pytest.raises(GraphError, match="value %y is output and is not among the graph's outputs"):
        parse_graph("graph g\ninput %x: f32[2]\n%y!: f32[2] = aten.relu.default(%x)\nreturn %x")
