"""What the losses refuse."""

from __future__ import annotations

import math

import numpy as np
import pytest
from kinds import KINDS
from refusals import each, refuses

import anymax as A
from anymax import Budget, Softmax, Sparsemax, SparseSoftmax

torch = pytest.importorskip("torch")


X = np.zeros((3, 4))
T = np.zeros(3, int)
PAIRS, pairs = np.ones((9, 4)), A.contrastive_loss
WRONG = {
    "shape": (lambda: A.fenchel_young(Sparsemax(), X, np.zeros(4, int)), ValueError, r"target of shape \(4,\).*expected class indices of shape \(3,\)"),  # noqa: E501
    "soft shape": (lambda: A.fenchel_young(Sparsemax(), X, np.zeros(3)), ValueError, r"distribution.*must have the shape of the scores, \(3, 4\)"),  # noqa: E501
    "bool": (lambda: A.fenchel_young(Sparsemax(), X, np.zeros((3, 4), bool)), TypeError, "class indices .*or a distribution"),
    "complex": (lambda: A.fenchel_young(Sparsemax(), X, np.zeros((3, 4), complex)), TypeError, "class indices .*or a distribution"),
    "words": (lambda: A.fenchel_young(Sparsemax(), X, ["a"] * 3), TypeError, "target: expected an array"),
    "too high": (lambda: A.fenchel_young(Sparsemax(), X, T + 4), IndexError, "from 0 to 3, or ignore_index=-100, got values from 4 to 4"),
    "negative": (lambda: A.fenchel_young(Sparsemax(), X, T - 1), IndexError, "from 0 to 3"),
    "other ignore_index": (lambda: A.fenchel_young(Sparsemax(), X, T - 100, ignore_index=-1), IndexError, "ignore_index=-1"),
    "not a distribution": (lambda: A.fenchel_young(Sparsemax(), X, X + 1.0), ValueError, "sum to 1.*divide their indicator"),
    "negative mass": (lambda: A.fenchel_young(Sparsemax(), X, X + [2, -1, 0, 0]), ValueError, "non-negative"),
    "budget index": (lambda: A.fenchel_young(Budget(2), X, T), ValueError, "indicator of 2 classes"),
    "option": (lambda: A.fenchel_young(Sparsemax(), X, T, smoothing=0.1), TypeError, "no option 'smoothing'.*say label_smoothing="),
    "reduction": (lambda: A.fenchel_young(Sparsemax(), X, T, reduction="average"), ValueError, "^fenchel_young: .*'none', got 'average'"),
    "smoothing": (lambda: A.fenchel_young(Sparsemax(), X, T, label_smoothing=1.5), ValueError, "^fenchel_young: .*from 0 to 1, got 1.5"),
    "smoothing nan": (lambda: A.fenchel_young(Sparsemax(), X, T, label_smoothing=math.nan), ValueError, "from 0 to 1"),
    "smoothing bool": (lambda: A.fenchel_young(Sparsemax(), X, T, label_smoothing=True), ValueError, "from 0 to 1"),
    "smoothing top-k": (lambda: A.fenchel_young(SparseSoftmax(k=2), X, T, label_smoothing=0.1), ValueError, "sparse_softmax_loss"),
    "smoothing top-p": (lambda: A.fenchel_young(SparseSoftmax(p=0.3), X, T, label_smoothing=0.2), ValueError, "for label_smoothing; give"),
    "soft top-p": (lambda: A.fenchel_young(SparseSoftmax(p=1.0), X, X * 0 + 0.25), ValueError, "a distribution as target; give class"),
    "weight": (lambda: A.fenchel_young(Sparsemax(), X, T, np.ones(3)), ValueError, "each of the 4 classes"),
    "weight shape": (lambda: A.fenchel_young(Sparsemax(), X, T, np.ones((3, 4))), ValueError, "each of the 4 classes"),
    "axis": (lambda: A.fenchel_young(Sparsemax(), X, T, axis=2), ValueError, "axis 2 is out of range"),
    "axes": (lambda: A.nll(Softmax(), X, 0, axis=(0, 1), dim=(1, 0)), TypeError, "two names of one argument"),
    "axes index": (lambda: A.nll(Softmax(), X, T, axis=(0, 1)), ValueError, r"axes \(0, 1\), expected class indices .* shape \(\),"),
    "axes soft": (lambda: A.nll(Softmax(), X, X[0], axis=(0, 1)), ValueError, r"shape of the scores, \(3, 4\)"),
    "axis and dim": (lambda: A.fenchel_young(Sparsemax(), X, T, axis=1, dim=0), TypeError, "two names of one argument"),
    "mapping": (lambda: A.fenchel_young(2, X, T), TypeError, "expected a mapping"),
    "mapping of nll": (lambda: A.nll(Sparsemax, X, T), TypeError, "expected a mapping"),
    "0-d axes": (lambda: A.logsumexp(np.float64(1.0), (0,)), ValueError, "at least one dimension"),
    "0-d": (lambda: A.fenchel_young(Sparsemax(), np.float64(1.0), 0), ValueError, "at least one dimension|out of range"),
    "epsilon": (lambda: A.smoothed_nll(Sparsemax(), X, T, epsilon=0), ValueError, "positive"),
    "multilabel shape": (lambda: A.multilabel_softmax_loss(X, T), ValueError, r"expected one number for each score, shape \(3, 4\)"),
    "multilabel range": (lambda: A.multilabel_softmax_loss(X, X + 2), ValueError, "between 0 and 1"),
    "old reduction": (lambda: A.nll(Softmax(), X, T, reduction="elementwise_mean"), ValueError, "^nll: .*it is called 'mean' here"),
    "multilabel reduction": (lambda: A.multilabel_softmax_loss(X, X, reduction="avg"), ValueError, "^multilabel_softmax_loss: .*'mean'"),
    "mask dtype": (lambda: A.fenchel_young(Sparsemax(), X, T, mask=X), TypeError, "boolean array, True = keep"),
    "foreign target": (lambda: A.fenchel_young(Sparsemax(), X, torch.zeros(3, dtype=torch.int64)), TypeError, "torch tensor"),
    "pairs": (lambda: pairs(PAIRS, PAIRS[:3]), ValueError, r"b \[pairs, features\], or \[pairs \+ negatives, features\], got \(9, 4\) and \(3, 4\)"),  # noqa: E501
    "pairs: bidirectional": (lambda: pairs(PAIRS, PAIRS, bidirectional="no"), TypeError, "bidirectional must be True or False, got 'no'"),
    "pairs: mask dtype": (lambda: pairs(PAIRS, PAIRS, mask=np.ones((9, 9))), TypeError, "mask must be booleans, True = keep, got float64"),
    "pairs: mask": (lambda: pairs(PAIRS, PAIRS, mask=np.ones((8, 9), dtype=bool)), ValueError, r"mask of shape \(8, 9\) does not broadcast"),  # noqa: E501
    "pairs: temperature": (lambda: pairs(PAIRS, PAIRS, temperature=0.0), ValueError, "temperature must be above 0"),
    "pairs: temperatures": (lambda: pairs(PAIRS, PAIRS, temperature=np.ones(9)), ValueError, "one number for all pairs"),
    "pairs: tau": (lambda: pairs(PAIRS, PAIRS, tau=0.1), TypeError, "say temperature="),
    "pairs: axis_name": (lambda: pairs(PAIRS, PAIRS, axis_name="pairs"), TypeError, "torch tensor with group="),
}  # fmt: skip


