"""Training pipelines drawn by hand: a stack of matrices, one a stage, trained by momentum.

    h_0 = x, h_{s+1} = h_s w_s, loss = sum((h_S - target)^2) over the batch
    m_s = 0.5 m_s + dloss/dw_s, w_s = w_s - lr m_s

`linear_step` writes the file, `LinearModel` is what it must compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from shardwright.ir import Builder
from shardwright.pipeline import (
    Metadata,
    MetadataTensors,
    MetadataTensorSlices,
    Microbatches,
    Pipeline,
    StateOrigin,
    SuperTask,
    TensorInfo,
    Training,
)
from shardwright.pipeline.check_schedule import schedule_info
from shardwright.schedules import make_schedule
from tests.runtime.sketch import Sketch

ROWS, WIDTH = 8, 3


class LinearModel:
    """The stack and its momentum, on one device."""

    def __init__(self, stages: int) -> None:
        self.weights = [weight(stage) for stage in range(stages)]
        self.momenta = [torch.zeros_like(w) for w in self.weights]

    def outputs(self, x: Tensor) -> Tensor:
        for w in self.weights:
            x = x @ w
        return x

    def step(self, x: Tensor, target: Tensor, lr: float) -> dict[str, Tensor]:
        leaves = [w.requires_grad_() for w in self.weights]
        y = self.outputs(x)
        loss = ((y - target) ** 2).sum()
        grads = torch.autograd.grad(loss, leaves)
        self.momenta = [0.5 * m + g for m, g in zip(self.momenta, grads, strict=True)]
        self.weights = [
            (w - lr * m).detach() for w, m in zip(self.weights, self.momenta, strict=True)
        ]
        return {"loss": loss.detach(), "y": y.detach()}

    def state(self) -> dict[str, Tensor]:
        momenta = {f"optimizer.w{s}.momentum_buffer": m for s, m in enumerate(self.momenta)}
        return {f"w{s}": w for s, w in enumerate(self.weights)} | momenta


def weight(stage: int) -> Tensor:
    draws = torch.Generator().manual_seed(stage)
    return torch.randn(WIDTH, WIDTH, generator=draws, dtype=torch.float64) / 2


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(99)
    found = torch.randn(count, 2, ROWS, WIDTH, generator=draws, dtype=torch.float64)
    return [(one[0], one[1]) for one in found]


def linear_step(
    kind: str = "1f1b",
    *,
    ranks: int = 2,
    microbatches: int = 2,
    data: int = 1,
    chunks: int | None = None,
    op: str | None = None,
) -> Pipeline:
    """The step of a stack with a stage a virtual stage; ``data`` slots share each one's batch.

    It returns the loss and the outputs. ``op`` is an operator that the last stage's forward calls.
    """
    return _LinearStep(kind, ranks, microbatches, data, chunks, op).pipeline()


class _LinearStep:
    def __init__(
        self,
        kind: str,
        ranks: int,
        microbatches: int,
        data: int,
        chunks: int | None,
        op: str | None,
    ) -> None:
        self.schedule = make_schedule(kind, ranks=ranks, microbatches=microbatches, chunks=chunks)
        self.data = data
        self.op = op
        self.sketch = Sketch(ranks * data)
        self.sketch.requires = (op,) if op else None
        self.rows = ROWS // microbatches // data
        self.places: dict[str, tuple[Any, int | None]] = {}
        self.replaces: dict[str, str] = {}

    def pipeline(self) -> Pipeline:
        last = self.schedule.stages - 1
        for k in range(self.data):
            self._inputs(k)
            for stage in range(last + 1):
                self._forward(stage, k)
            for stage in reversed(range(last + 1)):
                self._backward(stage, k)
        for stage in range(last + 1):
            self._update(stage)
        return self._finish()

    # --- slots, names -------------------------------------------------------------------------

    def slot(self, stage: int, k: int) -> str:
        return f"d{self.schedule.placement[stage] * self.data + k}"

    def fx(
        self,
        place: tuple[Any, int | None],
        task: str,
        device: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        write: Callable[..., Any],
    ) -> None:
        self.sketch.fx(task, device, inputs, outputs, write)
        self.places[task] = place

    def move(self, tensor: str, phase: str, source: int, target: int, k: int) -> str:
        """A tensor on another stage's slot: sent in the one's action, received in the other's."""
        if self.slot(source, k) == self.slot(target, k):
            return tensor
        name = self.sketch.send(tensor, self.slot(source, k), self.slot(target, k))
        self.places[f"send.{name}"] = (phase, source)
        self.places[f"recv.{name}"] = (phase, target)
        return name

    def zeros(self, name: str, shape: tuple[int, ...], origin: StateOrigin | None = None) -> str:
        self.sketch.tensors[name] = TensorInfo(shape, "f64", init="zeros", origin=origin)
        return name

    # --- phases -------------------------------------------------------------------------------

    def _inputs(self, k: int) -> None:
        part = ((k * self.rows, (k + 1) * self.rows), (0, WIDTH))
        last = self.schedule.stages - 1
        for name, stage in (("x", 0), ("target", last)):
            self.sketch.input(
                f"{name}.{k}", (self.rows, WIDTH), self.slot(stage, k), "f64", (name, part)
            )
        for stage in range(last + 1):
            self.sketch.input(f"lr.{stage}.{k}", (), self.slot(stage, k), "f64", ("lr", ()))

    def _forward(self, stage: int, k: int) -> None:
        device, place = self.slot(stage, k), ("forward", stage)
        h = f"x.{k}" if stage == 0 else self.move(f"h{stage}.{k}", "forward", stage - 1, stage, k)
        w = self.sketch.constant(f"w{stage}.{k}", weight(stage))
        last = stage == self.schedule.stages - 1
        write = self._product_and_op if last and self.op else _product
        self.fx(place, f"F{stage}.{k}", device, [h, w], [f"h{stage + 1}.{k}"], write)
        if last:
            inputs = [f"h{stage + 1}.{k}", f"target.{k}", self.zeros(f"sum.{k}", ())]
            self.fx(place, f"loss.{k}", device, inputs, [f"d.{k}", f"sum_new.{k}"], _loss)
            self.replaces[f"sum_new.{k}"] = f"sum.{k}"

    def _backward(self, stage: int, k: int) -> None:
        device = self.slot(stage, k)
        last = stage == self.schedule.stages - 1
        dy = f"d.{k}" if last else self.move(f"dh{stage}.{k}", "backward", stage + 1, stage, k)
        h = f"x.{k}" if stage == 0 else f"h{stage}.{k}"
        if stage and self.slot(stage - 1, k) != device:
            h = f"{h}@{device}"
        if stage:
            self.fx(
                ("backward", stage), f"B{stage}.{k}", device,
                [dy, f"w{stage}.{k}"], [f"dh{stage - 1}.{k}"],
                lambda b, dy, w: b.call("aten.mm.default", dy, b.call("aten.t.default", w)),
            )  # fmt: skip
        acc = self.zeros(f"g{stage}.{k}", (WIDTH, WIDTH))
        self.fx(
            ("backward_weight", stage), f"W{stage}.{k}", device,
            [acc, h, dy], [f"g_new{stage}.{k}"],
            lambda b, acc, h, dy: b.call(
                "aten.addmm.default", acc, b.call("aten.t.default", h), dy
            ),
        )  # fmt: skip
        self.replaces[f"g_new{stage}.{k}"] = acc

    def _update(self, stage: int) -> None:
        grads = {k: f"g_new{stage}.{k}" for k in range(self.data)}
        if self.data > 1:
            outputs = {self.slot(stage, k): (f"g_sum{stage}.{k}", (WIDTH, WIDTH)) for k in grads}
            inputs = {self.slot(stage, k): name for k, name in grads.items()}
            group = f"reduce{stage}"
            self.sketch.together("all_reduce", inputs, outputs, group, reduce_op="sum")
            for device in inputs:
                self.places[f"{group}.{device}"] = ("update", None)
            grads = {k: f"g_sum{stage}.{k}" for k in grads}
        whole = ((0, WIDTH), (0, WIDTH))
        origin = StateOrigin(f"optimizer.w{stage}.momentum_buffer", whole, (WIDTH, WIDTH))
        for k, grad in grads.items():
            w, m = f"w{stage}.{k}", self.zeros(f"m{stage}.{k}", (WIDTH, WIDTH), origin)
            inputs = [w, m, grad, f"lr.{stage}.{k}"]
            outputs = [f"w_new{stage}.{k}", f"m_new{stage}.{k}"]
            self.fx(
                ("update", None), f"U{stage}.{k}", self.slot(stage, k), inputs, outputs, _momentum
            )
            self.replaces |= {outputs[0]: w, outputs[1]: m}

    def _product_and_op(self, builder: Builder, h: Any, w: Any) -> Any:
        assert self.op is not None
        return builder.call(self.op, _product(builder, h, w))

    # --- the file -----------------------------------------------------------------------------

    def _finish(self) -> Pipeline:
        sketch, schedule, last = self.sketch, self.schedule, self.schedule.stages - 1
        totals = [f"sum_new.{k}" for k in range(self.data)]
        end = self.slot(last, 0)
        if self.data > 1:
            sketch.together(
                "reduce", {self.slot(last, k): name for k, name in enumerate(totals)},
                {end: ("sum_all", ())}, "sums", reduce_op="sum", dst=end,
            )  # fmt: skip
            self.places |= {
                f"sums.{self.slot(last, k)}": ("update", None) for k in range(self.data)
            }
        total = "sum_all" if self.data > 1 else totals[0]
        self.fx(("update", None), "total", end, [total], ["loss"], _same)
        parts: dict[str, Any] = {}
        for k in range(self.data):
            part = ((k * self.rows, (k + 1) * self.rows), (0, WIDTH))
            parts[f"h{last + 1}.{k}"] = ("y", part)
        pipeline = sketch.finish(["loss", *parts], parts=parts)
        for name, info in pipeline.tensors.items():
            if info.value is not None:
                stored = name.partition(".")[0]
                info.value = msgspec.structs.replace(info.value, name=stored, shape=(WIDTH, WIDTH))
                pipeline.weights.put("weights", stored, sketch.contents[name])
        slots = [
            [f"d{rank * self.data + k}" for k in range(self.data)] for rank in range(schedule.ranks)
        ]
        pipeline.training = Training(
            self.replaces,
            Microbatches(schedule.microbatches, {"x": 0, "target": 0, "y": 0}),
            schedule_info(schedule, slots),
        )
        pipeline.supertasks = {
            name: self._placed(name, task) for name, task in pipeline.supertasks.items()
        }
        pipeline.metadata = _whole_batch(pipeline.metadata)
        return pipeline

    def _placed(self, name: str, task: SuperTask) -> SuperTask:
        phase, stage = self.places.get(name, (None, None))
        return msgspec.structs.replace(task, phase=phase, stage=stage)


