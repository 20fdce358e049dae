"""Everything under `docs/generated/`, in one call."""

from __future__ import annotations

from pathlib import Path

from . import api, evidence, maps, measured, migrating, scores, text


def write(folder: Path, pictures: bool = True) -> None:
    maps.write(folder / "maps", pictures)
    scores.write(folder / "scores", pictures)
    evidence.write(folder / "evidence")
    migrating.write(folder / "migrating.md")
    api.write(folder / "api")
    parts = {
        "promises": maps.promises(),
        "costs": measured.costs(),
        "errors": measured.errors(),
        "verdicts": evidence.verdicts(),
        "evidence-toc": evidence.contents(),
        "performance-short": measured.short(),
        "performance-gpu": measured.gpu(),
        "performance-pictures": measured.pictures(folder) if pictures else "",
    }
    for name, body in parts.items():
        text.save(folder / "parts" / f"{name}.md", body + "\n")
    if pictures:
        maps.hero(folder / "hero.svg")
    text.save(folder / "benchmarks.md", measured.all_figures())
