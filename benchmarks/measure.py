"""Timing of variants in turn.

Machines are shared and their speed drifts, so an absolute time says little: the variants run one
after the other in each round, and what is printed beside the medians is the median of the ratios
within a round.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

console = Console(width=100)


@dataclass(frozen=True)
class Timings:
    """Seconds of each variant, one a round."""

    seconds: Mapping[str, Sequence[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, baseline: str) -> float:
        """Median over the rounds of a variant's time over the baseline's."""
        pairs = zip(self.seconds[name], self.seconds[baseline], strict=True)
        return statistics.median(time / base for time, base in pairs)


def alternate(
    variants: Mapping[str, Callable[[], object]], *, rounds: int = 7, warmup: int = 1
) -> Timings:
    """Run every variant once a round, the order turned round each time."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(warmup + rounds):
        order = list(variants) if number % 2 == 0 else list(variants)[::-1]
        for name in order:
            start = time.perf_counter()
            variants[name]()
            if number >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return Timings(seconds)


def print_timings(title: str, timings: Timings, baseline: str) -> None:
    """Median, least and most time of each variant, and its ratio to the baseline."""
    table = Table(title=title, title_justify="left")
    for heading in ("variant", "median", "min", "max", f"ratio to {baseline}"):
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    for name, found in timings.seconds.items():
        shown = [
            f"{1e3 * value:.1f} ms" for value in (timings.median(name), min(found), max(found))
        ]
        table.add_row(name, *shown, f"{timings.ratio(name, baseline):.3f}")
    console.print(table)


def print_machine() -> None:
    """What the figures were measured with."""
    console.print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads in this process, "
        f"Python {platform.python_version()}, {platform.machine()}"
    )