def _whole_batch(metadata: Metadata) -> Metadata:
    """The metadata with the whole batch's shapes, ``lr`` last among the inputs."""

    def whole(side: dict[str, Any], order: Sequence[str]) -> dict[str, Any]:
        return {
            name: msgspec.structs.replace(
                side[name], shape=(ROWS, WIDTH) if side[name].shape else (), idx=idx
            )
            for idx, name in enumerate(order)
        }

    return Metadata(
        MetadataTensors(
            whole(metadata.tensors.inputs, ["x", "target", "lr"]),
            whole(metadata.tensors.outputs, ["loss", "y"]),
        ),
        MetadataTensorSlices(metadata.tensor_slices.inputs, metadata.tensor_slices.outputs),
    )


def _product(b: Builder, h: Any, w: Any) -> Any:
    return b.call("aten.mm.default", h, w)


def _loss(b: Builder, y: Any, target: Any, total: Any) -> list[Any]:
    d = b.call("aten.sub.Tensor", y, target)
    loss = b.call("aten.sum.default", b.call("aten.mul.Tensor", d, d))
    return [b.call("aten.mul.Tensor", d, 2.0), b.call("aten.add.Tensor", total, loss)]


def _momentum(b: Builder, w: Any, m: Any, grad: Any, lr: Any) -> list[Any]:
    kept = b.call("aten.add.Tensor", b.call("aten.mul.Tensor", m, 0.5), grad)
    return [b.call("aten.sub.Tensor", w, b.call("aten.mul.Tensor", kept, lr)), kept]


def _same(b: Builder, value: Any) -> Any:
    return b.call("aten.clone.default", value)
