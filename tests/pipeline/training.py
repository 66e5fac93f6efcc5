"""A small good training step, written by hand: two stages, two microbatches of two rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwright.ir import Builder, IRValue
from shardwright.pipeline import (
    Device,
    Document,
    Metadata,
    MetadataTensor,
    MetadataTensors,
    MetadataTensorSlice,
    MetadataTensorSlices,
    Microbatches,
    ScheduleInfo,
    SuperTask,
    TensorInfo,
    Training,
)
from shardwright.pipeline.fxtext import encode
from tests.pipeline.documents import constant, linear, whole

Shape = tuple[int, ...]


def graph(
    shapes: Sequence[Shape], write: Callable[..., Sequence[IRValue]], dtype: str = "f32"
) -> str:
    """The text of what ``write`` writes with a builder, on inputs of these shapes."""
    builder = Builder()
    inputs = [builder.input(f"x{i}", shape, dtype) for i, shape in enumerate(shapes)]
    return encode(builder.finish([*write(builder, *inputs)]))


def _forward(b: Builder, h: IRValue, w: IRValue, loss: IRValue, count: IRValue) -> list[IRValue]:
    y = b.call("aten.linear.default", h, w)
    share = b.call("aten.div.Tensor", b.call("aten.sum.default", y), count)
    return [y, b.call("aten.add.Tensor", loss, share)]


def _accumulate(b: Builder, total: IRValue, dy: IRValue, x: IRValue) -> list[IRValue]:
    gradient = b.call("aten.mm.default", b.call("aten.t.default", dy), x)
    return [b.call("aten.add.Tensor", total, gradient)]


def _descend(b: Builder, weight: IRValue, gradient: IRValue, lr: IRValue) -> list[IRValue]:
    return [b.call("aten.sub.Tensor", weight, b.call("aten.mul.Tensor", gradient, lr))]


def _count(b: Builder, labels: IRValue) -> list[IRValue]:
    return [b.call("aten.sum.default", labels)]


def _same(b: Builder, x: IRValue) -> list[IRValue]:
    return [b.call("aten.mul.Tensor", x, 1.0)]


def _mm(b: Builder, x: IRValue, y: IRValue) -> list[IRValue]:
    return [b.call("aten.mm.default", x, y)]


def compute(device: str, place: str, inputs: str, outputs: str, data: str) -> SuperTask:
    """``place`` is a phase and a stage, tensors are names with spaces between."""
    phase, _, stage = place.partition(" ")
    task = SuperTask("FX", tuple(inputs.split()), tuple(outputs.split()), device, data)
    task.phase, task.stage = phase, int(stage) if stage else None  # type: ignore[assignment]
    return task


def message(
    group: str, source: tuple[str, str, str], target: tuple[str, str, str]
) -> dict[str, SuperTask]:
    """A send and its recv, each told by device, place and tensor."""
    made = {}
    for index, (kind, (device, place, tensor)) in enumerate((("send", source), ("recv", target))):
        phase, _, stage = place.partition(" ")
        inputs, outputs = ((tensor,), ()) if kind == "send" else ((), (tensor,))
        task = SuperTask(kind, inputs, outputs, device, None, group, index, {})  # type: ignore[arg-type]
        task.phase, task.stage = phase, int(stage)  # type: ignore[assignment]
        made[f"{group}.{kind}"] = task
    return made


def training_step() -> Document:
    """``x -> h => h@d1 -> y, loss`` and back, with one step of descent on each slot."""
    f32 = {
        **{"x": (2, 8), "labels": (4, 2), "lr": (), "lr@d1": (), "count": ()},
        **{"h": (2, 8), "h@d1": (2, 8), "y": (2, 2), "loss'": (), "mean": ()},
        **{"dh@d1": (2, 8), "dh": (2, 8), "g1'": (8, 8), "g2'": (2, 8)},
        **{"w1'": (8, 8), "w2'": (2, 8)},
    }
    zeros = {"loss": (), "g1": (8, 8), "g2": (2, 8)}
    return Document(
        name="step",
        devices={"d0": Device("cpu", 0), "d1": Device("cpu", 1)},
        tensors={
            "w1": constant("up.weight", 8, 8),
            "w2": constant("down.weight", 2, 8),
            **{name: TensorInfo(shape, "f32") for name, shape in f32.items()},
            **{name: TensorInfo(shape, "f32", init="zeros") for name, shape in zeros.items()},
        },
        supertasks={
            "input": SuperTask("input", (), ("x", "labels", "lr", "lr@d1")),
            "d1.P.0": compute("d1", "prepare", "labels", "count", graph([(4, 2)], _count)),
            "d0.F0.0": compute("d0", "forward 0", "x w1", "h", linear(2, 8, 8)),
            **message("g0", ("d0", "forward 0", "h"), ("d1", "forward 1", "h@d1")),
            "d1.F1.0": compute(
                *("d1", "forward 1", "h@d1 w2 loss count", "y loss'"),
                graph([(2, 8), (2, 8), (), ()], _forward),
            ),
            "d1.B1.0": compute("d1", "backward 1", "y w2", "dh@d1", graph([(2, 2), (2, 8)], _mm)),
            **message("g1", ("d1", "backward 1", "dh@d1"), ("d0", "backward 0", "dh")),
            "d1.W1.0": compute(
                *("d1", "backward_weight 1", "g2 y h@d1", "g2'"),
                graph([(2, 8), (2, 2), (2, 8)], _accumulate),
            ),
            "d0.W0.0": compute(
                *("d0", "backward_weight 0", "g1 dh x", "g1'"),
                graph([(8, 8), (2, 8), (2, 8)], _accumulate),
            ),
            "d0.U.0": compute(
                "d0", "update", "w1 g1' lr", "w1'", graph([(8, 8), (8, 8), ()], _descend)
            ),
            "d1.U.0": compute(
                "d1", "update", "w2 g2' lr@d1", "w2'", graph([(2, 8), (2, 8), ()], _descend)
            ),
            "d1.U.1": compute("d1", "update", "loss'", "mean", graph([()], _same)),
            "output": SuperTask("output", ("y", "mean"), ()),
        },
        metadata=Metadata(
            MetadataTensors(
                {
                    "x": MetadataTensor((4, 8), "f32", 0),
                    "labels": MetadataTensor((4, 2), "f32", 1),
                    "lr": MetadataTensor((), "f32", 2),
                },
                {
                    "prediction": MetadataTensor((4, 2), "f32", 0),
                    "loss": MetadataTensor((), "f32", 1),
                },
            ),
            MetadataTensorSlices(
                {
                    "x": MetadataTensorSlice(((0, 2), (0, 8)), "x", "f32", "d0"),
                    "labels": whole("labels", "d1", 4, 2),
                    "lr": whole("lr", "d0"),
                    "lr@d1": whole("lr", "d1"),
                },
                {
                    "y": MetadataTensorSlice(((0, 2), (0, 2)), "prediction", "f32", "d1"),
                    "mean": whole("loss", "d1"),
                },
            ),
        ),
        version=1,
        training=Training(
            replaces={"loss'": "loss", "g1'": "g1", "g2'": "g2", "w1'": "w1", "w2'": "w2"},
            microbatches=Microbatches(2, {"x": 0, "labels": 0, "prediction": 0}),
            schedule=ScheduleInfo("1f1b", 2, 1, (0, 1), (("d0",), ("d1",))),
        ),
    )
