"""What C code prints to the standard output is not heard, what Python prints is."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def output_of(program: str) -> str:
    """What a Python program prints, down to the file descriptor."""
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    return found.stdout


def test_what_c_code_prints_is_not_heard() -> None:
    program = """
        import ctypes
        from shardwright.planning.metis import unheard

        library = ctypes.CDLL(None)
        library.puts(b"before")
        try:
            with unheard():
                library.puts(b"within")
                raise ValueError
        except ValueError:
            library.puts(b"after")
        library.fflush(None)
        print("end")
    """
    assert output_of(program) == "before\nafter\nend\n"


def test_metis_says_nothing_of_parts_that_it_finds_empty() -> None:
    program = """
        import sys
        import shardwright as sw

        builder = sw.Builder("tiny")
        x = builder.input("x", (4,), "f32")
        for _ in range(4):
            x = builder.call("aten.relu.default", x)
        weights = iter([1000.0, 1.0, 1.0, 1.0])
        found = sw.metis_partition(
            builder.finish([x]), 4, node_weight_function=lambda node: next(weights)
        )
        print(max(found.stages))
    """
    assert output_of(program) == "3\n"


def test_a_closed_output_stays_closed() -> None:
    program = """
        import os, sys
        os.close(1)
        from shardwright.planning.metis import unheard

        with unheard():
            pass
        try:
            os.fstat(1)
        except OSError:
            sys.exit(0)
        sys.exit(1)
    """
    assert output_of(program) == ""
