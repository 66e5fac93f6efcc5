"""Running pipelines: the Runner, the Session, and what they report."""

from typing import TYPE_CHECKING

from shardwright.lazy import import_lazily

if TYPE_CHECKING:
    from shardwright.runtime.runner import Runner, run
    from shardwright.runtime.session import Session
    from shardwright.runtime.task_times import profile_tasks
    from shardwright.runtime.verify import OutputDifference, Report, verify

__all__ = [
    "OutputDifference",
    "Report",
    "Runner",
    "Session",
    "profile_tasks",
    "run",
    "verify",
]

import_lazily(__name__)
