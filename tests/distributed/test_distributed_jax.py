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
import functools, re, sys
import jax, numpy as np, jax.numpy as jnp
jax.config.update("jax_enable_x64", True)
import anymax as A
from anymax import distributed as D
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("classes",))
rng = np.random.default_rng(0)
numbers = lambda *shape: jnp.asarray(rng.normal(size=shape))
own = P(None, "classes")
def finite(v):
    return jnp.where(jnp.isfinite(v), v, 0)
def spec(a, axis):
    return P() if axis is None else P(*[None] * (axis % a.ndim), "classes")
def one(verb, *arguments, **options):
    return getattr(A if hasattr(A, verb) else A.linear, verb)(*arguments, **options)
def split(f, leaves, out=P(), check=True):
    "f(call, *leaves) on the mesh, of leaves (array, the axis along which it is cut or None)."
    def shard(*parts):
        return f(lambda verb, *a, **o: getattr(D, verb)(*a, axis_name="classes", **o), *parts)
    return jax.shard_map(shard, mesh=mesh, in_specs=tuple(spec(*leaf) for leaf in leaves), out_specs=out, check_vma=check)
def held(name, f, leaves, out=P(), check=True, chunk=None):
    "The values and the gradients of the mesh are those of one array."
    def on_mesh(call, *a):
        return f(lambda verb, *b, **o: call(verb, *b, **o, **({"chunk": chunk} if chunk and verb.startswith("linear_") else {})), *a)
    arrays = [a for a, _ in leaves]
    def moved(g):
        def total(*a):
            values = g(*a)
            values = values if isinstance(values, tuple) else (values,)
            real = [v for v in values if jnp.issubdtype(v.dtype, jnp.floating)]
            return sum((finite(v) * jnp.cos(jnp.arange(v.size).reshape(v.shape))).sum() for v in real) + 0.0, values
        return jax.jit(jax.value_and_grad(total, tuple(range(len(arrays))), has_aux=True))
    (_, got), got_grads = moved(split(on_mesh, leaves, out, check))(*arrays)
    (_, want), want_grads = moved(functools.partial(f, one))(*arrays)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12, err_msg=name)
    for a, b in zip(got_grads, want_grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9, err_msg="gradient, " + name)
"""


def right(program):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(program) + "\nprint('right')"],
        env=env, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "right\n"


SCORES = """
    x, w, t, y = numbers(3, 36), numbers(3, 36), jnp.asarray([0, 35, 5]), jax.nn.softmax(numbers(3, 36))
    key = jax.random.key(0)
    maps = {"softmax": A.Softmax(), "sparsemax": A.Sparsemax(), "normmax": A.NormMax(2.0), "taylor": A.Taylor(2),
            "topk": A.SparseSoftmax(k=4), "topp": A.SparseSoftmax(p=0.8), "sigmoid": A.Elementwise("sigmoid", 0.2),
            "softpick": A.Softpick(), "fusedmax": A.Fusedmax(0.2), "ranks": A.Ranks(), "bounded": A.Bounded(0.2),
            "relaxed top-k": A.Budget(4, shape="sigmoid")}
    maps |= {f"sink of {i}": A.Sink(i, 0.3) for i in ("softmax", "entmax15", "sparse_softmax:p=0.8", "taylor", "perturb_max")}
    of_index = ("softmax", "sparsemax", "normmax", "taylor", "topk", "topp")
    of_point = ("sigmoid", "softpick", "fusedmax", "ranks", "bounded", "relaxed top-k")
    groups = {"classes": of_index, "points": of_point, "sinks": [n for n in maps if n.startswith("sink")]}
    for name in groups[which]:
        m = maps[name]
        check, sink = name not in ("normmax", "sink of perturb_max"), name.startswith("sink")
        loss = "fenchel_young" if m.facts.has_potential else "nll"
        held("p, " + name, lambda call, x: call("apply", m, x), [(x, -1)], own, check)
        if name in of_index or sink:
            index = jnp.asarray([0, -1, 35]) if sink else t
            held("loss, " + name, lambda call, x: call(loss, m, x, index), [(x, -1)], check=check)
            held("entropy, " + name, lambda call, x: call("log_prob_entropy", m, x, index)[1], [(x, -1)], check=check)
        if name in of_point or name in ("softmax", "sparsemax") or (sink and "sparse_softmax" not in name):
            point = 0.7 * y if sink else y if name in of_index else A.apply(m, w)
            f = lambda call, x, y: call(loss, m, x, jax.lax.stop_gradient(y))
            held("loss of shares, " + name, f, [(x, -1), (point, -1)], check=check)
        if name in ("softmax", "sink of softmax", "sink of perturb_max"):
            held("samples, " + name, lambda call, x: call("sample", m, x, generator=key, num_samples=9), [(x, -1)], check=check)
    for inner in ("softmax", "entmax15") if which == "sinks" else ():
        f = lambda call, x, s: call("nll", A.Sink(inner, s), x, jnp.asarray([0, -1, 35]))
        held("a sink's score, " + inner, f, [(x, -1), (jnp.asarray(0.3), None)])
    for alpha in (0.7, 1.6) if which == "classes" else ():  # below 1 a threshold bounds no class
        f = lambda call, x, alpha: call("apply", A.Entmax(alpha), x)
        held(f"a traced alpha, {alpha}", f, [(x, -1), (jnp.asarray(alpha), None)], own)
