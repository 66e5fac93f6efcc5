"""The order in which pipeline ranks work on stages and microbatches: made, proved, simulated."""

from shardwright.schedule.check import check_schedule, phases_of
from shardwright.schedule.file import schedule_info, schedule_of
from shardwright.schedule.make import KINDS, make_schedule
from shardwright.schedule.prove import prove
from shardwright.schedule.schedule import Action, Schedule, ScheduleKind, Work
from shardwright.schedule.simulate import Simulation, simulate
from shardwright.schedule.text import format_schedule

__all__ = [
    "KINDS",
    "Action",
    "Schedule",
    "ScheduleKind",
    "Simulation",
    "Work",
    "check_schedule",
    "format_schedule",
    "make_schedule",
    "phases_of",
    "prove",
    "schedule_info",
    "schedule_of",
    "simulate",
]
