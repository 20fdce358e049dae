"""The range of every parameter: an error where the values can be read, NaN where they can't, alike for numbers and for arrays of each kind.

One table of rows: how a call takes the parameter, and values in and out of its range. A parameter of a map or a transform that has no row
is found by its signature.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from kinds import KINDS, back

import anymax as am
from anymax import _array, mappings, transforms
from anymax._array import ranges
from anymax.thresholds import mellowmax
from anymax.transforms import adaptive

INF, NAN = math.inf, math.nan
X = np.array([[3.0, 1.0, 2.0, -1.0], [0.0, 0.5, 1.0, 2.0]]) / 4.0
TOKENS = np.array([[1, 2, 1, 2], [0, 1, 0, 1]])
ARRAYS = {kind: KINDS[kind] for kind in ("numpy", "torch", "jax") if kind in KINDS}


@dataclasses.dataclass(frozen=True)
class Row:
    """`call(value, x)` makes a map, transform or loss with the parameter, for rows x. An array has one value per row, [2, 1]."""

    call: Callable[[Any, Any], Any]
    good: tuple[float, ...]  # the ends of the range that belong to it, and a number inside
    bad: tuple[float, ...]  # the ends that do not, and numbers outside
    arrays: bool = True  # the parameter may be an array
    each: bool = True  # with one value for each row; else one number for all


def mapped(kind: Any, name: str, *more: Any, **fixed: Any) -> Callable[[Any, Any], Any]:
    return lambda v, x: am.apply(kind(*more, **{name: v}, **fixed), x)


def moved(make: Any, name: str, *more: Any, **fixed: Any) -> Callable[[Any, Any], Any]:
    return lambda v, x: make(*more, **{name: v}, **fixed)(x)


def target(x: Any) -> Any:
    index = [0, 3][: x.shape[0]]
    return torch.tensor(index) if isinstance(x, torch.Tensor) else np.array(index)


def one(v: Any) -> Any:
    return v.reshape(-1)[0] if hasattr(v, "reshape") else v


POSITIVE = ((1e-3, 1.0), (0.0, -1.0, INF))
NOT_NEGATIVE = ((0.0, 1.0), (-1e-3, INF))
SHARE = ((1e-3, 1.0), (0.0, -0.5, 1.001, INF))
UNIT = ((0.0, 0.5, 1.0), (-1e-3, 1.001))
INSIDE = ((1e-3, 0.5), (0.0, 1.0, -1.0))
AT_LEAST_0 = ((0.0, 1.0, INF), (-1e-3, -INF))
FINITE = ((-2.0, 0.0, 2.0), (INF, -INF))
ENTMAX = am.Entmax(1.5)
MAPS = {
    "Entmax alpha": Row(mapped(am.Entmax, "alpha"), *POSITIVE),
    "NormMax alpha": Row(mapped(am.NormMax, "alpha"), (1.001, 2.0), (1.0, 0.5, INF)),
    "Budget k": Row(mapped(am.Budget, "k"), (1e-3, 0.0, 4.0), (-1e-3, -INF)),
    "Budget k sigmoid": Row(mapped(am.Budget, "k", shape="sigmoid"), (0.0, 1e-3, 4.0), (-1e-3, -INF)),
    "Budget k laplace": Row(mapped(am.Budget, "k", shape="laplace"), (0.0, 1e-3, 4.0), (-1e-3, -INF)),
    "Fusedmax strength": Row(mapped(am.Fusedmax, "strength"), *NOT_NEGATIVE),
    "Ranks strength": Row(mapped(am.Ranks, "strength"), *POSITIVE),
    "Ranks strength kl": Row(mapped(am.Ranks, "strength", regularization="kl"), *POSITIVE),
    "PerturbMax scale": Row(mapped(am.PerturbMax, "scale"), *POSITIVE),
    "PerturbMax scale gumbel": Row(mapped(am.PerturbMax, "scale", noise="gumbel"), *POSITIVE),
    "Bounded upper": Row(mapped(am.Bounded, "upper"), *AT_LEAST_0),
    "Bounded alpha": Row(mapped(am.Bounded, "alpha", 0.5), (1.0, 1.5, 2.0), (0.999, 2.001, INF)),
    "SparseSoftmax p": Row(mapped(am.SparseSoftmax, "p"), *SHARE),
    "SparseSoftmax k": Row(mapped(am.SparseSoftmax, "k"), (1, 9), (0, -1)),
    "Sink score": Row(mapped(am.Sink, "score"), (-INF, -2.0, 0.0, 2.0), (INF,)),
    "Sink bound": Row(mapped(am.Sink, "bound", am.Bounded(0.4)), *AT_LEAST_0),
    "Elementwise tau": Row(mapped(am.Elementwise, "tau"), *FINITE),
    "Softpick epsilon": Row(mapped(am.Softpick, "epsilon"), *NOT_NEGATIVE, arrays=False),
    "Taylor order": Row(mapped(am.Taylor, "order"), (2, 170), (0, 1, 3, -2, 172), arrays=False),
    "PerturbMax nodes": Row(mapped(am.PerturbMax, "nodes"), (8, 64), (7, 0, -1), arrays=False),
}
MAPS_INSIDE = {  # a parameter of a map in a map, and of what is made of maps
    "Sink of Entmax": Row(lambda v, x: am.apply(am.Sink(am.Entmax(v)), x), *POSITIVE),
    "Elementwise of Entmax": Row(lambda v, x: am.apply(am.Elementwise(am.Entmax(v)), x), *POSITIVE),
    "soft_rank": Row(lambda v, x: am.soft_rank(x, regularization_strength=v), *POSITIVE),
    "soft_sort": Row(lambda v, x: am.soft_sort(x, regularization_strength=v), *POSITIVE),
    "soft_sort kl": Row(lambda v, x: am.soft_sort(x, "kl", v), *POSITIVE),
    "soft_permutation": Row(lambda v, x: am.soft_permutation(x, temperature=v).reshape(2, -1), *POSITIVE),
    "Sinkhorn": Row(lambda v, x: am.Sinkhorn(temperature=one(v))(x).reshape(1, -1), *POSITIVE, each=False),
}
TRANSFORMS = {
    "temperature T": Row(moved(transforms.temperature, "T"), *AT_LEAST_0),
    "scalable beta": Row(moved(transforms.scalable, "beta"), (-1.0, 0.0, 2.0), ()),
    "scalable gamma": Row(moved(transforms.scalable, "gamma"), (-1.0, 0.0, 2.0), ()),
    "scalable delta": Row(moved(transforms.scalable, "delta"), (-1.0, 0.0, 2.0), ()),
    "scalable n": Row(moved(transforms.scalable, "n"), (1.0, 9.0), (0.5, -1.0)),
    "prior log_p": Row(moved(transforms.prior, "log_p"), (-1.0, 0.0, 2.0), ()),
    "prior scale": Row(moved(transforms.prior, "scale"), (-1.0, 0.0, 2.0), ()),
    "prior strength": Row(moved(transforms.prior, "strength", [0.0, 0.0, 0.0, -1.0]), (-1.0, 0.0), (INF,), arrays=False),
    "softcap cap": Row(moved(transforms.softcap, "cap"), *POSITIVE),
    "noise scale": Row(moved(transforms.noise, "scale", "gumbel", generator=0), *NOT_NEGATIVE),
    "cosine eps": Row(moved(transforms.cosine, "eps", np.eye(4)), (1e-8, 1.0), (0.0, -1.0), arrays=False),
    "topk k": Row(moved(transforms.topk, "k"), (1, 9), (0, -1)),
    "topk min_keep": Row(moved(transforms.topk, "min_keep", 1), (1, 9), (0, -1), arrays=False),
    "topp p": Row(moved(transforms.topp, "p"), *SHARE),
    "minp p": Row(moved(transforms.minp, "p"), *SHARE),
    "topnsigma n": Row(moved(transforms.topnsigma, "n"), (1e-3, 2.0), (0.0, -1.0)),
    "typical mass": Row(moved(transforms.typical, "mass"), *SHARE),
    "epsilon_cutoff epsilon": Row(moved(transforms.epsilon_cutoff, "epsilon"), *INSIDE),
    "eta epsilon": Row(moved(transforms.eta, "epsilon"), *INSIDE),
    "xtc threshold": Row(moved(transforms.xtc, "threshold", generator=0), *UNIT),
    "xtc probability": Row(moved(transforms.xtc, "probability", generator=0), *UNIT),
    "toph a": Row(moved(transforms.toph, "a"), *SHARE),
    "toph_of_transformers a": Row(moved(adaptive.toph_of_transformers, "a"), *SHARE),
    "mink tau": Row(moved(transforms.mink, "tau"), *NOT_NEGATIVE),
    "dynamic_temperature low": Row(moved(transforms.dynamic_temperature, "low", high=1.0), *NOT_NEGATIVE),
    "dynamic_temperature high": Row(moved(transforms.dynamic_temperature, "high", low=0.0), *NOT_NEGATIVE),
    "dynamic_temperature exponent": Row(moved(transforms.dynamic_temperature, "exponent", 0.5, 1.0), *POSITIVE),
    "repetition_penalty penalty": Row(moved(transforms.repetition_penalty, "penalty", TOKENS), *POSITIVE),
    "repetition_penalty presence": Row(moved(transforms.repetition_penalty, "presence", TOKENS), *FINITE),
    "repetition_penalty frequency": Row(moved(transforms.repetition_penalty, "frequency", TOKENS), *FINITE),
    "dry multiplier": Row(moved(transforms.dry, "multiplier", TOKENS), *NOT_NEGATIVE),
    "dry base": Row(moved(transforms.dry, "base", TOKENS), (1.0, 2.0), (0.9, -1.0, INF)),
    "dry allowed_length": Row(moved(transforms.dry, "allowed_length", TOKENS), (1, 3), (0, -1), arrays=False),
    "logit_bias bias": Row(moved(transforms.logit_bias, "bias"), (-1.0, 0.0, -INF), (INF,)),
    "mix weight": Row(lambda v, x: transforms.mix(am.softmax(x), np.full(4, 0.25), v), *UNIT),
}  # fmt: skip
for _name in ("topp", "minp", "typical", "epsilon_cutoff", "eta", "toph", "mink"):
    _first = {"typical": 0.5, "mink": 3.0}.get(_name, 0.4)
    TRANSFORMS[f"{_name} min_keep"] = Row(
        moved(getattr(transforms, _name), "min_keep", _first), (1, 9), (0, -1), arrays=False
    )
TRANSFORMS["pless min_keep"] = Row(moved(transforms.pless, "min_keep"), (1, 9), (0, -1), arrays=False)


def layer(x: Any, **options: Any) -> Any:
    weight = torch.eye(4, dtype=x.dtype) if isinstance(x, torch.Tensor) else np.eye(4)
    return am.linear_loss(x, weight, target(x), "sparsemax", reduction="none", **options)


def tempered(v: Any, x: Any) -> Any:
    v = v[..., 0] if getattr(v, "ndim", 0) else v
    return am.linear_log_prob(
        x, torch.eye(4, dtype=x.dtype) if isinstance(x, torch.Tensor) else np.eye(4), target(x), temperature=v
    )


LOSSES = {
    "margin_loss scale": Row(lambda v, x: am.margin_loss("sparsemax", x, target(x), scale=v, reduction="none"), *POSITIVE),
    "margin_loss margin": Row(lambda v, x: am.margin_loss("sparsemax", x, target(x), margin=v, reduction="none"), *FINITE, arrays=False),
    "smoothed_nll epsilon": Row(
        lambda v, x: am.smoothed_nll("sparsemax", x, target(x), epsilon=v, reduction="none"), *POSITIVE, arrays=False
    ),
    "label_smoothing": Row(lambda v, x: am.nll("softmax", x, target(x), label_smoothing=v, reduction="none"), *UNIT, arrays=False),
    "linear z_loss": Row(lambda v, x: layer(x, z_loss=v), *NOT_NEGATIVE, arrays=False),
    "linear suppress": Row(lambda v, x: layer(x, suppress=v), *NOT_NEGATIVE, arrays=False),
    "linear temperature": Row(tempered, (1e-3, 1.0, INF), (-1e-3,)),
    "log_prob temperature": Row(lambda v, x: am.log_prob("softmax", x, target(x), temperature=v), *AT_LEAST_0),
    "contrastive temperature": Row(
        lambda v, x: am.contrastive_loss(x, x, temperature=one(v), reduction="none"), (1e-2, 1.0), (0.0, -1.0), each=False
    ),
    "logsumexp temperature": Row(lambda v, x: am.logsumexp(x, temperature=v), (0.0, 1.0), (-1e-3,)),
    "mellowmax omega": Row(lambda v, x: mellowmax(x, v), (-1.0, 0.0, 2.0), ()),
    "entropy alpha": Row(lambda v, x: am.entropy(am.softmax(x), "renyi", v), *POSITIVE),
    "attention weight of mix": Row(
        lambda v, x: am.attention(x[None], x[None], x[None], mix=(am.softmax(x @ x.T)[None], v)), *UNIT, arrays=False
    ),
    "attention softcap": Row(lambda v, x: am.attention(x[None], x[None], x[None], softcap=v), *POSITIVE, arrays=False),
    "attention dropout": Row(lambda v, x: am.attention(x[None], x[None], x[None], dropout_p=v), (0.0,), (1.0, -0.1), arrays=False),
    "perturb_argmax scale": Row(lambda v, x: am.sampling.perturb_argmax(x, scale=v, generator=0), *NOT_NEGATIVE, arrays=False),
    "gumbel_softmax temperature": Row(lambda v, x: am.gumbel_softmax(x, v, generator=0), *AT_LEAST_0),
}  # fmt: skip
TABLE = MAPS | MAPS_INSIDE | TRANSFORMS | LOSSES
IN_ARRAYS = {name: row for name, row in TABLE.items() if row.arrays}


def beside(row: Row, value: float) -> np.ndarray:
    """The value for the first row, and a good one for the second."""
    inside = next(v for v in reversed(row.good) if math.isfinite(v))
    return np.array(
        [[value], [inside]] if row.each else [[value]], dtype=None if isinstance(value, int) else np.float64
    )


def lost(out: Any) -> list[bool]:
    """For each row whether all of it is NaN; half of a row would be an error."""
    out = back(out).astype(float).reshape(len(out) if np.ndim(out) else 1, -1)
    nan = np.isnan(out)
    assert (nan.all(1) == nan.any(1)).all(), out
    return nan.all(1).tolist()


def never(row: Row) -> tuple[float, ...]:
    """What is out of the range; NaN is out of all of them."""
    return row.bad if all(isinstance(v, int) for v in row.good) else (*row.bad, NAN)


# -- where the values can be read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLE)
def test_a_number(name):
    row = TABLE[name]
    for value in row.good:
        assert not any(lost(row.call(value, X))), value
        row.call(np.float64(value) if isinstance(value, float) else np.int64(value), X)
    for value in never(row):
        with pytest.raises((ValueError, TypeError)):
            row.call(value, X)


@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("name", IN_ARRAYS)
def test_an_array(name, kind):
    row, make = IN_ARRAYS[name], ARRAYS[kind]
    for value in () if kind == "jax" else row.good:  # for JAX below
        assert not any(lost(row.call(make(beside(row, value)), make(X)))), value
    for value in never(row):
        with pytest.raises(ValueError):
            row.call(make(beside(row, value)), make(X))


# -- where they can't -----------------------------------------------------------------------------------------------------------------

# tokens of two rows, or draws, which vmap does not split
OF_TWO_ROWS = ("repetition_penalty", "dry", "noise", "xtc", "gumbel_softmax")


def holds(row, out, value):
    """The row of the parameter is NaN if it is out of range, and no other row; if there is one number for all, all of them are."""
    got, out_of_range = lost(out), value not in row.good
    assert got == [out_of_range] * len(got) if not row.each else (got[0] is out_of_range and not any(got[1:])), (
        value,
        got,
    )


@pytest.mark.parametrize("name", [n for n, row in IN_ARRAYS.items() if row.each and n.split()[0] not in OF_TWO_ROWS])
def test_under_vmap_of_torch(name):
    row = IN_ARRAYS[name]
    for value in (*never(row)[:2], row.good[0]):
        program = torch.func.vmap(lambda v, x: row.call(v[None], x[None]))
        holds(row, program(torch.tensor(beside(row, value)), torch.tensor(X)).reshape(2, -1), value)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if i % 12 == 5 else pytest.mark.whole) for i, n in enumerate(IN_ARRAYS)]
)
def test_under_jit_of_jax(name):
    row = IN_ARRAYS[name]
    program = jax.jit(row.call)
    for value in (*never(row), row.good[0]):
        holds(row, program(jnp.asarray(beside(row, value)), jnp.asarray(X)), value)


@pytest.mark.parametrize(
    "name", ["Entmax alpha", *(pytest.param(n, marks=pytest.mark.whole) for n in ("topp p", "margin_loss scale"))]
)
def test_under_compile_of_torch(name):
    row = IN_ARRAYS[name]
    program = torch.compile(row.call, backend="eager", fullgraph=True)
    for value in (row.bad[1], row.good[0]):
        holds(row, program(torch.tensor(beside(row, value)), torch.tensor(X)), value)


CHANGED = [
    (n, learned) for n in MAPS if MAPS[n].arrays for learned in (False, True) if not learned or n != "SparseSoftmax k"
]


@pytest.mark.parametrize(("name", "learned"), CHANGED)
def test_a_map_whose_parameter_changes_in_place(name, learned):
    row = MAPS[name]
    for value in (*never(row), row.good[0]):
        v = torch.tensor(beside(row, row.good[0])).requires_grad_(learned)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(am, "apply", lambda mapping, x: mapping)
            mapping = row.call(v, torch.tensor(X))
        v.data[0] = value
        for verb in (am.apply, am.log_apply):
            holds(row, verb(mapping, torch.tensor(X)), value)


# -- nothing is forgotten --------------------------------------------------------------------------------------------------------------

NO_NUMBER = {  # parameters that are no numbers, or integers without a range of their own
    "mapping", "shape", "noise", "regularization", "u", "du", "monotone", "sparse", "axis", "dim", "generator", "kind", "keep", "weight",
    "tokens", "classes", "sequence_breakers", "norm", "transforms", "by", "groups", "keep_groups", "group_by", "name", "transform",
}  # fmt: skip
OWN_TESTS = {("sequence_bias", "bias")}  # a dict of numbers


def named(name, kind):
    return f"{kind} {name}"


def test_each_parameter_of_a_map_has_a_row():
    for kind in mappings.CATALOGUE:
        for field in dataclasses.fields(kind):
            assert field.name in NO_NUMBER or named(field.name, kind.__name__) in MAPS, (kind.__name__, field.name)


def test_each_parameter_of_a_transform_has_a_row():
    for function in [getattr(transforms, name) for name in transforms.__all__] + [adaptive.toph_of_transformers]:
        if isinstance(function, type) or function.__name__ in ("compose", "from_config"):
            continue
        for name, parameter in inspect.signature(function).parameters.items():
            if name in NO_NUMBER or (function.__name__, name) in OWN_TESTS or parameter.kind is parameter.VAR_KEYWORD:
                continue
            if function is transforms.mix and name in ("p", "prior"):
                continue
            assert f"{function.__name__} {name}" in TRANSFORMS, (function.__name__, name)


def test_each_range_is_that_of_an_array_in_the_table():
    """A map and a transform say the ranges of all that they align to rows, so that rows out of range become NaN."""
    for kind in mappings.CATALOGUE:
        own = kind.__dict__.get("own_ranges", kind.__dict__.get("ranges", {}))
        for name in {f.name for f in dataclasses.fields(kind)} - NO_NUMBER:
            row = MAPS[named(name, kind.__name__)]
            assert (name in own) is row.arrays, (kind.__name__, name)
    known = [c for c in every_subclass(transforms.Transform) if c.__module__.startswith("anymax.") and c.aligned]
    for kind in known:
        assert set(kind.aligned) - {"keep", "by"} <= set(kind.ranges) | {"n"}, kind


def every_subclass(kind):
    return [c for below in kind.__subclasses__() for c in (below, *every_subclass(below))]


@pytest.mark.parametrize(
    ("allowed", "words"),
    [
        (ranges.POSITIVE, "above 0 and finite"), (ranges.NOT_NEGATIVE, "at least 0 and finite"), (ranges.SHARE, "above 0 and at most 1"),
        (ranges.UNIT, "from 0 to 1"), (ranges.INSIDE, "above 0 and below 1"), (ranges.AT_LEAST_1, "at least 1"), (ranges.FINITE, "finite"),
        (ranges.NOT_NAN, "a number, not NaN"), (ranges.Range(1.0, INF, "low", whole=True), "a whole number from 1 on"),
        (ranges.Range(-INF, INF, "low"), "a number below infinity, not NaN"), (ranges.ABOVE_0, "above 0"),
    ],
)  # fmt: skip
def test_the_words_of_a_range(allowed, words):
    assert allowed.words == words


def test_a_tensor_of_fakes_is_not_read():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        alpha = torch.tensor([[1.5], [-1.0]])
        assert not _array.readable(alpha)
        assert am.apply(am.Entmax(alpha), torch.zeros(2, 3)).shape == (2, 3)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
@pytest.mark.parametrize("kind", [torch.tensor, lambda *a, **k: torch.nn.Parameter(torch.tensor(*a, **k))])
def test_one_number_in_a_tensor_is_read_only_where_nothing_looks_on(kind):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            raise AssertionError(f"{function} was called")

    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        alpha, bad = kind(1.5, dtype=dtype), kind(-1.0, dtype=dtype)
        assert am.Entmax(alpha).alpha is alpha
        assert am.Entmax(alpha).facts.sparse
        assert not am.Entmax(kind(0.5, dtype=dtype)).facts.sparse
        for wrong in (bad, kind(NAN, dtype=dtype)):
            with pytest.raises(ValueError, match=r"Entmax\(alpha=...\): every entry must be above 0"):
                am.Entmax(wrong)
        with ranges.unchecked():
            am.Entmax(bad)
        with Seen():
            am.Entmax(bad)
        torch.func.vmap(lambda x, bad=bad: am.Entmax(bad) and x)(torch.zeros(2))
        torch.jit.trace(lambda x, bad=bad: am.Entmax(bad) and x, torch.zeros(2), check_trace=False)
        am.Entmax(bad.to("meta"))
    with pytest.raises(TypeError, match="dense"):
        am.Entmax(torch.tensor(1.5).to_sparse())


@pytest.mark.parametrize("shape", ["linear", "sigmoid", "laplace"])
def test_a_budget_of_nothing(shape):
    """k = 0 gives 0 with gradient 0, as a number, as an array and in some rows."""
    want = np.array([[0.0] * 4, am.budget(X, 1, shape=shape)[1]])
    for k in (0, 0.0, torch.tensor(0.0), torch.zeros(2, 1)):
        assert not am.budget(torch.tensor(X), k, shape=shape).any(), k
    for k in (torch.tensor([[0.0], [1.0]], dtype=torch.float64), torch.tensor([[0.0], [1.0]], requires_grad=True)):
        x = torch.tensor(X, requires_grad=True)
        p = am.budget(x, k, shape=shape)
        np.testing.assert_allclose(back(p), want, atol=1e-7)
        grads = torch.autograd.grad((p * torch.arange(4.0)).sum(), [x, k] if k.requires_grad else [x])
        assert not any(g[0].any() or g.isnan().any() for g in grads)
    np.testing.assert_allclose(am.budget(X, np.array([[0.0], [1.0]]), shape=shape), want, atol=1e-12)
    assert not am.apply(am.Sink(am.Budget(0, shape)), X).any()
    assert not am.segment_apply(am.Budget(np.zeros(2), shape), X.ravel(), lengths=[4, 4]).any()
