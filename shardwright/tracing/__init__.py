"""From a PyTorch model to a graph."""

from shardwright.tracing.capture import CaptureWarning, capture
from shardwright.tracing.empty_weights import empty_weights

__all__ = ["CaptureWarning", "capture", "empty_weights"]
