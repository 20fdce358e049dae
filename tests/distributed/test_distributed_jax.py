"""Classes along an axis of JAX's mesh: the same numbers as of one array, and the scores are not gathered."""

import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest

if importlib.util.find_spec("jax") is None:
    pytest.skip("needs JAX", allow_module_level=True)

HEAD = """
import re, sys
import jax, numpy as np, jax.numpy as jnp
jax.config.update("jax_enable_x64", True)
import anymax as A
from anymax import distributed as D
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("classes",))
rng = np.random.default_rng(0)
def finite(v):
    return jnp.where(jnp.isfinite(v), v, 0)
def split(f, out, check=True):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P(None, "classes"), out_specs=out, check_vma=check))
def held(x, f, ref, out, w=1.0, check=True):
    g = split(f, out, check)
    np.testing.assert_allclose(g(x), ref(x), rtol=1e-10, atol=1e-12)
    if jnp.issubdtype(g(x).dtype, jnp.floating):
        got, want = (jax.grad(lambda x: (finite(h(x)) * w).sum())(x) for h in (g, ref))
        np.testing.assert_allclose(got, want, rtol=1e-8, atol=1e-10)
def gathered(f, x):
    "How many numbers the largest all-gather of the program brings together."
    text = split(f, P(None, "classes")).lower(x).compile().as_text()
    sizes = re.findall(r"= \\(?f64\\[([\\d,]*)\\][^=]* all-gather", text)
    return max([int(np.prod([int(v) for v in s.split(",") if v])) for s in sizes], default=0), len(sizes)
"""


def right(program):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(program) + "\nprint('right')"],
        env=env, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "right\n"


@pytest.mark.whole
def test_classes_on_four_devices():
    right("""
    x, w = jnp.asarray(rng.normal(size=(3, 2000))), jnp.asarray(rng.normal(size=(3, 2000)))
    t = jnp.asarray([0, 1999, 5])
    held(x, lambda x: D.apply("softmax", x, axis_name="classes"), A.softmax, P(None, "classes"), w)
    held(x, lambda x: D.nll("softmax", x, t, axis_name="classes"), lambda x: A.cross_entropy(x, t), P())
    held(x, lambda x: D.fenchel_young("sparsemax", x, t, axis_name="classes"), lambda x: A.sparsemax_loss(x, t), P())
    y = jax.nn.softmax(w)
    for loss, m in (("nll", "softmax"), ("fenchel_young", "sparsemax")):
        value = jax.jit(jax.shard_map(lambda x, y: getattr(D, loss)(m, x, y, axis_name="classes"), mesh=mesh,
            in_specs=P(None, "classes"), out_specs=P()))(x, y)
        np.testing.assert_allclose(value, getattr(A, loss)(m, x, y), rtol=1e-10)
    few, many = gathered(lambda x: D.apply("sparse_softmax:k=5", x, axis_name="classes"), x)
    assert 0 < few <= 3 * 4 * 8, few
    """)


@pytest.mark.whole
def test_an_output_layer_on_four_devices():
    right("""
    x, w, b = (jnp.asarray(rng.normal(size=s)) for s in ((2, 3, 6), (40, 6), (40,)))
    t = jnp.asarray(rng.integers(0, 40, (2, 3)))
    factors = jnp.asarray(rng.uniform(size=40))
    for mapping, options in (("softmax", {}), ("sparsemax", {"reduction": "none"}), ("entmax15", {"weight": factors}),
                             ("sparse_softmax:k=3", {}), ("sparse_softmax:p=0.7", {"weight": factors})):
        def one(x, w, b, f, chunk):
            given = {k: f if k == "weight" else v for k, v in options.items()}
            return D.linear_loss(x, w, t, mapping, linear_bias=b, axis_name="classes", chunk=chunk, **given)
        for chunk in (None, 4):
            g = jax.jit(jax.shard_map(lambda x, w, b, f: one(x, w, b, f, chunk), mesh=mesh,
                in_specs=(P(), P("classes"), P("classes"), P("classes")), out_specs=P()))
            ref = lambda x, w, b: A.linear_loss(x, w, t, mapping, linear_bias=b, **options)
            np.testing.assert_allclose(g(x, w, b, factors), ref(x, w, b), rtol=1e-10)
            for got, want in zip(jax.grad(lambda *a: g(*a, factors).sum(), (0, 1, 2))(x, w, b),
                                 jax.grad(lambda *a: ref(*a).sum(), (0, 1, 2))(x, w, b)):
                np.testing.assert_allclose(got, want, rtol=1e-8, atol=1e-10)
    """)


@pytest.mark.whole
def test_maps_on_four_devices():
    right("""
    w, t = jnp.asarray(rng.normal(size=(3, 36))), jnp.asarray([0, 35, 5])
    x = jnp.asarray(rng.normal(size=(3, 36)))
    own, here = P(None, "classes"), dict(axis_name="classes")
    held(x, lambda x: D.apply("normmax", x, **here), lambda x: A.normmax(x), own, w, check=False)
    for m in (A.Taylor(2), A.SparseSoftmax(k=4), A.SparseSoftmax(p=0.8)):
        held(x, lambda x: D.apply(m, x, **here), lambda x: A.apply(m, x), own, w)
        loss = "fenchel_young" if m.facts.has_potential else "nll"
        value = split(lambda x: getattr(D, loss)(m, x, t, **here), P())(x)
        np.testing.assert_allclose(value, getattr(A, loss)(m, x, t), rtol=1e-10)
    key = jax.random.key(0)
    h = split(lambda x: D.log_prob_entropy("taylor", x, t, **here)[1], P())(x)
    np.testing.assert_allclose(h, A.log_prob_entropy(A.Taylor(2), x, t)[1], rtol=1e-10)
    drawn = split(lambda x: D.sample("softmax", x, generator=key, num_samples=9, **here), P())(x)
    assert (drawn == A.sample("softmax", x, generator=key, num_samples=9)).all()
    """)


