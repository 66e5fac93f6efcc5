"""Sample calls written as Python and captured from there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.ir import IRGraph, IRNode
from shardwright.ir.structure import Leaf
from shardwright.tracing import capture
from tests.codegenerate.spelling_samples import EveryCall, Sample, class_text, run_class


def written(samples: Sequence[Sample], *, in_module: bool = True) -> str:
    """A class ``Samples`` with a method a sample."""
    calls = [
        (sample.spelled(in_module=in_module), *counts(sample.graph()[0])) for sample in samples
    ]
    return class_text("Samples", calls)


def counts(graph: IRGraph) -> tuple[int, bool]:
    """How many tensors a sample takes, and whether it gives one rather than a tuple."""
    return len(graph.inputs), isinstance(graph.out_structure, Leaf)


class Recaptured:
    """What samples of one mode are captured as, all in one graph."""

    def __init__(
        self, samples: Sequence[Sample], *, training: bool, in_module: bool = True
    ) -> None:
        calls = run_class("Samples", written(samples, in_module=in_module))
        model = EveryCall(calls, [len(each.specs()) for each in samples]).train(training)
        self.graph = capture(model, [spec.make() for each in samples for spec in each.specs()])
        self._nodes = self.graph.node_by_id()
        self._places: dict[str, int] = {}
        place = 0
        for sample in samples:
            self._places[str(sample)] = place
            place += len(sample.graph()[1].outputs)
        assert place == len(self.graph.outputs)

    def is_nothing(self, sample: Sample) -> bool:
        """Whether the sample's text is captured as no call at all."""
        return self._producer(sample) is None

    def _producer(self, sample: Sample) -> int | None:
        return self.graph.values[self.graph.outputs[self._places[str(sample)]]].producer

    def assert_is_captured_back(self, sample: Sample) -> None:
        """The sample's text is captured as its very call."""
        producer = self._producer(sample)
        assert producer is not None, f"{sample} is captured as nothing"
        found, expected = self._nodes[producer], sample.graph()[1]
        assert found.op == expected.op, str(sample)
        assert _said(found.attrs) == _said(expected.attrs), str(sample)
        assert _order(self.graph, found) == _order(sample.graph()[0], expected), str(sample)
        assert len(found.outputs) == len(expected.outputs), str(sample)


def _said(attrs: dict[str, Any]) -> dict[str, Any]:
    """What the text says; torch's own settings are read from torch."""
    return {name: value for name, value in attrs.items() if not name.startswith("cudnn_enable")}


def _order(graph: IRGraph, node: IRNode) -> list[int]:
    """Which of the sample's tensors stand where."""
    places = [graph.inputs.index(value_id) for value_id in node.inputs]
    return [place - places[0] for place in places]
