"""Partitioners: METIS, memory balance and PipeDream."""
