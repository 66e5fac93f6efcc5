"""How long something takes: the median of several samples, after some runs to warm up.

What takes less than a sample should is run several times in one; so samples are long against the
clock's own steps. Runs follow one another on the same tensors, so that caches are as warm as they
can be; in a model that is larger than they are, they are colder.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

WARM_UP = 3
"""Runs before the first sample: kernels are chosen and caches filled in them."""
SAMPLE = 200e-6
"""Seconds that a sample should last."""
REPEATS = 50
"""Runs in a sample, at most."""

Call = Callable[[], object]


def median_seconds(call: Call, samples: int, device: torch.device) -> float:
    """Seconds of one run of ``call``; on CUDA, from when the device could start to when it ends."""
    return statistics.median(sample_seconds(call, samples, device))


def sample_seconds(call: Call, samples: int, device: torch.device) -> list[float]:
    """Seconds of one run, so many times, after some runs to warm up."""
    sample = _cuda_sample if device.type == "cuda" else _cpu_sample
    for _ in range(WARM_UP - 1):
        call()
    once = sample(call, 1, device)
    repeats = min(REPEATS, max(1, math.ceil(SAMPLE / once))) if once > 0 else REPEATS
    return [sample(call, repeats, device) for _ in range(samples)]


@contextmanager
def computing_threads(count: int) -> Iterator[None]:
    """Compute with so many threads in the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _cpu_sample(call: Call, repeats: int, device: torch.device) -> float:
    del device
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def _cuda_sample(call: Call, repeats: int, device: torch.device) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream(device)
    torch.cuda.synchronize(device)
    start.record(stream)
    for _ in range(repeats):
        call()
    end.record(stream)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / repeats
