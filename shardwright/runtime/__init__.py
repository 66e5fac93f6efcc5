"""Running pipelines: the Runner, its workers, the Generator, and what they report.

`Runner` and `run` are the way in, `verify` holds a pipeline against its model. `in_process`,
`processes` and `torchrun` are the three ways to run the slots; `worker` is what they share.
"""

from shardwright.runtime.generator import Generator
from shardwright.runtime.runner import Runner, run
from shardwright.runtime.timeline import Event, SlotSummary, Timeline
from shardwright.runtime.verify import Difference, Report, verify

__all__ = [
    "Difference",
    "Event",
    "Generator",
    "Report",
    "Runner",
    "SlotSummary",
    "Timeline",
    "run",
    "verify",
]
