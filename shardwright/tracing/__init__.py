"""From a PyTorch model, or a step of training, to a graph."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from shardwright.ir.graph import IRGraph
from shardwright.lazy import LazyPackage, import_lazily
from shardwright.tracing.active import LiveGraph, get_ir, is_tracing
from shardwright.tracing.active import tracing as _tracing

if TYPE_CHECKING:
    from shardwright.tracing.capture import Model, capture, empty_weights
    from shardwright.tracing.failures import CaptureWarning
    from shardwright.tracing.step import CapturedStep, Rate, capture_step, compile_ir

__all__ = [
    "CaptureWarning",
    "CapturedStep",
    "LiveGraph",
    "Model",
    "Rate",
    "capture",
    "capture_step",
    "compile_ir",
    "empty_weights",
    "get_ir",
    "is_tracing",
]


class _Package(LazyPackage):
    """This package, which is also the context manager of its name: ``with sw.tracing(ir):``."""

    def __call__(self, ir: IRGraph) -> AbstractContextManager[IRGraph]:
        """Inside, `is_tracing` is true and `get_ir` gives ``ir``."""
        return _tracing(ir)


import_lazily(__name__, _Package)
