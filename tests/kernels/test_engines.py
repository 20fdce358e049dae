"""Engines: who serves a call, why not another, and that nobody's choice leaks."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kinds import KINDS, back, every_kind

import anymax as A
from anymax import Entmax, Softmax, Sparsemax, Taylor, kernels
from anymax._attention.implementations import IMPLEMENTATIONS
from anymax.functional import verbs
from anymax.kernels import explanation, link, native, tasks
from anymax.kernels.engine import WORDS

needs_torch = pytest.mark.skipif("torch" not in KINDS, reason="torch is not installed")


def scores(kind="numpy"):
    return KINDS[kind](np.random.default_rng(0).normal(size=(2, 5)))


@pytest.fixture(autouse=True)
def _unset(environment):
    environment(None)


@every_kind
@pytest.mark.parametrize("op", kernels.OPS)
def test_the_reference_never_refuses(op, kind):
    assert kernels.ENGINES[-1].name == "reference"
    for mapping in (Softmax(), Sparsemax(), Entmax(3.0)):
        assert kernels.reference.ENGINE.refuse(op, mapping, scores(kind)) is None
        assert A.choose(op, mapping, scores(kind)).name in kernels.names()


@every_kind
def test_a_refusal_is_a_sentence(kind):
    for engine in kernels.ENGINES:
        for op in kernels.OPS:
            for mapping in (Softmax(), Sparsemax()):
                reason = engine.refuse(op, mapping, scores(kind))
                assert reason is None or (len(reason.split()) >= 4 and not reason.endswith("."))


@every_kind
def test_every_engine_gives_the_same(kind):
    x = scores(kind)
    for mapping in (Softmax(), Sparsemax()):
        want = back(A.apply(mapping, x))
        for engine in kernels.ENGINES:
            if engine.refuse("forward", mapping, x) is None:
                with A.use(engine.name):
                    np.testing.assert_allclose(back(A.apply(mapping, x)), want, rtol=1e-6, atol=1e-12)


TASKS = {  # name -> (what is asked for, x)
    tasks.DECODE: (Softmax(), scores()), tasks.SELECT: ((2, tasks.WHOLE), scores()), tasks.ROUTE: ((2, tasks.WHOLE), scores()),
    tasks.SINKHORN: (tasks.Sinkhorn(None, None, 3, 1.0), scores()), tasks.SINKHORN_LIMIT: (tasks.Sinkhorn(None, None, 3, 1.0), scores()),
    tasks.LINEAR_ATTENTION: ((scores(), scores()), scores()), tasks.LAYER: ((scores(),), scores()),
    tasks.SCORES: (None, scores()),
}  # fmt: skip


@pytest.mark.parametrize("op", TASKS)
def test_a_task_has_the_engine_that_is_asked_for_or_none(op):
    having = [engine for engine in kernels.ENGINES if op in engine.tasks]
    assert having
    refusals = {engine.name: engine.refuse_task(op, *TASKS[op]) for engine in kernels.ENGINES}
    for engine in kernels.ENGINES:
        reason = refusals[engine.name]
        assert reason == f"it has no {op}" if engine not in having else reason is None or len(reason.split()) >= 4
        with A.use(engine.name):
            assert kernels.engine_of(op, *TASKS[op]) is (None if reason else engine)
    first = next((engine for engine in having if refusals[engine.name] is None), None)
    assert kernels.engine_of(op, *TASKS[op]) is first


def test_an_engine_has_no_task_that_it_does_not_name():
    for engine in kernels.ENGINES:
        for op in TASKS:
            if op not in (tasks.LAYER, tasks.SCORES, *engine.tasks):
                assert getattr(type(engine), op) is getattr(kernels.Engine, op)


@pytest.fixture
def no_library(monkeypatch):
    """As where no compiler was at hand."""
    monkeypatch.setattr(kernels.native, "load", lambda: "there is no compiled library here")
    for name in list(vars(kernels.native.ENGINE)):  # the library's functions
        monkeypatch.delattr(kernels.native.ENGINE, name)
    monkeypatch.setattr(verbs, "_QUICK", {})
    monkeypatch.setattr(kernels.xla.ENGINE, "refuse", lambda op, mapping, x: "there is no compiled library here")


@needs_torch
def test_torchs_own_softmax_serves_softmax(no_library):
    import torch

    x = torch.randn(2, 5)
    assert A.choose("forward", Softmax(), x).name == "framework"
    assert A.choose("forward", Sparsemax(), x).name == "reference"
    assert A.choose("forward", Softmax(), scores()).name == "reference"
    assert torch.equal(A.softmax(x), torch.softmax(x, -1))


@needs_torch
def test_torchs_softmax_of_masked_rows_and_their_neighbours():
    import torch

    x = torch.tensor([[0.0, -torch.inf, 1.0], [-torch.inf] * 3, [torch.nan, 0.0, 0.0]])
    with A.use("framework"):
        p = A.softmax(x)
    assert torch.equal(p[0], torch.softmax(x[0], -1))
    assert torch.equal(p[1], torch.zeros(3))
    assert p[2].isnan().all()


@needs_torch
def test_explain(no_library):
    import torch

    told = A.explain(Softmax(), torch.randn(2, 5), verbose=True)
    assert [op for op, _, _ in told.rows] == list(kernels.OPS)
    assert str(told) == repr(told)
    short = str(A.explain(Softmax(), torch.randn(2, 5)))
    lines = [line for line in short.splitlines() if not line.startswith("Why no other engine")]
    assert lines == [line for line in str(told).splitlines() if not line.lstrip().startswith("not ")]
    assert len(short.partition("\n\n")[0].splitlines()) == 1 + len(kernels.OPS)
    assert str(told).splitlines()[0] == "Softmax()"
    assert "  p                     framework\n" in str(told)
    assert " not framework: it has no loss (soft targets), only p, gradient of p\n" in str(told)
    with A.use("reference"):
        said = str(A.explain(Sparsemax(), torch.randn(2, 5)))
        assert "  p                     reference: iterates, 20 to 1,000 times a kernel's time\n" in said
        assert "  log p                 reference: the logarithm of p\n" in said
        assert "  loss (soft targets)   reference: a formula of p\n" in said
        assert " reference: 5 to 100 times a kernel's time" in str(A.explain(A.Elementwise(), torch.randn(2, 5)))
    told = A.explain(Sparsemax(), torch.randn(2, 5), verbose=True)
    assert "torch has a fused softmax, but no sparsemax" in str(told)
    told = A.explain(Softmax(), [0.0, 1.0], verbose=True)
    assert "these scores are of numpy" in str(told)
    with A.use("reference"):
        assert "engine 'reference' was asked for" in str(A.explain(Softmax(), torch.randn(2, 5), verbose=True))


def test_explain_says_where_a_forced_engine_cannot():
    torch = pytest.importorskip("torch")
    with A.use("framework"):
        told = A.explain(Sparsemax(), torch.randn(2, 5))
    assert {engine for _, engine, _ in told.rows} == {"none"}
    assert told.rows[0][2][0][0] == "framework"
    assert "an error, unless it follows from p" in str(told)


def test_explain_says_what_every_name_in_it_means():
    assert tuple(explanation.ENGINES_ARE) == (*kernels.names(), "none")
    assert tuple(explanation.IMPLEMENTATIONS_ARE) == tuple(one.name for one in IMPLEMENTATIONS)
    assert tuple(WORDS) == (*kernels.OPS, "slope")
    for m in ("sparsemax", "fusedmax", "ranks"):
        for framework in KINDS.values():
            head, _, legend = str(A.explain(m, framework(np.zeros((3, 5), "float32")))).partition("\n\n")
            for line in head.splitlines()[1:]:
                engine = line[22:].split(":")[0].strip()
                assert "over processes" in line or f"{engine}: {explanation.ENGINES_ARE[engine]}\n" in legend


def test_an_engine_that_was_asked_for_and_refuses_is_an_error():
    with (
        A.use("framework"),
        pytest.raises(
            RuntimeError, match=r"engine 'framework' was asked for and can't compute forward of Sparsemax\(\): "
        ),
    ):
        A.sparsemax([0.0, 1.0])
    np.testing.assert_allclose(A.sparsemax([0.0, 0.5]), [0.25, 0.75])


@needs_torch
def test_an_engine_that_was_asked_for_serves():
    import torch

    x = torch.randn(2, 5, requires_grad=True)
    with A.use("framework"):
        A.softmax(x)[0, 0].backward()
        assert A.choose("forward", Softmax(), x).name == "framework"
    with A.use("reference"):
        assert A.choose("forward", Softmax(), x).name == "reference"


def test_the_environment(environment):
    x = scores()
    environment("reference")
    assert A.choose("forward", Softmax(), x).name == "reference"
    environment("framework")
    with pytest.raises(RuntimeError, match="engine 'framework' was asked for"):
        A.softmax(x)
    with A.use("reference"):  # the nearer word counts
        A.softmax(x)
    environment("warp")
    with pytest.raises(ValueError, match="ANYMAX_ENGINE: there is no engine 'warp'"):
        A.softmax(x)
    environment(None)
    A.softmax(x)
    code = "import anymax; print(anymax.choose('forward', anymax.Sparsemax(), [0.0, 1.0]).name)"
    env = {**os.environ, "ANYMAX_ENGINE": "reference"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "reference"


def test_contexts_nest_and_restore():
    assert kernels.forced() is None
    with A.use("reference"):
        with A.use("framework"):
            assert kernels.forced().name == "framework"
        assert kernels.forced().name == "reference"
    assert kernels.forced() is None
    with pytest.raises(KeyError), A.use("framework"):
        raise KeyError
    assert kernels.forced() is None


def test_a_context_that_is_never_entered_says_so():
    with pytest.warns(RuntimeWarning, match=r"anymax\.use\('reference'\) alone does nothing: write `with") as told:
        A.use("reference")
    assert [w.filename for w in told] == [__file__]
    asked = A.use("reference")(kernels.asked)  # a decorated function enters it at each call
    assert [asked(), kernels.asked(), asked()] == ["reference", None, "reference"]


def test_threads_do_not_see_each_others_choice():
    inside, done, seen = threading.Event(), threading.Event(), []

    def other():
        inside.wait(10)
        seen.append(kernels.forced())
        with A.use("reference"):
            done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with A.use("framework"):
        inside.set()
        done.wait(10)
        assert kernels.forced().name == "framework"
        thread.join(10)
    assert seen == [None]


@pytest.mark.skipif("jax" not in KINDS, reason="jax is not installed")
def test_a_compiled_jax_call_does_not_outlive_the_choice():
    import jax

    x = jax.numpy.asarray([0.0, 1.0])
    A.softmax(x)
    with A.use("framework"), pytest.raises(RuntimeError, match="was asked for"):
        A.softmax(x)
    A.softmax(x)


@pytest.mark.skipif(native.isa() is None, reason="no compiled library")
def test_calls_go_to_the_engine_as_they_come(monkeypatch):
    torch = pytest.importorskip("torch")
    x = torch.randn(3, 4, 50)
    sugar = (
        A.softmax,
        A.sparsemax,
        A.entmax15,
        lambda x, *a, **k: A.entmax(x, 1.5, *a, **k),
        lambda x, *a, **k: A.sparse_softmax(x, *a, k=2, **k),
    )
    asked = [
        *[((i,), {}) for i in (-1, 2, 0, 1, -2)],
        *[((), {name: i}) for name in ("axis", "dim") for i in (-1, 2, 0, -3)],
        ((), {"dim": None, "mask": None}),
    ]
    others = [((), {"axis": 0, "dim": 0}), ((-1,), {"dim": -1}), ((), {"dim": (2,)})]
    wanted = [[f(x, *a, **k) for a, k in others] for f in sugar]
    if native.isa() is None:
        pytest.skip("no compiled engine here")
    longs = []
    split = verbs.split
    monkeypatch.setattr(verbs, "split", lambda *a, **k: longs.append(a) or split(*a, **k))
    for f, want in zip(sugar, wanted, strict=True):
        for a, k in asked:
            axis = next((i for i in (*a, k.get("axis"), k.get("dim")) if i is not None), -1)
            same = f(x.movedim(axis, -1).contiguous()).movedim(-1, axis)
            assert torch.equal(f(x, *a, **k), same), (a, k)
            assert np.array_equal(f(x.numpy(), *a, **k), same.numpy())
        keep = torch.rand(3, 1, 50) < 0.8
        same = f(torch.where(keep, x, -torch.inf))
        assert torch.equal(f(x, mask=keep), same)
        assert np.array_equal(f(x.numpy(), mask=keep.numpy()), same.numpy())
        assert not longs
        for (a, k), p in zip(others, want, strict=True):
            assert torch.equal(f(x, *a, **k), p), (a, k)
    for mapping in (A.Sparsemax(), A.Entmax(1.2)):
        module = A.nn.Activation(mapping, dim=-1)
        assert torch.equal(module(x), A.apply(mapping, x))
        assert torch.equal(A.apply(mapping, x, 2), A.apply(mapping, x))
    assert not longs
    assert torch.equal(A.apply(A.Sparsemax(), x, 0, dim=0), wanted[1][0])
    assert A.sparsemax([1.0, 0.0], axis=-1).tolist() == [1.0, 0.0]


def test_memory_mapped_arrays_are_served_as_any_others(tmp_path):
    x = np.random.default_rng(0).normal(size=(4, 300)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert type(mapped) is np.memmap
    assert A.explain(Sparsemax(), mapped).rows == A.explain(Sparsemax(), x).rows
    classes = np.array([0, 7, 2, 1])
    np.save(tmp_path / "classes.npy", classes)
    for f in (
        A.sparsemax, A.log_softmax, A.logsumexp, lambda x: A.sparsemax(x, axis=0), lambda x: A.softmax(x, mask=mapped > 0),
        lambda x: A.entmax_loss(x, np.load(tmp_path / "classes.npy", mmap_mode="r")), lambda x: A.linear_attention(x, x, x),
        lambda x: A.attention(x, x, x, Sparsemax()), lambda x: A.threshold(Entmax(1.5), x)[0], A.topk(3),
    ):  # fmt: skip
        got = f(mapped)
        assert type(got) in (np.ndarray, np.float32)
        np.testing.assert_array_equal(got, f(x))
    out = np.memmap(tmp_path / "out", np.float32, "w+", shape=x.shape)
    for axis in (-1, 0):
        assert A.sparsemax(mapped, axis=axis, out=out) is out
        np.testing.assert_array_equal(out, A.sparsemax(x, axis=axis))
    assert A.taylor_softmax(x, 4, out=out) is out
    with A.use("reference"):
        assert A.softmax(mapped, out=out) is out
    np.testing.assert_allclose(out, A.softmax(x), rtol=1e-6)
    with pytest.raises(ValueError, match="read-only"):
        A.softmax(x, out=mapped)


@pytest.mark.parametrize(
    "mapping",
    [
        Entmax(1e301), Entmax(1e-310), A.NormMax(1e300), A.NormMax(1e305), A.Budget(1e-305), A.SparseSoftmax(p=1e-310),
        A.SparseSoftmax(k=10**16), A.PerturbMax(scale=1e301), A.PerturbMax(nodes=5000),
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("kind", [k for k in ("numpy", "torch") if k in KINDS])
def test_a_parameter_out_of_the_range_of_an_engine_goes_to_another(mapping, kind):
    x = scores(kind)
    assert "it takes " in native.ENGINE.refuse("forward", mapping, scores())
    with A.use("reference"):
        want = A.apply(mapping, x)
    np.testing.assert_array_equal(back(A.apply(mapping, x)), back(want))
    if isinstance(mapping, Entmax):
        np.testing.assert_array_equal(back(A.entmax(x, mapping.alpha)), back(want))
    if isinstance(mapping, A.SparseSoftmax) and mapping.k:
        np.testing.assert_array_equal(back(A.sparse_softmax(x, k=mapping.k)), back(want))


@pytest.mark.parametrize("kind", [k for k in ("numpy", "torch", "jax") if k in KINDS])
def test_rows_of_more_classes_than_an_engine_counts_go_to_the_reference(kind):
    """No array of that many is made: one number, or what JAX traces, stands for all."""
    chosen = []

    def look(x):
        for op in ("forward", "index_loss"):
            chosen.append(A.choose(op, A.Sparsemax(), x).name)
        return x

    for n in (link.MOST_CLASSES, link.MOST_CLASSES + 1):
        if kind == "numpy":
            look(np.broadcast_to(np.float32(0.0), (1, n)))
        elif kind == "torch":
            import torch

            look(torch.zeros(1).expand(1, n))
        else:
            import jax

            jax.eval_shape(look, jax.ShapeDtypeStruct((1, n), np.float32))
    assert chosen[2:] == ["reference", "reference"]
    if not isinstance(native.load(), str):
        assert "reference" not in chosen[:2]


@pytest.mark.skipif(isinstance(native.load(), str), reason="no compiled engine")
def test_the_library_says_how_many_classes_it_counts():
    text = (Path(__file__).parents[2] / "csrc" / "core" / "unit.h").read_text()
    assert "#define ANYMAX_MOST_CLASSES (INT32_MAX - 1024)" in text
    assert link.MOST_CLASSES == 2**31 - 1 - 1024
    x = np.broadcast_to(np.float32(0.0), (1, link.MOST_CLASSES + 1))
    assert native.load().forward(A.Softmax(), x, -1, None, None) is None


@pytest.mark.skipif(isinstance(native.load(), str), reason="no compiled engine")
@pytest.mark.parametrize("kind", link.RANGES)
def test_the_library_takes_what_its_ranges_say(kind):
    make = {
        "entmax": Entmax, "budget": A.Budget, "normmax": A.NormMax, "topk": lambda k: A.SparseSoftmax(k=int(k)),
        "topp": lambda p: A.SparseSoftmax(p=p), "perturb_max": lambda s: A.PerturbMax(scale=s), "taylor": lambda k: A.Taylor(int(k)),
        "bounded": lambda a: A.Bounded(0.5, a), "softpick": A.Softpick,
    }[kind]  # fmt: skip
    low, high = link.RANGES[kind]
    for value in (1.0000001 if kind == "normmax" else low, 2.0 if kind == "budget" else high):
        p = native.ENGINE.forward(make(value), scores())
        assert p.shape == (2, 5)


def test_a_taylor_polynomial_of_the_highest_order():
    assert np.isfinite(A.taylor_softmax(np.array([1.0, 900.0]), 170)).all()


# -- a kernel holds for the class that names it ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Hot(Softmax):
    """Softmax at half the temperature."""

    def forward(self, x, xp):
        return super().forward(2.0 * x, xp)

    def log_forward(self, x, xp):
        return super().log_forward(2.0 * x, xp)


@dataclasses.dataclass(frozen=True, eq=False)
class Half(Sparsemax):
    """The nearest point to x / 2: `omega = q^2`."""

    def omega_terms(self, q, xp):
        return q * (q - 1.0)

    def link(self, t, xp):
        return 0.5 * super().link(t, xp)

    def slope(self, q, xp):
        return 2.0 * q

    def curvature(self, q, xp):
        return 2.0 * xp.ones_like(q)

    def sensitivity(self, p, xp):
        return 0.5 * super().sensitivity(p, xp)

    def closed(self, y, keep, xp):
        return None


class Doubled:
    def forward(self, x, xp):
        return super().forward(2.0 * x, xp)


@dataclasses.dataclass(frozen=True, eq=False)
class Mixed(Doubled, Softmax):
    """The formula comes from another base."""


@dataclasses.dataclass(frozen=True, eq=False)
class Eager(Entmax):
    """A default and a name of its own: the formulas are Entmax's."""

    alpha: Any = 1.25
    name = "eager"


