"""Ways to damage a file: one place of a document's structure, or some of its bytes.

`spoil` changes a document of dicts and lists in one place, `spoil_bytes` bytes, `spoil_zip` a zip
file as one writes it anew: an entry's bytes, name or packing. Each says what it did.
"""

from __future__ import annotations

import base64
import copy
import io
import json
import random
import warnings
import zipfile
from collections.abc import Iterator
from typing import Any

Place = tuple[Any, Any]
"""A container, and the key or index in it."""


def _places(tree: Any) -> Iterator[Place]:
    keys = tree.keys() if isinstance(tree, dict) else range(len(tree))
    for key in list(keys):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from _places(tree[key])


def spoil(tree: dict[str, Any], draw: random.Random) -> str:
    """Change the document in one place; says how."""
    section = draw.choice([key for key in tree if isinstance(tree[key], dict | list)] or [*tree])
    below = tree[section]
    candidates = [*_places(below)] if isinstance(below, dict | list) else []
    holder, key = draw.choice(candidates or [(tree, section)])
    change = draw.choice(_CHANGES)
    before = json.dumps(holder[key])[:60]
    name = change(tree, holder, key, draw)
    return f"{section}: {name} {key!r} {before}"


def _drop(tree: Any, holder: Any, key: Any, draw: random.Random) -> str:
    del holder[key]
    return "drop"


