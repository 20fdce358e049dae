"""Errors to 50 digits of every map, and of other packages on the same rows: `python -m benchmarks.accuracy`.

The rows are of the kind of `tests/laws/test_law_accuracy.py`: 2, 5 and 63 scores, normal with standard deviation 8, 1, 0.1 and 0.02,
as they are and, for maps that a common constant does not change, beside 10,000.
The oracles are those of the tests; they share no code with the library.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import anymax

from . import report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "laws"))

import cases
import laws
import oracles

FOLDER = report.RESULTS / "accuracy"
SIZES, SIGMAS, OFFSETS = (2, 5, 63), (8.0, 1.0, 0.1, 0.02), (0.0, 1e4)
DTYPES = {"fp32": np.float32, "fp64": np.float64}


def rows(case: Any) -> Iterator[np.ndarray]:
    for n in SIZES:
        if n >= case.mass:
            for sigma in SIGMAS:
                for offset in OFFSETS if case.mapping.facts.shift_invariant else (0.0,):
                    yield laws.scores(n, sigma=sigma, seed=n) + offset


def peers() -> dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]]:
    """case -> the call of another package, on a row of NumPy."""
    out: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {}
    if importlib.util.find_spec("torch") is None:
        return out
    import torch

    def on_torch(f: Callable) -> Callable[[np.ndarray], np.ndarray]:
        return lambda x: f(torch.tensor(x)[None])[0].numpy()

    out["softmax"] = "torch.softmax", on_torch(lambda x: torch.softmax(x, -1))
    if importlib.util.find_spec("entmax") is None:
        return out
    import entmax

    out["sparsemax"] = "entmax.sparsemax", on_torch(entmax.sparsemax)
    out["entmax-1.5"] = "entmax.entmax15", on_torch(entmax.entmax15)
    for alpha, name in ((1.1, "1.1"), (1.25, "1.25"), (4 / 3, "4/3"), (3.0, "3"), (10.0, "10")):
        bisect = on_torch(lambda x, alpha=alpha: entmax.entmax_bisect(x, alpha=alpha))
        out[f"entmax-{name}"] = "entmax.entmax_bisect", bisect
    for alpha in (1.5, 2.0, 4.0):
        out[f"normmax-{alpha:g}"] = (
            "entmax.normmax_bisect",
            on_torch(lambda x, alpha=alpha: entmax.normmax_bisect(x, alpha=alpha)),
        )
    out["budget-2"] = "entmax.budget_bisect", on_torch(lambda x: entmax.budget_bisect(x, budget=2))
    return out


def worst(apply: Callable[[np.ndarray], np.ndarray], case: Any, dtype: type) -> dict[str, float]:
    """The largest error in units of the last place of the largest probability, and in total variation."""
    ulps = variation = 0.0
    for row in rows(case):
        x = row.astype(dtype)
        p, exact = apply(x), case.oracle(x)
        ulps = max(ulps, oracles.worst_ulps(p, exact))
        variation = max(variation, oracles.total_variation(p, exact))
    return {"ulps": float(f"{ulps:.3g}"), "tv": float(f"{variation:.3g}")}


def measure() -> dict[str, Any]:
    others, out = peers(), []
    for case in cases.CASES:
        if case.mapping.params():
            continue
        found: dict[str, Any] = {"case": case.id, "map": case.mapping.name, "quadrature": case.tv is not None}
        for name, dtype in DTYPES.items():
            found[name] = worst(case.apply, case, dtype)
        if case.id in others:
            peer, call = others[case.id]
            found["peer"] = {"name": peer, **{name: worst(call, case, dtype) for name, dtype in DTYPES.items()}}
        print(json.dumps(found), file=sys.stderr)
        out.append(found)
    return {
        **report.facts(threads=1),
        "engine": str(anymax.choose("forward", anymax.Sparsemax(), np.zeros(3)).__name__).split(".")[-1],
        "errors": out,
    }


def main() -> None:
    found = measure()
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{found['date']}-{report.slug(found['hardware']['cpu'])}.json"
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
