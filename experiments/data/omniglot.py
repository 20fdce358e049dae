"""Omniglot's two small background sets (github.com/brendenlake/omniglot) as the file that `experiments.verification` reads.

`python -m experiments.data.omniglot CHECKOUT DATA` reads python/images_background_small1.zip and small2.zip of a checkout and writes
DATA/verification/omniglot_small.npz: the union of both (Greek and Latin are in both, with the same drawings), in the order of alphabet,
character and drawer. `bits` has the ink of each drawing, a bit a pixel, row by row; `shape` is (drawings, height, width).
"""

from __future__ import annotations

import io
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from . import Arrays, main

FILE = "verification/omniglot_small.npz"
SETS = ("images_background_small1", "images_background_small2")
_DRAWING = re.compile(r"[^/]+/(?P<alphabet>[^/]+)/(?P<character>character\d+)/\d+_(?P<drawer>\d+)\.png")


def drawings(path: Path) -> Iterator[tuple[tuple[str, str, int], np.ndarray]]:
    """Of each drawing of a zip file its alphabet, character and drawer, and where its ink is, [height, width]."""
    from matplotlib.image import imread  # late: an optional extra

    with zipfile.ZipFile(path) as file:
        for name in file.namelist():
            found = _DRAWING.fullmatch(name)
            if found:
                paper = imread(io.BytesIO(file.read(name)), format="png")  # 1 is white
                yield (found["alphabet"], found["character"], int(found["drawer"])), paper < 0.5


def read(checkout: Path) -> Arrays:
    known: dict[tuple[str, str, int], np.ndarray] = {}
    for part in SETS:
        for key, ink in drawings(checkout / "python" / f"{part}.zip"):
            if not np.array_equal(known.setdefault(key, ink), ink):
                raise ValueError(f"{'/'.join(map(str, key))}: the two sets have different drawings of it")
    order = sorted(known)
    ink = np.stack([known[key] for key in order])
    alphabets, characters, drawers = zip(*order)
    return {
        "bits": np.packbits(ink.reshape(len(ink), -1), axis=1),
        "shape": np.array(ink.shape),
        "alphabet": np.array(alphabets),
        "char": np.array([f"{a}/{c}" for a, c in zip(alphabets, characters)]),
        "drawer": np.array(drawers, dtype=np.int8),
    }


def convert(checkout: Path) -> Iterator[tuple[str, Arrays]]:
    yield FILE, read(checkout)


if __name__ == "__main__":
    sys.exit(main("Omniglot's two small background sets as the file that experiments.verification reads.", convert))
