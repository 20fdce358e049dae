# pyright: basic, reportUnnecessaryTypeIgnoreComment=true
"""Read by pyright and mypy, and never run: an array comes back as the kind that was given, and a wrong call is seen before it runs.

What is wrong has a comment that lets it pass; where a checker does not need that comment, it says so, as an error.
"""

from typing import Any, assert_type

import jax
import numpy as np
import torch
from numpy.typing import NDArray

import anymax
from anymax import Entmax, Sparsemax


def of_numpy(x: NDArray[np.float32], y: NDArray[np.int64]) -> None:
    assert_type(anymax.softmax(x), NDArray[np.float32])
    assert_type(anymax.entmax(x, 1.3, axis=0, mask=x > 0), NDArray[np.float32])
    assert_type(anymax.apply(Entmax(1.5), x, dim=-1), NDArray[np.float32])
    assert_type(anymax.fenchel_young(Sparsemax(), x, y, reduction="none"), NDArray[np.float32])


def of_torch(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
    assert_type(anymax.sparsemax(x, out=out), torch.Tensor)
    assert_type(anymax.sparse_softmax(x, k=5, dtype=torch.float32), torch.Tensor)
    assert_type(anymax.log_softmax(x, dim=1), torch.Tensor)
    assert_type(anymax.cross_entropy(x, y, ignore_index=-1, label_smoothing=0.1), torch.Tensor)
    assert_type(anymax.margin_loss(Sparsemax(), x, y, margin=0.2, axis=1), torch.Tensor)
    assert_type(anymax.logsumexp(x, axis=(0, 1), keepdims=True), torch.Tensor)


def of_jax(x: jax.Array, y: jax.Array) -> None:
    assert_type(anymax.budget(x, 2), jax.Array)
    assert_type(anymax.nll(anymax.Taylor(2), x, y), jax.Array)


def of_lists() -> None:
    assert_type(anymax.softmax([2.0, 1.0]), np.ndarray[Any, Any])
    assert_type(anymax.perturb_max([[1, 2], [3, 4]], "gumbel"), np.ndarray[Any, Any])


def wrong_calls(x: torch.Tensor, y: torch.Tensor) -> None:
    anymax.entmax(x, alph=2)  # type: ignore  # noqa: PGH003
    anymax.entmax("abc")  # type: ignore  # noqa: PGH003
    anymax.softmax(x, axis="rows")  # type: ignore  # noqa: PGH003
    anymax.cross_entropy(x, y, reduction="average")  # type: ignore  # noqa: PGH003
    print(anymax.nosuch)  # type: ignore  # noqa: PGH003, T201
