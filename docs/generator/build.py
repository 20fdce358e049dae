"""Everything under `docs/generated/`, in one call."""

from __future__ import annotations

from pathlib import Path

from . import api, evidence, front, maps, measured, project, scores, speed, text


def write(folder: Path, pictures: bool = True) -> None:
    maps.write(folder / "maps", pictures)
    scores.write(folder / "scores", pictures)
    evidence.write(folder / "evidence")
    api.write(folder / "api")
    parts = {
        "speed-growth": measured.growth(),
        "performance-gpu": measured.gpu(),
        "speed-cpu": speed.overview(folder, speed.CPU) if pictures else "",
        "speed-gpu": speed.overview(folder, speed.GPU) if pictures else "",
        "speed-every": speed.every(folder) if pictures else "",
        "repository": project.links(),
        "hero": front.hero(folder / "hero.svg") if pictures else "",
    }
    for name, body in parts.items():
        text.save(folder / "parts" / f"{name}.md", body + "\n")
    text.save(folder / "benchmarks.md", measured.all_figures())