@every_kind
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_subclass_with_a_formula_of_its_own_is_served_by_it(kind, dtype):
    x = KINDS[kind](np.random.default_rng(0).normal(size=(8, 40)).astype(dtype))
    atol = 1e-6 if "32" in str(x.dtype) else 1e-13
    for mapping in (Hot(), Mixed()):
        np.testing.assert_allclose(back(A.apply(mapping, x)), back(A.softmax(2.0 * x)), atol=atol)
    np.testing.assert_allclose(back(A.log_apply(Hot(), x)), back(A.log_softmax(2.0 * x)), atol=20 * atol)
    np.testing.assert_allclose(back(A.apply(Half(), x)), back(A.sparsemax(0.5 * x)), atol=atol)
    np.testing.assert_allclose(
        back(A.threshold(Half(), x).tau), 2 * back(A.threshold(Sparsemax(), 0.5 * x).tau), atol=8 * atol
    )
    y = KINDS[kind](np.arange(8))
    np.testing.assert_allclose(
        back(A.fenchel_young(Half(), x, y)), 2 * back(A.sparsemax_loss(0.5 * x, y)), atol=8 * atol
    )
    np.testing.assert_allclose(back(A.nll(Hot(), x, y)), back(A.cross_entropy(2.0 * x, y)), atol=20 * atol)


