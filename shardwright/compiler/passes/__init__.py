"""Rewritings of a graph before it is lowered; each keeps what the graph computes."""
