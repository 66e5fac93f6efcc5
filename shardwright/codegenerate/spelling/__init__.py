"""How the calls of a graph are written in Python."""
