"""Old name to new name, from `docs/migrating.json`; `tests/test_docs.py` runs both sides of every row and compares them."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

from . import text

DATA = Path(__file__).parents[1] / "migrating.json"
SEARCH = "migrating, migrate, entmax package, optax, other packages"
INTRODUCTION = (
    "Each row of these tables is run by a test: the call on the left and the call on the right give the same values, and where "
    "they are differentiable the same gradients, on the same random inputs. `F` is `torch.nn.functional`; maps and margins are "
    "imported from `anymax` and `anymax.margins`."
)


def tables() -> list[dict[str, Any]]:
    return json.loads(DATA.read_text(encoding="utf-8"))


def _note(row: dict[str, Any]) -> str:
    return f"<br>{row['note']}" if "note" in row else ""


def _version(package: str) -> str:
    """What the rows are run against here."""
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
