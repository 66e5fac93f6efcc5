"""One wrong thing at a time in graphs, and which tasks share one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from shardwright.errors import PipelineError
from shardwright.ir import Builder, inference
from shardwright.ir.inference import Inference
from shardwright.ir.operators import allow_namespace
from shardwright.pipeline import Document, SuperTask, check
from shardwright.pipeline.fxtext import encode
from shardwright.pipeline.graphs import TaskGraphs, _prove
from tests.pipeline.documents import Broken, cases, prove_broken, task, tensor, two_stages, value
from tests.runtime.sketch import Sketch
from tests.runtime.sketch import identity as give


def text(change: Callable[[Any], object]) -> Callable[[Document], None]:
    """A change of the JSON of d1's graph."""

    def apply(document: Document) -> None:
        data = json.loads(document.supertasks["d1.0"].data or "")
        change(data)
        document.supertasks["d1.0"].data = json.dumps(data)

    return apply


def node(**fields: Any) -> Callable[[Document], None]:
    """A change of the one node of d1's graph."""
    return text(lambda d: d["nodes"][0].update(fields))


def identity(document: Document) -> None:
    """d1's task gives its input."""
    text(lambda d: d.update(outputs=[{"ref": "i0"}]))(document)


def a_key_twice(document: Document) -> None:
    """d1's node says twice which operator it calls."""
    data = document.supertasks["d1.0"].data or ""
    document.supertasks["d1.0"].data = data.replace('"op":', '"op":"aten.mm.default","op":')


def transposed(document: Document) -> None:
    """d1's task gives the transpose of what it gave, which is not contiguous."""
    builder = Builder()
    h, weight = builder.input("h", (4, 8)), builder.input("weight", (2, 8))
    made = builder.call("aten.linear.default", weight, h)
    transpose = builder.call("aten.t.default", made)
    document.supertasks["d1.0"].data = encode(builder.finish([transpose]))


def attention() -> Document:
    """`two_stages`, the second of which calls an operator that only CPUs have."""
    document = two_stages()
    builder = Builder()
    h = builder.input("h", (4, 8))
    weight = builder.input("weight", (2, 8))
    x = builder.call("aten.view.default", h, [1, 1, 4, 8])
    op = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    y = builder.call("aten.view.default", builder.call(op, x, x, x)[0], [4, 8])
    made = builder.call("aten.linear.default", y, weight)
    document.supertasks["d1.0"].data = encode(builder.finish([made]))
    return document


COMPUTE = cases(
    Broken(
        "on another kind of device",
        "device-kind",
        lambda d: setattr(d.devices["d1"], "kind", "cuda"),
        "d1.0",
        base=attention,
    ),
    Broken("unknown", "blobs", task("d0.1", data_blob="q"), "d0.1"),
    Broken("no blobs", "blobs", lambda d: setattr(d, "blobs", None), "d0.0"),
    Broken("unused", "blobs", lambda d: d.blobs.update(spare="")),
    Broken("garbage", "graph", task("d1.0", data="garbage"), "d1.0"),
    Broken("empty", "graph", task("d1.0", data=""), "d1.0"),
    Broken("a pickle", "graph", task("d1.0", data="\x80\x04K\x01."), "d1.0"),
    Broken(
        "cut short", "graph", lambda d: task("d1.0", data=d.supertasks["d1.0"].data[:-9])(d), "d1.0"
    ),
    Broken("an unknown operator", "operators", node(op="aten.lineer.default"), "d1.0"),
    Broken("a missing argument", "graph-calls", node(args=[]), "d1.0"),
    Broken(
        "a default left out",
        "graph-calls",
        node(op="aten.add.Tensor", args=[{"ref": "i0"}, {"ref": "i0"}]),
        "d1.0",
    ),
    Broken(
        "an argument of another kind",
        "graph-calls",
        node(args=[{"ref": "i0"}, {"ref": "i1"}, {"dtype": "f32"}]),
        "d1.0",
    ),
    Broken(
        "a call that does not run",
        "graph-calls",
        node(args=[{"ref": "i1"}, {"ref": "i0"}, {"ref": "i0"}]),
        "d1.0",
    ),
    Broken(
        "an operator that no file may call",
        "operators",
        node(op="aten._reshape_alias.default", args=[{"ref": "i0"}, [4, 2], [2, 1]]),
        "d1.0",
    ),
    Broken("a key twice", "unique-keys", a_key_twice, "d1.0"),
    Broken(
        "an operator that writes",
        "operators",
        node(op="aten.relu_.default", args=[{"ref": "i0"}]),
        "d1.0",
    ),
    Broken(
        "one input too many",
        "graph-tensors",
        task("d1.0", inputs=("h2@d1", "w3", "w3")),
        "d1.0",
    ),
    Broken("one output too few", "graph-tensors", text(lambda d: d.update(outputs=[])), "d1.0"),
    Broken(
        "another shape",
        "graph-calls",
        node(outputs=[{"shape": [2, 4], "dtype": "f32"}]),
        "d1.0",
    ),
    Broken(
        "another dtype",
        "graph-calls",
        node(outputs=[{"shape": [4, 2], "dtype": "f64"}]),
        "d1.0",
    ),
    Broken(
        "strides that it does not make",
        "graph-calls",
        node(outputs=[{"shape": [4, 2], "dtype": "f32", "strides": [1, 4]}]),
        "d1.0",
    ),
    Broken("other strides", "graph-tensors", tensor("h1", strides=(1, 4)), "d0.0", "h1"),
    Broken("an input of another shape", "graph-tensors", identity, "d1.0", "y"),
    Broken("another placeholder", "name-in-graph", value("w3", name_in_graph="i0"), "d1.0", "w3"),
    Broken(
        "another placeholder of a blob",
        "name-in-graph",
        value("w2", name_in_graph="w"),
        "d0.1",
        "w2",
    ),
    Broken("a foreign operator", "requires", node(op="mine.act.default"), "d1.0"),
    Broken("one too many", "requires", lambda d: setattr(d, "requires", ("mine.act.default",))),
)


