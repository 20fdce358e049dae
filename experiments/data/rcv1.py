"""The five subsets of RCV1-v2 (github.com/fcharte/mldr.datasets) as the file that `experiments.multilabel` reads.

`python -m experiments.data.rcv1 CHECKOUT DATA` reads additional-data/rcv1sub1.rda to rcv1sub5.rda of a checkout of commit 23d103a (later
ones have them no more) and writes DATA/multilabel/rcv1v2_subsets_pooled.npz: the features as CSR in half precision, the labels as packed
bits, of each document its subset, 1 to 5, and its half: whether it is of the training file (0) or of the test file (1). R is not needed.

**Labels that are out of place.** An .rda file is Mulan's table of a training and a test file, 3,000 documents each, with one number of
features for both. The two files had different ones, so that where there were fewer the labels stand too far to the left, by 1 to 24
columns: the first of them are called features, and the last labels are empty. What tells it: only without those columns have the
features of each document length 1. So the labels of a half are taken to be the last 101 columns that any of its documents uses.

**Documents that are there twice.** The subsets overlap. Of documents with the same features the first is kept.
"""

from __future__ import annotations

import lzma
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import Arrays, main

FILE = "multilabel/rcv1v2_subsets_pooled.npz"
FEATURES, LABELS, HALF = 47236, 101, 3000
SUBSETS = (1, 2, 3, 4, 5)
_REST = (".labelcount", ".SCUMBLE")  # columns of the table that are neither features nor labels


class Column(NamedTuple):
    """A column of numbers: how many, and those that are not 0."""

    length: int
    rows: np.ndarray
    values: np.ndarray


class Reader:
    """What R's `save` has written, as far as lists of numbers and words go ("Serialization Formats" in R Internals).

    Numbers are read column by column, and only those that are not 0 are kept: whole tables would take gigabytes.
    """

    def __init__(self, file: lzma.LZMAFile) -> None:
        self.file = file
        self.symbols: list[str] = []
        if self._bytes(7) != b"RDX2\nX\n":
            raise ValueError("not what R's `save` writes in its second format")
        self._bytes(12)  # the versions of the format and of R

    def _bytes(self, n: int) -> bytes:
        read = self.file.read(n)
        if len(read) < n:
            raise ValueError(f"the file ends {n - len(read)} bytes early")
        return read

    def _int(self) -> int:
        return struct.unpack(">i", self._bytes(4))[0]

    def item(self) -> Any:
        """A Column, an array of integers, a list of words, a list or (where the items have names) a dict of such, or None."""
        flags = self._int()
        kind = flags & 0xFF
        if kind in (0, 254):
            return None
        if kind == 1:
            self.symbols.append(self.item())
            return self.symbols[-1]
        if kind == 255:
            return self.symbols[(flags >> 8) - 1]
        if kind == 2:
            return self._pairs(flags)
        n = self._int()
        if kind == 9:
            return None if n < 0 else self._bytes(n).decode()
        if kind == 14:
            numbers = np.frombuffer(self._bytes(8 * n), ">f8")
            rows = np.flatnonzero(numbers)
            found: Any = Column(n, rows.astype(np.int32), numbers[rows].astype(np.float64))
        elif kind in (10, 13):
            found = np.frombuffer(self._bytes(4 * n), ">i4").astype(np.int32)
        elif kind in (16, 19):
            found = [self.item() for _ in range(n)]
        else:
            raise ValueError(f"an object of R's type {kind}, which is neither numbers nor words nor a list of them")
        names = (self.item() or {}).get("names") if flags & 0x200 else None
        return dict(zip(names, found)) if kind == 19 and names else found

    def _pairs(self, flags: int) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        while flags & 0xFF == 2:
            if flags & 0x200:
                self.item()
            if not flags & 0x400:
                raise ValueError("a pair without a name")
            name = self.item()
            pairs[name] = self.item()
            flags = self._int()
        return pairs


def table(path: Path, name: str) -> Any:
    """All features and labels of a file, CSR."""
    from scipy import sparse  # late: an optional extra

    with lzma.open(path) as file:
        known = Reader(file).item()[name]["dataset"]
    columns = [column for name, column in known.items() if name not in _REST]
    ends = np.cumsum([0, *(len(column.rows) for column in columns)])
    parts = (np.concatenate([column.values for column in columns]), np.concatenate([column.rows for column in columns]))
    return sparse.csc_matrix((*parts, ends), shape=(columns[0].length, len(columns))).tocsr()


def repaired(part: Any, features: int, labels: int) -> tuple[Any, np.ndarray]:
    """The features, CSR, and the labels of a half: the last columns that are used are its labels."""
    start = int(part.indices.max()) + 1 - labels
    y = part[:, start:].toarray()[:, :labels]
    if not np.isin(y, (0.0, 1.0)).all():
        raise ValueError(f"the last {labels} columns that are used are not all labels")
    x = part[:, :start].copy()
    x.resize((x.shape[0], features))
    return x, y > 0


def read(checkout: Path, features: int = FEATURES, labels: int = LABELS, half: int = HALF) -> Arrays:
    from scipy import sparse  # late: an optional extra

    found = []
    for subset in SUBSETS:
        name = f"rcv1sub{subset}"
        both = table(checkout / "additional-data" / f"{name}.rda", name)
        found += [repaired(part, features, labels) for part in (both[:half], both[half:])]
    x, y = sparse.csr_matrix(sparse.vstack([x for x, _ in found])), np.concatenate([y for _, y in found])
    x.sort_indices()
    documents = [(x.indices[a:b].tobytes(), x.data[a:b].tobytes()) for a, b in zip(x.indptr[:-1], x.indptr[1:])]
    first = {document: i for i, document in reversed(list(enumerate(documents)))}
    keep = sorted(first.values())
    x, y = x[keep], y[keep]
    subsets = np.repeat(np.asarray(SUBSETS), [len(a) + len(b) for (_, a), (_, b) in zip(found[::2], found[1::2])])
    halves = np.repeat(np.tile([0, 1], len(SUBSETS)), [len(part) for _, part in found])
    return {
        "X_data": x.data.astype(np.float16), "X_indices": x.indices, "X_indptr": x.indptr, "X_shape": np.array(x.shape),
        "Y": np.packbits(y, axis=1), "Y_shape": np.array(y.shape),
        "subset": subsets[keep].astype(np.int8), "half": halves[keep].astype(np.int8),
    }  # fmt: skip


def convert(checkout: Path) -> Iterator[tuple[str, Arrays]]:
    yield FILE, read(checkout)


if __name__ == "__main__":
    sys.exit(main("The five subsets of RCV1-v2 as the file that experiments.multilabel reads.", convert))
