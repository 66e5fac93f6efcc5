"""`train`: steps, data, checkpoints and logs of a training run."""

from typing import TYPE_CHECKING

from shardwright.lazy import import_lazily

if TYPE_CHECKING:
    from shardwright.training.result import TrainResult, state_dict
    from shardwright.training.trainer import train

__all__ = [
    "TrainResult",
    "state_dict",
    "train",
]

import_lazily(__name__)