@each(WRONG)
def test_errors_say_what_to_do(call, error, words):
    refuses(call, error, words)


def test_a_stray_index_under_jit_is_nan_in_its_sample_only():
    jax = pytest.importorskip("jax")
    s = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    t = np.array([0, 9, -100])
    out = np.asarray(jax.jit(lambda s, t: A.cross_entropy(s, t, reduction="none"))(s, t))
    assert np.isnan(out[1])
    assert np.isfinite(out[[0, 2]]).all()


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "jax"])
@pytest.mark.parametrize("options", [{}, {"weight": np.ones(3)}, {"mask": np.array([True, True, True])}], ids=str)
def test_an_index_is_below_the_number_of_classes(kind, options):
    c = KINDS[kind]
    for bad in (3, -1):
        with pytest.raises(IndexError, match="class indices must be from 0 to 2"):
            A.sparsemax_loss(c(np.zeros((2, 3))), c(np.array([0, bad])), **{k: c(v) for k, v in options.items()})


_LARGEST = np.array([2**64 - 1, 1], np.uint64)
_OUT_OF_64_BITS = {
    "log_prob": lambda x, t: A.log_prob("softmax", x, t),
    "log_prob_entropy": lambda x, t: A.log_prob_entropy("softmax", x, t),
    "topk_kl": lambda x, t: A.topk_kl(x, t[:, None], x[:, :1] - 3.0),
    "nll": lambda x, t: A.nll("softmax", x, t),
    "linear_log_prob": lambda x, t: A.linear_log_prob(x, x, t, "softmax"),
    "repetition_penalty": lambda x, t: A.transforms.repetition_penalty(t[:, None], 2.0)(x),
    "segment_loss": lambda x, t: A.segment_loss("softmax", x[:, 0], t, lengths=[1, 1]),
}


@pytest.mark.parametrize(
    ("scores", "target"), [(np.asarray, np.asarray), (torch.tensor, np.asarray), (torch.tensor, torch.tensor)]
)
@pytest.mark.parametrize("name", _OUT_OF_64_BITS)
def test_an_unsigned_index_of_64_bits_is_refused(name, scores, target):
    x, t = scores(np.zeros((2, 2))), target(_LARGEST)
    with pytest.raises((IndexError, ValueError), match=r"9223372036854775807|a token is out of range"):
        _OUT_OF_64_BITS[name](x, t)


def test_unsigned_indices_beside_a_tensor():
    torch = pytest.importorskip("torch")
    x = torch.tensor([[1.0, 2.0, 0.5], [0.0, 1.0, 3.0]])
    for dtype in (np.uint8, np.uint16, np.uint32, np.uint64):
        for weight in (None, torch.ones(3)):
            got = A.sparsemax_loss(x, np.array([2, 0], dtype), weight)
            assert torch.equal(got, A.sparsemax_loss(x, torch.tensor([2, 0]), weight))
