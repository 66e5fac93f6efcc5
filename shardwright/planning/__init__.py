"""Plans: which device slots run which node, and how it is split over them."""

from shardwright.planning.make import make_plan, plan
from shardwright.planning.plan import Assignment, Plan, SlotLoad, Split, Terms
from shardwright.planning.policy import Policy, PolicyGraph, Resource

__all__ = [
    "Assignment",
    "Plan",
    "Policy",
    "PolicyGraph",
    "Resource",
    "SlotLoad",
    "Split",
    "Terms",
    "make_plan",
    "plan",
]
