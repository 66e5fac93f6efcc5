"""`plan`: policies, partitioners and the automatic planner, by name."""

from typing import TYPE_CHECKING

from shardwright.lazy import import_lazily

if TYPE_CHECKING:
    from shardwright.planner.make import plan

__all__ = [
    "plan",
]

import_lazily(__name__)
