"""Kernels: what a lowered call may be, how it is written down and proved, and what runs it."""
