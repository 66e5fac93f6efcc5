"""The simulator against reality: `python -m benchmarks.simulator`.

Training steps of a GPT, of MiniLM and of a ResNet on two processes, by GPipe and 1F1B, in 2 to 16
microbatches; then one GPT cut in 20 places. The links are measured once. Of each file the
supertasks are measured alone (as `profile_tasks` does: on both slots at the same time, so that what
these share of the machine is in the times), the file is simulated, and steps are run, in turn,
round after round: machines drift, and a prediction holds for the machine that was measured. Said
are medians of the predicted and the measured time of a step, of their ratio within a round, the
memory of the slot that holds most, and how well the two orders of the cuts agree. `--save FILE`
writes all that as Markdown.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.measure import console, print_machine
from benchmarks.simulator import cases, cuts
from benchmarks.simulator.report import Part, markdown, table_of, words_of
from benchmarks.simulator.steps import MODELS
from shardwright.clusters import Cluster
from shardwright.profiling.machine import profile_links


def of_cases(options: argparse.Namespace, cluster: Cluster) -> Part | None:
    """Steps of models, or None where none are asked for."""
    found = []
    for case in cases.cases(options.models, options.microbatches, options.rounds, cluster):
        console.print(*case.row[:3], "step", *case.row[5:6], "memory", *case.row[8:9])
        found.append(case)
    if not found:
        return None
    rows = [case.row for case in found]
    return Part(
        "Steps of models, by schedule and number of microbatches (mb)",
        cases.HEADINGS,
        rows,
        cases.summary(found),
    )


def of_cuts(options: argparse.Namespace, cluster: Cluster) -> Part | None:
    """Cuts of one model, or None where none are asked for."""
    if not options.cuts:
        return None
    found = cuts.cuts(options.cuts, options.rounds, cluster, console.print)
    return Part("Cuts of one GPT", cuts.HEADINGS, cuts.rows(found), cuts.summary(found))


def main(arguments: Sequence[str]) -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=5, help="of which a median is taken")
    parser.add_argument("--cuts", type=int, default=20, help="0 for none")
    parser.add_argument("--save", type=Path, help="a file of Markdown to write")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print_machine()
    cluster = Cluster.of(2, inside=profile_links())
    start, parts = time.monotonic(), []
    for made in (of_cases, of_cuts):
        part = made(options, cluster)
        if part is None:
            continue
        parts.append(part)
        console.print(table_of(part), *part.summary, sep="\n")
        if options.save is not None:
            words = words_of(
                arguments=[a for a in arguments if a not in ("--save", str(options.save))],
                seconds=time.monotonic() - start,
                rounds=options.rounds,
            )
            options.save.write_text(markdown(words, parts))


if __name__ == "__main__":
    main(sys.argv[1:])
