"""Ragged rows in JAX: programs that call the engine, against torch's and the rows'; what they do with an index that is not known."""

import numpy as np
import pytest

import anymax
from anymax import Entmax, NormMax, Sigsoftmax, Softmax, SparseSoftmax, segment_apply
from anymax.kernels import jax_primitives, native

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
jnp = jax.numpy
pytestmark = pytest.mark.skipif(isinstance(native.load(), str), reason="no engine")

LENGTHS = np.random.default_rng(0).integers(0, 60, 20)
COUNT, ENTRIES = len(LENGTHS), int(LENGTHS.sum())
SORTED = np.repeat(np.arange(COUNT), LENGTHS)
SHUFFLED = np.random.default_rng(1).permutation(SORTED)
ALPHA = np.linspace(1.1, 2.0, COUNT)[:, None]
X, G = (np.random.default_rng(s).normal(size=(ENTRIES, 3)).astype(np.float32) * 2 for s in (2, 3))
MAPS = {
    "softmax": lambda a: Softmax(), "entmax": lambda a: Entmax(1.5), "topk": lambda a: SparseSoftmax(k=3),
    "sigsoftmax": lambda a: Sigsoftmax(), "alpha of each": lambda a: Entmax(a(ALPHA)),
}  # fmt: skip


@pytest.mark.whole(lambda traced, name: name not in ("entmax", "alpha of each") or not traced)
@pytest.mark.parametrize("traced", [True, False], ids=["index traced", "index known"])
@pytest.mark.parametrize("name", MAPS)
def test_a_program_gives_what_numpy_and_torch_have(name, traced):
    for index in (SORTED, SHUFFLED):
        t = torch.tensor(X, requires_grad=True)
        p = segment_apply(MAPS[name](torch.tensor), t, index=index, num_segments=COUNT)
        (slope,) = torch.autograd.grad(p, t, torch.tensor(G))

        def apply(x, index):
            return segment_apply(MAPS[name](jnp.asarray), x, index=index, num_segments=COUNT)

        f = jax.jit(apply) if traced else lambda x, index, apply=apply: jax.jit(lambda x: apply(x, index))(x)
        np.testing.assert_array_equal(f(X, index), p.detach())
        got = jax.grad(lambda x, index=index, f=f: jnp.sum(f(x, index) * G))(jnp.asarray(X))
        np.testing.assert_array_equal(got, slope)


@pytest.mark.whole
def test_the_engine_is_in_the_program_and_nothing_is_padded():
    f = jax.jit(lambda x, index: segment_apply("sparsemax", x, index=index, num_segments=COUNT))
    words = f.lower(X, SHUFFLED).as_text()
    assert words.count(f"custom_call @{jax_primitives.TARGET}") == 2  # one sorts
    assert "stablehlo.sort" not in words
    with anymax.use("reference"):
        g = jax.jit(lambda x, index: segment_apply("sparsemax", x, index=index, num_segments=COUNT))
        assert jax_primitives.TARGET not in g.lower(X, SHUFFLED).as_text()
        np.testing.assert_allclose(g(X, SHUFFLED), f(X, SHUFFLED), atol=2e-6)
    exported = jax.export.export(f)(
        jax.ShapeDtypeStruct(X.shape, X.dtype), jax.ShapeDtypeStruct(SHUFFLED.shape, "int32")
    )
    assert jax_primitives.TARGET not in exported.mlir_module()


@pytest.mark.whole(lambda dtype: dtype != "float16")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_entries_of_no_segment_become_nan(dtype):
    index = SHUFFLED.copy()
    index[5], index[9] = COUNT, -3
    x = jnp.asarray(X).astype(dtype)
    got = jax.jit(lambda i: segment_apply("sparsemax", x, index=i, num_segments=COUNT))(index).astype("float32")
    assert np.nonzero(np.isnan(got).all(axis=1))[0].tolist() == [5, 9]
    assert np.isnan(got).sum() == 6
    ptr = np.array([3, 10, ENTRIES - 1])
    got = jax.jit(lambda ptr: segment_apply("sparsemax", x, ptr=ptr))(ptr).astype("float32")
    assert np.nonzero(np.isnan(got).all(axis=1))[0].tolist() == [0, 1, 2, ENTRIES - 1]
    np.testing.assert_array_equal(got[3:10], segment_apply("sparsemax", x[3:10], lengths=[7]).astype("float32"))


