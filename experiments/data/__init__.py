"""Files of ANYMAX_DATA made from their public originals: one script for each original, named in the README.md above."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

Arrays = Mapping[str, np.ndarray]


def main(about: str, convert: Callable[[Path], Iterator[tuple[str, Arrays]]]) -> int:
    """The command `python -m experiments.data.NAME CHECKOUT DATA`: each file that `convert(checkout)` gives, written below DATA."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("checkout", type=Path, help="a checkout of the original's repository")
    parser.add_argument("data", type=Path, help="the folder that ANYMAX_DATA names; it is made if it is not there")
    options = parser.parse_args()
    try:
        for name, arrays in convert(options.checkout):
            path = options.data / name
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
            print(f"{name}: {', '.join(f'{key} {array.shape}' for key, array in arrays.items())}", flush=True)
    except FileNotFoundError as error:
        print(f"{error.filename} is not there: what is before {options.data} must be such a checkout", file=sys.stderr)
        return 2
    return 0