def test_a_constant_is_named_as_in_its_first_users_graph() -> None:
    document = two_stages()
    document.supertasks["d0.1"].inputs = ("w1", "w1")
    document.tensors["h2"].shape = document.tensors["h2@d1"].shape = (8, 8)
    del document.tensors["w2"]
    with pytest.raises(PipelineError, match="graph-calls"):
        check(document)


def test_a_wrong_call_is_named() -> None:
    document = two_stages()
    node(outputs=[{"shape": [2, 4], "dtype": "f32"}])(document)
    with pytest.raises(PipelineError) as caught:
        check(document)
    assert (caught.value.task, caught.value.node) == ("d1.0", "n0")
    assert "makes f32[4, 2], the text says f32[2, 4]" in str(caught.value)


def test_equal_graphs_are_proved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    run = Inference._run
    monkeypatch.setattr(
        Inference, "_run", lambda self, op, *rest: calls.append(op) or run(self, op, *rest)
    )
    document = two_stages()
    _prove.cache_clear()
    monkeypatch.setattr(inference, "_kept", {})
    calls.clear()
    check(document)
    check(document)
    assert calls == ["aten.linear.default"] * 2, "two layers of d0 are equal, d1's is another"


def test_strides_of_a_graph_may_be_left_out_of_tensors() -> None:
    document = two_stages()
    transposed(document)
    check(document)
    document.tensors["y"].strides = (1, 4)
    check(document)


def test_an_operator_that_is_not_loaded_is_believed_if_it_is_required() -> None:
    document = two_stages()
    node(op="absent.act.default", args=[{"ref": "i0"}, {"ref": "i1"}])(document)
    document.requires = ("absent.act.default",)
    check(document)
    node(args=[{"ref": "i7"}])(document)
    with pytest.raises(Exception, match="'i7' is to no input"):
        check(document)


@pytest.fixture
def registered() -> Iterator[str]:
    """An operator of a namespace of its own."""
    library = torch.library.Library("shardwright_test", "DEF")
    library.define("act(Tensor x, Tensor w) -> Tensor")
    library.impl("act", torch.nn.functional.linear, "CompositeImplicitAutograd")
    allow_namespace("shardwright_test")
    yield "shardwright_test.act.default"
    library._destroy()


def test_a_required_operator_that_is_loaded_is_held_to_its_schema(registered: str) -> None:
    document = two_stages()
    document.requires = (registered,)
    node(op=registered, args=[{"ref": "i0"}, {"ref": "i1"}])(document)
    check(document)
    node(args=[{"ref": "i0"}])(document)
    with pytest.raises(Exception, match="every argument of the operator's schema"):
        check(document)


def test_a_graph_of_no_tensors() -> None:
    document = two_stages()
    document.supertasks["d0.nothing"] = SuperTask(
        "FX", (), (), "d0", '{"version":1,"inputs":[],"nodes":[],"outputs":[]}'
    )
    check(document)


def test_supertasks_with_equal_tensors_share_a_graph() -> None:
    sketch = Sketch(1)
    sketch.input("x", (2,))
    sketch.input("wide", (3,))
    sketch.fx("a", "d0", ["x"], ["y"], give)
    sketch.fx("b", "d0", ["y"], ["z"], give)
    sketch.fx("c", "d0", ["wide"], ["u"], give)
    graphs = TaskGraphs(sketch.finish(["z", "u"]))
    assert graphs.of("a") is graphs.of("b")
    assert graphs.key("a") == graphs.key("b") != graphs.key("c")
    assert graphs.of("c").values[graphs.of("c").inputs[0]].shape == (3,)


@pytest.mark.parametrize("case", COMPUTE)
def test_broken(case: Broken) -> None:
    prove_broken(case)