def _double(tree: Any, holder: Any, key: Any, draw: random.Random) -> str:
    if isinstance(holder, dict):
        holder[f"{key}'"] = copy.deepcopy(holder[key])
    else:
        holder.insert(draw.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
    return "double"


def _swap(tree: Any, holder: Any, key: Any, draw: random.Random) -> str:
    other = draw.choice([*(holder if isinstance(holder, dict) else range(len(holder)))])
    holder[key], holder[other] = holder[other], holder[key]
    return "swap"


def _reorder(tree: Any, holder: Any, key: Any, draw: random.Random) -> str:
    if isinstance(holder, dict):
        items = [*holder.items()]
        draw.shuffle(items)
        holder.clear()
        holder.update(items)
    else:
        draw.shuffle(holder)
    return "reorder"


def _from_elsewhere(tree: Any, holder: Any, key: Any, draw: random.Random) -> str:
    """What stands under the same key, or is of the same type, in another place."""
    places = [*_places(tree)]
    alike = [h[k] for h, k in places if k == key and h is not holder]
    typed = [h[k] for h, k in places if type(h[k]) is type(holder[key])]
    holder[key] = copy.deepcopy(draw.choice(alike or typed))
    return "put another"


def _rename(tree: Any, holder: Any, key: Any, draw: random.Random) -> str:
    if not isinstance(holder, dict):
        return _from_elsewhere(tree, holder, key, draw)
    names = [k for h, k in _places(tree) if isinstance(h, dict)]
    new = draw.choice([*names, "", "none", "a b"])
    items = [(new if k == key else k, v) for k, v in holder.items()]
    holder.clear()
    holder.update(items)
    return f"rename to {new!r}"


def _retype(tree: Any, holder: Any, key: Any, draw: random.Random) -> str:
    holder[key] = draw.choice(
        [None, True, 0, -1, 1.5, "", "x", [], {}, [[]], {"ref": "n0"}, [1, 2]]
    )
    return "retype"


_NUMBERS = (0, 1, 2, 3, -1, 7, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**64, 10**30)
_OPERATORS = (
    *("relu", "neg", "exp", "abs", "t", "detach", "clone", "contiguous", "alias", "sigmoid"),
    *("mm", "matmul", "bmm", "dot", "mv", "outer"),
    *("mul.Tensor", "sub.Tensor", "div.Tensor", "maximum", "pow.Tensor_Tensor", "add_.Tensor"),
    *("sum", "mean", "amax", "argmax", "cumsum", "sort", "topk", "nonzero", "unique_consecutive"),
    *("view", "reshape", "expand", "permute", "slice.Tensor", "select.int", "as_strided"),
    *("index_select", "gather", "scatter.src", "embedding", "embedding_dense_backward"),
    *("_reshape_alias", "resize", "empty.memory_format", "max_pool2d_with_indices_backward"),
    *("from_file", "segment_reduce", "set_.source_Tensor", "resize_", "no_such_operator"),
    *("item", "_local_scalar_dense", "rand_like", "native_dropout", "dropout", "to.dtype"),
)


def _scalar(tree: Any, holder: Any, key: Any, draw: random.Random) -> str:
    """Another number, text, operator or dtype in a leaf."""
    old = holder[key]
    if isinstance(old, bool) or old is None:
        holder[key] = draw.choice([True, False, None, 1])
    elif isinstance(old, int):
        holder[key] = draw.choice([old + 1, old - 1, old * 2, draw.choice(_NUMBERS)])
    elif isinstance(old, float):
        holder[key] = draw.choice([-old, old * 2, 0.0, 1e300, 1e-300, 3])
    elif key == "op":
        name = draw.choice(_OPERATORS)
        holder[key] = f"aten.{name}" if "." in name else f"aten.{name}.default"
    elif key == "blob":
        holder[key] = _other_blob(old, draw)
    elif key == "dtype":
        holder[key] = draw.choice(["f32", "f64", "f16", "bf16", "i64", "i32", "bool", "u8", "c64"])
    elif key == "kind":
        kinds = ["FX", "dfg", "send", "recv", "all_reduce", "all_gather", "input", "output", "npu"]
        holder[key] = draw.choice(kinds)
    elif isinstance(old, str):
        texts = [h[k] for h, k in _places(tree) if isinstance(h[k], str) and len(h[k]) < 99]
        holder[key] = draw.choice([*texts, "", old + "x", old[:-1], "\0", "\ud7ff", "../" + old])
    else:
        return _retype(tree, holder, key, draw)
    return "change"


def _other_blob(blob: Any, draw: random.Random) -> str:
    data = bytearray(base64.b64decode(blob))
    if data and draw.random() < 0.7:
        data[draw.randrange(len(data))] = draw.randrange(256)
    else:
        data = data[: draw.randrange(len(data) + 1)] + bytes(draw.randrange(3))
    return base64.b64encode(bytes(data)).decode()


_CHANGES = (
    *(_drop, _double, _swap, _reorder, _from_elsewhere, _from_elsewhere, _rename, _retype),
    *(_scalar,) * 6,
)


def spoil_bytes(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    """Change the bytes; says how."""
    place, length = draw.randrange(len(data)), draw.randrange(1, 40)
    kind = draw.choice(("flip", "flip", "cut", "end", "double", "noise", "digit"))
    if kind == "flip":
        flipped = bytes([data[place] ^ (1 << draw.randrange(8))])
        return kind, data[:place] + flipped + data[place + 1 :]
    if kind == "digit":
        digits = [k for k, byte in enumerate(data) if 48 <= byte < 58] or [place]
        place = draw.choice(digits)
        number = draw.choice((b"0", b"7", b"-1", b"99999999999"))
        return kind, data[:place] + number + data[place + 1 :]
    parts = {
        "cut": data[:place] + data[place + length :],
        "end": data[:place],
        "double": data[: place + length] + data[place:],
        "noise": data[:place] + draw.randbytes(length) + data[place + length :],
    }
    return kind, parts[kind]


def spoil_zip(
    data: bytes, draw: random.Random, documents: tuple[str, ...] = ()
) -> tuple[str, bytes]:
    """Change one entry of a zip file, mostly of those whose names end so; JSON as a document."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = [(item.filename, archive.read(item)) for item in archive.infolist()]
    at = draw.randrange(len(entries))
    name, content = entries[at]
    packing = zipfile.ZIP_STORED
    kind = draw.choice(("drop", "double", "rename", "pack", "empty", *("change",) * 8))
    if kind == "drop":
        del entries[at]
    elif kind == "double":
        entries.insert(at, (entries[draw.randrange(len(entries))][0], content))
    elif kind == "rename":
        entries[at] = (draw.choice([name + "x", "../" + name, "/", entries[0][0]]), content)
    elif kind == "empty":
        entries[at] = (name, b"")
    elif kind == "pack":
        packing = zipfile.ZIP_DEFLATED
    else:
        chosen = [k for k, (other, _) in enumerate(entries) if other.endswith(documents)]
        at = draw.choice(chosen) if documents and chosen and draw.random() < 0.8 else at
        name, content = entries[at]
        if name.endswith(".json") and draw.random() < 0.8:
            tree = {"document": json.loads(content)}
            kind, content = spoil(tree, draw), json.dumps(tree.get("document")).encode()
        elif content:
            kind, content = spoil_bytes(content, draw)
        entries[at] = (name, content)
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", packing) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that stand twice
        for other, content in entries:
            archive.writestr(other, content)
    return f"{name}: {kind}", written.getvalue()
