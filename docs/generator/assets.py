"""Files of others that the site carries, so that no page asks another server for anything."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
MATHJAX = "sphinx-mathjax-offline"  # a PyPI package: MathJax 3 as it is on npm
EXPLORER = ROOT / "src" / "anymax" / "explorer" / "index.html"


def write(folder: Path) -> None:
    """MathJax under `static/`, the explorer under `extra/`."""
    static, extra = folder / "static", folder / "extra"
    (static / "mathjax").mkdir(parents=True, exist_ok=True)
    extra.mkdir(parents=True, exist_ok=True)
    found = importlib.util.find_spec(MATHJAX)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"the site needs MathJax: pip install {MATHJAX} (it is in the extra `docs`)")
    shutil.copy(
        Path(found.submodule_search_locations[0]) / "static" / "mathjax" / "tex-svg-full.js", static / "mathjax"
    )
    (extra / "explorer").mkdir(exist_ok=True)
    shutil.copy(EXPLORER, extra / "explorer")  # one file, whole in itself
