"""The compiled kernels inside of JAX programs: the reference's numbers, under every transformation and on a mesh."""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

import anymax as A
from anymax import Budget, Entmax, NormMax, PerturbMax, Ratio, Sigsoftmax, Softmax, Sparsemax, SparseSoftmax, Taylor
from anymax.kernels import jax_primitives, link, reference, xla

REFUSAL = xla.ENGINE.refuse("forward", Softmax(), jnp.ones(2))
needs_library = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))

MAPS = {
    "softmax": Softmax(),
    "sparsemax": Sparsemax(),
    "entmax1": Entmax(1.0),
    "entmax0.7": Entmax(0.7),
    "entmax1.5": Entmax(1.5),
    "entmax3": Entmax(3.0),
    "budget": Budget(2.5),
    "normmax2": NormMax(2.0),
    "normmax1.3": NormMax(1.3),
    "top5": SparseSoftmax(k=5),
    "nucleus": SparseSoftmax(p=0.8),
    "taylor2": Taylor(2),
    "taylor4": Taylor(4),
    "sigsoftmax": Sigsoftmax(),
    "perturb_normal": PerturbMax(),
    "perturb_logistic": PerturbMax("logistic", scale=0.7),
    "perturb_uniform": PerturbMax("uniform", nodes=48),
    "ranks": A.Ranks(0.7),
    "ranks_kl": A.Ranks(0.3, "kl"),
    "fusedmax": A.Fusedmax(0.05),
}
every_map = pytest.mark.parametrize("name", MAPS)
X = np.random.default_rng(0).normal(size=(3, 4, 37))
G = np.random.default_rng(1).normal(size=X.shape)


def served(f, *args):
    """What f compiles to, having seen that the kernels are in it."""
    program = jax.jit(f).lower(*args).compile()
    assert f'custom_call_target="{jax_primitives.TARGET}"' in program.as_text()
    return program(*args)


def exactly(mapping, x, g=None):
    x = np.asarray(x, np.float64)
    p = reference.ENGINE.forward(mapping, x)
    return p if g is None else reference.ENGINE.vjp(mapping, x, p, np.asarray(g, np.float64))


# -- what is declared in our own words -------------------------------------------------------------------------------

STRUCTS = {
    "xla_extension XLA_FFI_Extension_Base": "size=struct_size type next",
    "xla_version XLA_FFI_Api_Version": (
        "size=struct_size extensions=extension_start major=major_version minor=minor_version"
    ),
    "xla_buffer XLA_FFI_Buffer": "size=struct_size extensions=extension_start dtype data rank dims",
    "xla_list XLA_FFI_Args": "size=struct_size extensions=extension_start count=size types items=args",
    "xla_list XLA_FFI_Rets": "size=struct_size extensions=extension_start count=size types items=rets",
    "xla_text XLA_FFI_ByteSpan": "text=ptr length=len",
    "xla_scalar XLA_FFI_Scalar": "dtype value",
    "xla_attributes XLA_FFI_Attrs": "size=struct_size extensions=extension_start count=size types names items=attrs",
    "xla_error_args XLA_FFI_Error_Create_Args": "size=struct_size extensions=extension_start message code=errc",
    "xla_error_destroy_args XLA_FFI_Error_Destroy_Args": "size=struct_size extensions=extension_start error",
    "xla_schedule_args XLA_FFI_ThreadPool_Schedule_Args": (
        "size=struct_size extensions=extension_start context=ctx task data"
    ),
    "xla_threads_args XLA_FFI_ThreadPool_NumThreads_Args": (
        "size=struct_size extensions=extension_start context=ctx count=num_threads"
    ),
    "xla_metadata_extension XLA_FFI_Metadata_Extension": "base=extension_base metadata",
}
PREFIXES = {  # of which XLA's own go on
    "xla_api XLA_FFI_Api": (
        "size=struct_size extensions=extension_start version=api_version internal=internal_api "
        "error_create=XLA_FFI_Error_Create error_message=XLA_FFI_Error_GetMessage error_destroy=XLA_FFI_Error_Destroy "
        "schedule=XLA_FFI_ThreadPool_Schedule threads=XLA_FFI_ThreadPool_NumThreads"
    ),
    "xla_call XLA_FFI_CallFrame": (
        "size=struct_size extensions=extension_start api context=ctx stage operands=args results=rets attributes=attrs"
    ),
    "xla_metadata XLA_FFI_Metadata": "size=struct_size version=api_version traits",
}
CONSTANTS = """
    XLA_MAJOR=XLA_FFI_API_MAJOR XLA_S32=XLA_FFI_DataType_S32 XLA_S64=XLA_FFI_DataType_S64 XLA_F16=XLA_FFI_DataType_F16
    XLA_F32=XLA_FFI_DataType_F32 XLA_F64=XLA_FFI_DataType_F64 XLA_BF16=XLA_FFI_DataType_BF16
    XLA_EXECUTE=XLA_FFI_ExecutionStage_EXECUTE XLA_INVALID_ARGUMENT=XLA_FFI_Error_Code_INVALID_ARGUMENT
    XLA_INTERNAL=XLA_FFI_Error_Code_INTERNAL XLA_IS_BUFFER=XLA_FFI_ArgType_BUFFER XLA_IS_BUFFER=XLA_FFI_RetType_BUFFER
    XLA_IS_SCALAR=XLA_FFI_AttrType_SCALAR XLA_IS_METADATA=XLA_FFI_Extension_Metadata
""".split()


