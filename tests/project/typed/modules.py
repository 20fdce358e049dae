# pyright: basic, reportUnnecessaryTypeIgnoreComment=true
"""Read by pyright and mypy, and never run: attention, modules, margins, estimators and pictures say what they take and what they give.

What is wrong has a comment that lets it pass; where a checker does not need that comment, it says so, as an error.
"""

from typing import Any, assert_type

import jax
import numpy as np
import torch
from matplotlib.axes import Axes
from numpy.typing import NDArray

import anymax
from anymax import Entmax, LinearState, Sparsemax, hf, margins, nn, plot
from anymax.sklearn import (
    LabelDistributionClassifier,
    MappingClassifier,
    MultiLabelMappingClassifier,
    SupportConformalClassifier,
)


def attention_of_numpy(q: NDArray[np.float32], lengths: NDArray[np.int64]) -> None:
    assert_type(anymax.attention(q, q, q, Sparsemax(), is_causal=True, lengths=lengths), NDArray[np.float32])
    assert_type(anymax.linear_attention(q, q, q, is_causal=True), NDArray[np.float32])


def token_statistics_of_torch(h: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> None:
    assert_type(anymax.linear_log_prob_entropy(h, w, t), tuple[torch.Tensor, torch.Tensor])
    kept, whole = anymax.linear_log_prob_entropy(h, w, t, support=(t, t), full=True)
    assert_type(kept, tuple[torch.Tensor, torch.Tensor])
    assert_type(whole, tuple[torch.Tensor, torch.Tensor])
    assert_type(anymax.linear_loss(h, w, t, return_predicted=True), tuple[torch.Tensor, torch.Tensor])


def attention_of_torch(q: torch.Tensor, mask: torch.Tensor, weights: bool) -> None:
    assert_type(anymax.attention(q, q, q), torch.Tensor)
    assert_type(anymax.attention(q, q, q, "entmax:alpha=1.3"), torch.Tensor)
    assert_type(anymax.attention(q, q, q, Entmax(1.5), mask, window=(4, None), softcap=30.0), torch.Tensor)
    assert_type(anymax.attention(q, q, q, need_weights=True), tuple[torch.Tensor, torch.Tensor])
    assert_type(anymax.attention(q, q, q, return_threshold=True), tuple[torch.Tensor, torch.Tensor])
    three = anymax.attention(q, q, q, need_weights=True, return_threshold=True)
    assert_type(three, tuple[torch.Tensor, torch.Tensor, torch.Tensor])
    assert_type(
        anymax.attention(q, q, q, need_weights=weights, implementation="blockwise"),
        torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    )
    out, state = LinearState.of(q, q).step(q, q, q)
    assert_type(out, torch.Tensor)
    assert_type(state.attend(q), torch.Tensor)
    print(anymax.explain_attention(q, q, q, Sparsemax(), window=4).rows)  # noqa: T201


def attention_of_jax(q: jax.Array) -> None:
    out, weights = anymax.attention(q, q, q, sink=q, need_weights=True)
    assert_type(out, jax.Array)
    assert_type(weights, jax.Array)


def modules(x: torch.Tensor, y: torch.Tensor) -> None:
    assert_type(nn.Activation(Entmax(1.5), learn="alpha")(x), torch.Tensor)
    assert_type(nn.Activation("sparsemax")(x), torch.Tensor)
    assert_type(nn.Loss(Sparsemax(), reduction="none", label_smoothing=0.1)(x, y), torch.Tensor)
    out, weights = nn.Attention(16, 4, Sparsemax(), batch_first=True)(x, x, x, need_weights=False)
    assert_type(out, torch.Tensor)
    assert_type(weights, torch.Tensor | None)
    scale = nn.AdaptiveScale(16, 4, only=(2, 3))
    assert_type(scale(x), anymax.transforms.Transform)
    nn.Attention(16, 4, "entmax15", alibi=[1.0, 0.5, 0.0, 0.0], transform=scale)
    assert_type(anymax.attention(x, x, x, transform=scale(x)), torch.Tensor)
    layer = nn.GraphAttention(16, 4, 2, "sparsemax", edge_dim=3)
    assert_type(layer(x, y, x), torch.Tensor)
    assert_type(layer((x, x), y, return_attention_weights=True), tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]])
    assert_type(nn.AttentionPool("sparsemax", 16)(x, lengths=[2, 3]), torch.Tensor)
    assert_type(nn.AttentionPool()(x, x, index=y, return_attention_weights=True), tuple[torch.Tensor, torch.Tensor])
    assert_type(anymax.attention_varlen(x, x, x, [0, 2, 5], mapping="sparsemax"), torch.Tensor)
    assert_type(nn.LinearLoss(8, 5, "entmax15", bias=True)(x, y), torch.Tensor)
    assert_type(nn.LinearLoss(8, 5, return_predicted=True)(x, y), tuple[torch.Tensor, torch.Tensor])
    head = nn.MarginHead(8, 5, margin=margins.ArcFace(0.3))
    assert_type(head(x, y), torch.Tensor)
    assert_type(head.probabilities(x), torch.Tensor)
    assert_type(head.mapping, anymax.Mapping)
    assert_type(hf.register(), tuple[str, ...])


