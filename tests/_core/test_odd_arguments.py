"""Odd arguments: one sentence each, in words of ours."""

import dataclasses

import numpy as np
import pytest
from refusals import each, one_sentence, said
from test_first_guesses import Model, X, Y, same

import anymax as am
from anymax import Sparsemax
from anymax._array import like


class Column:
    """A column of polars or pandas: a dtype and a shape, and no array."""

    dtype, shape, ndim = "Float64", (3,), 1

    def __array__(self, dtype=None, copy=None):
        return np.array([2.0, 1.0, 0.1])


class Words(Column):
    dtype = "str"

    def __array__(self, dtype=None, copy=None):
        return np.array(["a", "b", "c"], dtype=object)


def test_a_column_is_read():
    want = am.softmax([2.0, 1.0, 0.1])
    same(am.softmax(Column()), want)


def sparse_matrix():
    return pytest.importorskip("scipy.sparse").csr_matrix(X)


ODD = said(
    (TypeError, ValueError, IndexError),
    (lambda: am.softmax(sparse_matrix()), "got csr_matrix of shape (2, 3) and dtype float64; call its toarray()"),
    (lambda: am.softmax("abc"), "scores: expected an array or a list of numbers, got 'abc'"),
    (lambda: am.softmax({1.0, 2.0}), "got a set, which has no order or length; make a list of it"),
    (lambda: am.softmax(v for v in [1.0, 2.0]), "got a generator, which has no order or length; make a list of it"),
    (lambda: am.softmax({"logits": X}), "got a dict; give the numbers in it, as in x['logits']"),
    (lambda: am.softmax([1.0, "2"]), "got a list with '2' in it"),
    (lambda: am.softmax([1.0, None]), "got a list with None in it"),
    (lambda: am.softmax([[1.0, 2.0], [3.0]]), "got rows of different lengths, from 1 to 2; pad them, and say mask="),
    (lambda: am.softmax([1, [2, 3]]), "got rows of different lengths"),
    (lambda: am.softmax([10**30, 1]), "got a list with an integer beyond 64 bits; convert it to float"),
    (lambda: am.softmax([1 + 2j, 2]), "got a list with (1+2j) in it"),
    (lambda: am.softmax(Model()), "got a value of the type Model, which is called to give numbers; give what it returns"),
    (lambda: am.softmax(Sparsemax()), "got Sparsemax(), which is called to give numbers; give what it returns"),
    (lambda: am.softmax(Sparsemax), "got the class Sparsemax"),
    (lambda: am.softmax(object()), "got a value of the type object"),
    (lambda: am.softmax(Words()), "got Words of shape (3,) and dtype str"),
    (lambda: am.softmax(X, X), "axis: expected an integer, got ndarray of shape (2, 3)"),
    (lambda: am.softmax(X, dtype="nonsense"), "dtype: expected a floating-point dtype such as 'float32', got 'nonsense'"),
    (lambda: am.softmax(X, dtype=int), "dtype: expected a floating-point dtype such as 'float32', got <class 'int'>"),
    (lambda: am.softmax(X, dtype="bfloat17"), "dtype: NumPy has no 'bfloat17'"),
    (lambda: am.cross_entropy(Y, X), "the scores come first, the target after them"),
    (lambda: am.cross_entropy(X, Y.astype(float)), "class indices must be integers"),
    (lambda: am.cross_entropy(X, np.eye(3, dtype=int)[Y]), "convert one-hot rows to floating point, or give their argmax"),
    (lambda: am.cross_entropy(X, np.eye(3, dtype=bool)[Y]), "got bool; convert one-hot rows to floating point"),
    (lambda: am.cross_entropy(X, Y, ignore_index="a"), "cross_entropy(ignore_index='a'): ignore_index must be an integer"),
    (lambda: am.cross_entropy(X, Y, ignore_index=None), "ignore_index must be an integer"),
    (lambda: am.sparsemax_loss(X, [[-0.5, 0.5, 1.0], [0, 0, 1.0]]), "non-negative numbers that sum to 1; the smallest number is -0.5"),
    (lambda: am.margin_loss(Sparsemax(), X / 9, Y, scale="a"), "margin_loss(scale=...): expected a number or an array, got 'a'"),
    (lambda: am.entropy(Sparsemax()), "entropy: expected probabilities, got Sparsemax(); a map gives them: anymax.entropy(anymax.apply("),
    (lambda: am.entropy(Sparsemax(), X), "entropy: expected probabilities, got Sparsemax()"),
    (lambda: am.entropy("softmax", X), "entropy: expected probabilities, got 'softmax'"),
    (lambda: am.entropy(X, ["shannon"]), "entropy: kind must be one of renyi, renyi2, shannon, tsallis, got ['shannon']"),
    (lambda: am.support(Sparsemax()), "support: expected probabilities, got Sparsemax()"),
    (lambda: am.support(X + 0j), "p: expected real floating-point"),
    (lambda: am.support([2.0, 0.5]), "for scores, apply a map first: anymax.support(anymax.apply(mapping, x))"),
    (lambda: am.support([0.5, -0.5]), "support: expected probabilities, from 0 to 1, got numbers from -0.5 to 0.5"),
    (lambda: am.gumbel_softmax(X, generator=0, hard="yes"), "gumbel_softmax: hard must be True or False, got 'yes'"),
    (lambda: am.attention([[1.0, 2.0]], X, X), "attention: q must be an array, got list; give numpy.asarray(q)"),
    (lambda: am.attention(X, X, X, np.eye(2) > 0), "attention: after q, k and v comes the map; give a mask as mask="),
    (lambda: am.attention(X, X, X, "entmax", 1.5), "attention: mask must be an array, got 1.5; a parameter of the map goes with it"),
    (lambda: am.choose("forward", Sparsemax(), "a"), "scores: expected an array or a list of numbers, got 'a'"),
    (lambda: am.softmax(np.matrix(X)), "scores: a numpy.matrix is not read, since its rows are matrices again; give numpy.asarray(x)"),
    (lambda: am.entropy(np.matrix(X)), "p: a numpy.matrix is not read"),
    (lambda: am.nll(X, Y), "the map is missing, since ndarray of shape (2, 3) comes first; write nll(anymax.Softmax(), scores, target)"),
    (lambda: am.sample(X.tolist()), "sample: the map is missing, since list comes first; write sample(anymax.Softmax(), x)"),
    (lambda: am.log_prob("softmax", y=Y), "log_prob: x is missing; write log_prob(anymax.Softmax(), x, target)"),
    (lambda: am.compose(top_p=0.9), "compose takes transforms, and no options, got top_p=0.9; write compose(anymax.topp(0.9))"),
    (lambda: am.compose(minp=0.2), "write compose(anymax.transforms.minp(0.2))"),
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@each(ODD)
def test_an_odd_argument_is_one_sentence(call, error, words):
    one_sentence(call, error, words)


# -- a parameter of a user's map may have any name ------------------------------------------------------------------------------


NAMES = (
    "keep",
    "x",
    "target",
    "weight",
    "bias",
    "mask",
    "tau",
    "index",
    "value",
    "static",
    "mapping",
    "options",
    "dim",
)
DRAW = np.random.default_rng(0)
FEATURES, WEIGHT, KEEP, OF_ROWS = (
    DRAW.normal(size=(6, 4)),
    DRAW.normal(size=(5, 4)),
    DRAW.random((6, 5)) < 0.8,
    DRAW.random((6, 1)),
)
TARGET, SCORES, ROW = KEEP.argmax(1), FEATURES @ WEIGHT.T, np.array([0, 0, 0, 1, 1, 2])


def named(name):
    """exp(c tanh(x)) by its sum, where c is a parameter of this name."""

    def weights(self, x, keep, xp):
        c = like(getattr(self, name), x, xp)
        u = xp.exp(c * xp.tanh(x))
        return u, u * c * (1 - xp.tanh(x) ** 2)

    facts = am.Facts(monotone=True, shift_invariant=False, sparse=False, has_potential=False)
    space = {"facts": facts, "name": "own", "formula": "", "weights": weights, "__annotations__": {name: object}}
    return dataclasses.dataclass(frozen=True, eq=False)(type("Own", (am.RatioMap,), space))


CALLS = {
    "apply": lambda m, a: am.apply(m(a(OF_ROWS)), a(SCORES), mask=a(KEEP)),
    "log p": lambda m, a: am.log_prob(m(a(OF_ROWS)), a(SCORES), a(TARGET), mask=a(KEEP)),
    "nll": lambda m, a: am.nll(m(a(OF_ROWS)), a(SCORES), a(TARGET), a(np.arange(1.0, 6.0)), label_smoothing=0.1),
    "linear_loss": lambda m, a: am.linear_loss(
        a(FEATURES), a(WEIGHT), a(TARGET), m(a(OF_ROWS)), mask=a(KEEP), linear_bias=a(WEIGHT[:, 0]), chunk=2, reduction="none"
    ),
    "linear_log_prob_entropy": lambda m, a: am.linear_log_prob_entropy(a(FEATURES), a(WEIGHT), a(TARGET), m(a(OF_ROWS)))[1],
    "linear_loss of a sink": lambda m, a: am.linear_loss(a(FEATURES), a(WEIGHT), a(TARGET), am.Sink(m(a(OF_ROWS)))),
    "segments": lambda m, a: am.segment_apply(m(a(OF_ROWS[0, 0])), a(SCORES[:, 0]), index=a(ROW), num_segments=3),
    "attention": lambda m, a: am.attention(*[a(SCORES[None])] * 3, m(a(OF_ROWS[None]))),
    "over processes": lambda m, a: am.distributed.linear_loss(a(FEATURES), a(WEIGHT), a(TARGET), m(a(OF_ROWS)), mask=a(KEEP)),
    "Activation": lambda m, a: am.nn.Activation(m(a(OF_ROWS)))(a(SCORES)),
    "Loss": lambda m, a: am.nn.Loss(m(a(OF_ROWS)))(a(SCORES), a(TARGET)),
}  # fmt: skip
OF_TORCH = ("over processes", "Activation", "Loss")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("call", CALLS)
def test_a_parameter_of_a_map_may_have_any_name(call, name, one_process):
    torch, compute = pytest.importorskip("torch"), CALLS[call]
    for array in (torch.tensor,) if call in OF_TORCH else (np.array, torch.tensor):
        np.testing.assert_allclose(compute(named(name), array), compute(named("own"), array), err_msg=str(array))


@pytest.mark.parametrize("name", ["keep", "x", "weight"])
def test_a_parameter_of_a_map_may_have_any_name_in_jax(name):
    array = pytest.importorskip("jax").numpy.asarray
    compute = CALLS["linear_loss"]
    np.testing.assert_allclose(compute(named(name), array), compute(named("own"), np.array), rtol=1e-5)
