"""Docstrings are plain English with code in backticks; this gives autodoc the reStructuredText that says the same."""

from __future__ import annotations

import re
from typing import Any

_CODE = re.compile(r"`+([^`]+)`+")
_MEANT_LITERALLY = re.compile(r"([*|\\]|(?<=\w)_(?!\w))")


def plain(lines: list[str]) -> list[str]:
    """Code spans as literals, and nothing else as markup; examples after `>>>` stay as they are.

    A title underlined with dashes, NumPy's style, begins a list: an item for each line that is not indented.
    """
    out, example, listing, text = [], False, False, []

    def flush() -> None:
        out.extend(_escape("\n".join(text)).split("\n") if text else [])
        text.clear()

    for line in lines:
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
    lines[:] = plain(lines)
