"""A program of its own, ``layout.py FORMAT``: a digraph's text comes in, its image goes out.

It lays out by ``pygraphviz``, in a process that can be ended: a library's call cannot. It imports
nothing of this package, so that it begins at once.
"""

from __future__ import annotations

import sys


def main(form: str) -> None:
    """Read a digraph, and write its image. Exits with what Graphviz said where it fails."""
    from pygraphviz import AGraph

    try:
        image = AGraph(string=sys.stdin.buffer.read().decode()).draw(format=form, prog="dot")
    except ValueError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    sys.stdout.buffer.write(image)


if __name__ == "__main__":
    main(sys.argv[1])