"""

# Where more classes than a fixed number may be kept the devices search with sums; both are in one program.
GATHERED = """
    x = numbers(3, 2000)
    f = lambda call, x: call("apply", "sparse_softmax:k=5", x)
    text = jax.jit(split(f, [(x, -1)], own)).lower(x).compile().as_text()
    sizes = re.findall(r"= \\(?f64\\[([\\d,]*)\\][^=]* all-gather", text)
    few = max([int(np.prod([int(v) for v in s.split(",") if v])) for s in sizes], default=0)
    assert 0 < few <= 3 * 4 * 8, few  # how many numbers the largest all-gather brings together
    for size in (1.0, 1e-4):
        f = lambda call, x: call("fenchel_young", "entmax15", x, jnp.asarray([0, 999, 5]))
        held(f"candidates, {size}", f, [(size * x[:, :1000], -1)])
    for size in (6.0, 0.1):  # a small nucleus, and one of nearly all classes
        for m in ("sparse_softmax:p=0.8", A.SparseSoftmax(p=jnp.asarray([[1.0], [0.3], [0.9]]))):
            f = lambda call, x: call("apply", m, x)
            held(f"a nucleus, {size}", f, [(size * x, -1)], own)
            f = lambda call, x: call("fenchel_young", m, x, jnp.asarray([0, 999, 5]))
            held(f"loss of a nucleus, {size}", f, [(size * x, -1)])
"""

LAYERS = """
    x, w, b = leaves = numbers(2, 3, 6), 0.5 * numbers(40, 6), numbers(40)
    leaves = [(x, None), (w, 0), (b, -1)]
    t, factors, keep = jnp.asarray([[5, 0, 33], [-1, 12, 35]]), jnp.asarray(rng.uniform(size=40)), jnp.arange(40) < 38
    ids = jnp.asarray(np.stack([rng.permutation(40)[:5] for _ in range(6)]).reshape(2, 3, 5)).at[1, 2, 4].set(-1)
    log_p = jax.nn.log_softmax(numbers(2, 3, 5)) + np.log(0.8)
    kept = [30, 5, 2, 21], [1, 36, 0], [9], [3, 22, 35], [], [20, 4, 7, 19, 36]
    support = np.array(sum(kept, [])), np.append(0, np.cumsum([len(k) for k in kept]))
    cap = [(jnp.asarray(2.0), None)]
    for mapping, options, weighted in (("softmax", {}, 0), ("sparsemax", {"reduction": "none"}, 0), ("entmax15", {}, 1),
                                       ("sparse_softmax:k=3", {}, 0), ("sparse_softmax:p=0.7", {}, 1)) if which == "losses" else ():
        def loss(call, x, w, b, f):
            more = {"weight": f} if weighted else {}
            return call("linear_loss", x, w, t, mapping, linear_bias=b, ignore_index=-1, **more, **options)
        for chunk in (None, 4):
            held(f"loss, {mapping}, {chunk}", loss, [*leaves, (factors, -1)], chunk=chunk)
    both = ("softmax", 4, "one class", "reverse"), ("entmax15", None, "ignore", "forward")
    for mapping, chunk, tail, direction in both if which == "tokens" else ():
        def terms(call, x, w, b, keep):
            given = {"linear_bias": b, "temperature": 1.3, "mask": keep > 0}
            return call("linear_log_prob_entropy", x, w, t, mapping, **given)
        def kl(call, x, w, b, log_p):
            return call("linear_topk_kl", x, w, ids, log_p, mapping, linear_bias=b, tail=tail, direction=direction)
        def pair(call, x, w, b, y, v):
            more = {"linear_bias": b, "temperature": 1.3, "beta": 0.3, "where": t > 0, "reduction": "mean"}
            return call("linear_kl", x, w, y, v, mapping, **more), call("linear_kl", x, w, y, v, direction=direction)
        held("linear_kl, " + mapping, pair, [*leaves, (numbers(2, 3, 4), None), (numbers(40, 4), 0)], chunk=chunk)
        held("terms, " + mapping, terms, [*leaves, (keep * 1.0, -1)], chunk=chunk)
        held("kl, " + mapping, kl, [*leaves, (log_p, None)], chunk=chunk)
    for mapping, chunk, *_ in both if which == "supports" else ():
        def capped(call, x, w, b, cap):
            given = {"linear_bias": b, "transform": A.transforms.softcap(cap)}
            pairs = call("linear_log_prob_entropy", x, w, t, mapping, temperature=1.3, support=support, full=True, **given)
            further = {"z_loss": 0.2} if mapping == "softmax" else {"suppress": 0.3}
            kl = call("linear_topk_kl", x, w, ids, log_p, mapping, tail="one class", **given)
            return *pairs[0], *pairs[1], kl, call("linear_loss", x, w, t, mapping, ignore_index=-1, **further, **given)
        held("support and cap, " + mapping, capped, [*leaves, *cap], chunk=chunk)
        def sink(call, x, w, b, s):
            return call("linear_loss", x, w, t, A.Sink(mapping, s), linear_bias=b)
        held("sink, " + mapping, sink, [*leaves, (jnp.asarray(0.3), None)], chunk=4)
    for mapping in ("softmax", "entmax15", "normmax") if which == "losses" else ():
        def tau(call, x, w, b):
            loss = call("linear_loss", x, w, t, mapping, linear_bias=b, ignore_index=-1, z_loss=0.3)
            return call("linear_threshold", x, w, mapping, linear_bias=b).tau, loss
        held("tau, " + mapping, tau, leaves)
    def traced(w, ids):
        return D.linear_log_prob(x, w, t, support=(ids, support[1]), axis_name="classes")
    try:
        jax.jit(jax.shard_map(traced, mesh=mesh, in_specs=(P("classes"), P()), out_specs=P()))(w, support[0])
    except TypeError as error:
        assert "in JAX let the function close over it" in str(error), error
    else:
        raise AssertionError("a traced support")
    constants = tuple(map(jnp.asarray, support))  # what JAX runs as it comes has the values of constants, too
    f = lambda call, x, w: call("linear_log_prob", x, w, t, support=constants)
    np.testing.assert_allclose(split(f, leaves[:2])(x, w), f(one, x, w), rtol=1e-12)