def test_bounds_that_do_not_ascend_are_refused_as_the_program_runs():
    f = jax.jit(lambda ptr: segment_apply("sparsemax", jnp.asarray(X), ptr=ptr))
    with pytest.raises(Exception, match="bounds must ascend"):
        f(np.array([0, 20, 10, ENTRIES])).block_until_ready()


def test_vmap_over_scores_parameters_and_segments():
    f = lambda x, index: segment_apply("entmax15", x, index=index, num_segments=COUNT)  # noqa: E731
    both, indices = jnp.stack([X, 2 * X]), jnp.stack([SHUFFLED, SORTED])
    got = jax.vmap(f, (0, None))(both, SHUFFLED)
    np.testing.assert_array_equal(got[1], f(2 * X, SHUFFLED))
    got = jax.vmap(f)(both, indices)
    np.testing.assert_array_equal(got[0], f(X, SHUFFLED))
    np.testing.assert_array_equal(got[1], f(2 * X, SORTED))
    slopes = jax.vmap(jax.grad(lambda x: jnp.sum(f(x, SORTED) ** 2)))(both)
    np.testing.assert_allclose(slopes[0], jax.grad(lambda x: jnp.sum(f(x, SORTED) ** 2))(jnp.asarray(X)), atol=1e-6)
    alphas = jnp.asarray([1.2, 1.7])
    each = jax.vmap(lambda a: segment_apply(NormMax(a), jnp.asarray(X), index=SORTED, num_segments=COUNT))(alphas)
    want = segment_apply(NormMax(jnp.asarray(1.7)), jnp.asarray(X), index=SORTED, num_segments=COUNT)
    np.testing.assert_allclose(each[1], want, atol=2e-6)


@pytest.mark.whole
def test_the_derivative_of_a_parameter():
    f = lambda a: jnp.sum(segment_apply(Entmax(a), jnp.asarray(X[:8, 0]), lengths=[3, 5]) ** 3)  # noqa: E731
    with anymax.use("reference"):
        want = jax.grad(f)(jnp.asarray(1.4))
    np.testing.assert_allclose(jax.grad(f)(jnp.asarray(1.4)), want, rtol=1e-3)


@pytest.mark.whole
def test_second_derivatives_and_forward_mode():
    x, step = jnp.asarray(X[:6, 0]), jnp.asarray(G[:6, 0])
    f = lambda x: segment_apply("softmax", x, lengths=[2, 4])  # noqa: E731
    slope = lambda x: jax.vjp(f, x)[1](step)[0]  # noqa: E731
    moved = jax.jvp(slope, (x,), (step,))[1]
    near = [slope(x + e * step).astype("float32") for e in (1e-2, -1e-2)]
    np.testing.assert_allclose(moved, (near[0] - near[1]) / 2e-2, rtol=3e-3, atol=1e-3)
    np.testing.assert_allclose(jax.jvp(f, (x,), (step,))[1], slope(x), atol=1e-6)


@pytest.mark.whole(lambda mapping: isinstance(mapping, Entmax))
@pytest.mark.parametrize("mapping", [Softmax(), Entmax(1.5)], ids=repr)
def test_a_traced_target_of_another_segment_makes_its_loss_nan(mapping):
    def loss(x, target):
        return anymax.segment_loss(mapping, x, target, lengths=[2, 3], reduction="none")

    x = np.arange(5.0, dtype=np.float32)
    good, bad = (jax.jit(loss)(x, np.array(target)) for target in ([1, 4], [3, 4]))
    assert np.isnan(np.asarray(bad)).tolist() == [True, False]
    np.testing.assert_allclose(bad[1], good[1], rtol=1e-6)
    np.testing.assert_allclose(good, loss(x, np.array([1, 4])), rtol=1e-6)
