"""Stages whose work is split over slots: their collectives, gradients and slices."""