"""

# By themselves, as XLA splits programs, and by explicit sharding.
ROWS = """
    rows = Mesh(np.array(jax.devices()), ("rows",))
    x = jax.device_put(numbers(8, 50), NamedSharding(rows, P("rows")))
    for f in (A.softmax, A.taylor_softmax, A.sparsemax):
        text = jax.jit(f).lower(x).compile().as_text()
        assert "all-gather" not in text and "all-reduce" not in text, f
        np.testing.assert_allclose(jax.jit(f)(x), f(np.asarray(x)), atol=1e-12)
"""

PAIRS = """
    a, b, mask = numbers(8, 3), numbers(12, 3), jnp.asarray(rng.random((8, 12)) < 0.7)
    columns = np.concatenate([[2 * r, 2 * r + 1, 8 + r] for r in range(4)])  # those of each device, its pairs before its negatives
    for mapping, check in (("softmax", True), ("sparsemax", False)):
        options = {"temperature": 0.5, "mapping": mapping}
        f = lambda a, b, keep: A.contrastive_loss(a, b, mask=keep, axis_name="classes", **options)
        f = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(P("classes"),) * 3, out_specs=P(), check_vma=check))
        want = A.contrastive_loss(a, b, mask=mask, **options)
        np.testing.assert_allclose(f(a, b[columns], mask[:, columns]), want, rtol=1e-12)
"""

# `out_specs=P()`, which JAX proves when it traces; and what is missing is said
TRACED = """
    def common(f, *given):
        jax.eval_shape(split(f, [(a, -1) for a in given]), *given)
    x, y, w, t = jnp.zeros((3, 8)), jnp.full((3, 8), 0.125), jnp.ones((5, 8)), jnp.asarray([0, 7, 5])
    for m in ("softmax", "sparsemax", "normmax", "taylor", "sparse_softmax:p=0.8", "perturb_max"):
        common(lambda call, x, y: call("nll", m, x, y, label_smoothing=0.1, axis=-1), x, y)
        if m not in ("taylor", "sparse_softmax:p=0.8"):
            common(lambda call, x, y: call("fenchel_young", m, x, y, reduction="none", axis=-1), x, y)
    for m in ("sparse_softmax:k=3", "sparse_softmax:p=0.8"):
        common(lambda call, w: call("linear_loss", jnp.ones((3, 5)), w.T, t, m), w)
    common(lambda call, w, y: call("linear_loss", jnp.ones((3, 5)), w.T, y, "entmax15"), w, y)
    def said(f, words, x=jnp.zeros((2, 4))):
        try:
            f(x)
        except (TypeError, NameError) as error:
            assert words in str(error), error
        else:
            raise AssertionError(words)
    said(lambda x: D.apply("softmax", x), "say axis_name=")
    said(lambda x: D.apply("softmax", x, axis_name="classes"), "call it inside jax.shard_map")
    said(split(lambda call, x: call("apply", "softmax", x, class_start=1), [(x, -1)], own), "leave class_start= out")
"""
PROGRAMS = {
    "what is gathered": GATHERED, "rows need no communication": ROWS, "pairs": PAIRS, "what is traced": TRACED,
} | {f"scores, {which}": f"    which = {which!r}" + SCORES for which in ("classes", "points", "sinks")} | {
    f"layers, {which}": f"    which = {which!r}" + LAYERS for which in ("losses", "tokens", "supports")
}  # fmt: skip


@pytest.mark.whole
@pytest.mark.parametrize("name", PROGRAMS)
def test_four_devices(name):
    right(PROGRAMS[name])
