"""What a piece of generated code has to import.

`imports` reads it off the text; `module_of` finds the module that registers an operator which
torch does not bring.
"""

from __future__ import annotations

import re
import sys

from shardwright.ir import WITH_BACKWARD
from shardwright.ir.operators import is_built_in
from shardwright.ops import registered
from shardwright.torch_internals import registering_module

LINES = {
    "torch": "import torch",
    "math": "import math",
    "dist": "import torch.distributed as dist",
    "F": "import torch.nn.functional as F",
    "nn": "from torch import nn",
}
"""The import line of each name that texts use before a dot."""

_NAMES = re.compile(rf"(?<![\w.\"'])({'|'.join(LINES)})\.(?=[A-Za-z_])")


def imports(text: str) -> frozenset[str]:
    """The import lines that a text of code needs."""
    return frozenset(LINES[name] for name in _NAMES.findall(text))


def module_of(op: str) -> str | None:
    """The module whose import registers the operator; None where torch brings it.

    Raises nothing: an operator whose origin is not known is looked for under its namespace's
    name among the modules that are loaded, and is ``""`` where there is none.
    """
    if is_built_in(op) and not op.startswith("shardwright."):
        return None
    if op == WITH_BACKWARD:
        return None  # its text is pasted
    found = registered(op)
    if found is not None:
        return found.module
    namespace, name, _ = op.split(".", 2)
    return registering_module(f"{namespace}::{name}") or (
        namespace if namespace in sys.modules else ""
    )
