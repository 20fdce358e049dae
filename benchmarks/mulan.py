"""Sets of labels from the Mulan repository (github.com/tsoumakas/mulan) as the files that `benchmarks.defaults` reads.

`python -m benchmarks.mulan CHECKOUT FOLDER` reads the ARFF files of a checkout and writes FOLDER/NAME.npz: the features as CSR, the labels
as packed bits, and of each row whether it trains (0), tests (1) or has no official part (-1). A nominal feature of more than two values
becomes one column for each value; one of over a hundred values names the rows, and is left out.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np

# the files of a set: one without an official split, or its training and its test rows; and the labels
FILES = {
    "corel16k": (("corel16k/Corel16k001-test.arff",), "corel16k/Corel16k001.xml"),
    "corel5k": (("corel5k/Corel5k-train-sparse.arff", "corel5k/Corel5k-test-sparse.arff"), "corel5k/Corel5k.xml"),
    "foodtruck": (("foodtruck/foodtruck.arff",), "foodtruck/foodtruck.xml"),
    "tmc2007": (("tmc2007/tmc2007-500-train.arff", "tmc2007/tmc2007-500-test.arff"), "tmc2007/tmc2007-500.xml"),
} | {
    name: ((f"{name}/{name}-train.arff", f"{name}/{name}-test.arff"), f"{name}/{name}.xml")
    for name in ("enron", "flags", "genbase", "medical", "yeast")
}
_NAMES = 100  # a nominal feature of more values is a name
_ATTRIBUTE = re.compile(r"""@attribute\s+('(?:[^'\\]|\\.)*'|"[^"]*"|\S+)\s+(\{.*\}|\S+)""", re.IGNORECASE)


def name_of(word: str) -> str:
    return re.sub(r"\\(.)", r"\1", word.strip().strip("'\""))


def read_arff(text: str) -> tuple[list[str], list[list[str]], np.ndarray]:
    """The names of the attributes, their nominal values (none if numeric), and the table; a nominal value counts from 0."""
    head, _, body = re.split(r"(?im)^(@data)\s*$", text, maxsplit=1)
    names: list[str] = []
    nominal: list[list[str]] = []
    for line in head.splitlines():
        found = _ATTRIBUTE.match(line.strip())
        if found:
            names.append(name_of(found[1]))
            values = found[2].strip("{} ").split(",") if found[2].startswith("{") else []
            nominal.append(sorted(name_of(value) for value in values))  # 0 before 1
    rows = [line.strip() for line in body.splitlines() if line.strip() and not line.startswith("%")]
    table = np.zeros((len(rows), len(names)))
    for at, row in zip(table, rows):
        if row.startswith("{"):
            cells = [cell.split(None, 1) for cell in row.strip("{} ").split(",") if cell.strip()]
            pairs = [(int(i), value) for i, value in cells]
        else:
            pairs = list(enumerate(row.split(",")))
        for i, value in pairs:
            at[i] = nominal[i].index(name_of(value)) if nominal[i] else float(value)
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


def read(folder: Path, name: str) -> dict[str, np.ndarray]:
    """The arrays of a set, as `benchmarks.defaults.kept` reads them; `folder` is data/multi-label of the checkout."""
    from scipy import sparse  # late: an optional extra

    files, xml = FILES[name]
    wanted = [name_of(w) for w in re.findall(r"""<label name=("[^"]*")""", (folder / xml).read_text("utf-8"))]
    parts = [read_arff((folder / file).read_text("utf-8")) for file in files]
    names, nominal, _ = parts[0]
    table = np.concatenate([part for *_, part in parts])
    split = np.concatenate([np.full(len(part), i if len(parts) > 1 else -1) for i, (*_, part) in enumerate(parts)])
    labels = [names.index(w) for w in wanted]
    features = [i for i in range(len(names)) if i not in set(labels)]
    x = sparse.csr_matrix(columns(table[:, features], [nominal[i] for i in features]))
    y = table[:, labels] > 0
    return {
        "X_data": x.data, "X_indices": x.indices, "X_indptr": x.indptr, "X_shape": np.array(x.shape),
        "Y": np.packbits(y, axis=1), "Y_shape": np.array(y.shape), "split": split.astype(np.int8),
    }  # fmt: skip


def main() -> int:
    checkout, out = map(Path, sys.argv[1:])
    for name in FILES:
        arrays = read(checkout / "data" / "multi-label", name)
        np.savez_compressed(out / f"{name}.npz", **arrays)  # type: ignore[arg-type]
        print(f"{name}: {arrays['X_shape']}, {arrays['Y_shape'][1]} labels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
