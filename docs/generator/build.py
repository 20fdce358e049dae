"""Everything under `docs/generated/`, in one call."""

from __future__ import annotations

from pathlib import Path

from . import api, maps


def write(folder: Path, pictures: bool = True) -> None:
    maps.write(folder / "maps", pictures)
    api.write(folder / "api")
