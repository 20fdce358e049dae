"""JAX: every transformation, compiled once a mapping, on a mesh, in halves, with and without x64."""

from __future__ import annotations

import numpy as np
import plainly
import pytest
from cases import takes_an_index, whole

jax = pytest.importorskip("jax")
jnp = jax.numpy
import jax.export

import anymax as A
from anymax import Budget, Entmax, NormMax, PerturbMax, Ratio, Sigsoftmax, Softmax, Sparsemax, SparseSoftmax, Taylor

MAPS = whole(
    {
        "softmax": Softmax(),
        "sparsemax": Sparsemax(),
        "entmax1.5": Entmax(1.5),
        "entmax3": Entmax(3.0),
        "budget": Budget(1.5),
        "budget_sigmoid": Budget(1.5, "sigmoid"),
        "normmax": NormMax(2.0),
        "taylor": Taylor(2),
        "ratio": Ratio.sigmoid(),
        "ratio_traced": Ratio(lambda x: 1.0 + x * x),
        "sigsoftmax": Sigsoftmax(),
        "sparse_softmax_k": SparseSoftmax(k=3),
        "sparse_softmax_p": SparseSoftmax(p=0.8),
        "perturb_max": PerturbMax(),
    }
)
FENCHEL = [n for n, m in MAPS.items() if m.facts.has_potential and takes_an_index(m)]
every_map = pytest.mark.parametrize("name", MAPS)
X = np.random.default_rng(0).normal(size=(3, 5))


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def square(name):
    return lambda x: (A.apply(MAPS[name], x) ** 2).sum()


@pytest.mark.whole(lambda name: name not in ("softmax", "entmax3", "taylor"))
@every_map
def test_values_and_derivatives(name, x64):
    """One program for the value, the Jacobians of both modes, vmap and the Hessian; held to NumPy and to differences."""
    mapping, x = MAPS[name], jnp.asarray(X)

    @jax.jit
    def program(x, v):
        f = lambda x: A.apply(mapping, x)  # noqa: E731
        p, tangent = jax.jvp(f, (x,), (v,))
        return (
            p,
            tangent,
            jax.vmap(f, 1, 1)(jnp.stack([x, v], 1)),
            jax.vmap(jax.grad(square(name)))(x),
            jax.hessian(square(name))(x[0]),
        )

    v = np.random.default_rng(1).normal(size=X.shape)
    p, tangent, stacked, gradient, hessian = program(x, jnp.asarray(v))
    f, h = (lambda a: A.apply(mapping, a)), 1e-6
    np.testing.assert_allclose(p, f(X), atol=1e-12)
    np.testing.assert_allclose(A.apply(mapping, x), p, atol=1e-14)  # without jit
    np.testing.assert_allclose(tangent, (f(X + h * v) - f(X - h * v)) / (2 * h), atol=1e-8)
    np.testing.assert_allclose(stacked, np.stack([f(X), f(v)], 1), atol=1e-12)

    def slope(a):
        return np.stack([((f(a + h * e) ** 2).sum(-1) - (f(a - h * e) ** 2).sum(-1)) / (2 * h) for e in np.eye(5)], -1)

    np.testing.assert_allclose(gradient, slope(X), atol=1e-8)
    grad = jax.jit(jax.grad(square(name)))
    want = np.stack([(grad(X[0] + h * e) - grad(X[0] - h * e)) / (2 * h) for e in np.eye(5)])
    np.testing.assert_allclose(hessian, want, atol=1e-6)


@pytest.mark.whole(lambda name: name not in ("sparsemax", "entmax3"))
@pytest.mark.parametrize("name", FENCHEL)
def test_the_loss(name, x64):
    mapping, t = MAPS[name], jnp.asarray([0, 4, 2])
    x = jnp.asarray(X)

    @jax.jit
    def program(x):
        f = lambda x: A.fenchel_young(mapping, x, t, reduction="sum")  # noqa: E731
        return f(x), jax.grad(f)(x), jax.hessian(lambda z: A.fenchel_young(mapping, z, 1))(x[0])

    value, gradient, hessian = program(x)
    np.testing.assert_allclose(value, A.fenchel_young(mapping, X, np.asarray(t), reduction="sum"), rtol=1e-11)
    np.testing.assert_allclose(gradient, A.apply(mapping, X) - np.eye(5)[np.asarray(t)], atol=1e-11)
    np.testing.assert_allclose(hessian, A.jacobian(mapping, X[0]), atol=1e-9)


