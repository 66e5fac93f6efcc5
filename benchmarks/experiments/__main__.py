"""Throughput, memory and accuracy of training: `python -m benchmarks.experiments`.

A small ViT and a ResNet learn scikit-learn's digits, a character-level GPT Python's own help: each
in an ordinary PyTorch loop and on 1, 2 and 4 devices, by pipeline, tensor, data and mixed.
Runs are kept in ``runs.json``; each subject writes a table and a plot beside it. ``--draw`` makes
these again of the runs that are there.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import torch
from rich.progress import track

from benchmarks.experiments.figures import SUBJECTS, figure, markdown
from benchmarks.experiments.measurements import PYTORCH, WAYS, Run, measure
from benchmarks.experiments.programs import PROGRAMS
from benchmarks.measure import console, print_machine

RESULTS = Path("benchmarks/results")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("subjects", nargs="*", help=f"any of {', '.join(SUBJECTS)}; all by default")
    parser.add_argument("--programs", nargs="*", default=list(PROGRAMS), choices=PROGRAMS)
    parser.add_argument("--steps", type=int, default=50, help="steps of each run")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where files are written")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    options = parser.parse_args()
    unknown = set(options.subjects) - set(SUBJECTS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(SUBJECTS)}")
    options.results.mkdir(parents=True, exist_ok=True)
    kept = options.results / "runs.json"
    if not options.draw:
        run_all(options.programs, options.steps, kept)
    write(msgspec.json.decode(kept.read_bytes(), type=list[Run]), options)


def run_all(programs: list[str], steps: int, kept: Path) -> None:
    """Every program in every way; the file has the runs that are over."""
    torch.set_num_threads(1)
    print_machine()
    cases = [(program, way) for program in programs for way in (PYTORCH, *WAYS)]
    runs: list[Run] = []
    for case in track(cases, "runs", console=console):
        runs.append(measure(*case, steps))
        kept.write_bytes(msgspec.json.encode(runs))


def write(runs: list[Run], options: argparse.Namespace) -> None:
    """A table and a plot of each subject that was asked for."""
    for name in options.subjects or SUBJECTS:
        table = markdown(SUBJECTS[name], runs)
        (options.results / f"{name}.md").write_text(table)
        figure(SUBJECTS[name], runs).savefig(options.results / f"{name}.png", dpi=110)
        console.print(f"{name}\n{table}", markup=False)


if __name__ == "__main__":
    main()
