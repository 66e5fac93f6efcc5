"""Command line: ``python -m fuzz --seeds 0:200``, or ``python -m fuzz --program FILE``."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from fuzz.drive import Tally, drive
from fuzz.grammar import draw
from fuzz.reduce import reduced


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--seeds", default="0:200", help="A:B, or one seed")
    parser.add_argument("--program", type=Path, help="a program's file in place of seeds")
    parser.add_argument("--way", action="append", help="only these ways, whatever fits")
    parser.add_argument("--share", type=float, default=1.0, help="scales how often a way is gone")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--reduce", action="store_true", help="make the program smaller first")
    parser.add_argument("--times", action="store_true", help="print the time of each way")
    return parser.parse_args()


def requests(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What is asked of workers."""
    common = {"share": options.share, **({"ways": options.way} if options.way else {})}
    if options.program:
        return [{"seed": 0, "text": options.program.read_text(), **common}]
    first, _, last = options.seeds.partition(":")
    return [{"seed": s, **common} for s in range(int(first), int(last or int(first) + 1))]


def told(seed: int, answer: dict[str, Any]) -> None:
    """Say at once what failed."""
    if answer["kind"] == "failed":
        print(f"seed {seed}, {answer['way']}: {answer['reason']}", flush=True)


def main() -> int:
    """Run; 1 where anything failed."""
    options = parsed()
    if options.reduce:
        for request in requests(options):
            text = request.get("text") or draw(request["seed"]).text
            print(reduced(text, options.way[0]))
        return 0
    begun = time.perf_counter()
    tally: Tally = drive(requests(options), processes=options.processes, told=told)
    print(tally)
    if options.times:
        for way, seconds in tally.seconds.most_common():
            print(f"  {seconds:7.1f} s  {tally.ways[way]:5} x {way}")
    print(f"{time.perf_counter() - begun:.0f} s")
    return int(bool(tally.failed))


if __name__ == "__main__":
    sys.exit(main())
