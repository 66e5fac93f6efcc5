"""A profile as text, as a file and as a chart."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from shardwright.autodiff.needed import needing_gradients, trained_parameters
from shardwright.clusters import CPU_CORE
from shardwright.costs import Analytic
from shardwright.costs.measurement import Measurement, Timing
from shardwright.costs.profile import (
    LONGEST_NAME,
    Layer,
    Profile,
    equals,
    format_profile,
    number_text,
)
from shardwright.costs.roofline import node_work
from shardwright.errors import ProfileError
from shardwright.ir import IRGraph
from tests.graphs import language_model


def layer(name: str, node: int, measurement: str, forward: float, backward: float) -> Layer:
    return Layer(name, "Block", (node,), measurement, forward, backward, 1.5, 0.25, 12.0, 2.0, 0.5)


def made_up(graph: IRGraph | None = None) -> Profile:
    graph = graph or language_model()
    return Profile(
        graph="GPT",
        device="Abacus 3000",
        kind="cpu",
        torch_version="2.13.0",
        threads=1,
        recompute=False,
        layers=(
            layer("embed", 1, "a", 0.01234, 0),
            layer("blocks.0", 2, "b", 10, 250),
            layer("blocks.1", 3, "b", 10, 250),
        ),
        measurements={
            "a": Measurement(Timing(1.234e-5), ("aten.embedding.default:0:--",)),
            "b": Measurement(Timing(1e-2, 2e-1, 5e-2), ("aten.linear.default:0:ms",)),
        },
    )


def test_the_table() -> None:
    assert str(made_up()).splitlines() == [
        "profile of GPT: 3 layers, 2 of them distinct",
        "Abacus 3000, 1 thread, torch 2.13.0",
        "",
        "layer       kind   ×  forward  backward  forward  backward  layer  input  output",
        "                         time      time   memory    memory   size   size    size",
        "                           ms        ms       MB        MB     MB     MB      MB",
        "embed       Block  1   0.0123         0      1.5      0.25     12      2     0.5",
        "blocks.0 …  Block  2       10       250      1.5      0.25     12      2     0.5",
        "all                3    20.01       500",
    ]


def test_the_table_says_of_recomputation_and_threads() -> None:
    text = format_profile(msgspec.structs.replace(made_up(), recompute=True, threads=4))
    assert text.startswith("profile of GPT: 3 layers, 2 of them distinct, backward with recomputa")
    assert "4 threads" in text


def test_long_names_lose_their_beginning() -> None:
    name = "model." * 20 + "end"
    only = msgspec.structs.replace(made_up(), layers=(layer(name, 1, "a", 1, 1),))
    shown = str(only).splitlines()[6].split()[0]
    assert len(shown) == LONGEST_NAME
    assert shown.startswith("…")
    assert shown.endswith("model.end")


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (0.0012345, "0.00123"), (99.96, "100"), (12345.6, "12346")]
)
def test_numbers_have_three_digits(number: float, text: str) -> None:
    assert number_text(number) == text


def test_equal_layers_stand_together_in_the_order_of_the_first() -> None:
    found = equals(made_up().layers)
    assert [(line.name, line.count) for line in found] == [("embed", 1), ("blocks.0 …", 2)]


def test_a_profile_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    made_up().save(path)
    assert Profile.load(path) == made_up()
    assert path.read_text().startswith('{\n "version": 1,\n "profile": {\n  "graph": "GPT"')
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"version": 9, "profile": {}}'])
def test_a_file_that_is_no_profile(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=r"profile.json is no profile.*shardwright profile -o"):
        Profile.load(path)
    with pytest.raises(ProfileError, match=r"no profile can be read from .*none.json: No such"):
        Profile.load(tmp_path / "none.json")


def test_costs_are_those_that_were_measured_on_a_roofline_of_the_same_kind() -> None:
    graph = language_model(layers=1)
    costs = made_up().costs()
    assert all(costs.node(graph, node).forward >= 0 for node in graph.nodes)


def test_the_device_is_the_one_that_explains_the_times() -> None:
    graph = language_model(layers=2, width=64)
    device = msgspec.structs.replace(CPU_CORE, flops=7e9, bandwidth=5e8, overhead=1e-4)
    costs, needing = Analytic(device), needing_gradients(graph, trained_parameters(graph))
    measurements = {
        str(node.id): Measurement(
            Timing(*costs.node(graph, node)), (str(node.id),), node_work(graph, node, needing)
        )
        for node in graph.nodes
    }
    found = msgspec.structs.replace(made_up(), measurements=measurements).device_model()
    assert (found.name, found.kind) == ("Abacus 3000", "cpu")
    assert found.bandwidth == pytest.approx(5e8, rel=1e-2)
    assert found.overhead == pytest.approx(1e-4, rel=1e-2)


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_the_chart(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"chart.{suffix}"
    made_up().plot(path)
    begins = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}
    assert path.read_bytes().startswith(begins[suffix])
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_the_chart_has_a_bar_for_each_distinct_layer(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        made_up().plot(tmp_path / "chart.svg")
    words = list(ElementTree.parse(tmp_path / "chart.svg").getroot().itertext())
    assert "embed (Block)" in words
    assert "blocks.0 … (Block) ×2" in words
    assert "GPT on Abacus 3000" in words


def test_charts_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProfileError, match=r"'chart.gif'; its name ends in .svg, .png, .pdf"):
        made_up().plot(tmp_path / "chart.gif")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ProfileError, match="matplotlib, which draws charts, is not installed"):
        made_up().plot(tmp_path / "chart.svg")
