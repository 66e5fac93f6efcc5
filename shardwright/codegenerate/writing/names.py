"""Names in generated code: of classes, and of the variables of one function.

Comes in: the program's names (a value's ``linear__3``, a port's ``transformer.h.5/add_1``, a
class's ``transformers.models.gpt2.modeling_gpt2.GPT2Block``). Goes out: identifiers that a person
would choose. What always holds: no name is a keyword, hides a builtin or an import of the file, or
stands for two things at once.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterable
from keyword import iskeyword, issoftkeyword
from unicodedata import normalize

IMPORTED = (
    "F",
    "Tensor",
    "OrderedDict",
    "Any",
    "base64",
    "cast",
    "dist",
    "math",
    "nn",
    "torch",
    "warnings",
    "zlib",
)
"""What the names of a generated file's imports are."""
AMBIGUOUS = ("I", "O", "l")
"""Names that look like numbers."""
PASTED = "with_backward"
"""The function of a file that forwards call by its name; collectives have no names like values."""
RESERVED = frozenset((*IMPORTED, *AMBIGUOUS, PASTED, "self", *dir(builtins)))

STEMS = {
    "scaled_dot_product_attention": "attention",
    "native_layer_norm": "normed",
    "layer_norm": "normed",
    "_native_batch_norm_legit_functional": "normed",
    "batch_norm": "normed",
    "view": "x",
    "reshape": "x",
    "transpose": "x",
    "permute": "x",
    "contiguous": "x",
    "to": "x",
    "clone": "x",
    "detach": "x",
    "with_backward": "x",
    "input": "x",
    "arg0": "x",
}
"""Better names for what some operators make."""


def is_plain(name: str) -> bool:
    """Whether ``name`` can stand behind a dot in a class, and means itself there."""
    is_private = name.startswith("__") and not name.endswith("__")
    return name.isidentifier() and not (
        iskeyword(name) or is_private or normalize("NFKC", name) != name
    )


def identifier(text: str) -> str:
    """The nearest name that a variable may have."""
    name = re.sub(r"[^A-Za-z0-9_]+", "_", text).strip("_") or "x"
    name = f"x_{name}" if name[0].isdigit() else name
    return f"{name}_" if name in RESERVED or iskeyword(name) or issoftkeyword(name) else name


def stem(name: str) -> str:
    """A value's name without its module and without the number that made it unique."""
    bare = re.sub(r"(__?\d+)+$", "", name.rpartition("/")[2].rpartition(".")[2])
    return identifier(STEMS.get(bare, bare))


def class_stem(qualified: str, path: str) -> str:
    """The name for a class: its own, or one made from the module's path where it is not known."""
    bare = qualified.rpartition(".")[2]
    if not is_plain(bare):
        words = re.findall(r"[A-Za-z0-9]+", _without_numbers(path)) or ["module"]
        words += ["item"] if path.rpartition(".")[2].isdigit() else []
        bare = "".join(word[0].upper() + word[1:] for word in words)
    return f"{bare}_" if bare in RESERVED else bare


def _without_numbers(path: str) -> str:
    parts = [part for part in path.split(".") if not part.isdigit()]
    return parts[-1] if parts else ""


def item_name(class_name: str) -> str:
    """What one of several modules of a class is called in a loop: ``block`` for ``GPT2Block``."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z]*|[a-z]+", class_name)
    return identifier(words[-1].lower() if words else "module")


class ClassNames:
    """Hands out names of classes, the second of a name with a 2."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = {*taken, *RESERVED}

    def take(self, wanted: str) -> str:
        """``wanted``, or the first free ``wanted2``, ``wanted3``, …."""
        name, number = wanted, 2
        separator = "_" if wanted[-1].isdigit() else ""
        while name in self._taken:
            name, number = f"{wanted}{separator}{number}", number + 1
        self._taken.add(name)
        return name


class Variables:
    """The variables of one function, and which are in use."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._held = set(reserved)

    def take(self, wanted: str) -> str:
        """``wanted``, or the first ``wanted_1``, ``wanted_2``, … that nothing uses now."""
        name, number = wanted, 1
        while name in self._held:
            name, number = f"{wanted}_{number}", number + 1
        self._held.add(name)
        return name

    def free(self, name: str) -> None:
        """Say that nothing needs what ``name`` holds."""
        self._held.discard(name)
