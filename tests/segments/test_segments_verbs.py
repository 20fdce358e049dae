"""Ragged rows: every verb, and every loss with its options, against a loop over the segments by the verb on rows."""

import contextlib
import inspect

import numpy as np
import pytest
from kinds import back
from loss_cases import OPTIONS
from segment_cases import (
    COUNT,
    ENTRIES,
    FEW,
    JAX,
    LENGTHS,
    MAPS,
    PTR,
    SHUFFLED,
    SORTED,
    by_few,
    by_segment,
    each_segment,
    its_own_warnings,
    scores,
    targets,
)

import anymax
from anymax import (
    Budget,
    Entmax,
    PerturbMax,
    Segments,
    SparseSoftmax,
    segment_apply,
    segment_entropy,
    segment_logsumexp,
    segment_loss,
    segment_sample,
    segment_support,
    segment_threshold,
)
from anymax.kernels import native

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
jnp = jax.numpy

pytestmark = its_own_warnings
GIVEN = {"index": SHUFFLED, "num_segments": COUNT}


# -- every verb ------------------------------------------------------------------------------------------------------------------------


def _verbs():
    """Name -> (of x and segments, of a row, what a segment without entries has; None for a verb that gives each entry a number)."""
    for m in MAPS:
        for name in ("apply", "log_apply"):
            verbs = getattr(anymax, f"segment_{name}"), getattr(anymax, name)
            yield f"{name}-{m!r}", (*(lambda *x, v=v, m=m, **g: v(m, *x, **g) for v in verbs), None)
        for field, empty in (("tau", -np.inf), ("support", 0)) if m.has_threshold else ():
            verbs = segment_threshold, anymax.threshold
            yield (
                f"{field}-{m!r}",
                (*(lambda *x, v=v, m=m, f=field, **g: getattr(v(m, *x, **g), f) for v in verbs), empty),
            )
    yield "logsumexp", (segment_logsumexp, anymax.logsumexp, -np.inf)
    of_p = lambda verb, *o: lambda x, **g: verb(segment_apply("sparsemax", x, **g), *o, **g)  # noqa: E731
    for o in (("shannon",), ("renyi", 3.0), ("renyi2",), ("tsallis", 1.5)):
        yield (
            f"entropy-{o[0]}",
            (of_p(segment_entropy, *o), lambda row, o=o: anymax.entropy(anymax.sparsemax(row), *o), 0.0),
        )
    yield "support", (of_p(segment_support), lambda row: anymax.support(anymax.sparsemax(row)).sum(), 0)


VERBS = dict(_verbs())
FRAMEWORKS = ("engine", "reference", "torch", "jax", "jit", "compiled")
ELSEWHERE = {
    "logsumexp",
    "entropy-shannon",
    "support",
    *(f"{verb}-{FEW[1]!r}" for verb in ("apply", "log_apply", "tau")),
}


def in_framework(framework, verb, x, **more):
    """What a verb gives in a framework: with the index of the segments as a part of the program, where there is one."""
    if framework in ("jit", "compiled"):
        call = lambda x, index: verb(x, index=index, num_segments=COUNT, **more)  # noqa: E731
        if framework == "jit":
            return jax.jit(call)(jnp.asarray(x), jnp.asarray(SHUFFLED))
        torch._dynamo.reset()
        return torch.compile(call, fullgraph=True, backend="eager")(torch.tensor(x), torch.tensor(SHUFFLED))
    with anymax.use("reference") if framework == "reference" else contextlib.nullcontext():
        return verb({"torch": torch.tensor, "jax": jnp.asarray}.get(framework, np.asarray)(x), **GIVEN, **more)


CELLS = [(f, verb) for f in FRAMEWORKS for verb in VERBS if f in ("engine", "reference", "torch") or verb in ELSEWHERE]
SHORT = [("jax", "logsumexp"), ("jit", f"apply-{FEW[1]!r}"), ("compiled", "support")]  # of those that compile


