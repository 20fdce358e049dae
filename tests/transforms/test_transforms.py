"""The contract of transforms: composition, equality, axes, dtypes and errors."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import pathlib
import pickle

import numpy as np
import pytest
from kinds import KINDS, back, every_kind
from refusals import each, refuses
from transform_cases import ALL, INF, everyone

import anymax as A
from anymax.kernels import decode
from anymax.transforms import compose, minp, temperature, topk, topp
from anymax.transforms.truncation import Truncation


def test_functions_of_scores_are_transforms():
    own = eval("lambda x: x / 2", {})  # of no module
    x = np.array([1.0, 2.0, 4.0])
    for function in (own, A.log_softmax, A.soft_rank):
        np.testing.assert_array_equal(compose(function, function)(x), function(function(x)))


def test_compose_goes_left_to_right_and_flattens():
    x = np.array([1.0, 2.0, 3.0])
    assert np.array_equal(compose(lambda v: v + 1, temperature(2))(x), [1, 1.5, 2])
    assert np.array_equal(compose()(x), x)
    deep = compose(topk(2), compose(temperature(2.0), compose(minp(0.1))))
    assert deep == compose(topk(2), temperature(2.0), minp(0.1))
    assert repr(deep) == "compose(topk(k=2), temperature(T=2.0), minp(p=0.1))"
    with pytest.raises(TypeError, match="expected functions"):
        compose(2.0)


@everyone
def test_pickles_and_prints(name):
    transform = ALL[name]
    x = np.random.default_rng(0).normal(size=(3, 5))
    assert np.array_equal(pickle.loads(pickle.dumps(transform))(x), transform(x))
    assert "(" in repr(transform)
    assert len(repr(transform)) < 90
    assert hash(transform) == hash(transform)
    with pytest.raises(AttributeError):
        transform.axis = 3


def test_equality_is_by_value():
    assert topk(3) == topk(3)
    assert topk(3) != topk(3, axis=0)
    assert topk(3) != topp(0.3)
    assert repr(topk(3, dim=1)) == "topk(k=3, axis=1)"


@every_kind
@everyone
def test_kept_properties(kind, name):
    """The dtype is kept, the input is not modified, a NaN or +inf stays in its row, and -inf stays -inf."""
    transform, c = ALL[name], KINDS[kind]
    x = np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32)
    a = c(x)
    y = back(transform(a))
    assert y.dtype == np.float32
    assert np.array_equal(back(a), x)
    for strange in (math.nan, INF):
        bad = x.copy()
        bad[1, 2] = strange
        z = back(transform(c(bad)))
        np.testing.assert_array_equal(z[[0, 2]], y[[0, 2]])
        assert not np.isfinite(z[1]).all()
        assert np.isnan(z[1]).any() or (z[1] == INF).any()
    if name != "cosine":
        holes = x.copy()
        holes[1, 2], holes[2] = -INF, -INF
        z = back(transform(c(holes)))
        assert z[1, 2] == -INF
        assert (z[2] == -INF).all()
        assert not np.isnan(z).any()


ROWS = {  # what has one value for each of three rows, with the classes along the first axis
    "temperature[]": temperature(np.array([[2.0, 1.0, 0.5]]), axis=0),
    "topk[]": topk(np.array([[3, 1, 2]]), min_keep=2, axis=0),
}


@every_kind
@everyone
def test_any_axis(kind, name):
    x = np.random.default_rng(2).normal(size=(3, 5))
    if name in ("noise", "compose"):
        return
    transform, c = ALL[name], KINDS[kind]
    other = dataclasses.replace(transform, axis=0)
    if name in ROWS:
        other = ROWS[name]
    np.testing.assert_allclose(back(other(c(x.T))), back(transform(c(x))).T, rtol=1e-13)
    if name not in ROWS and kind != "jax":
        cube = np.random.default_rng(3).normal(size=(2, 5, 3))
        middle = dataclasses.replace(transform, axis=1)
        want = np.moveaxis(back(transform(c(np.moveaxis(cube, 1, -1)))), -1, 1)
        np.testing.assert_allclose(back(middle(c(cube))), want, rtol=1e-13)


@everyone
def test_the_contract(name):
    for t in getattr(ALL[name], "transforms", (ALL[name],)):
        assert set(t.aligned) <= set(dict(t.params))
        assert t.step is None or t.step in decode.STEPS
        assert t.replace() == t
        assert t.truncates == isinstance(t, Truncation)
        assert getattr(A.transforms, t.name)


def test_each_transform_has_its_rows_in_the_tables():
    """All laws go over tests/transforms/transform_cases.py, and tests/autodiff/test_torch_derivatives.py has a table of its own."""
    have = {t.name for case in ALL.values() for t in getattr(case, "transforms", (case,))}
    made = {
        name
        for name in A.transforms.__all__
        if inspect.isfunction(make := getattr(A.transforms, name)) and make.__annotations__["return"] == "Transform"
    }
    assert made - have == set(), "these have no row in tests/transforms/transform_cases.py"
    tree = ast.parse(
        (pathlib.Path(__file__).parents[1] / "autodiff" / "test_torch_derivatives.py").read_text(encoding="utf-8")
    )
    table = next(
        n for n in ast.walk(tree) if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "TRANSFORMS"
    )
    assert made - {ast.literal_eval(k) for k in table.value.keys} == set(), "these have no row in TRANSFORMS"  # type: ignore[attr-defined]


def test_a_transform_owes_its_rows():
    with pytest.raises(TypeError, match="abstract method"):
        A.transforms.Transform(())


def test_axis_and_dim():
    x = np.random.default_rng(0).normal(size=(4, 3))
    assert np.array_equal(topk(2, dim=0)(x), topk(2, axis=0)(x))
    with pytest.raises(TypeError, match="two names"):
        topk(2, axis=0, dim=1)
    with pytest.raises(ValueError, match="axis 2 is out of range"):
        topk(2, axis=2)(x)


def test_integers_are_promoted_and_booleans_are_errors():
    assert np.array_equal(temperature(2)([1, 3]), [0.5, 1.5])
    assert np.array_equal(topk(1)(np.array([1, 3])), [-INF, 3.0])
    for transform in ALL.values():
        with pytest.raises(TypeError, match="bool"):
            transform(np.ones((3, 5), bool))


@everyone
def test_empty_batches(name):
    if name not in ROWS:
        assert ALL[name](np.zeros((0, 5))).shape == (0, 5)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@everyone
def test_halves_are_computed_in_fp32(name, half):
    torch = pytest.importorskip("torch")
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(getattr(torch, half))
    y = ALL[name](x)
    assert y.dtype == x.dtype
    assert torch.equal(y, ALL[name](x.float()).to(x.dtype))


REFUSED = {  # a call, what it raises, and its words
    "temperature(-1.0)": (ValueError, "at least 0"),
    "temperature(math.nan)": (ValueError, "at least 0"),
    "temperature(np.array([1.0, -0.5]))": (ValueError, "at least 0"),
    'temperature("1")': (TypeError, "number or an array"),
    "temperature(True)": (TypeError, "number or an array"),
    "mask([1, 0])": (TypeError, "boolean"),
    "prior()": (TypeError, "log_p=.*scale="),
    "prior(math.nan)": (ValueError, "NaN"),
    "prior(np.zeros(3), strength=math.inf)": (TypeError, "finite number"),
    "prior(np.zeros(3), strength=np.ones(3))": (TypeError, "finite number"),
    'prior(0.5, strength="sparsemax")': (TypeError, "one number a class"),
    'prior(np.zeros(3), strength="square")': (ValueError, "no strength fits"),
    "prior(np.zeros(3), strength=A.Entmax(np.array([1.5])))": (TypeError, "arrays as parameters"),
    'normalize("l3")': (ValueError, "'l1', 'l2', 'max' or 'standard'"),
    "topk(0)": (ValueError, "at least 1"),
    "topk(1.5)": (TypeError, "integer"),
    "topk(True)": (TypeError, "integer"),
    "topp(0)": (ValueError, "above 0 and at most 1"),
    "topp(1.1)": (ValueError, "above 0 and at most 1"),
    "minp(0.0)": (ValueError, "above 0 and at most 1"),
    "minp(0)": (ValueError, "for off is no transform: leave it out, or use from_config"),
    "topk(-1)": (ValueError, "k must be at least 1 .a config's -1 for off is no transform"),
    "topnsigma(0)": (ValueError, "n must be above 0 .a config's 0 for off is no transform"),
    "topnsigma(-2)": (ValueError, "n must be above 0; got -2"),
    "topnsigma(np.array([[1.0], [0.0]]))": (ValueError, "n must be above 0"),
    "scalable(n=0)": (ValueError, "n must be at least 1"),
    'scalable(beta="1")': (TypeError, "beta must be a number or an array"),
    "cosine(np.ones(3))": (ValueError, r"\[classes, features\]"),
    "cosine(np.ones((2, 3)), eps=0)": (ValueError, "eps"),
    "cosine(np.ones((2, 3)))(np.ones(4))": (ValueError, "4 features and weight has 3"),
    'noise("cauchy", generator=0)': (ValueError, "gumbel, normal"),
    "noise(scale=-1, generator=0)": (ValueError, "at least 0"),
    "noise(scale=INF, generator=0)": (ValueError, "at least 0 and finite"),
    'normalize("l2")(np.zeros((3, 0)))': (ValueError, r"scores of shape \(3, 0\) have no classes along their axis"),
    "topnsigma(1.0)(np.zeros((3, 0)))": (ValueError, "have no classes along their axis; at least one is needed"),
    "topk(3, min_keep=0)": (ValueError, "min_keep must be an integer of at least 1"),
    "topp(0.5, min_keep=1.5)": (ValueError, "min_keep must be an integer of at least 1"),
    "typical(0)": (ValueError, "above 0 and at most 1"),
    "typical(1.01)": (ValueError, "above 0 and at most 1"),
    "epsilon_cutoff(1.0)": (ValueError, "above 0 and below 1"),
    "epsilon_cutoff(np.array([0.5, np.nan]))": (ValueError, "above 0 and below 1"),
    "eta(0.0)": (ValueError, "above 0 and below 1"),
    'eta("0.1")': (TypeError, "epsilon must be a number or an array"),
    "xtc(-0.1)": (ValueError, "threshold must be from 0 to 1"),
    "xtc(0.1, 1.1)": (ValueError, "probability must be from 0 to 1"),
    'xtc(0.1, generator="0")([1.0, 2.0])': (TypeError, "generator: NumPy arrays need"),
    "xtc(generator=[1, 2])(np.zeros((3, 2)))": (ValueError, "got 2 for 3 rows; give one for each row"),
    "pless(0.3)": (TypeError, "norm must be True or False, got 0.3"),
    "pless(np.ones(3))": (TypeError, r"pless makes a function of scores, as in pless\(...\)\(x\)"),
    "pless(min_keep=0)": (ValueError, "min_keep must be an integer of at least 1"),
    "toph(0)": (ValueError, "a must be above 0 and at most 1"),
    "mink(-1.0)": (ValueError, "tau must be at least 0 and finite"),
    "dynamic_temperature(-1, 1)": (ValueError, "low must be at least 0 and finite"),
    "dynamic_temperature(0, INF)": (ValueError, "high must be at least 0 and finite"),
    "dynamic_temperature(0, 1, 0)": (ValueError, "exponent must be above 0 and finite"),
    "dry(3)": (ValueError, "dry: tokens must have an axis"),
    "dry([0.5])": (TypeError, "dry: tokens must be integers"),
    "dry([0], -1)": (ValueError, "multiplier must be at least 0 and finite"),
    "dry([0], base=0.9)": (ValueError, "base must be at least 1 and finite"),
    "dry([0], allowed_length=0)": (ValueError, "allowed_length must be an integer of at least 1"),
    'dry([0], sequence_breakers="\\n")': (TypeError, "sequence_breakers must be a list of classes"),
    "dry([0], sequence_breakers=[-1])": (TypeError, "sequence_breakers must be a list of classes"),
    "dry([0, 5])(np.ones(5))": (ValueError, "dry: a token is out of range for 5 classes"),
    "dry([[0], [1]])(np.ones((3, 5)))": (ValueError, "dry: tokens of shape .* do not belong to rows"),
    "repetition_penalty(3)": (ValueError, "tokens must have an axis"),
    "repetition_penalty([0.5])": (TypeError, "tokens must be integers"),
    "repetition_penalty([0], 0.0)": (ValueError, "penalty must be above 0 and finite"),
    "repetition_penalty([0], presence=INF)": (ValueError, "presence must be finite"),
    "repetition_penalty([0, 5])(np.ones(5))": (ValueError, "out of range for 5 classes; tokens are 0 to 4"),
    "repetition_penalty([0, -2])(np.ones(5))": (ValueError, "out of range for 5 classes; tokens are 0 to 4"),
    "repetition_penalty([[0], [1]])(np.ones((3, 5)))": (ValueError, "do not belong to rows"),
    "repetition_penalty([[0], [1]])(np.ones(5))": (ValueError, "do not belong to rows"),
    "logit_bias({5: 1.0})(np.ones(5))": (ValueError, "class 5 is out of range for 5 classes"),
    "logit_bias({-1: 1.0})(np.ones(5))": (ValueError, "class -1 is out of range for 5 classes"),
    "logit_bias({0.5: 1.0})": (TypeError, "keys of bias must be classes"),
    'logit_bias({0: "1"})': (TypeError, "values of bias must be numbers"),
    "logit_bias({0: INF})": (ValueError, "below infinity"),
    "logit_bias([0.0, np.nan])": (ValueError, "below infinity"),
    "mix([0.5, 0.5], [0.5, 0.5], 1.5)": (ValueError, "from 0 to 1"),
    "temperature(np.ones((2, 2, 2)), axis=0)(np.ones((2, 2)))": (ValueError, "does not broadcast"),
}  # fmt: skip
NAMES = {**vars(A.transforms), "np": np, "math": math, "INF": INF, "A": A}


@each({call: (lambda call=call: eval(call, NAMES), error, words) for call, (error, words) in REFUSED.items()})
def test_what_is_refused(call, error, words):
    refuses(call, error, words)
