"""Tensors from one stage's device to another's, beside what these compute.

Between two GPUs a copy runs on streams of its own: it waits for what the source has been asked for
so far, and what the target is asked for next waits for it. So a stage goes on with its next
microbatch while its last one travels (the copy streams of torchgpipe, arXiv 2004.09910).
"""

from __future__ import annotations

import torch
from torch import Tensor


class Copies:
    """Copies tensors between devices, on a stream for each of them and direction.

    What copies this object gets one with streams of its own.
    """

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}

    def __reduce__(self) -> tuple[type[Copies], tuple[()]]:
        return type(self), ()

    def moved(self, tensor: Tensor, device: torch.device | None) -> Tensor:
        """The tensor on a device; itself where it is there, or where there is none to go to."""
        if device is None or tensor.device == device:
            return tensor
        if tensor.is_cuda and device.type == "cuda":
            return self._between(tensor, device)
        # Towards the CPU the copy must have ended before anybody there reads it.
        return tensor.to(device, non_blocking=device.type == "cuda")

    def _between(self, tensor: Tensor, device: torch.device) -> Tensor:
        out, into = self._stream(tensor.device, "out"), self._stream(device, "in")
        out.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(out), torch.cuda.stream(into):
            moved = tensor.to(device, non_blocking=True)
        here = torch.cuda.current_stream(device)
        here.wait_stream(into)
        tensor.record_stream(out)
        moved.record_stream(here)
        return moved

    def _stream(self, device: torch.device, direction: str) -> torch.cuda.Stream:
        if (device, direction) not in self._streams:
            self._streams[device, direction] = torch.cuda.Stream(device)
        return self._streams[device, direction]