@pytest.mark.whole(lambda framework, verb: framework in ("jax", "jit", "compiled") and (framework, verb) not in SHORT)
@pytest.mark.parametrize(("framework", "verb"), CELLS)
def test_a_verb_is_that_of_each_segment(framework, verb):
    call, row, empty = VERBS[verb]
    x, tolerance = scores(2, dtype="float64"), 1e-9 if framework not in ("jax", "jit") else 1e-5
    with np.errstate(divide="ignore"):
        want = by_segment(x, SHUFFLED, row) if empty is None else each_segment(x, SHUFFLED, row, empty)
    got = in_framework(framework, call, x)
    np.testing.assert_allclose(back(got), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("verb", [v for v in VERBS if v.split("-")[0] in ("apply", "tau", "logsumexp", "entropy")])
def test_a_gradient_is_that_of_each_segment(verb):
    """And forward mode has the same derivative."""
    call, row, empty = VERBS[verb]
    x = torch.tensor(scores(2, dtype="float64"), requires_grad=True)
    shape = x.shape if empty is None else (COUNT, 2)
    g, v = (torch.tensor(np.random.default_rng(s).normal(size=n)) for s, n in ((4, shape), (5, x.shape)))
    some = slice(None) if empty is None else torch.tensor(LENGTHS) > 0
    (got,) = torch.autograd.grad((call(x, **GIVEN) * g)[some].sum(), x)
    parts = []
    for s in range(COUNT):
        own = torch.tensor(np.nonzero(s == SHUFFLED)[0])
        parts += [(row(x[own, h]) * (g[own, h] if empty is None else g[s, h])).sum() for h in range(2) if len(own)]
    (want,) = torch.autograd.grad(sum(parts), x)
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)
    _, change = torch.func.jvp(lambda x: (call(x, **GIVEN) * g)[some].sum(), (x.detach(),), (v,))
    torch.testing.assert_close(change, (got * v).sum())


@pytest.mark.parametrize("make", [np.asarray, torch.tensor], ids=["numpy", "torch"])
def test_logsumexp_of_rows_that_are_lost_or_masked(make):
    x = scores(2)
    x[PTR[2], 0], x[PTR[4], 1], x[PTR[0] : PTR[1], 0] = np.nan, np.inf, -np.inf
    want = each_segment(x, SORTED, anymax.logsumexp, -np.inf)
    np.testing.assert_allclose(segment_logsumexp(make(x), ptr=PTR), want, rtol=1e-6)


# -- a value for each segment -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["numpy", "padded", "torch", JAX])
@pytest.mark.parametrize("shape", ["segments", "segments and heads", "heads"])
@pytest.mark.parametrize("map_of", [Entmax, lambda scale: PerturbMax("logistic", scale=scale)], ids=["alpha", "scale"])
def test_a_parameter_of_each_segment(map_of, kind, shape):
    x = scores(2, dtype="float64")
    size = {"segments": (COUNT, 1), "segments and heads": (COUNT, 2), "heads": (1, 2)}[shape]
    alpha = np.random.default_rng(3).uniform(1.1, 2.5, size)
    place = {"numpy": np.asarray, "padded": np.asarray, "torch": torch.tensor, "jax": jnp.asarray}[kind]
    with anymax.use("reference") if kind == "padded" else contextlib.nullcontext():
        got = np.asarray(segment_apply(map_of(place(alpha)), place(x), index=place(SHUFFLED), num_segments=COUNT))
    full = np.broadcast_to(alpha, (COUNT, 2))
    for s in range(COUNT):
        for h in range(2):
            own = np.nonzero(s == SHUFFLED)[0]
            if len(own):
                want = anymax.apply(map_of(np.array([full[s, h]])), np.ascontiguousarray(x[own, h]))
                np.testing.assert_allclose(got[own, h], want, atol=1e-12 if kind != "jax" else 2e-6)


def test_a_budget_of_each_segment():
    k = np.array([2.0, 1.0, 3.5, 1.0, 2.0, 10.0, 4.0])
    p = segment_apply(Budget(k), scores(), ptr=PTR)
    np.testing.assert_allclose(np.add.reduceat(p, PTR[[0, 2, 3, 4, 5]]), [2.0, 3.5, 1.0, 2.0, 10.0], rtol=1e-5)
    # more than there are entries: each gets 1
    for engine in ("native", "reference"):
        if engine == "reference" or not isinstance(native.load(), str):
            with anymax.use(engine):
                assert segment_apply(Budget(3), [1.0, 0.0, 2.0, 5.0, 4.0, 0.0], lengths=[2, 4])[:2].tolist() == [
                    1.0,
                    1.0,
                ]


def test_a_learned_parameter_of_each_segment():
    alpha = torch.full((COUNT,), 1.5, dtype=torch.float64, requires_grad=True)
    x = torch.tensor(scores(dtype="float64"))
    assert torch.autograd.gradcheck(lambda a: segment_apply(Entmax(a), x, ptr=PTR), (alpha,))


