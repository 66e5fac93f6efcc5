"""Running pipelines: the Runner, the TrainingRunner, and what they report."""

from typing import TYPE_CHECKING

from shardwright.lazy import import_lazily

if TYPE_CHECKING:
    from shardwright.runtime.runner import Runner, run
    from shardwright.runtime.task_times import profile_tasks
    from shardwright.runtime.training_runner import Session, TrainingRunner
    from shardwright.runtime.verify import OutputDifference, Report, verify

__all__ = [
    "OutputDifference",
    "Report",
    "Runner",
    "Session",
    "TrainingRunner",
    "profile_tasks",
    "run",
    "verify",
]

import_lazily(__name__)
