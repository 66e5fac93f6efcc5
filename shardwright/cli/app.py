"""``shardwright``: the steps of the package as commands.

A result goes to standard output, what is being done to the error stream. A `ShardwrightError`, or
a file that cannot be read or written, ends a command with one line and exit status 1; ``--debug``
before the command shows the traceback instead.

A command imports what it needs when it runs: ``--help``, and what is wrong with options, come
without torch, which takes longer to import than many a command takes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from shardwright.cli import files, programs
from shardwright.cli.options import with_options
from shardwright.cli.train import train
from shardwright.errors import ShardwrightError
from shardwright.version import __version__


class Commands(TyperGroup):
    """Turns the errors of this package, and of files, into one line."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; exit with status 1 where it fails."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # the reader of a pipe has enough; typer ends the command quietly
        except (ShardwrightError, OSError) as error:
            if ctx.params["debug"]:
                raise
            parts = (f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ()))
            Console(stderr=True).print(
                ", ".join(parts), style="red", markup=False, highlight=False, soft_wrap=True
            )
            raise typer.Exit(1) from None


app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardwright {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Partition a PyTorch program for one device across many, and run it."""


for command in (
    programs.build,
    programs.plan,
    programs.profile,
    programs.draw,
    programs.codegen,
    programs.cluster,
    files.check,
    files.show,
    files.run,
    files.verify,
    files.simulate,
    files.lower,
    files.schema,
    train,
):
    app.command()(with_options(command))


@app.command()
def demo(
    directory: Annotated[
        Path | None, typer.Option(help="Directory for the pipeline file and the trace.")
    ] = None,
) -> None:
    """Split all-MiniLM-L6-v2 in two, run it on two processes, and compare."""
    # It compares to the last bit. On some processors MKL rounds by where arrays lie unless it is
    # told not to; it and the workers read this when they start, so it is said before torch comes.
    os.environ.setdefault("MKL_CBWR", "AUTO")
    from shardwright.cli.demo import run_demo

    run_demo(directory, Console())
