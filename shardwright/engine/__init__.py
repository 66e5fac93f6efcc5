"""One slot's part of a pipeline at work: what it does, in which order, and what it holds."""

from typing import TYPE_CHECKING

from shardwright.lazy import import_lazily

if TYPE_CHECKING:
    from shardwright.engine.generator import Generator
    from shardwright.engine.timeline import Event, SlotSummary, Timeline

__all__ = [
    "Event",
    "Generator",
    "SlotSummary",
    "Timeline",
]

import_lazily(__name__)
