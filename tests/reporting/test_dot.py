"""A drawing as DOT text, and as an image by Graphviz."""

from __future__ import annotations

import os
import re
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardwright as sw
from shardwright.errors import DrawError
from shardwright.ir import Builder, IRGraph
from shardwright.reporting import dot
from shardwright.reporting.dot import COLOURS, INK, box_size, colour, edge_text, edge_width
from tests.graphs import language_model
from tests.ir.random_graphs import NAMES, RandomGraph, random_graphs

SVG = "{http://www.w3.org/2000/svg}"


DOT = f"""#!{sys.executable} -P
import sys
from pygraphviz import AGraph

try:
    image = AGraph(string=sys.stdin.read()).draw(format=sys.argv[1][2:], prog="dot")
except ValueError as error:
    sys.exit(f"{{error}}")
sys.stdout.buffer.write(image)
"""


@pytest.fixture
def graphviz(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's ``dot``, or else the one of the wheels that developers install."""
    if shutil.which("dot") is None:
        folder = tmp_path_factory.mktemp("graphviz")
        put_dot(folder, DOT)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def two_layers() -> tuple[IRGraph, dict[int, int], dict[int, float]]:
    graph = language_model(layers=4)
    parts = {node.id: int(i > 19) for i, node in enumerate(graph.nodes)}
    return graph, parts, {node.id: 0.1 * i for i, node in enumerate(graph.nodes)}


# --- text -----------------------------------------------------------------------------------------


def test_boxes_have_operator_shape_and_time() -> None:
    graph, parts, times = two_layers()
    text = str(sw.draw(graph, partition=parts, profile=times, depth=1))
    assert text.startswith('digraph "language_model" {\n')
    assert text.endswith("}\n")
    assert "<B>Block ×2</B>" in text
    assert ">layers.0 … 1<" in text
    assert ">f64[2, 3, 8]<" in text
    assert "<B>linear</B>" in text
    assert "3.9 ms, 3.2 kB stored" in text
    assert 'label=" 384 B"' in text


def test_parts_are_frames_and_rows_of_the_legend() -> None:
    graph, parts, times = two_layers()
    text = str(sw.draw(graph, partition=parts, profile=times, depth=1))
    assert len(re.findall("subgraph cluster_", text)) == 2
    for number in (0, 1):
        assert f'BGCOLOR="{colour(number)}80"' in text
        assert f'fillcolor="{colour(number)}20"' in text
    crossing = [line for line in text.splitlines() if "->" in line and f'color="{INK}"' in line]
    assert len(crossing) == 1
    assert "BGCOLOR" not in str(sw.draw(graph, depth=1))


def test_a_layer_after_a_layer_is_a_dashed_edge() -> None:
    text = str(sw.draw(language_model(layers=12), depth=2))
    dashed = [line for line in text.splitlines() if "dashed" in line]
    assert dashed
    assert all('label=" 11 × 384 B"' in line for line in dashed)


def test_bytes_of_an_edge() -> None:
    assert edge_text((1_500_000,)) == "1.5 MB"
    assert edge_text((1_500_000,) * 12) == "12 × 1.5 MB"
    assert edge_text((1000, 500)) == "1.5 kB"


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_more_time_is_never_a_smaller_box(first: float, second: float) -> None:
    less, more = sorted((first, second))
    small, large = box_size(less, more), box_size(more, more)
    assert small[0] <= large[0]
    assert small[1] <= large[1]
    assert box_size(None, more) == box_size(0.0, more)


def test_areas_grow_in_proportion_to_time() -> None:
    area = [width * height for width, height in (box_size(t, 4.0) for t in (0.0, 1.0, 2.0, 4.0))]
    assert area[2] - area[0] == pytest.approx(2 * (area[1] - area[0]))
    assert area[3] - area[0] == pytest.approx(4 * (area[1] - area[0]))


@given(st.integers(0, 10**15), st.integers(0, 10**15))
def test_more_bytes_are_never_a_thinner_edge(first: int, second: int) -> None:
    less, more = sorted((first, second))
    assert edge_width(less) <= edge_width(more)
    assert edge_width(10**7) - edge_width(10**6) == pytest.approx(
        edge_width(10**4) - edge_width(10**3)
    )


def test_colours_begin_again_after_the_last() -> None:
    assert len(set(COLOURS)) == 8
    assert colour(0) == colour(8) != colour(1)
    assert colour(None) not in COLOURS


def balanced(text: str) -> bool:
    """Whether quotes, and then brackets and braces, of a digraph come in pairs."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', "", text)
    bare = re.sub(r"<[^<>]*>", "", bare.replace(" -> ", " "))
    pairs = all(bare.count(a) == bare.count(b) for a, b in ("[]", "{}", "<>"))
    return pairs and '"' not in bare


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(random_graphs())
def test_no_name_escapes_its_quotes(drawn: RandomGraph) -> None:
    assert balanced(str(sw.draw(drawn.graph)))


# --- images ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("graphviz")
def test_an_svg_shows_every_box(tmp_path: Path) -> None:
    graph, parts, times = two_layers()
    drawing = sw.draw(graph, tmp_path / "graph.svg", partition=parts, profile=times)
    root = ElementTree.fromstring((tmp_path / "graph.svg").read_text())
    classes = [element.get("class") for element in root.iter() if element.get("class")]
    assert classes.count("node") == len(drawing.boxes) + len(drawing.ends)
    assert classes.count("edge") == len(drawing.edges)
    assert classes.count("cluster") == len(drawing.frames)
    assert drawing.svg() == drawing._repr_svg_()
    assert list(tmp_path.iterdir()) == [tmp_path / "graph.svg"]


@pytest.mark.usefixtures("graphviz")
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(random_graphs(), NAMES)
def test_odd_names_are_drawn_as_text(drawn: RandomGraph, name: str) -> None:
    drawn.graph.name = name
    drawing = sw.draw(drawn.graph, depth=9, fold=False)
    root = ElementTree.fromstring(drawing.svg())
    nodes = [element for element in root.iter() if element.get("class") == "node"]
    assert len(nodes) == len(drawing.boxes) + len(drawing.ends)


@pytest.mark.usefixtures("graphviz")
def test_an_image_is_written(tmp_path: Path) -> None:
    sw.draw(language_model(layers=2), tmp_path / "graph.png")
    assert (tmp_path / "graph.png").read_bytes().startswith(b"\x89PNG")


def empty() -> IRGraph:
    builder = Builder("")
    return builder.finish([])


@pytest.mark.usefixtures("graphviz")
def test_nothing_is_drawn_too() -> None:
    assert "<svg" in sw.draw(empty()).svg()


@pytest.mark.usefixtures("graphviz")
def test_larger_boxes_take_longer() -> None:
    builder = Builder("sizes")
    x = builder.input("x", (2,), "f32")
    for _ in range(2):
        x = builder.call("aten.relu.default", x)
    graph = builder.finish(x)
    times = {node.id: time for node, time in zip(graph.nodes, (1.0, 8.0), strict=True)}
    root = ElementTree.fromstring(sw.draw(graph, profile=times).svg())
    heights = []
    for element in root.iter(f"{SVG}g"):
        if element.get("class") == "node":
            if not element.findtext(f"{SVG}title", "").startswith("b"):
                continue
            shape = next(element.iter(f"{SVG}polygon"))
            points = [tuple(map(float, p.split(","))) for p in shape.attrib["points"].split()]
            heights.append(max(y for _, y in points) - min(y for _, y in points))
    assert heights[0] < heights[1]


def test_text_is_written_without_graphviz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    drawing = sw.draw(language_model(layers=2), tmp_path / "graph.dot")
    assert (tmp_path / "graph.dot").read_text() == str(drawing)
    with pytest.raises(DrawError, match=r"svg needs Graphviz.*apt install graphviz"):
        drawing.save(tmp_path / "graph.svg")
    assert list(tmp_path.iterdir()) == [tmp_path / "graph.dot"]


def put_dot(folder: Path, script: str) -> None:
    program = folder / "dot"
    program.write_text(script)
    program.chmod(0o755)


@pytest.fixture
def only_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a script ``dot`` the only program that there is."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return lambda script: put_dot(tmp_path, f"#!/bin/sh\n{script}\n")


def test_the_systems_program_draws(only_dot: Callable[[str], None]) -> None:
    only_dot('echo "$1"; while read -r line; do echo "$line"; done')
    drawing = sw.draw(empty())
    assert drawing.svg().splitlines()[:2] == ["-Tsvg", 'digraph "" {']


def test_what_the_systems_program_says_is_told(only_dot: Callable[[str], None]) -> None:
    only_dot("echo no fonts >&2; exit 3")
    with pytest.raises(DrawError, match="dot failed with status 3: no fonts"):
        sw.draw(empty()).svg()


@pytest.mark.usefixtures("graphviz")
def test_what_is_no_digraph_cannot_be_drawn() -> None:
    with pytest.raises(DrawError, match=r"failed with status [1-9]\d*: "):
        dot.render("digraph {", "svg")


@pytest.mark.usefixtures("graphviz")
def test_a_layout_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dot, "SECONDS", 1.5)
    edges = "".join(f"n{i} -> n{j};" for i in range(400) for j in range(i + 1, i + 20))
    with pytest.raises(DrawError, match=r"has not finished in 1\.5 s"):
        dot.render(f"digraph {{{edges}}}", "svg")


def test_a_program_that_does_not_end(
    monkeypatch: pytest.MonkeyPatch, only_dot: Callable[[str], None]
) -> None:
    only_dot("while :; do :; done")
    monkeypatch.setattr(dot, "SECONDS", 0.2)
    with pytest.raises(DrawError, match=r"has not finished in 0\.2 s"):
        sw.draw(empty()).svg()
