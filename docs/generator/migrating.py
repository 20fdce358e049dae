"""The page "Migrating", from the tables of `anymax._core.elsewhere`; `tests/project/test_docs.py` compares both sides of every row."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from anymax._core.elsewhere import tables

from . import text

SEARCH = "migrating, migrate, entmax package, optax, other packages"
INTRODUCTION = (
    "Find your call on the left and write the one on the right. A test runs both sides of each row, except in the last two tables, on "
    "the same random inputs: they give the same values, and the same gradients where they are differentiable. `F` is "
    "`torch.nn.functional`. If you try an old name, as in "
    "`anymax.entmax_bisect`, the error says what to write."
)


def _note(row: dict[str, Any]) -> str:
    return f"<br>{row['note']}" if "note" in row else ""


def _version(package: str | None) -> str:
    """What the rows are run against here."""
    if package is None:
        return ""
    try:
        return f" Names as in {package} {importlib.metadata.version(package.replace('_', '-'))}."
    except importlib.metadata.PackageNotFoundError:
        return ""


def write(path: Path) -> None:
    parts = ["# Migrating", text.found_by(SEARCH), INTRODUCTION]
    for table in tables():
        rows = [(f"`{row['old']}`", f"`{row['new']}`{_note(row)}") for row in table["rows"]]
        parts += [
            text.section(table["title"], table["text"] + _version(table["package"])),
            text.table(("old", "new"), rows),
        ]
    text.save(path, text.page(parts))