@pytest.mark.whole
def test_many_and_few_candidates():
    """Where more classes than a fixed number may be kept the devices search with sums; both are in one program."""
    right("""
    t = jnp.asarray([0, 999, 5])
    f = split(lambda x: D.fenchel_young("entmax15", x, t, axis_name="classes"), P())
    g = jax.jit(jax.grad(f))
    for size in (1.0, 1e-4):
        x = size * jnp.asarray(rng.normal(size=(3, 1000)))
        np.testing.assert_allclose(f(x), A.entmax15_loss(x, t), rtol=1e-10)
        np.testing.assert_allclose(g(x), jax.grad(lambda x: A.entmax15_loss(x, t))(x), rtol=1e-8, atol=1e-12)
    """)


@pytest.mark.whole
def test_rows_on_several_devices_need_no_communication():
    """By themselves, as XLA splits programs, and by explicit sharding."""
    right("""
    rows = Mesh(np.array(jax.devices()), ("rows",))
    x = jax.device_put(jnp.asarray(rng.normal(size=(8, 50))), NamedSharding(rows, P("rows")))
    for f in (A.softmax, A.taylor_softmax, A.sparsemax):
        text = jax.jit(f).lower(x).compile().as_text()
        assert "all-gather" not in text and "all-reduce" not in text, f
        np.testing.assert_allclose(jax.jit(f)(x), f(np.asarray(x)), atol=1e-12)
    """)


def test_losses_are_known_to_be_the_same_on_every_device():
    """`out_specs=P()`, which JAX proves when it traces."""
    right("""
    def common(f, *given):
        specs = tuple(P(*(None,) * (a.ndim - 1), "classes") for a in given)
        jax.eval_shape(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P()), *given)
    x, y, w, t = jnp.zeros((3, 8)), jnp.full((3, 8), 0.125), jnp.ones((5, 8)), jnp.asarray([0, 7, 5])
    here = dict(axis_name="classes", axis=-1)
    for m in ("softmax", "sparsemax", "normmax", "taylor", "sparse_softmax:p=0.8", "perturb_max"):
        common(lambda x, y: D.nll(m, x, y, label_smoothing=0.1, **here), x, y)
        if m not in ("taylor", "sparse_softmax:p=0.8"):
            common(lambda x, y: D.fenchel_young(m, x, y, reduction="none", **here), x, y)
    for m in ("sparse_softmax:k=3", "sparse_softmax:p=0.8"):
        common(lambda w: D.linear_loss(jnp.ones((3, 5)), w.T, t, m, axis_name="classes"), w)
    common(lambda w, y: D.linear_loss(jnp.ones((3, 5)), w.T, y, "entmax15", axis_name="classes"), w, y)
    """)


def test_what_is_missing_is_said():
    right("""
    def said(f, words, x=jnp.zeros((2, 4))):
        try:
            f(x)
        except (TypeError, NameError) as error:
            assert words in str(error), error
        else:
            raise AssertionError(words)
    said(lambda x: D.apply("softmax", x), "say axis_name=")
    said(lambda x: D.apply("softmax", x, axis_name="classes"), "call it inside jax.shard_map")
    said(split(lambda x: D.apply("softmax", x, axis_name="classes", class_start=1), P(None, "classes")), "leave class_start= out")
    """)


def test_a_support_without_jit():
    """What JAX runs as it comes has the values of constants, too."""
    right("""
    x, w = jnp.asarray(rng.normal(size=(3, 5))), jnp.asarray(rng.normal(size=(8, 5)))
    t, kept = jnp.asarray([1, 6, 3]), (jnp.asarray([1, 2, 6, 7, 0, 3]), jnp.asarray([0, 2, 4, 6]))
    f = lambda x, w: D.linear_log_prob(x, w, t, support=kept, axis_name="classes")
    got = jax.shard_map(f, mesh=mesh, in_specs=(P(), P("classes")), out_specs=P())(x, w)
    np.testing.assert_allclose(got, A.linear_log_prob(x, w, t, support=kept), rtol=1e-12)
    """)


@pytest.mark.whole
def test_pairs_on_four_devices():
    right("""
    a, b, mask = jnp.asarray(rng.normal(size=(8, 3))), jnp.asarray(rng.normal(size=(12, 3))), jnp.asarray(rng.random((8, 12)) < 0.7)
    columns = np.concatenate([[2 * r, 2 * r + 1, 8 + r] for r in range(4)])  # those of each device, its pairs before its negatives
    for mapping, check in (("softmax", True), ("sparsemax", False)):
        options = {"temperature": 0.5, "mapping": mapping}
        f = lambda a, b, keep: A.contrastive_loss(a, b, mask=keep, axis_name="classes", **options)
        f = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(P("classes"),) * 3, out_specs=P(), check_vma=check))
        want = A.contrastive_loss(a, b, mask=mask, **options)
        np.testing.assert_allclose(f(a, b[columns], mask[:, columns]), want, rtol=1e-12)
    """)