@pytest.mark.whole
def test_gradient_in_alpha(x64):
    """One program for every alpha: it is an argument."""
    x, h = jnp.asarray(X[0]), 1e-5
    y = jnp.asarray([0.5, 0.0, 0.5, 0.0, 0.0])
    f = jax.jit(jax.jacrev(A.entmax, 1))
    g = jax.jit(jax.grad(lambda a: A.entmax_loss(x, y, alpha=a)))

    def loss(a):
        return plainly.fenchel_young(plainly.entmax(X[0], a), lambda q: plainly.neg_tsallis(q, a), X[0], np.asarray(y))

    for alpha in (0.6, 1.0, 1 + 1e-6, 1.0001, 1.5, 3.0):
        p = [plainly.entmax(X[0], alpha + s) for s in (-h, h)]
        np.testing.assert_allclose(f(x, jnp.asarray(alpha)), (p[1] - p[0]) / (2 * h), atol=2e-6)
        want = (loss(alpha + h) - loss(alpha - h)) / (2 * h)
        np.testing.assert_allclose(g(jnp.asarray(alpha)), want, atol=1e-7)


@pytest.mark.whole
@pytest.mark.parametrize(
    "shape", [(7,), (64, 10), (16, 1000), pytest.param((2048, 2048), marks=pytest.mark.whole)], ids=str
)
@pytest.mark.parametrize("scale", [1.0, 5.0, 20.0])
def test_softmax_beside_that_of_jax(shape, scale):
    """In fp32: within 5e-7 of the largest p of a row, and each p within the rounding of the exponent's argument."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape) * scale, jnp.float32)
    eps = np.finfo(np.float32).eps
    p, q, below = (np.asarray(a, np.float64) for a in (A.softmax(x), jax.nn.softmax(x), x - x.max(-1, keepdims=True)))
    assert (np.abs(p - q) <= 5e-7 * q.max(-1, keepdims=True)).all()
    normal = below > -80.0
    assert (np.abs(p - q) <= (6.0 - below) * eps * q)[normal].all()
    logs, others = (np.asarray(f(x), np.float64) for f in (A.log_softmax, jax.nn.log_softmax))
    assert np.abs(logs - others).max() <= 2 * eps * np.abs(np.asarray(others)).max()


@pytest.mark.whole(lambda name: name not in ("sparsemax", "taylor"))
@pytest.mark.parametrize("name", ["softmax", "sparsemax", "entmax1.5", "entmax3", "budget", "taylor", "perturb_max"])
def test_masks(name):
    x = X.copy()
    x[0, 1] = x[1, 2] = x[2] = -np.inf
    f = jax.jit(lambda x: A.apply(MAPS[name], x))
    np.testing.assert_allclose(f(jnp.asarray(x)), A.apply(MAPS[name], x), atol=2e-6)
    keep = jnp.asarray(np.isfinite(x))
    np.testing.assert_allclose(A.apply(MAPS[name], jnp.asarray(X), mask=keep), A.apply(MAPS[name], x), atol=2e-6)
    g = jax.jit(jax.grad(square(name)))(jnp.asarray(x))
    assert np.isfinite(g).all()
    assert not np.asarray(g)[np.isinf(x)].any()


def test_a_loss_with_a_mask_and_options_under_jit():
    x, t = jnp.asarray(X), jnp.asarray([0, -100, 4])
    keep = jnp.ones((3, 5), bool).at[:, 2].set(False)
    f = jax.jit(lambda x: A.entmax15_loss(x, t, jnp.arange(1.0, 6.0), mask=keep, label_smoothing=0.1))
    got, grad = jax.value_and_grad(f)(x)
    want = A.entmax15_loss(X, np.asarray(t), np.arange(1.0, 6.0), mask=np.asarray(keep), label_smoothing=0.1)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert not grad[:, 2].any()
    assert not grad[1].any()


@pytest.mark.parametrize("switch", ["jax_numpy_rank_promotion", "jax_numpy_dtype_promotion"])
def test_nothing_is_promoted_where_jax_forbids_it(switch):
    t, key, m = jnp.asarray([0, -100, 4]), jax.random.key(0), MAPS["perturb_max"]
    lengths, alpha = jnp.asarray([2]), jnp.asarray([[1.2], [2.0], [2.5]])
    before = getattr(jax.config, switch)
    jax.config.update(switch, "raise" if switch == "jax_numpy_rank_promotion" else "strict")
    try:
        for f in (
            lambda x: A.smoothed_nll(Taylor(2), x, t, jnp.ones(5)),
            lambda x: A.entmax_loss(x, t, jnp.ones(5), alpha=alpha, label_smoothing=0.1),
            lambda x: (A.log_apply(m, x), m.monte_carlo(x, 8, key)),
            lambda x: A.gumbel_softmax(x, hard=True, generator=key),
            lambda x: A.margin_loss(Softmax(), x / 9, t, margin=A.margins.ArcFace(0.5)),
            lambda x: A.attention(*[x[None, None]] * 3, Sparsemax(), is_causal=True, window=(2, 0), lengths=lengths),
        ):
            jax.make_jaxpr(f)(jnp.asarray(X))
    finally:
        jax.config.update(switch, before)


@pytest.mark.whole
def test_debug_nans_stops_at_nothing_that_is_sound():
    x, t = jnp.asarray(X).at[1, 3].set(-jnp.inf), jnp.asarray([0, -100, 4])
    with jax.debug_nans(True):
        assert A.log_apply(Taylor(2), x)[1, 3] == -jnp.inf
        assert jnp.isfinite(A.smoothed_nll(Sparsemax(), x, t))
        assert jnp.isfinite(A.threshold(Entmax(1.5), x).tau).all()
        assert jnp.isfinite(A.entmax15_loss(x, t))


def test_a_nan_is_found_by_debug_nans():
    x = jnp.asarray(X).at[0, 0].set(jnp.inf)
    with jax.debug_nans(True):
        for f in (A.sparsemax, lambda x: A.entmax15_loss(x, jnp.asarray([0, 2, 4])), lambda x: A.apply(Taylor(2), x)):
            with pytest.raises(FloatingPointError, match="nan"):
                f(x)


def test_without_jit():
    x, t = jnp.asarray(X), jnp.asarray([0, 2, 4])
    f = jax.value_and_grad(lambda x: A.sparsemax_loss(x, t) + (A.entmax15(x) ** 2).sum())
    with jax.disable_jit():
        got = f(x)
    for a, b in zip(got, f(x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.whole(lambda mapping: mapping is not Entmax)
@pytest.mark.parametrize(
    "mapping", [Entmax, NormMax, Budget, lambda v: SparseSoftmax(p=v / 2)], ids=["entmax", "normmax", "budget", "topp"]
)
def test_outside_of_jit_one_program_serves_every_number(mapping):
    x, y = jnp.asarray(X, jnp.float32), jnp.asarray([0, 1, 2])
    compiled = []

    def calls(value):
        m = mapping(value)
        np.testing.assert_allclose(A.apply(m, x), A.apply(m, np.asarray(x)), atol=1e-6)
        jax.grad(lambda x: (A.apply(m, x) ** 2).sum())(x)
        jax.vmap(lambda x: A.apply(m, x))(x)
        if m.has_threshold:
            np.testing.assert_allclose(A.threshold(m, x).tau, A.threshold(m, np.asarray(x)).tau, rtol=1e-5)
        if mapping is not Budget:
            loss = A.fenchel_young(m, x, y)
            np.testing.assert_allclose(loss, A.fenchel_young(m, np.asarray(x), np.asarray(y)), rtol=1e-5)
            jax.grad(lambda x: A.fenchel_young(m, x, y))(x)

    calls(1.2345)
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
    try:
        for i in range(3):
            calls(1.2346 + 0.0123 * i)
    finally:
        jax.monitoring.clear_event_listeners()
    assert not [event for event in compiled if "backend_compile" in event]
    with jax.disable_jit(False):
        program = jax.jit(lambda x: A.apply(mapping(1.2345), x))
        np.testing.assert_allclose(program(x), A.apply(mapping(1.2345), x), atol=1e-6)


def test_equal_mappings_are_compiled_once():
    from anymax.autodiff import jax as leaf

    x = jnp.asarray(np.ones((2, 7), np.float32))
    A.entmax(x, 1.37)
    size = leaf._compiled._cache_size()
    A.entmax(x, 1.37)
    A.apply(Entmax(alpha=1.37), x + 1)
    A.apply(Entmax(jnp.asarray(1.37)), x)  # an array is an argument, as an unusual number is
    A.apply(Entmax(jnp.asarray(1.38)), x)
    assert leaf._compiled._cache_size() == size
    traces = []

    @jax.jit
    def f(x):
        traces.append(1)
        return A.apply(Entmax(1.37), x)

    f(x)
    f(x + 1)
    assert len(traces) == 1


@pytest.mark.whole
@pytest.mark.parametrize("alpha", [3.0, np.float32(2.5)])
def test_export_of_any_number_of_classes(alpha):
    (n,) = jax.export.symbolic_shape("n")
    f = jax.jit(lambda x: A.entmax(x, alpha if isinstance(alpha, float) else jnp.asarray(alpha)))
    program = jax.export.export(f)(jax.ShapeDtypeStruct((3, n), jnp.float32))
    for size in (1, 5, 70):
        x = jnp.asarray(np.random.default_rng(size).normal(size=(3, size)), jnp.float32)
        np.testing.assert_allclose(program.call(x), f(x), atol=1e-6)


def test_the_gradient_of_a_soft_targets_loss():
    x, y = jax.numpy.asarray([[1.0, 0.5, -2.0]]), jax.numpy.asarray([[0.2, 0.3, 0.5]])
    got = jax.grad(lambda x: A.fenchel_young(Sparsemax(), x, y, reduction="sum"))(x)
    np.testing.assert_allclose(got, A.sparsemax(x) - y, atol=1e-6)


def test_the_loss_of_a_masked_class_in_plain_operations():
    from anymax.kernels import xla_rows

    x = jax.numpy.asarray([[1.0, -np.inf, 0.0], [1.0, 0.0, -np.inf]])
    value = xla_rows.plain_loss(Sparsemax(), x, A.sparsemax(x), jax.numpy.asarray([1, 1]))
    np.testing.assert_allclose(value, [np.inf, A.sparsemax_loss(x, np.array([0, 1]), reduction="none")[1]], rtol=1e-6)