def test_a_temperature_of_each_segment():
    rows, t = Segments.of(SHUFFLED, num_segments=COUNT), np.linspace(0.5, 2.0, COUNT)
    x = scores(dtype="float64")
    want = each_segment(x, SHUFFLED, anymax.logsumexp, -np.inf)
    np.testing.assert_allclose(segment_logsumexp(x, index=rows), want)
    warm = t * segment_logsumexp(x / rows.spread(t), index=rows)
    np.testing.assert_allclose(segment_logsumexp(x, index=rows, temperature=t), warm)
    assert rows.spread(torch.tensor(t)).shape == (ENTRIES,)


@pytest.mark.parametrize(("kind", "alpha"), [("renyi", 3.0), ("tsallis", 1.5)])
def test_an_entropy_of_each_segment(kind, alpha):
    p, each = segment_apply("sparsemax", scores(2, dtype="float64"), **GIVEN), np.linspace(1.2, alpha, COUNT)[:, None]
    got = segment_entropy(p, kind, each, **GIVEN)
    np.testing.assert_allclose(got[5, 1], anymax.entropy(p[SHUFFLED == 5, 1], kind, float(each[5, 0])))


# -- samples and losses ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["numpy", "torch", JAX])
def test_samples(kind):
    x = {"numpy": np.asarray, "torch": torch.tensor, "jax": jnp.asarray}[kind](scores(2))
    p = np.asarray(segment_apply("sparsemax", x, **GIVEN))
    drawn = np.asarray(segment_sample("sparsemax", x, **GIVEN, generator=0, num_samples=4000))
    assert drawn.shape == (4000, COUNT, 2)
    for s in range(COUNT):
        for h in range(2):
            own = np.nonzero(s == SHUFFLED)[0]
            found = drawn[:, s, h]
            if not len(own):
                assert (found == -1).all()
                continue
            share = np.array([(found == e).mean() for e in own])
            assert share.sum() == pytest.approx(1.0)
            assert (share[p[own, h] == 0] == 0).all()
            np.testing.assert_allclose(share, p[own, h], atol=0.04)
    one = segment_sample("sparsemax", x, **GIVEN, generator=0)
    assert tuple(one.shape) == (COUNT, 2)


_OF_SEGMENTS = {"index", "ptr", "lengths", "num_segments", "axis", "dim"}
KEYWORDS = {
    p.name for p in inspect.signature(segment_loss).parameters.values() if p.kind is p.KEYWORD_ONLY
} - _OF_SEGMENTS
LOSS_OPTIONS = [name for name, given in OPTIONS.items() if set(given) <= KEYWORDS | {"target"}]


def test_every_option_of_the_loss_has_a_row():
    assert {key for name in LOSS_OPTIONS for key in OPTIONS[name]} - {"target"} == KEYWORDS


def asked(option):
    """Targets and keywords of a row of OPTIONS: an entry of each segment, or the shares of the entries."""
    given, t = dict(OPTIONS[option]), targets(heads=(2,))
    kind = getattr(given.pop("target", None), "__name__", "")
    if "ignore_index" in given:
        given["ignore_index"] = int(t[0, 0])
        t[np.array(LENGTHS) == 0] = t[0, 0]
    if kind == "_soft":
        t = segment_apply("softmax", scores(2, dtype="float64", seed=8), **GIVEN)
    return np.full_like(t, -100) if kind == "_ignored" else t, given


def by_rows(mapping, x, t, reduction="mean", ignore_index=-100):
    values, counted = np.zeros((COUNT, 2)), 0
    for s, h in np.ndindex(COUNT, 2):
        own = np.nonzero(s == SHUFFLED)[0]
        soft = t.shape == x.shape
        if not len(own) or (not soft and t[s, h] == ignore_index):
            continue
        target = t[own, h] if soft else int(np.nonzero(own == t[s, h])[0][0])
        values[s, h] = anymax.fenchel_young(mapping, x[own, h], target, axis=0)
        counted += 1
    return {"none": values, "sum": values.sum(), "mean": values.sum() / max(counted, 1)}[reduction]


