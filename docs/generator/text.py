"""Markdown in small pieces: tables, front matter, sections."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple


class Prose(NamedTuple):
    """A file of prose: `key: value` lines, an introduction, sections by their titles."""

    keys: dict[str, str]
    introduction: str
    sections: dict[str, str]


def read(path: Path, allowed: Sequence[str], required: Sequence[str]) -> Prose:
    """The file's keys before the first empty line, then its text; a section that is missing or unknown is an error.

    The keys may stand in a comment, and a title, which a forge shows, before the text.
    """
    head, _, body = _from_generated(path.read_text(encoding="utf-8")).partition("\n\n")
    keys = dict(line.split(": ", 1) for line in head.splitlines() if line not in ("<!--", "-->"))
    body = re.sub(r"^# .*\n+", "", body)
    introduction, *parts = re.split(r"^## (.+)\n", body, flags=re.M)
    sections = {title.strip(): text.strip() for title, text in zip(parts[::2], parts[1::2])}
    missing = [title for title in required if not sections.get(title)]
    unknown = [title for title in sections if title not in allowed]
    if missing or unknown:
        raise ValueError(
            f"{path}: sections missing: {missing or 'none'}; unknown: {unknown or 'none'}; write {', '.join(allowed)}"
        )
    return Prose(keys, introduction.strip(), sections)


def _from_generated(prose: str) -> str:
    """Prose of a folder, with links as the page needs them that is made of it, one folder deeper."""
    prose = prose.replace("](../../experiments/results/", "](../evidence/")
    return re.sub(r"\]\(\.\./(?!maps/|scores/|evidence/)", "](../../", prose)


def plain(words: str) -> str:
    """Words that are no markup."""
    return re.sub(r"([\\`*_{}\[\]<>$])", r"\\\1", words)


def found_by(words: str) -> str:
    """Entries of the index, which the site's search shows before anything else; words between commas."""
    return f"```{{index}} {', '.join(f'! {word.strip()}' for word in words.split(','))}\n```"


def table(header: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[int] = ()) -> str:
    """A Markdown table; columns in `right` are aligned to the right."""
    line = "|" + "|".join("---:" if i in right else "---" for i in range(len(header))) + "|"
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(["| " + " | ".join(header) + " |", line, *("| " + " | ".join(row) + " |" for row in cells)])


def section(title: str, body: str) -> str:
    return f"## {title}\n\n{body}"


def toctree(names: Iterable[str], option: str) -> str:
    listed = "\n".join(names)
    return f"```{{toctree}}\n{option}\n\n{listed}\n```"


def contents(path: Path, names: Iterable[str]) -> str:
    """The page of a folder of prose, from its README, with the pages made of the prose below it."""
    return page([_from_generated(path.read_text(encoding="utf-8")).rstrip("\n"), toctree(names, ":hidden:")])


def page(parts: Iterable[str]) -> str:
    return "\n\n".join(parts) + "\n"


def save(path: Path, text: str) -> None:
    """Only what has changed is written, so that Sphinx reads only that again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
