"""The pictures of the README and of the site's start page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anymax

from . import pictures

README = Path(__file__).parents[1] / "_static" / "readme.svg"
THREE = (anymax.Softmax(), anymax.Entmax(1.5), anymax.Sparsemax())


def front(target: Path) -> None:
    """README's picture, which is kept in the repository: `cd docs && python -m generator.front` draws it anew."""
    from anymax import plot

    def picture(plt: Any) -> Any:
        figure, (left, right) = plt.subplots(1, 2, figsize=(9.0, 3.6), layout="constrained", width_ratios=(1.1, 1))
        plot.bars(THREE, ax=left)
        plot.curves(THREE, ax=right)
        return figure

    pictures.one(target, picture, **{"font.size": 11})


def hero(target: Path) -> str:
    """The picture of the start page: the row of scores of its example under three maps. The Markdown that shows it."""
    from anymax import plot

    def picture(plt: Any) -> Any:
        figure, ax = plt.subplots(figsize=(5.2, 3.0), layout="constrained")
        plot.bars(THREE, ax=ax)
        return figure

    if pictures.old(target, (*pictures.code(), pictures.__file__, __file__)):
        pictures.save(target, picture, **{"font.size": 11})
    words = (
        "Bars: the probabilities that softmax, entmax and sparsemax give to four scores. Softmax gives every class some, entmax leaves "
        "one out, sparsemax two."
    )
    return pictures.shown(f"/generated/{target.name}", words, "hero")


if __name__ == "__main__":
    front(README)