def test_a_kernel_is_not_inherited():
    assert Softmax.kernel == "softmax"
    assert (Hot.kernel, Half.kernel, Mixed.kernel, Eager.kernel) == (None, None, None, None)

    class Hotter(Hot):
        pass

    class Renamed(Half):
        kernel = "sparsemax"  # said in so many words

    class Again(Renamed):
        pass

    assert (Hotter.kernel, Renamed.kernel, Again.kernel) == (None, "sparsemax", None)
    x = scores()
    np.testing.assert_allclose(A.apply(Eager(), x), A.entmax(x, 1.25), atol=1e-6)


def test_a_map_with_a_p_of_its_own_has_the_log_of_that_p():
    """A subclass that overrides what p follows from, and not `log_forward`, does not keep its base's."""

    class HotSoftmax(Softmax):
        def forward(self, x, xp):
            return super().forward(2.0 * x, xp)

    class HotSigsoftmax(A.Sigsoftmax):
        def weights(self, x, keep, xp):
            u, du = super().weights(2.0 * x, keep, xp)
            return u, 2.0 * du

    class FewHot(A.SparseSoftmax):
        def forward(self, x, xp):
            return super().forward(2.0 * x, xp)

    class Renamed(Softmax):
        name = "renamed"

    x = scores()
    for mapping, base in (
        (HotSoftmax(), Softmax()),
        (HotSigsoftmax(), A.Sigsoftmax()),
        (FewHot(k=2), A.SparseSoftmax(k=2)),
    ):
        np.testing.assert_allclose(A.log_apply(mapping, x), A.log_apply(base, 2.0 * x), rtol=1e-5)
        np.testing.assert_allclose(
            A.nll(mapping, x, np.zeros(len(x), int)), A.nll(base, 2.0 * x, np.zeros(len(x), int)), rtol=1e-5
        )
    assert Renamed.log_forward is Softmax.log_forward  # the same p, whose log p may be far below the smallest number


