"""Execution plans: a graph as a flat list of kernel calls on memory that is planned ahead."""

from shardwright.exec import operators as operators  # registers what graphs may hold
