"""Running pipelines: the Runner, the Session, their workers, and what they report.

`Runner` and `run` run a model, a `Session` the steps of a training, which `train` drives; `verify`
holds a pipeline against its model. `in_process`, `processes` and `torchrun` are the three ways to
run the slots; each slot has a `host`, which hands what is asked of it to a `worker`. A
`SynchronousPipeline` runs generated code, in this process.
"""

from typing import TYPE_CHECKING

from shardwright.lazy import import_lazily

if TYPE_CHECKING:
    from shardwright.runtime.generator import Generator
    from shardwright.runtime.result import TrainResult, state_dict
    from shardwright.runtime.runner import Runner, run
    from shardwright.runtime.session import Session
    from shardwright.runtime.synchronous import SynchronousPipeline
    from shardwright.runtime.task_times import profile_tasks
    from shardwright.runtime.trainer import train
    from shardwright.runtime.verify import Difference, Report, verify
    from shardwright.schedule.timeline import Event, SlotSummary, Timeline

__all__ = [
    "Difference",
    "Event",
    "Generator",
    "Report",
    "Runner",
    "Session",
    "SlotSummary",
    "SynchronousPipeline",
    "Timeline",
    "TrainResult",
    "profile_tasks",
    "run",
    "state_dict",
    "train",
    "verify",
]

import_lazily(__name__)