def claims():
    """C++ that compiles if our declarations of the interface are XLA's."""
    yield '#include "xla/ffi/api/c_api.h"\n#include "xla_ffi_abi.h"'
    for structs, fields in (STRUCTS | PREFIXES).items():
        ours, theirs = structs.split()
        for field in fields.split():
            a, _, b = field.partition("=")
            b = b or a
            yield f"static_assert(offsetof({ours}, {a}) == offsetof({theirs}, {b}));"
            yield f"static_assert(sizeof((({ours} *)0)->{a}) == sizeof((({theirs} *)0)->{b}));"
        if structs in STRUCTS:
            yield f"static_assert(sizeof({ours}) == sizeof({theirs}));"
    for constant in CONSTANTS:
        yield "static_assert((int){} == (int){});".format(*constant.split("="))


def test_the_declarations_are_xlas(tmp_path):
    header = Path(__file__).parents[2] / "csrc" / "doors" / "xla_ffi_abi.h"
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    include = Path(jax.ffi.include_dir())
    if compiler is None or not header.exists() or not (include / "xla/ffi/api/c_api.h").exists():
        pytest.skip("needs a C++ compiler, our sources and jaxlib's headers")
    source = tmp_path / "claims.cpp"
    source.write_text("\n".join(claims()))
    flags = ["-std=c++17", "-fsyntax-only", "-Wno-invalid-offsetof", f"-I{include}", f"-I{header.parent}"]
    done = subprocess.run([compiler, *flags, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- values and derivatives ------------------------------------------------------------------------------------------


@pytest.mark.whole(lambda name, dtype: dtype != "float32" and name != "sparsemax")
@needs_library
@every_map
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_values_and_gradients(name, dtype):
    mapping = MAPS[name]
    if reason := xla.ENGINE.refuse("forward", mapping, jnp.ones(2)):
        pytest.skip(reason)

    def program(x, g):
        p, pull = jax.vjp(lambda x: A.apply(mapping, x), x)
        return p, pull(g)[0]

    with jax.enable_x64(dtype == "float64"):
        x, g = jnp.asarray(X, dtype), jnp.asarray(G, dtype)
        p, gradient = served(program, x, g)
        assert p.dtype == gradient.dtype == x.dtype
    eps = float(jnp.finfo(dtype).eps)
    small = {"float32": 1e-6 if name == "perturb_logistic" else 2e-7, "float64": 1e-12}.get(dtype, 0.5 * eps)
    np.testing.assert_allclose(np.asarray(p, np.float64), exactly(mapping, x), atol=small, rtol=2 * eps)
    np.testing.assert_allclose(np.asarray(gradient, np.float64), exactly(mapping, x, g), atol=16 * small, rtol=4 * eps)


@pytest.mark.whole(lambda name: name not in ("softmax", "entmax3"))
@needs_library
@pytest.mark.parametrize("name", ["softmax", "sparsemax", "entmax1.5", "entmax3", "normmax2", "taylor2", "sigsoftmax"])
def test_derivatives_agree_with_the_references(name):
    """jvp, vmap of every axis, the Hessian and a third derivative, in one program each."""
    mapping = MAPS[name]
    with jax.enable_x64(True):
        x, v = jnp.asarray(X[0]), jnp.asarray(G[0])

        def value(z):
            return (A.apply(mapping, z) * v[0]).sum() ** 2

        def program(x, v):
            f = lambda x: A.apply(mapping, x)  # noqa: E731
            return (
                jax.jvp(f, (x,), (v,)),
                jax.vmap(f, 1, 1)(jnp.stack([x, v], 1)),
                jax.vmap(jax.grad(value), 1, 1)(x.T),
                jax.hessian(value)(x[0]),
                jax.jvp(lambda z: jax.jvp(jax.grad(value), (z,), (v[1],))[1], (x[0],), (v[2],))[1],
            )

        got = served(program, x, v)
        with A.use("reference"):
            want = jax.jit(program)(x, v)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-9)


@pytest.mark.whole
@needs_library
def test_parameters_one_a_row():
    """Values by the kernels, for each row its own; the gradient in the parameter, and the mixed second derivative."""
    with jax.enable_x64(True):
        x = jnp.asarray(X[0])
        alpha = jnp.asarray([[1.2], [1.5], [2.0], [3.0]])
        nucleus = lambda x, p: A.sparse_softmax(x, p=0.3 * p)  # noqa: E731
        for f, a in ((A.entmax, alpha), (A.normmax, alpha), (A.budget, alpha), (nucleus, alpha)):
            got = served(f, x, a)
            want = [f(X[0][i], a[i].item()) for i in range(4)]
            np.testing.assert_allclose(got, np.stack(want), atol=1e-12)
            np.testing.assert_allclose(served(jax.vmap(f), x, a[:, 0]), got, atol=1e-14)
            np.testing.assert_allclose(served(f, x, a[2, 0])[2], got[2], atol=1e-14)  # one for all
            if f in (A.entmax, A.normmax):
                assert np.isnan(served(f, x, a.at[1].set(-1.0))[1]).all()
            single = served(f, x.astype("float32"), a.astype("float32"))
            np.testing.assert_allclose(single, got, atol=1e-6)
        value = lambda x, a: (A.entmax(x, a) * G[0]).sum()  # noqa: E731
        h, slope = 1e-5, jax.jit(jax.grad(value))
        mixed = jax.jit(jax.jacfwd(jax.grad(value), 1))(x, alpha)[..., 0]
        for i in range(4):
            e = jnp.zeros((4, 1)).at[i].set(h)
            np.testing.assert_allclose(mixed[..., i], (slope(x, alpha + e) - slope(x, alpha - e)) / (2 * h), atol=1e-6)


@pytest.mark.whole(lambda name: name != "sparsemax")
@needs_library
@pytest.mark.parametrize("name", ["sparsemax", "entmax1.5", "budget", "normmax2", "perturb_normal"])
def test_losses(name):
    """The value, the gradient p - y, and the Hessian J."""
    mapping, t, weight = MAPS[name], np.array([3, 0, 36, 7]), np.arange(1.0, 5.0)[:, None]
    y = np.eye(37)[t] if name != "budget" else 2.5 * A.softmax(G[0])
    keep = np.ones((4, 37), bool)
    keep[:, 5] = name == "budget"

    def f(x):
        values = A.fenchel_young(mapping, x, jnp.asarray(y, x.dtype), mask=jnp.asarray(keep), reduction="none")
        return (values * jnp.asarray(weight[:, 0], x.dtype)).sum()

    value, gradient = served(jax.value_and_grad(f), jnp.asarray(X[0], "float32"))
    want = A.fenchel_young(mapping, X[0], y, mask=keep, reduction="none")
    np.testing.assert_allclose(value, (want * weight[:, 0]).sum(), rtol=4e-6)
    np.testing.assert_allclose(gradient, weight * (A.apply(mapping, X[0], mask=keep) - y), atol=4e-6)
    with jax.enable_x64(True):
        x = jnp.asarray(X[0, 0])
        hessian = jax.jit(jax.hessian(lambda x: A.fenchel_young(mapping, x, jnp.asarray(y[0]))))(x)
        np.testing.assert_allclose(hessian, A.jacobian(mapping, X[0, 0]), atol=1e-9)


@pytest.mark.whole(lambda name: name != "softmax")
@needs_library
@pytest.mark.parametrize("name", ["softmax", "sparsemax", "entmax1.5", "entmax3", "normmax2", "top5", "perturb_normal"])
def test_losses_of_class_indices(name):
    """One pass each way. The gradient p - y, for every kind of row; the Hessian J; no p is kept in between."""
    mapping = MAPS[name]
    x = X[0, [0, 1, 2, 3, 0, 1, 2]].copy()
    x[2, 4], x[3, 5], x[4], x[5, :8] = -np.inf, np.nan, -np.inf, -np.inf
    t = np.array([3, -100, 4, 7, 0, 20, 36])  # ignored, masked, in a row with NaN, in a row with nothing
    weight = np.arange(1.0, 8.0)

    def f(x, t):
        return A.fenchel_young(mapping, x, t, reduction="none")

    def program(x, t):
        values, pull = jax.vjp(lambda x: f(x, t), x)
        return values, pull(jnp.asarray(weight, values.dtype))[0]

    want = f(x, t)
    y = np.eye(37)[np.maximum(t, 0)]
    slope = np.where(t[:, None] < 0, 0.0, weight[:, None] * (A.apply(mapping, x) - y))
    sound = [0, 1, 5, 6]
    for dtype, tolerance in (("float32", 4e-6), ("bfloat16", 8e-2), ("float64", 1e-12)):
        with jax.enable_x64(dtype == "float64"):
            a, b = jnp.asarray(x, dtype), jnp.asarray(t)
            values, gradient = served(program, a, b)
            assert values.dtype == gradient.dtype == a.dtype
            np.testing.assert_allclose(values, want, rtol=tolerance, atol=tolerance)
            np.testing.assert_allclose(np.asarray(gradient, float)[sound], slope[sound], atol=8 * tolerance)
            if dtype == "float32":
                np.testing.assert_allclose(f(a, b), values, rtol=1e-6)  # outside of jit
                np.testing.assert_allclose(served(jax.vmap(f), a, b), values, rtol=1e-6)
                tangent = served(lambda a, b: jax.jvp(lambda a: f(a, b), (a,), (jnp.cos(a),))[1], a[6:], b[6:])
                np.testing.assert_allclose(tangent, (slope[6:] * np.cos(x[6:])).sum(-1) / 7.0, rtol=1e-5)
                stray = jax.jit(f)(a, b.at[0].set(37).at[6].set(-3))
                assert np.isnan(stray[jnp.array([0, 6])]).all()
                np.testing.assert_allclose(stray[1:3], values[1:3])
    with jax.enable_x64(True):
        hessian = served(jax.hessian(lambda x: f(x[None], jnp.asarray([7]))[0]), jnp.asarray(X[0, 0]))
        np.testing.assert_allclose(hessian, A.jacobian(mapping, X[0, 0]), atol=1e-9)


@needs_library
def test_options_of_losses_of_class_indices():
    x, t, weight = X[0].astype(np.float32), np.array([3, -100, 36, 7]), np.linspace(0.5, 2.0, 37)
    for options in ({}, {"reduction": "sum"}, {"weight": weight}, {"mask": np.arange(37) != 9}, {"ignore_index": 36}):
        options = {"ignore_index": -100} | options
        t = np.where(t == -100, options["ignore_index"], t)
        rest = {k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
        got = served(lambda x, t: A.entmax15_loss(x, t, **rest), jnp.asarray(x), jnp.asarray(t))  # noqa: B023
        np.testing.assert_allclose(got, A.entmax15_loss(x, t, **options), rtol=1e-5)
    with A.use("reference"):
        f = jax.jit(lambda x, t: A.entmax15_loss(x, t))
        assert jax_primitives.TARGET not in f.lower(jnp.asarray(x), jnp.asarray(t)).as_text()


# -- shapes, threads, places -----------------------------------------------------------------------------------------


@pytest.mark.whole
@needs_library
def test_shapes():
    for shape in ((0, 5), (3, 0, 5), (2, 1), (1, 1), (7,), (1,), (2, 3, 1, 9), (1, 70001), (3, 300000)):
        x = np.random.default_rng(2).normal(size=shape).astype(np.float32)
        for mapping in (Softmax(), Sparsemax(), Entmax(1.5)):
            program = lambda x: jax.vjp(lambda x: A.apply(mapping, x), x)[1](jnp.cos(x))[0]  # noqa: B023, E731
            p, gradient = jax.jit(lambda x: A.apply(mapping, x))(x), jax.jit(program)(jnp.asarray(x))  # noqa: B023
            assert p.shape == gradient.shape == shape
            np.testing.assert_allclose(p, exactly(mapping, x), atol=2e-7, rtol=2e-6)
            np.testing.assert_allclose(gradient, exactly(mapping, x, np.cos(x)), atol=3e-6)
    x = jnp.asarray(X, "float32")
    np.testing.assert_allclose(A.sparsemax(x, axis=0), A.sparsemax(X, axis=0), atol=2e-7)
    for _ in range(2):  # outside of jit; the second time by the short way
        np.testing.assert_allclose(A.sparsemax(x), exactly(Sparsemax(), x), atol=2e-7)


@pytest.mark.whole(lambda name: name not in ("sparsemax", "taylor2"))
@needs_library
@every_map
def test_masked_and_poisoned_rows(name):
    x = X[0].astype(np.float32)
    x[0, 3], x[1], x[2, 4], x[3, 5] = -np.inf, -np.inf, np.nan, np.inf
    p = np.asarray(jax.jit(lambda x: A.apply(MAPS[name], x))(x))
    assert np.isnan(p[2:]).all()
    assert not p[1].any()
    assert p[0, 3] == 0
    np.testing.assert_allclose(p[0], exactly(MAPS[name], x[0]), atol=5e-6)


@needs_library
def test_donated_operands():
    f = jax.jit(lambda x: A.sparsemax(A.entmax15(x) * 3.0), donate_argnums=0)
    x = np.random.default_rng(3).normal(size=(64, 1000)).astype(np.float32)
    want = exactly(Sparsemax(), 3.0 * exactly(Entmax(1.5), x))
    for _ in range(3):
        np.testing.assert_allclose(f(jnp.array(x)), want, atol=2e-6)


@pytest.mark.whole
@needs_library
def test_many_threads_and_loops_at_once():
    """Handlers run on XLA's threads and share their rows out to others of them: none may wait for one that waits."""
    x = np.random.default_rng(4).normal(size=(16, 96, 1200)).astype(np.float32)
    want = exactly(Sparsemax(), x)
    many = jax.jit(lambda x: jax.lax.map(A.sparsemax, x))
    side_by_side = jax.jit(lambda x: [A.sparsemax(x[i]) for i in range(16)])
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        jobs = [pool.submit(many if i % 2 else side_by_side, x) for i in range(24)]
        for job in jobs:
            np.testing.assert_allclose(np.stack(job.result(timeout=120)), want, atol=2e-6)


PROGRAM = """
    import warnings; warnings.simplefilter("error")
    import jax, jax.numpy as jnp, numpy as np, anymax as A
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    mesh = Mesh(np.array(jax.devices()), ("rows",))
    assert mesh.size == 2
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32))
    def same(a, b):
        np.testing.assert_allclose(a, b, atol=1e-5)
"""
MESHES = {
    "rows stay where they are, classes are brought together": """
        for m in (A.Sparsemax(), A.Taylor(2)):
            f = jax.jit(lambda x: A.apply(m, x))
            g = jax.jit(jax.grad(lambda x: (A.apply(m, x) ** 2).sum()))
            for spec, gathers in ((P("rows"), False), (P(None, "rows"), True)):
                there = jax.device_put(x, NamedSharding(mesh, spec))
                for h in (f, g):
                    program = h.lower(there).compile()
                    assert ("all-gather" in program.as_text()) == gathers and "anymax_" in program.as_text()
                    same(program(there), h(x))
        t = jnp.asarray([0, 4, 2, 1])
        there, t_there = (jax.device_put(a, NamedSharding(mesh, P("rows"))) for a in (x, t))
        loss = jax.jit(jax.grad(lambda x, t: A.sparsemax_loss(x, t, reduction="sum")))
        program = loss.lower(there, t_there).compile()
        assert "all-gather" not in program.as_text() and "anymax_" in program.as_text()
        same(program(there, t_there), loss(x, t))
        program = jax.jit(A.entmax).lower(there, jnp.asarray(1.4)).compile()
        assert "all-gather" not in program.as_text()
        same(program(there, jnp.asarray(1.4)), A.entmax(x, 1.4))
    """,
    "shard_map, with scores or a parameter that are the same everywhere": """
        w, alpha = jnp.cos(jnp.arange(48.0)).reshape(8, 6), jnp.asarray([[1.5], [2.0], [1.2], [3.0]] * 2)
        t = jnp.asarray([0, 1, 2, 3])
        def loss(x, a):
            return A.entmax_loss(x, t, alpha=a, reduction="none")[:, None]
        for f, i in ((A.entmax, 0), (loss, (0, 1))):
            one = jax.shard_map(f, mesh=mesh, in_specs=(P(), P("rows")), out_specs=P("rows"))
            got = lambda x, a: (one(x, a) * w).sum()
            want = lambda x, a: (jnp.concatenate([f(x, a[:4]), f(x, a[4:])]) * w).sum()
            jax.tree.map(same, *(jax.jit(jax.value_and_grad(h, i))(x, alpha) for h in (got, want)))
        try:  # which differs from device to device
            jax.shard_map(A.entmax, mesh=mesh, in_specs=(P(), P("rows")), out_specs=P())(x, alpha)
            raise AssertionError("taken for the same on all devices")
        except ValueError:
            pass
        two = jax.shard_map(A.entmax, mesh=mesh, in_specs=(P("rows"), P()), out_specs=P("rows"))
        got, want = (jax.jit(jax.grad(lambda x, a: (h(x, a) ** 2).sum()))(x, jnp.asarray(1.4)) for h in (two, A.entmax))
        same(got, want)
    """,
    "shard_map, by the name that JAX had before 0.8": """
        if hasattr(jax.lax, "pvary"):
            del jax.lax.pcast
        two = jax.shard_map(A.entmax, mesh=mesh, in_specs=(P("rows"), P()), out_specs=P("rows"))
        same(two(x, jnp.asarray(1.4)), A.entmax(x, 1.4))
    """,
    "shardings in types": """
        mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Explicit,))
        with jax.set_mesh(mesh):
            for spec in (P("rows", None), P(None, "rows")):
                there = jax.device_put(x, NamedSharding(mesh, spec))
                square = lambda x: (A.entmax15(x) ** 2).sum()
                for f in (A.sparsemax, lambda x: A.entmax(x, jnp.asarray(1.4)), jax.grad(square)):
                    out = jax.jit(f)(there)
                    assert jax.typeof(out).sharding.spec == spec
                    same(out, f(x))
    """,
}


@pytest.mark.whole(lambda what: not what.startswith("rows"))
@needs_library
@pytest.mark.parametrize("what", MESHES)
def test_two_devices(what):
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    code = textwrap.dedent(PROGRAM) + textwrap.dedent(MESHES[what]) + "print('right')"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout == "right\n", done.stderr


@pytest.mark.whole
@needs_library
def test_other_devices_and_exported_programs_get_the_formula():
    f = jax.jit(jax.grad(lambda x: (A.sparsemax(x) ** 2).sum()))
    x = jnp.asarray(X[0], "float32")
    assert jax_primitives.TARGET in f.lower(x).as_text()
    assert jax_primitives.TARGET not in f.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    rows = jax.export.symbolic_shape("rows")[0]
    for shape in ((4, 37), (rows, 37)):
        exported = jax.export.export(f)(jax.ShapeDtypeStruct(shape, "float32"))
        assert jax_primitives.TARGET not in exported.mlir_module()
        np.testing.assert_allclose(jax.export.deserialize(exported.serialize()).call(x), f(x), atol=1e-6)
    for mapping in (Softmax(), Entmax(1.5), SparseSoftmax(k=5)):
        loss = jax.jit(jax.value_and_grad(lambda x, t: A.fenchel_young(mapping, x, t)))  # noqa: B023
        t = jnp.asarray([3, -100, 36, 7])
        exported = jax.export.export(loss)(x, t)
        assert jax_primitives.TARGET not in exported.mlir_module()
        for got, want in zip(exported.call(x, t), loss(x, t), strict=True):
            np.testing.assert_allclose(got, want, atol=1e-6, rtol=1e-5)


# -- refusals --------------------------------------------------------------------------------------------------------


@needs_library
def test_what_is_refused():
    x = jnp.asarray(X[0], "float32")
    assert xla.ENGINE.refuse("forward", Sparsemax(), X) == "it takes JAX arrays, these scores are of numpy"
    assert (
        xla.ENGINE.refuse("loss", Sparsemax(), x)
        == "it has no loss (soft targets), only p, gradient of p, loss (class indices), gradient of a parameter"
    )
    assert xla.ENGINE.refuse("index_loss", Taylor(2), x) == "taylor has no such operation"
    assert "no kernel for ratio" in xla.ENGINE.refuse("forward", Ratio.sigmoid(), x)
    assert "taylor from 2 to 64, not 66" in xla.ENGINE.refuse("forward", Taylor(66), x)
    assert "not float8_e4m3fn" in xla.ENGINE.refuse("forward", Sparsemax(), x.astype("float8_e4m3fn"))
    assert xla.ENGINE.refuse("forward", Sparsemax(), x) is None
    assert A.choose("forward", Sparsemax(), x) is A.choose("vjp", Sparsemax(), x) is xla.ENGINE
    assert "not xla: it has no log p, only p" in str(A.explain(Sparsemax(), x, verbose=True))
    with A.use("xla"):
        A.sparsemax(x)
        with pytest.raises(RuntimeError, match="engine 'xla' was asked for and can't compute forward of Ratio"):
            A.apply(Ratio.sigmoid(), x)
    with A.use("reference"):
        assert jax_primitives.TARGET not in jax.jit(lambda x: A.sparsemax(x)).lower(x).as_text()


def raw(operands, results, **attributes):
    """The handler itself."""
    known = {"op": link.CODES["forward"], "map": 1, "noise": 0, "nodes": 0, "per_row": 0}
    attributes = {k: np.int64(v) for k, v in (known | attributes).items()}
    attributes = {"param": np.float64(0.0)} | attributes
    call = jax.ffi.ffi_call(jax_primitives.TARGET, [jax.ShapeDtypeStruct(s, d) for s, d in results])
    return jax.block_until_ready(jax.jit(lambda *a: call(*a, **attributes))(*operands))


@needs_library
@pytest.mark.filterwarnings("ignore:The default behavior of ffi_call under vmap")
def test_the_handler_refuses_what_it_does_not_know():
    x, row = jnp.asarray(X[0], "float32"), ((4,), "float32")
    out = [(x.shape, "float32")]
    (p,) = raw([x], out)
    np.testing.assert_allclose(p, exactly(Sparsemax(), x), atol=2e-7)
    form = "anymax: the call does not have the form that this version of the library knows"
    for operands, results, attributes in (
        ([x], out, {"op": link.CODES["largest"]}),
        ([x], out, {"op": 99}),
        ([x, x], out, {}),
        ([x], [(x.shape, "float16")], {}),
        ([x], [((4, 36), "float32")], {}),
        ([x], out, {"per_row": 1}),
        ([x, x], out, {"per_row": 1}),
        ([jnp.asarray(1.0)], [((), "float32")], {}),
        ([x, x[:3]], out, {"op": link.CODES["vjp"]}),
        ([x, jnp.zeros((4,), "int8")], [row, row], {"op": link.CODES["index_loss"]}),
        ([x, jnp.zeros((3,), "int32")], [row, row], {"op": link.CODES["index_loss"]}),
    ):
        with pytest.raises(Exception, match=form):
            raw(operands, results, **attributes)
    with pytest.raises(Exception, match="anymax: scores must be float16, bfloat16, float32 or float64"):
        raw([jnp.arange(4)], [((4,), "int32")])
    with pytest.raises(Exception, match="anymax: "):
        raw([x], out, map=99)
    with pytest.raises(Exception, match="anymax: the map's parameter is out of range"):
        raw([x], out, map=2)
    assert raw([jnp.zeros((0, 5))], [((0, 5), "float32")])[0].shape == (0, 5)


@needs_library
@pytest.mark.filterwarnings("ignore:The default behavior of ffi_call under vmap")
def test_the_handlers_other_operations():
    """Thresholds, log p, and the losses of class indices with their gradient."""
    x, t = jnp.asarray(X[0], "float32"), jnp.asarray([3, -1, 36, 7], "int32")
    row = ((4,), "float32")
    (tau,) = raw([x], [row], op=link.CODES["threshold"])
    np.testing.assert_allclose(tau, A.threshold(Sparsemax(), X[0]).tau, atol=1e-6)
    (log_p,) = raw([x], [(x.shape, "float32")], op=link.CODES["log_forward"], map=0)
    np.testing.assert_allclose(log_p, A.log_softmax(X[0]), atol=2e-6)
    value, tau = raw([x, t], [row, row], op=link.CODES["index_loss"])
    want = A.sparsemax_loss(X[0], np.where(np.asarray(t) < 0, -100, np.asarray(t)), reduction="none")
    np.testing.assert_allclose(value, want, atol=1e-6)
    scale = jnp.asarray([1.0, 2.0, 3.0, 4.0], "float32")
    (gradient,) = raw([x, tau, t, scale], [(x.shape, "float32")], op=link.CODES["index_loss_grad"])
    want = np.asarray(scale)[:, None] * (exactly(Sparsemax(), x) - np.eye(37)[np.asarray(t)])
    np.testing.assert_allclose(gradient, np.where(np.asarray(t)[:, None] < 0, 0.0, want), atol=1e-6)
