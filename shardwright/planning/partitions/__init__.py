"""Partitioners: METIS, PipeDream, exact and mixed partitions, each mended and reported."""
