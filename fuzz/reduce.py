"""Makes a failing program smaller, statement by statement, while it fails the same way."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator

from fuzz.drive import Child, shortened

NAME = re.compile(r"\b[vx]\d+\b")
ASSIGNMENT = re.compile(r"^ {8}(v\d+) = (.*)$")


def reduced(text: str, way: str) -> str:
    """The smallest program found that fails this way for the same reason."""
    with tempfile.TemporaryDirectory() as folder:
        worker = Child("fuzz.worker")

        def reason(candidate: str) -> str | None:
            request = {"seed": 0, "text": candidate, "ways": [way], "folder": folder}
            answers = list(worker.ask(json.dumps(request)))
            return next((shortened(a["reason"]) for a in answers if a["kind"] == "failed"), None)

        wanted = reason(text)
        if wanted is None:
            worker.close()
            raise ValueError(f"this program does not fail {way!r}")
        smaller = True
        while smaller:
            smaller = False
            for candidate in _smaller(text):
                if reason(candidate) == wanted:
                    text, smaller = candidate, True
                    break
        worker.close()
    return text


def _smaller(text: str) -> Iterator[str]:
    """Programs that lack something of this one."""
    lines = text.split("\n")
    yield from _simpler_step(text)
    body = range(_find(lines, "def forward") + 1, _find(lines, "def build"))
    result = next(i for i in reversed(body) if lines[i].lstrip().startswith("return "))
    last = [m[1] for i in body if (m := ASSIGNMENT.match(lines[i]))]
    current = lines[result].strip().removeprefix("return ")
    for name in last[: last.index(current)] if current in last else last:
        changed = [*lines[:result], f"        return {name}", *lines[result + 1 :]]
        yield re.sub(r"( {8}loss = ).*", r"\1out.square().mean()", "\n".join(changed))
    for i in reversed(body):
        if i != result and lines[i].startswith("        "):
            yield from _without(lines, i)
    for i in range(_find(lines, "super().__init__()") + 1, _find(lines, "def forward")):
        if lines[i].strip():
            yield "\n".join([*lines[:i], *lines[i + 1 :]])


def _find(lines: list[str], part: str) -> int:
    return next(i for i, line in enumerate(lines) if part in line)


def _without(lines: list[str], i: int) -> Iterator[str]:
    """The program without a statement, whose value one of its operands replaces."""
    end = i + 1
    while lines[i].endswith(":") and lines[end].startswith("            "):
        end += 1
    rest = lines[end:]
    found = ASSIGNMENT.match(lines[i])
    if found is None:
        yield "\n".join([*lines[:i], *rest])
        return
    for operand in dict.fromkeys(NAME.findall(found[2])):
        if operand != found[1]:
            after = re.sub(rf"\b{found[1]}\b", operand, "\n".join(rest))
            yield "\n".join(lines[:i]) + "\n" + after
    if not re.search(rf"\b{found[1]}\b", "\n".join(rest)):
        yield "\n".join([*lines[:i], *rest])


def _simpler_step(text: str) -> Iterator[str]:
    plain = "    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)"
    yield from (
        changed
        for pattern, put in (
            (r"\n        scheduler.step\(\)", ""),
            (r"\n    scheduler = .*", ""),
            (r"\n        nn.utils.clip_grad.*", ""),
            (r"    optimizer = .*", plain),
            (r"\n    (first|groups).*", ""),
            (r"( {8}loss = )([^+\n]*) \+ .*", r"\1\2"),
            (r" {8}loss = .*", "        loss = out.square().mean()"),
        )
        if (changed := re.sub(pattern, put, text)) != text
    )
