"""Execution plans: a graph as a flat list of kernel calls on memory that is planned ahead."""
