"""Docstrings are plain English with code in backticks; this gives autodoc the reStructuredText that says the same."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection
from typing import Any

_CODE = re.compile(r"`+([^`]+)`+")
_ARGUMENT = re.compile(r"(\w+(?:, \w+)*): (.*)")
_MEANT_LITERALLY = re.compile(r"([*|\\]|(?<=\w)_(?!\w))")


def plain(lines: list[str], names: Collection[str] = ()) -> list[str]:
    """Code spans as literals, and nothing else as markup; examples after `>>>` stay as they are.

    `name: text`, for one of the names, is the field of an argument, with the indented lines that follow; `Returns ...` is a field too.
    A title underlined with dashes, NumPy's style, begins a list: an item for each line that is not indented.
    """
    out, example, listing, text, fields = [], False, False, [], []

    def flush() -> None:
        said = _escape("\n".join(text)).split("\n") if text else []
        out.extend([f":{field}: {' '.join(part.strip() for part in said)}" for field in fields] or said)
        text.clear()
        fields.clear()

    for line in lines:
        if not example:
            argument, returns = _ARGUMENT.match(line), not text and line.startswith("Returns ")
            if argument and set(argument[1].split(", ")) <= set(names):
                flush()
                fields += [f"param {name}" for name in argument[1].split(", ")]
                line = argument[2]
            elif returns:
                fields.append("returns")
                line = line.removeprefix("Returns ")
            elif fields and fields != ["returns"] and line.strip() and not line.startswith(" "):
                flush()
                out.append("")
        if text and line.strip() and not line.strip("-"):  # a title of NumPy's style
            title = text.pop()
            flush()
            out += [f"**{title.strip()}**", ""]
            listing = True
            continue
        if listing and line.strip():
            flush()
            text.append(f"  {line.strip()}" if line.startswith(" ") else f"- {line.strip()}")
            continue
        listing = listing and bool(line.strip())
        example = line.lstrip().startswith((">>>", "...")) or (example and bool(line.strip()))
        if example or not line.strip():
            flush()
            out.append(line)
        else:
            text.append(line)
    flush()
    return out


def _escape(text: str) -> str:
    """A paragraph; a code span may run over the end of a line."""
    parts, last = [], 0
    for code in _CODE.finditer(text):
        parts += [_MEANT_LITERALLY.sub(r"\\\1", text[last : code.start()]), f"``{' '.join(code[1].split())}``"]
        last = code.end()
        if text[last : last + 1].isalnum():
            parts.append("\\ ")
    return "".join([*parts, _MEANT_LITERALLY.sub(r"\\\1", text[last:])])


def process(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    try:
        names = inspect.signature(thing).parameters
    except (TypeError, ValueError):  # a property, or what has no signature
        names = ()
    lines[:] = plain(lines, names)


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
