"""Fashion-MNIST, from the four files that Debian's package has."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np

from ._common import Missing

OPTION: dict[str, Any] = {
    "type": Path,
    "default": Path("/usr/share/datasets/fashion-mnist"),
    "metavar": "FOLDER",
    "help": "with the four files of Fashion-MNIST (default: where Debian's dataset-fashion-mnist puts them)",
}


def fashion(who: str, folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Fashion-MNIST (Xiao, Rasul and Vollgraf 2017): x, y, x_test, y_test; the pixels of an image in a row, from 0 to 1."""
    parts = []
    for part in ("train", "t10k"):
        for kind, header in (("images-idx3", 16), ("labels-idx1", 8)):
            path = folder / f"{part}-{kind}-ubyte.gz"
            if not path.is_file():
                raise Missing(
                    f"{who}: no {path.name} in {folder}; Fashion-MNIST (Xiao, Rasul and Vollgraf 2017) is Debian's package "
                    "dataset-fashion-mnist: install it, or name a folder with its four files by --fashion-mnist"
                )
            with gzip.open(path) as file:
                parts.append(np.frombuffer(file.read(), np.uint8, offset=header))
    x, y, x_test, y_test = parts
    x, x_test = (a.reshape(-1, 784).astype(np.float32) / 255 for a in (x, x_test))
    return x, y.astype(np.int64), x_test, y_test.astype(np.int64)