@pytest.mark.whole(
    lambda framework, mapping: framework in ("jax", "jit") or (framework == "reference" and mapping not in FEW)
)
@pytest.mark.parametrize(
    ("framework", "mapping"),
    [(f, m) for f in FRAMEWORKS if f != "compiled" for m in MAPS if m.facts.has_potential and (m in FEW or f not in ("jax", "jit"))],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("option", LOSS_OPTIONS)
def test_a_loss_is_that_of_each_segment(framework, mapping, option):
    x, (t, given) = scores(2, dtype="float64"), asked(option)
    if isinstance(mapping, SparseSoftmax) and t.shape == x.shape:
        pytest.skip("its loss of a distribution may be infinite, or there is none")
    place = {"torch": torch.tensor, "jax": jnp.asarray, "jit": jnp.asarray}.get(framework, np.asarray)
    got = in_framework(framework, lambda x, **g: segment_loss(mapping, x, place(t), **g), x, **given)
    tolerance = 1e-9 if framework not in ("jax", "jit") else 2e-5
    np.testing.assert_allclose(back(got), by_rows(mapping, x, t, **given), rtol=tolerance, atol=tolerance)


@by_few
def test_the_gradient_of_a_loss(mapping):
    x = torch.tensor(scores(2, dtype="float64"), requires_grad=True)
    t = torch.tensor(targets(heads=(2,)))
    given = {"index": SHUFFLED, "num_segments": COUNT}
    loss = lambda x: segment_loss(mapping, x, t, **given)  # noqa: E731
    (got,) = torch.autograd.grad(loss(x), x)
    y = torch.zeros_like(x).scatter_(0, t[t[:, 0] >= 0], 1.0)
    p = segment_apply(mapping, x.detach(), **given)
    torch.testing.assert_close(got, (p - y) / int((t >= 0).sum()))
    assert torch.autograd.gradgradcheck(loss, (x,))


@pytest.mark.whole
def test_the_gradient_of_a_loss_in_jax():
    x, t, given = scores(2), targets(heads=(2,)), {"index": SHUFFLED, "num_segments": COUNT}
    free = torch.tensor(x, requires_grad=True)
    (want,) = torch.autograd.grad(segment_loss("sparsemax", free, torch.tensor(t), **given), free)
    got = jax.grad(lambda x: segment_loss("sparsemax", x, jnp.asarray(t), **given))(jnp.asarray(x))
    np.testing.assert_allclose(got, want, atol=1e-6)


# -- under jit -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.parametrize("verb", [pytest.param("loss", marks=pytest.mark.whole), "sample"])
def test_under_torch_compile(verb):
    """The threshold and others are in the table of verbs."""
    index, x = torch.tensor([1, 0, 1, 1]), torch.tensor([0.5, -np.inf, -np.inf, -np.inf])
    given = {"loss": (x.clip(min=0), torch.tensor([-100, 2])), "sample": (x,)}[verb]
    call = lambda index: getattr(anymax, f"segment_{verb}")("softmax", *given, index=index, num_segments=2)  # noqa: E731
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="eager")(index), call(index))


@pytest.mark.whole
def test_a_sample_under_jit():
    draw = lambda x, **g: segment_sample("softmax", x, generator=jax.random.key(0), **g)  # noqa: E731
    np.testing.assert_array_equal(*(in_framework(f, draw, scores(2)) for f in ("jit", "jax")))


@pytest.mark.whole(lambda given: given == "lengths")
@pytest.mark.parametrize("given", ["ptr", "lengths"])
def test_jit_of_bounds(given):
    x, value = jnp.asarray(scores()), jnp.asarray(PTR if given == "ptr" else LENGTHS)
    f = jax.jit(lambda x, v: segment_apply("sparsemax", x, **{given: v}))
    np.testing.assert_allclose(f(x, value), segment_apply("sparsemax", x, ptr=PTR), atol=1e-6)
    np.testing.assert_allclose(
        jax.vmap(lambda x: segment_apply("softmax", x, ptr=PTR), 1, 1)(jnp.asarray(scores(3))),
        segment_apply("softmax", scores(3), ptr=PTR),
        atol=1e-6,
    )


@pytest.mark.parametrize("mapping", ["softmax", "sparsemax"])
def test_an_index_out_of_range_under_jit_is_nan(mapping):
    index = SHUFFLED.copy()
    index[3], index[7] = -1, COUNT
    f = jax.jit(lambda x, i: segment_apply(mapping, x, index=i, num_segments=COUNT))
    p = np.asarray(f(jnp.asarray(scores()), jnp.asarray(index)))
    assert np.nonzero(np.isnan(p))[0].tolist() == [3, 7]


def test_jit_asks_for_the_number_of_segments():
    with pytest.raises(TypeError, match="num_segments="):
        jax.jit(lambda x, i: segment_apply("softmax", x, index=i))(jnp.zeros(3), jnp.zeros(3, int))
