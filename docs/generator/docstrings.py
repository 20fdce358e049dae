"""Docstrings are plain English with code in backticks, in NumPy's style; this gives Sphinx the reStructuredText that says the same."""

from __future__ import annotations

import inspect
import re
from typing import Any

_CODE = re.compile(r"`+([^`]+)`+")
_MEANT_LITERALLY = re.compile(r"([*|\\]|(?<=\w)_(?!\w))")


def plain(lines: list[str]) -> list[str]:
    """Code spans as literals, and nothing else as markup; examples after `>>>` stay as they are."""
    out: list[str] = []
    for block in "\n".join(lines).split("\n\n"):  # a code span may run over the end of a line, but of no paragraph
        example = block.find(">>>")
        at = len(block) if example < 0 else example
        out += [*(_escape(block[:at]) + block[at:]).split("\n"), ""]
    return out[:-1]


def _escape(text: str) -> str:
    """A paragraph with its line breaks."""
    parts, last = [], 0
    for code in _CODE.finditer(text):
        parts += [_MEANT_LITERALLY.sub(r"\\\1", text[last : code.start()]), f"``{code[1]}``"]
        last = code.end()
        if text[last : last + 1].isalnum():
            parts.append("\\ ")
    return "".join([*parts, _MEANT_LITERALLY.sub(r"\\\1", text[last:])])


def process(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    lines[:] = plain(lines)


class _Words(str):
    """An annotation as it is written."""

    def __repr__(self) -> str:
        return str(self)


def signature(app: Any, what: str, name: str, thing: Any, options: Any, given: Any, returns: Any) -> Any:
    """That of a function or a class with the names of types as they are written: `Mask`, and not what it stands for."""
    if what not in ("function", "class"):
        return None
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return None

    def words(annotation: Any) -> Any:
        text = getattr(annotation, "__forward_arg__", annotation)  # that of a named tuple
        return _Words(text) if isinstance(text, str) else annotation

    parameters = [p.replace(annotation=words(p.annotation)) for p in found.parameters.values()]
    out = found.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
    result = found.return_annotation if what == "function" else inspect.Signature.empty
    return str(out), None if result is inspect.Signature.empty else inspect.formatannotation(words(result))
