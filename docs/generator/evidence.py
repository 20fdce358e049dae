"""The pages of `experiments/results/`: whichever are there, with their pictures, and all verdicts in one table."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from . import text

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"


def found() -> list[dict[str, Any]]:
    """What was found, by experiment; quick runs show that a script works, and are no evidence."""
    out = []
    for path in sorted(RESULTS.glob("*.json")):
        known = json.loads(path.read_text(encoding="utf-8"))
        if known.get("claims") and not known["quick"] and path.with_suffix(".md").exists():
            out.append(known)
    return out


def verdicts() -> str:
    """Every claim with its verdict, by itself and beside all others."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))  # the experiments are no part of the package
    from experiments._together import claims  # late: it needs scipy

    rows = [
        (
            text.plain(one.claim),
            text.plain(one.source),
            f"**{one.verdict}**",
            one.together if one.together != one.verdict else one.needed and f"{one.needed} would decide",
            f"{{doc}}`{one.experiment} </generated/evidence/{one.experiment}>`",
        )
        for one in claims(RESULTS)
    ]
    head = ("claim", "made by", "verdict", f"of {len(rows)} claims together", "")
    return text.table(head, rows) if rows else "No experiment has been saved yet."


def contents() -> str:
    names = [f"/generated/evidence/{known['name']}" for known in found()]
    return text.toctree(names, ":maxdepth: 1") if names else ""


def _local(page: str, kept: set[str]) -> str:
    """The page with links to what is not on the site as plain words."""

    def link(match: re.Match[str]) -> str:
        return match[0] if match[2].partition("#")[0] in {f"{name}.md" for name in kept} else match[1]

    return re.sub(r"(?<!!)\[([^\]\n]+)\]\((?!https?:|#)([^)\s]+)\)", link, page)


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    kept = {known["name"] for known in found()}
    for known in found():
        page = (RESULTS / f"{known['name']}.md").read_text(encoding="utf-8")
        text.save(folder / f"{known['name']}.md", _local(page, kept).replace("$", "\\$"))
        for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page):
            shutil.copy(RESULTS / picture, folder)
    for stale in folder.glob("*.md"):
        if stale.stem not in kept:
            stale.unlink()
