"""Sets of labels from the Mulan repository (github.com/tsoumakas/mulan) as the files that `experiments.multilabel` and
`benchmarks.defaults` read.

`python -m experiments.data.mulan CHECKOUT DATA` reads the ARFF files of a checkout and writes DATA/multilabel/NAME.npz: the features as
CSR, the labels as packed bits, their names, and of each row whether it trains (0), tests (1) or has no official part (-1). A nominal
feature of more than two values becomes one column for each value; one of over a hundred values names the rows, and is left out. In
those sets that `experiments.multilabel` reads a nominal feature (Birds has one, the place) is one column instead, with the number of
the value in the file's own list, and the features have single precision.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from . import Arrays, main


class Source(NamedTuple):
    """The files of a set: one without an official split, or its training and its test rows; and the labels."""

    rows: tuple[str, ...]
    labels: str
    numbered: bool = False  # nominal features are numbers, and all have single precision


def _split(name: str, numbered: bool = False) -> Source:
    return Source((f"{name}/{name}-train.arff", f"{name}/{name}-test.arff"), f"{name}/{name}.xml", numbered)


# those of `experiments.multilabel`, then those that `benchmarks.defaults` has besides
FILES = {
    "scene": _split("scene", numbered=True),
    "emotions": _split("emotions", numbered=True),
    "birds": _split("birds", numbered=True),
    "cal500": Source(("cal500/cal500.arff",), "cal500/cal500.xml", numbered=True),
    "bibtex": _split("bibtex", numbered=True),
    "delicious": _split("delicious", numbered=True),
    "corel16k": Source(("corel16k/Corel16k001-test.arff",), "corel16k/Corel16k001.xml"),
    "corel5k": Source(("corel5k/Corel5k-train-sparse.arff", "corel5k/Corel5k-test-sparse.arff"), "corel5k/Corel5k.xml"),
    "foodtruck": Source(("foodtruck/foodtruck.arff",), "foodtruck/foodtruck.xml"),
    "tmc2007": Source(("tmc2007/tmc2007-500-train.arff", "tmc2007/tmc2007-500-test.arff"), "tmc2007/tmc2007-500.xml"),
} | {name: _split(name) for name in ("enron", "flags", "genbase", "medical", "yeast")}
_NAMES = 100  # a nominal feature of more values is a name
_ATTRIBUTE = re.compile(r"""@attribute\s+('(?:[^'\\]|\\.)*'|"[^"]*"|\S+)\s+(\{.*\}|\S+)""", re.IGNORECASE)


def name_of(word: str) -> str:
    return re.sub(r"\\(.)", r"\1", word.strip().strip("'\""))


def read_arff(text: str) -> tuple[list[str], list[list[str]], np.ndarray]:
    """The names of the attributes, their nominal values in the file's order (none if numeric), and the table.

    There a nominal value is its place, from 0, in alphabetical order: 0 before 1.
    """
    head, _, body = re.split(r"(?im)^(@data)\s*$", text, maxsplit=1)
    names: list[str] = []
    nominal: list[list[str]] = []
    for line in head.splitlines():
        found = _ATTRIBUTE.match(line.strip())
        if found:
            names.append(name_of(found[1]))
            values = found[2].strip("{} ").split(",") if found[2].startswith("{") else []
            nominal.append([name_of(value) for value in values])
    ordered = [sorted(values) for values in nominal]
    rows = [line.strip() for line in body.splitlines() if line.strip() and not line.startswith("%")]
    table = np.zeros((len(rows), len(names)))
    for at, row in zip(table, rows):
        if row.startswith("{"):
            cells = [cell.split(None, 1) for cell in row.strip("{} ").split(",") if cell.strip()]
            pairs = [(int(i), value) for i, value in cells]
        else:
            pairs = list(enumerate(row.split(",")))
        for i, value in pairs:
            at[i] = ordered[i].index(name_of(value)) if ordered[i] else float(value)
    return names, nominal, table


def columns(table: np.ndarray, nominal: list[list[str]]) -> np.ndarray:
    """The features: a column for each value of those that are nominal, with more than two values and no names."""
    parts = []
    for column, values in zip(table.T, nominal):
        if len(values) <= 2:
            parts.append(column[:, None])
        elif len(values) <= _NAMES:
            parts.append(np.eye(len(values))[column.astype(int)])
    return np.concatenate(parts, axis=1)


def numbers(table: np.ndarray, nominal: list[list[str]]) -> np.ndarray:
    """The features, a column each: of a nominal one the place of the value in the file's order."""
    parts = [
        np.array([values.index(value) for value in sorted(values)])[column.astype(int)] if values else column
        for column, values in zip(table.T, nominal)
    ]
    return np.stack(parts, axis=1).astype(np.float32)


def read(folder: Path, name: str) -> Arrays:
    """The arrays of a set; `folder` is data/multi-label of the checkout."""
    from scipy import sparse  # late: an optional extra

    files, xml, numbered = FILES[name]
    wanted = [name_of(w) for w in re.findall(r"""<label name=("[^"]*")""", (folder / xml).read_text("utf-8"))]
    parts = [read_arff((folder / file).read_text("utf-8")) for file in files]
    names, nominal, _ = parts[0]
    table = np.concatenate([part for *_, part in parts])
    split = np.concatenate([np.full(len(part), i if len(parts) > 1 else -1) for i, (*_, part) in enumerate(parts)])
    labels = [names.index(w) for w in wanted]
    features = [i for i in range(len(names)) if i not in set(labels)]
    x = (numbers if numbered else columns)(table[:, features], [nominal[i] for i in features])
    x = sparse.csr_matrix(x)
    y = table[:, labels] > 0
    return {
        "X_data": x.data, "X_indices": x.indices, "X_indptr": x.indptr, "X_shape": np.array(x.shape),
        "Y": np.packbits(y, axis=1), "Y_shape": np.array(y.shape), "split": split.astype(np.int8),
        "label_names": np.array(wanted),
    }  # fmt: skip


def convert(checkout: Path) -> Iterator[tuple[str, Arrays]]:
    for name in FILES:
        yield f"multilabel/{name}.npz", read(checkout / "data" / "multi-label", name)


if __name__ == "__main__":
    sys.exit(
        main("Sets of labels from the Mulan repository as the files that experiments and benchmarks read.", convert)
    )
