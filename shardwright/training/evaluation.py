"""Evaluating the model that a session trains, where its parameters are.

Comes in: a function of a batch, and batches. Goes out: for each number that the function returns
its mean, each batch counted by its samples. The function is captured with its modules in eval mode
and run as a pipeline of its own on the session's slots, with the session's parameters; batches of
another shape have another pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwright.building import build
from shardwright.compiler import lower as lowered
from shardwright.ir import IRGraph
from shardwright.pipeline import Pipeline
from shardwright.pipeline.schema import DeviceKind
from shardwright.planning import Plan, plan_beside
from shardwright.runtime.session import Session
from shardwright.tracing import compile_ir
from shardwright.tracing.closures import Closure, find_closure, unchanged
from shardwright.training.loading import Batch, Data, Loading
from shardwright.training.measures import means
from shardwright.training.shared_names import share_names


class Evaluation:
    """An evaluation function, and a pipeline of it for each shape of its batches."""

    def __init__(
        self,
        evaluate: Callable[..., Any],
        data: Data,
        *,
        step: IRGraph,
        plan: Plan,
        device_kind: DeviceKind,
        seed: int,
        lower: bool = False,
    ) -> None:
        self._evaluate = evaluate
        self._name = getattr(evaluate, "__name__", "evaluation")
        self._loading = Loading(data, seed=seed, epochs=1)
        self._step = step
        self._plan = plan
        self._device_kind = device_kind
        self._lower = lower
        self._pipelines: dict[object, Pipeline] = {}

    def prepare(self) -> None:
        """Make the pipelines of all shapes that the data tells of.

        Raises CaptureError, PlanError and InputError, before anything is trained.
        """
        first = self._loading.first()
        for batch in (first, *self._loading.other_shapes(first, None)):
            self._pipeline(batch)

    def run(self, session: Session, *, leads: bool) -> dict[str, float]:
        """The means over all batches, on the rank that ``leads``; nothing elsewhere.

        Raises InputError where the function returns no tensor.
        """
        totals: dict[str, float] = {}
        samples = 0
        for batch in self._loading.batches():
            found = session.evaluate(self._pipeline(batch), *batch.args, **batch.kwargs)
            for name, number in (means(found, self._name) if leads else {}).items():
                totals[name] = totals.get(name, 0.0) + number * batch.size
            samples += batch.size
        return {name: total / samples for name, total in totals.items()}

    def _pipeline(self, batch: Batch) -> Pipeline:
        key = batch.shapes
        if key not in self._pipelines:
            graph = share_names(capture_evaluation(self._evaluate, batch), self._step)
            plan = plan_beside(graph, self._step, self._plan)
            pipeline = build(graph, plan, device_kind=self._device_kind)
            self._pipelines[key] = lowered(pipeline) if self._lower else pipeline
        return self._pipelines[key]


def capture_evaluation(evaluate: Callable[..., Any], batch: Batch) -> IRGraph:
    """The graph of an evaluation function, with the modules that it uses in eval mode."""
    closure = find_closure(evaluate)
    with unchanged(closure), torch.no_grad(), _eval_mode(closure):
        return compile_ir(evaluate, *batch.args, name="evaluation", **batch.kwargs)


@contextmanager
def _eval_mode(closure: Closure) -> Iterator[None]:
    modules = [part for module in closure.modules.values() for part in module.modules()]
    modes = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, training in zip(modules, modes, strict=True):
            module.training = training
