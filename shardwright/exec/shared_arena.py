"""One arena for several executors that run one at a time."""

from __future__ import annotations

import torch
from torch import Tensor


class SharedArena:
    """Memory that is as large as the largest plan needs.

    What always holds: memory that was handed out stays where it is. A larger plan gets larger
    memory, and so do those that come after it.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(1, dtype=torch.uint8, device=device)

    def of(self, nbytes: int) -> Tensor:
        """Memory of at least so many bytes."""
        if self._memory.numel() < nbytes:
            device = self._memory.device
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._memory
