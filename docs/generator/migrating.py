"""The tables of the page "Migrating"; `tests/project/test_docs.py` compares both sides of every row."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from anymax._core.elsewhere import tables

from . import text

PINS = Path(__file__).parents[2] / "constraints.txt"


def _note(row: dict[str, Any]) -> str:
    return f"<br>{row['note']}" if "note" in row else ""


def _version(package: str | None) -> str:
    """What the rows are run against."""
    name = (package or "").replace("_", "-")
    pin = re.search(rf"(?m)^{name}==(\S+)", PINS.read_text(encoding="utf-8")) if name else None
    return f" Names as in {package} {pin[1]}." if pin else ""


def rows() -> str:
    """All tables, each under its heading."""
    parts = []
    for table in tables():
        rows = [(f"`{row['old']}`", f"`{row['new']}`{_note(row)}") for row in table["rows"]]
        parts += [
            text.section(table["title"], table["text"] + _version(table["package"])),
            text.table(("old", "new"), rows),
        ]
    return "\n\n".join(parts)
