"""The graphs of a document's compute supertasks, each decoded once.

In comes a document; `TaskGraphs.of` gives a supertask's graph. What always holds: supertasks that
share a text and bind tensors of equal shapes, dtypes and strides have one graph, and one `key`.
"""

from __future__ import annotations

from collections.abc import Hashable

from shardwright.ir import IRGraph
from shardwright.pipeline.check_compute import data_of
from shardwright.pipeline.fxtext import decode
from shardwright.pipeline.schema import Document


class TaskGraphs:
    """The graphs of one document's compute supertasks."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._graphs: dict[Hashable, IRGraph] = {}

    def key(self, task: str) -> Hashable:
        """What supertasks have alike that have one graph."""
        spec = self._document.supertasks[task]
        inputs = [self._document.tensors[name] for name in spec.inputs]
        text = data_of(self._document, spec)
        return text, tuple((info.shape, info.dtype, info.strides) for info in inputs)

    def of(self, task: str) -> IRGraph:
        """A supertask's graph. Raises GraphError where its text is not one."""
        key = self.key(task)
        if key not in self._graphs:
            spec = self._document.supertasks[task]
            inputs = [self._document.tensors[name] for name in spec.inputs]
            self._graphs[key] = decode(data_of(self._document, spec), inputs, name=task)
        return self._graphs[key]
