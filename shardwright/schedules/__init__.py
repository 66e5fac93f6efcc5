"""The order in which pipeline ranks work on stages and microbatches: made, proved, simulated."""

from shardwright.schedules.make import KINDS, make_schedule
from shardwright.schedules.run import Simulation, format_schedule, prove, simulate
from shardwright.schedules.schedule import Action, Schedule, ScheduleKind, Work

__all__ = [
    "KINDS",
    "Action",
    "Schedule",
    "ScheduleKind",
    "Simulation",
    "Work",
    "format_schedule",
    "make_schedule",
    "prove",
    "simulate",
]