def margins_of_arrays(x: torch.Tensor, y: torch.Tensor) -> None:
    assert_type(margins.AM(0.35)(x, y), torch.Tensor)
    assert_type(
        margins.CosFace(0.35)(np.eye(2, dtype=np.float32), [0, 1]), np.ndarray[tuple[int, int], np.dtype[np.float32]]
    )
    assert_type(margins.SphereFace(2)([[0.5, 0.0]], [0]), np.ndarray[Any, Any])


def estimators(x: NDArray[np.float64], y: NDArray[np.int64]) -> None:
    model = MappingClassifier("entmax", alpha=1.3, class_weight="balanced").fit(x, y)
    assert_type(model, MappingClassifier)
    assert_type(model.predict(x), np.ndarray)
    assert_type(model.predict_proba([[1.0, 2.0]]), np.ndarray)
    assert_type(model.coef_, np.ndarray)
    assert_type(MultiLabelMappingClassifier(decision="support", scale=2.0).fit(x, y), MultiLabelMappingClassifier)
    assert_type(MappingClassifier(penalty=None, n_jobs=2).partial_fit(x, y, classes=[0, 1]), MappingClassifier)
    assert_type(LabelDistributionClassifier("sparsemax", smoothing=0.1).fit(x, x).score(x, x), float)
    assert_type(
        SupportConformalClassifier(model, mapping="sparsemax", coverage=0.95).fit(x, y), SupportConformalClassifier
    )
    assert_type(SupportConformalClassifier().predict_set(x, coverage=0.5), np.ndarray)


def pictures(x: torch.Tensor, ax: Axes) -> None:
    assert_type(plot.curves([Sparsemax(), Entmax(1.5)], ax=ax), Axes)
    assert_type(plot.bars(Sparsemax(), [2.0, 1.0]), Axes)
    assert_type(plot.losses(["softmax", Sparsemax()]), Axes)
    assert_type(plot.jacobian(Sparsemax(), x, bound=1.0), Axes)
    assert_type(plot.support_histogram({"a": x}), Axes)
    assert_type(plot.calibration(x, [0, 1]), Axes)
    plot.attention(x, queries=["a", "b"]).set_title("a head")


def wrong_calls(q: torch.Tensor, x: NDArray[np.float64]) -> None:
    anymax.attention(q, q, q, windw=4)  # type: ignore  # noqa: PGH003
    anymax.attention(q, q, q, implementation="flash")  # type: ignore  # noqa: PGH003
    anymax.attention([1.0], q, q)  # type: ignore  # noqa: PGH003
    anymax.explain_attention(q, q, q, causal=True)  # type: ignore  # noqa: PGH003
    nn.Loss(Sparsemax(), reduction="average")  # type: ignore  # noqa: PGH003
    nn.Activation(Sparsemax())(x)  # type: ignore  # noqa: PGH003
    margins.ArcFace("large")  # type: ignore  # noqa: PGH003
    MappingClassifier(solver="newton")  # type: ignore  # noqa: PGH003
    plot.curves(Sparsemax(), ax="left")  # type: ignore  # noqa: PGH003
    plot.attention("abc")  # type: ignore  # noqa: PGH003
