# pyright: basic, reportUnnecessaryTypeIgnoreComment=true
# mypy: warn-unused-ignores
"""Read by pyright and mypy, and never run: an array comes back as the kind that was given, and a wrong call is seen before it runs.

What is wrong has a comment that lets it pass; where a checker does not need that comment, it says so, as an error. An `Any` does not
pass as what `assert_type` asks for.
"""

from collections.abc import Callable
from typing import Any, assert_type

import jax
import numpy as np
import torch
from numpy.typing import NDArray

import anymax
from anymax import Entmax, Facts, Mapping, Sparsemax
from anymax.sampling import Sample
from anymax.thresholds import Threshold


def of_numpy(x: NDArray[np.float32], y: NDArray[np.int64], keep: NDArray[np.bool_]) -> None:
    assert_type(anymax.softmax(x), NDArray[np.float32])
    assert_type(anymax.entmax(x, alpha=1.3, axis=0, mask=keep), NDArray[np.float32])
    assert_type(anymax.apply(Entmax(1.5), x, dim=-1), NDArray[np.float32])
    assert_type(anymax.log_apply(Sparsemax(), x, axis=(0, 1)), NDArray[np.float32])
    assert_type(anymax.jacobian(Sparsemax(), x, axis=(0, 1)), NDArray[np.float32])
    assert_type(anymax.fenchel_young(Sparsemax(), x, y, reduction="none"), NDArray[np.float32])
    assert_type(anymax.threshold(Sparsemax(), x), Threshold[NDArray[np.float32]])
    assert_type(anymax.threshold(Sparsemax(), x).tau, NDArray[np.float32])
    assert_type(anymax.jacobian(Sparsemax(), x), NDArray[np.float32])
    assert_type(anymax.inspection.jacobian_norm(Sparsemax(), x, mask=keep), NDArray[np.float32])
    assert_type(anymax.entropy(x, "tsallis", 1.3), NDArray[np.float32])
    assert_type(anymax.sample(Sparsemax(), x, transform=anymax.topk(5)), np.ndarray[Any, Any])
    assert_type(anymax.compose(anymax.temperature(0.7), anymax.topp(y))(x), NDArray[np.float32])
    print(x[anymax.support(x)])  # noqa: T201 (booleans choose)


