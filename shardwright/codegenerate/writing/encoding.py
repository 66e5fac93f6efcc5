"""What an irregular tensor holds, as text of its bytes.

Comes in: a tensor that no short expression makes. Goes out: an expression that decodes it from
base64, where that is not too long. What always holds: evaluated, it is the tensor, bit for bit.
"""

from __future__ import annotations

import base64
import zlib

import torch
from torch import Tensor

LONGEST = 1 << 16
"""Characters of text that stand in a file for one tensor."""
LARGEST = 1 << 24
"""Bytes of a tensor that is looked at; a larger one is not short in any text."""
WIDTH = 64
"""Characters on a line."""


def encoded(tensor: Tensor, options: str = "") -> str | None:
    """An expression that decodes ``tensor``, None where that would be too long.

    ``options`` is put behind the arguments of what makes it, as ``, device="cpu"``.
    """
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.nbytes > LARGEST:
        return None
    flat = tensor.detach().to("cpu", copy=False).contiguous().reshape(-1)
    data = zlib.compress(flat.view(torch.uint8).numpy().tobytes(), level=9)
    text = base64.b64encode(data).decode()
    if len(text) > LONGEST:
        return None
    lines = " ".join(f'"{text[at : at + WIDTH]}"' for at in range(0, len(text), WIDTH))
    held = f"bytearray(zlib.decompress(base64.b64decode({lines})))"
    shape = "" if tensor.dim() == 1 else f".reshape({tuple(tensor.shape)})"
    return f"torch.asarray({held}, dtype={tensor.dtype}{options}){shape}"
