"""What a command is doing right now.

A step shows a spinner and the seconds passed while it runs, and leaves one line with its duration
when it ends. Without a terminal only the lines are written. Commands show their steps on the error
stream, so that standard output stays the result.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from shardwright.ir.tensor_meta import seconds_text


@dataclass(frozen=True)
class Steps:
    """Shows steps on a console; labels are padded to ``width``, and nothing shown if ``quiet``."""

    console: Console
    width: int = 20
    style: str = ""
    quiet: bool = False

    @contextmanager
    def step(self, label: str) -> Iterator[None]:
        """Show and time what stands in the block; a block that raises leaves no line."""
        text = Text(label.ljust(self.width), style=self.style)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        silent = self.quiet or not self.console.is_terminal
        start = time.perf_counter()
        with Progress(*columns, console=self.console, transient=True, disable=silent) as shown:
            shown.add_task(text.markup, total=None)
            yield
        if not self.quiet:
            seconds = seconds_text(time.perf_counter() - start)
            self.console.print(text.append(f" {seconds}", style="dim"), soft_wrap=True)