def of_torch(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
    alpha = torch.nn.Parameter(torch.tensor(1.5))
    assert_type(anymax.sparsemax(x, out=out), torch.Tensor)
    assert_type(anymax.entmax(x, alpha=alpha), torch.Tensor)
    assert_type(anymax.apply(Entmax(alpha=alpha), x), torch.Tensor)
    assert_type(anymax.sparse_softmax(x, k=5, dtype=torch.float32), torch.Tensor)
    assert_type(anymax.log_softmax(x, dim=1), torch.Tensor)
    assert_type(anymax.cross_entropy(x, y, ignore_index=-1, label_smoothing=0.1), torch.Tensor)
    assert_type(anymax.margin_loss(Sparsemax(), x, y, margin=0.2, axis=1), torch.Tensor)
    assert_type(anymax.margin_loss(Sparsemax(), x, y, margin=anymax.margins.ArcFace(0.5)), torch.Tensor)
    assert_type(anymax.multilabel_softmax_loss(x, y, mask=x > 0), torch.Tensor)
    assert_type(
        anymax.linear_loss(x, x, y, Entmax(1.5), reduction="none", label_smoothing=0.1, chunk=512), torch.Tensor
    )
    assert_type(anymax.linear_log_prob(x, x, y, "sparsemax"), torch.Tensor)
    assert_type(anymax.linear.linear_threshold(x, x, Sparsemax()).tau, torch.Tensor)
    assert_type(anymax.logsumexp(x, axis=(0, 1), keepdims=True), torch.Tensor)
    assert_type(anymax.support(x), torch.Tensor)
    assert_type(anymax.logit_gap(x, 10), torch.Tensor)
    assert_type(anymax.sample(Sparsemax(), x, num_samples=3, generator=[1, 2]), torch.Tensor)
    assert_type(anymax.gumbel_max(x), torch.Tensor)
    rows = anymax.Segments.of(y, num_segments=7)
    assert_type(anymax.segment_apply(Sparsemax(), x, index=rows), torch.Tensor)
    assert_type(anymax.segment_loss("softmax", x, y, lengths=[3, 4], reduction="none"), torch.Tensor)
    assert_type(anymax.segment_threshold(Sparsemax(), x, ptr=y, axis=1), Threshold[torch.Tensor])
    print(anymax.sample(Sparsemax(), x, return_log_prob=True).log_prob)  # noqa: T201
    assert_type(anymax.sample(Sparsemax(), x, return_log_prob=bool(x.ndim)), torch.Tensor | Sample)
    assert_type(anymax.sample(Sparsemax(), x, return_support=True, mask=x > 0), Sample)


def of_jax(x: jax.Array, y: jax.Array) -> None:
    assert_type(anymax.budget(x, k=2), jax.Array)
    assert_type(anymax.nll(anymax.Taylor(2), x, y), jax.Array)
    assert_type(anymax.threshold(Entmax(alpha=x), x).support, jax.Array)
    assert_type(anymax.normmax(x, alpha=3.0, mask=x > 0), jax.Array)


def of_lists() -> None:
    assert_type(anymax.softmax([2.0, 1.0]), np.ndarray[Any, Any])
    assert_type(anymax.perturb_max([[1, 2], [3, 4]], noise="gumbel"), np.ndarray[Any, Any])
    assert_type(anymax.nll(Sparsemax(), [[2.0, 1.0]], [0]), np.ndarray[Any, Any])
    assert_type(anymax.sparsemax_loss([2.0, 1.0], 0), np.ndarray[Any, Any])
    assert_type(anymax.logit_gap(0.1, 10), float)


def of_maps(mapping: Mapping) -> None:
    assert_type(anymax.facts(mapping), Facts)
    assert_type(anymax.facts(mapping).margin, float | None)
    assert_type(Entmax(1.5).replace(alpha=1.7), Entmax)
    assert_type(anymax.explain(mapping, [1.0, 2.0]).mapping, Mapping)
    assert_type(anymax.check_mapping(mapping, n=5), tuple[str, ...])
    assert_type(anymax.show_config("dicts"), dict[str, Any])
    with anymax.use("reference"):
        u: Callable[[Any], Any] = np.exp
        assert_type(anymax.apply(anymax.Ratio(u), [1.0, 2.0]), np.ndarray[Any, Any])


def wrong_calls(x: torch.Tensor, y: torch.Tensor) -> None:
    anymax.entmax(x, alph=2)  # type: ignore  # noqa: PGH003
    anymax.entmax("abc")  # type: ignore  # noqa: PGH003
    anymax.entmax(x, alpha="two")  # type: ignore  # noqa: PGH003
    anymax.softmax(x, axis="rows")  # type: ignore  # noqa: PGH003
    anymax.softmax(x, mask="upper")  # type: ignore  # noqa: PGH003
    anymax.softmax(x, temperature=2.0)  # type: ignore  # noqa: PGH003
    anymax.sparse_softmax(x, k=2.5)  # type: ignore  # noqa: PGH003
    anymax.cross_entropy(x, y, reduction="average")  # type: ignore  # noqa: PGH003
    anymax.fenchel_young(x, y)  # type: ignore  # noqa: PGH003
    anymax.entropy(x, "rényi")  # type: ignore  # noqa: PGH003
    anymax.facts(Sparsemax)  # type: ignore  # noqa: PGH003
    anymax.jacobian(Sparsemax(), x, axis="rows")  # type: ignore  # noqa: PGH003
    Entmax(alpha="1.5")  # type: ignore  # noqa: PGH003
    Entmax(1.5).alpha = 2.0  # type: ignore  # noqa: PGH003
    print(anymax.nosuch)  # type: ignore  # noqa: PGH003, T201
