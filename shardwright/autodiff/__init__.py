"""Derivatives of calls and segments, taken from torch itself, with the least that is saved."""