@dataclasses.dataclass(frozen=True, eq=False)
class Steeper(Taylor):
    """Taylor softmax of doubled scores."""

    def weights(self, x, keep, xp):
        u, du = super().weights(2.0 * x, keep, xp)
        return u, 2.0 * du


@every_kind
def test_attention_with_a_subclass_is_that_of_its_formulas(kind):
    if kind == "strict":
        pytest.skip("attention takes NumPy, torch and JAX")
    q, k, v = (KINDS[kind](np.random.default_rng(i).normal(size=(1, 2, 7, 4)).astype("float32")) for i in range(3))
    for mine, theirs in ((Hot(), Softmax()), (Half(), Sparsemax()), (Steeper(), Taylor(2))):
        factor = 0.5 if isinstance(mine, Half) else 2.0
        want = A.attention(factor * q, k, v, theirs)
        np.testing.assert_allclose(back(A.attention(q, k, v, mine)), back(want), atol=1e-6)
    with pytest.raises(ValueError, match="only Taylor softmax of order 2"):
        A.linear_attention(q, k, v, mapping=Steeper())


def test_explain_says_which_maps_gather_all_scores_over_processes():
    x, line = np.zeros((2, 5000)), "over processes, all scores of a row are gathered"
    for m in ("perturb_max", "softpick", "fusedmax", "ranks"):
        assert line in str(A.explain(m, x))
    for m in ("softmax", "perturb_max:noise=gumbel", "entmax15", "sparse_softmax:p=0.9", "taylor", "elementwise"):
        assert line not in str(A.explain(m, x))
