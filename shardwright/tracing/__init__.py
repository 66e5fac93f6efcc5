"""From a PyTorch model to a graph."""

from shardwright.tracing.capture import capture
from shardwright.tracing.empty_weights import empty_weights
from shardwright.tracing.failures import CaptureWarning
from shardwright.tracing.model import Model

__all__ = ["CaptureWarning", "Model", "capture", "empty_weights"]
