"""Torch's side of every kind: what a call does where no native kernel does it, and on a GPU."""
