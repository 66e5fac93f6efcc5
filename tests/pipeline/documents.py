"""Small good pipelines, written by hand, and the form of a mutation that breaks one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from shardwright.errors import PipelineError
from shardwright.ir import Builder
from shardwright.ir.structure import Arguments, Leaf, Parameter
from shardwright.pipeline import (
    Device,
    Document,
    Metadata,
    MetadataTensor,
    MetadataTensors,
    MetadataTensorSlice,
    MetadataTensorSlices,
    ParamValue,
    Structure,
    SuperTask,
    TensorInfo,
    Training,
    check,
)
from shardwright.pipeline.fxtext import encode


def linear(rows: int, inside: int, outside: int) -> str:
    """The text of ``x, weight -> linear(x, weight)``."""
    builder = Builder()
    x = builder.input("x", (rows, inside))
    weight = builder.input("weight", (outside, inside))
    return encode(builder.finish([builder.call("aten.linear.default", x, weight)]))


def constant(name: str, *shape: int) -> TensorInfo:
    whole = tuple((0, size) for size in shape)
    value = ParamValue("mlp.safetensors", "safetensors", name, "i1", whole, shape)
    return TensorInfo(shape, "f32", value)


def whole(name: str, device: str, *shape: int, dtype: str = "f32") -> MetadataTensorSlice:
    return MetadataTensorSlice(tuple((0, size) for size in shape), name, dtype, device)


def two_stages() -> Document:
    """Two equal layers on d0, a third on d1: ``x -> h1 -> h2 => h2@d1 -> y``."""
    return Document(
        name="mlp",
        devices={"d0": Device("cpu", 0), "d1": Device("cpu", 1)},
        tensors={
            "x": TensorInfo((4, 8), "f32"),
            "w1": constant("layers.0.weight", 8, 8),
            "w2": constant("layers.1.weight", 8, 8),
            "w3": constant("head.weight", 2, 8),
            "h1": TensorInfo((4, 8), "f32"),
            "h2": TensorInfo((4, 8), "f32"),
            "h2@d1": TensorInfo((4, 8), "f32"),
            "y": TensorInfo((4, 2), "f32"),
        },
        supertasks={
            "input": SuperTask("input", (), ("x",)),
            "d0.0": SuperTask("FX", ("x", "w1"), ("h1",), "d0", data_blob="layer"),
            "d0.1": SuperTask("FX", ("h1", "w2"), ("h2",), "d0", data_blob="layer"),
            "send": SuperTask("send", ("h2",), (), "d0", None, "g0", 0, {}),
            "recv": SuperTask("recv", (), ("h2@d1",), "d1", None, "g0", 1, {}),
            "d1.0": SuperTask("FX", ("h2@d1", "w3"), ("y",), "d1", linear(4, 8, 2)),
            "output": SuperTask("output", ("y",), ()),
        },
        metadata=Metadata(
            MetadataTensors(
                {"x": MetadataTensor((4, 8), "f32", 0)},
                {"output": MetadataTensor((4, 2), "f32", 0)},
            ),
            MetadataTensorSlices({"x": whole("x", "d0", 4, 8)}, {"y": whole("output", "d1", 4, 2)}),
            Structure(
                Arguments((Parameter("x", "POSITIONAL_OR_KEYWORD", Leaf("x", 0)),)),
                Leaf("output", 0),
            ),
        ),
        version=1,
        blobs={"layer": linear(4, 8, 8)},
    )


Shapes = list[tuple[int, ...] | None]


def collective(
    kind: str,
    inputs: Shapes,
    outputs: Shapes,
    metadata: dict[str, int | str],
    dtype: str = "f32",
) -> Document:
    """One communication: device i sends tensor xi and gets yi, of these shapes; None has none."""
    count = len(inputs)
    tensors, tasks = {}, {}
    for side, shapes in (("x", inputs), ("y", outputs)):
        for i, shape in enumerate(shapes):
            if shape is not None:
                tensors[f"{side}{i}"] = TensorInfo(shape, dtype)
    tasks["input"] = SuperTask("input", (), tuple(n for n in tensors if n[0] == "x"))
    for i in range(count):
        ins = (f"x{i}",) if inputs[i] is not None else ()
        outs = (f"y{i}",) if outputs[i] is not None else ()
        name = f"{kind}.{i}"
        tasks[name] = SuperTask(kind, ins, outs, f"d{i}", None, "g", i, dict(metadata))
    tasks["output"] = SuperTask("output", tuple(n for n in tensors if n[0] == "y"), ())

    def originals(side: str) -> dict[str, MetadataTensor]:
        names = [name for name in tensors if name[0] == side]
        return {n: MetadataTensor(tensors[n].shape, dtype, k) for k, n in enumerate(names)}

    def slices(side: str) -> dict[str, MetadataTensorSlice]:
        names = [name for name in tensors if name[0] == side]
        return {n: whole(n, f"d{n[1:]}", *tensors[n].shape, dtype=dtype) for n in names}

    return Document(
        name=kind,
        devices={f"d{i}": Device("cpu", i) for i in range(count)},
        tensors=tensors,
        supertasks=tasks,
        metadata=Metadata(
            MetadataTensors(originals("x"), originals("y")),
            MetadataTensorSlices(slices("x"), slices("y")),
        ),
    )


COLLECTIVES: dict[str, Callable[[], Document]] = {
    "all_reduce": lambda: collective(
        "all_reduce", [(4, 6)] * 3, [(4, 6)] * 3, {"reduce_op": "sum"}
    ),
    "all_gather": lambda: collective("all_gather", [(2, 6)] * 3, [(6, 6)] * 3, {"dim": 0}),
    "all_gather uneven": lambda: collective(
        "all_gather", [(3, 6), (3, 6), (2, 6)], [(8, 6)] * 3, {"dim": 0}
    ),
    "all_gather with an empty piece": lambda: collective(
        "all_gather", [(1, 6), (1, 6), (0, 6)], [(2, 6)] * 3, {"dim": 0}
    ),
    "reduce_scatter": lambda: collective(
        "reduce_scatter", [(4, 6)] * 3, [(4, 2)] * 3, {"reduce_op": "avg", "dim": 1}
    ),
    "reduce_scatter uneven": lambda: collective(
        "reduce_scatter", [(4, 5)] * 2, [(4, 3), (4, 2)], {"reduce_op": "max", "dim": 1}
    ),
    "all_to_all": lambda: collective(
        "all_to_all", [(4, 3)] * 2, [(2, 6)] * 2, {"src_dim": 0, "dst_dim": 1}
    ),
    "all_to_all uneven": lambda: collective(
        "all_to_all", [(5, 3), (5, 2)], [(3, 5), (2, 5)], {"src_dim": 0, "dst_dim": 1}
    ),
    "all_to_all in one dimension": lambda: collective(
        "all_to_all", [(4, 3)] * 2, [(4, 3)] * 2, {"src_dim": 0, "dst_dim": 0}
    ),
    "all_to_all uneven in one dimension": lambda: collective(
        "all_to_all", [(5, 3), (3, 3)], [(5, 3), (3, 3)], {"src_dim": 0, "dst_dim": 0}
    ),
    "reduce": lambda: collective(
        "reduce", [(4, 6)] * 3, [None, (4, 6), None], {"reduce_op": "min", "dst": "d1"}
    ),
    "broadcast": lambda: collective("broadcast", [None, None, (4, 6)], [(4, 6)] * 3, {"src": "d2"}),
}


def with_state() -> Document:
    """`two_stages` where h1 replaces a constant that begins with zeros and that d0.1 reads."""
    document = two_stages()
    builder = Builder()
    h = builder.input("h", (4, 8))
    weight = builder.input("weight", (8, 8))
    state = builder.input("state", (4, 8))
    made = builder.call("aten.add.Tensor", builder.call("aten.linear.default", h, weight), state)
    document.tensors["state"] = TensorInfo((4, 8), "f32", init="zeros")
    task = document.supertasks["d0.1"]
    task.inputs, task.data_blob = ("h1", "w2", "state"), None
    task.data = encode(builder.finish([made]))
    document.training = Training({"h1": "state"})
    return document


GOOD: dict[str, Callable[[], Document]] = {
    "two stages": two_stages,
    "state": with_state,
    **COLLECTIVES,
}


# --- mutations ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Broken:
    """A good document, a change to it, and what the one error must name."""

    what: str
    rule: str
    change: Callable[[Any], object]
    task: str | None = None
    tensor: str | None = None
    base: Callable[[], Document] = two_stages


def cases(*rows: Broken) -> list[Any]:
    """Rows as parameters of a test, each under its own words."""
    return [pytest.param(row, id=f"{row.rule}: {row.what}") for row in rows]


def prove_broken(case: Broken) -> PipelineError:
    """The document is good before the change and breaks exactly the rule after; the error."""
    document = case.base()
    check(document)
    case.change(document)
    with pytest.raises(PipelineError) as caught:
        check(document)
    error = caught.value
    assert (error.rule, error.task, error.tensor) == (case.rule, case.task, case.tensor), error
    assert str(error).endswith(f"[rule {case.rule}]")
    return error


def put(**fields: Any) -> Callable[[Any], None]:
    """Sets fields of a Struct; `task`, `tensor` and `value` say of which."""

    def change(struct: Any) -> None:
        for key, item in fields.items():
            setattr(struct, key, item)

    return change


def task(name: str, **fields: Any) -> Callable[[Document], None]:
    """A change that sets fields of a supertask."""
    return lambda document: put(**fields)(document.supertasks[name])


def tensor(name: str, **fields: Any) -> Callable[[Document], None]:
    """A change that sets fields of a tensor."""
    return lambda document: put(**fields)(document.tensors[name])


def value(name: str, **fields: Any) -> Callable[[Document], None]:
    """A change that sets fields of a constant's ParamValue."""
    return lambda document: put(**fields)(document.tensors[name].value)


def together(*changes: Callable[[Document], object]) -> Callable[[Document], None]:
    """Several changes as one."""

    def change(document: Document) -> None:
        for one in changes:
            one(document)

    return change
