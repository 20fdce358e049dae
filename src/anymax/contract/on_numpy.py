"""The laws of a map, its derivatives and its loss on NumPy."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from .. import kernels
from .._array import quiet
from .._core.facts import Facts
from .._core.mapping import Mapping
from .._core.ratio_map import RatioMap
from .._core.separable import Separable
from ..inspection import jacobian
from ..losses.verbs import fenchel_young, nll
from ..mappings import Ratio
from .case import BrokenLaw, Case, near, need

_SPREADS = (0.02, 1.0, 30.0)


def data(case: Case) -> None:
    m = case.mapping
    need(dataclasses.is_dataclass(m) and type(m).__dataclass_params__.frozen, "a map is a frozen dataclass")  # type: ignore[attr-defined]
    need(isinstance(getattr(m, "name", None), str), "a map has a `name`")
    need(isinstance(m.facts, Facts), "`facts` is an anymax.Facts")
    need(m == m.replace() and hash(m) == hash(m), "a map equals itself and can be hashed")
    unknown = set(m.per_class) - {f.name for f in dataclasses.fields(m)}  # type: ignore[arg-type]
    need(not unknown, f"`per_class` names fields of the map, not {', '.join(sorted(unknown))}")


def distribution(case: Case) -> None:
    """p >= 0, and every row sums to what `sums` says, for any width, spread and offset; a dense map never gives a row of zeros."""
    bounded = (
        np.max(case.mapping.sums(None, np)[1]) < math.inf or case.mapping.ceiling(np.ones((1, case.n)), np) is not None
    )
    vanishes = isinstance(case.mapping, Ratio) or (isinstance(case.mapping, RatioMap) and case.mapping.facts.sparse)
    for dtype, atol in ((np.float64, 1e-9), (np.float32, 1e-4)):
        far = (0.0, -800.0, 800.0, 1e5, -1e5, 3e38 if dtype is np.float32 else 1e300) if bounded else (0.0, -5.0, 5.0)
        for n in case.widths:
            for sigma, offset in [(s, 0.0) for s in _SPREADS] + [(1.0, f) for f in far]:
                with np.errstate(over="ignore"):
                    x = case.rows(3, sigma, n, dtype) + dtype(offset)
                x = np.clip(x, np.finfo(dtype).min, np.finfo(dtype).max)
                p = case.p(x)
                where = f"at {n} classes, spread {sigma:g}, offset {offset:g}, {np.dtype(dtype).name}"
                need(p.shape == x.shape and p.dtype == x.dtype, f"p has the shape and the dtype of the scores {where}")
                need(np.isfinite(p), f"p is finite {where}, got {p[0, :4]}")
                need(p >= 0, f"p is not negative {where}, got {p.min():.3g}")
                sums = p.sum(-1, dtype=np.float64)
                low, high = (np.reshape(a, (-1,)) * np.ones(3) for a in case.mapping.sums(np.isfinite(x), np))
                want = np.clip(sums, low, high)
                if vanishes:  # all weights may be 0
                    want = np.where(sums == 0, 0.0, want)
                near(sums, want, atol * float(np.max(np.abs(want), initial=1.0)), f"p sums to what sums() says {where}")
    # all classes, and each of them alone
    kept = np.concatenate([np.ones((1, case.n), bool), np.eye(case.n, dtype=bool)])
    sums = [np.max(a) for one in kept for a in case.mapping.sums(one[None], np)]
    need(case.mapping.sums_to_one == all(a == 1.0 for a in sums), "sums_to_one agrees with sums()")


def masked(case: Case) -> None:
    """A class with score -inf is masked: it has probability 0, and the others get the map of the rest; a fully masked row is zeros."""
    x = case.rows(4)
    x[1, 0] = x[2, -1] = -math.inf
    x[3] = -math.inf
    p = case.p(x)
    need(p[np.isneginf(x)] == 0, "a masked class (-inf) has probability 0, and a fully masked row is zeros")
    need(np.isfinite(p), "a masked class makes no NaN")
    for row in case.smooth(3, masked=2):
        want = case.slopes(case.p, row)
        got, size = np.asarray(jacobian(case.mapping, row)), max(1.0, float(np.abs(want).max()))
        near(got, want, 2e-5 * size, "a masked class has no derivative, and changes none of the others")
    if not case.by_class and not case.mapping.params():
        near(p[1, 1:], case.p(x[1, 1:]), 1e-9, "a masked class does not change the others")
    near(p[0], case.p(x[:1])[0], 0.0, "a row does not depend on the other rows")


def poisoned(case: Case) -> None:
    """A row with NaN or +inf becomes NaN, and the other rows do not change."""
    clean = case.p(case.rows(3))
    for bad in (math.nan, math.inf):
        for at in (0, case.n - 1):
            x = case.rows(3)
            x[1, at] = bad
            p = case.p(x)
            need(np.isnan(p[1]), f"a row with {bad} is NaN")
            near(p[[0, 2]], clean[[0, 2]], 0.0, f"a row with {bad} touches no other")


def permutation(case: Case) -> None:
    """p(Px) = P p(x), unless the order of the classes matters; then some permutation shows it."""
    if case.by_class:
        return
    x, order = case.rows(3), np.random.default_rng(case.seed).permutation(case.n)
    if case.facts.ordered:
        rows = [case.rows(6, s) for s in _SPREADS]
        moved = any(np.abs(case.p(x[:, order]) - case.p(x)[:, order]).max() > 1e-9 for x in rows)
        need(moved, "facts.ordered: some permutation of the classes changes more than the order of p")
        return
    near(case.p(x[:, order]), case.p(x)[:, order], 1e-9, "p follows a permutation of the classes")


def monotone(case: Case) -> None:
    if case.facts.monotone:
        for sigma in (0.3, 3.0):
            rising = np.sort(case.rows(6, sigma), -1)
            for x in (rising, rising[:, ::-1], case.rows(6, sigma)):  # parameters may rise or fall along the classes
                p = np.take_along_axis(case.p(x), np.argsort(x, -1), -1)
                need(np.diff(p) >= -1e-12, "facts.monotone: x_i > x_j implies p_i >= p_j, whichever classes they are")


def shift_invariant(case: Case) -> None:
    if case.facts.shift_invariant:
        x = np.round(case.rows(4) * 2**20) / 2**20
        for c in (1.0, -37.0, 2.0**14):
            near(case.p(x + c), case.p(x), 1e-8, f"facts.shift_invariant: p(x {c:+g}) = p(x)")


def sparse(case: Case) -> None:
    near = case.p(case.rows(6))
    if not case.facts.sparse:
        need(near > 0, "facts.sparse is False: no p_i of a moderate row is 0")
        return
    rows = [np.arange(case.n) - 1.0, *(case.rows(6, s) for s in (1.0, 30.0, 1e4, 1e8))]
    need(any((case.p(x) == 0).any() for x in rows), "facts.sparse: some p_i is exactly 0 at a large spread")


def formulas(case: Case) -> None:
    """The formulas agree: slope = omega', curvature = slope', link = the inverse of slope; and for a ratio map du is u'."""
    m = case.mapping
    if isinstance(m, Separable) and not case.by_class and not m.params():
        most = m.ceiling(np.ones((1, 1)), np)
        top = min(1.0, float(np.max(most))) if most is not None else 1.0
        q = top * np.linspace(0.1, 0.9, 9)[:, None]
        h = 1e-5 * q
        with quiet(q):
            around = (m.omega_terms(q + h, np) - m.omega_terms(q - h, np)) / (2 * h)
            slope, bend = m.slope(q, np), m.curvature(q, np) * np.ones_like(q)
            level = around - slope
            size = 1 + np.abs(slope)
            near(level / size, level.mean() / size, 1e-6, "slope is the derivative of omega_terms, up to a constant")
            rate = (m.slope(q + h, np) - m.slope(q - h, np)) / (2 * h)
            rounding = 1e-15 * float(np.max(size / (h * bend)))
            near(rate / bend, np.ones_like(q), 1e-5 + rounding, "curvature is the derivative of slope")
            if type(m).at is Separable.at:  # a map with its own `at` may have other levels
                near(m.link(slope, np), q, 1e-9, "link is the inverse of slope")
    elif isinstance(m, RatioMap):
        for x in case.smooth():
            keep = np.ones(x.shape, bool)
            with quiet(x):
                u, du = m.weights(x, keep, np)
                need(u >= 0, "weights() gives u >= 0")
                p = u / u.sum()
                want = (np.diag(du) - np.outer(p, du)) / u.sum()
            got = case.slopes(case.p, x)
            near(got, want, 1e-6 * max(1.0, np.abs(got).max()), "weights() gives u and its derivative")


def derivative(case: Case) -> None:
    """vjp and jvp are the derivative of forward, and the Jacobian has the symmetries that the facts promise."""
    m = case.mapping
    rows = case.smooth()
    for x in rows:
        j, want = np.asarray(jacobian(m, x)), case.slopes(case.p, x)
        size = max(1.0, float(np.abs(want).max()))
        near(j, want, 2e-5 * size, "vjp is the transpose of the derivative of forward")
        if case.facts.has_potential:
            near(j, j.T, 1e-8 * size, "facts.has_potential: the Jacobian is symmetric")
        if case.facts.shift_invariant:
            near(j.sum(1), np.zeros(case.n), 1e-8 * size, "facts.shift_invariant: the Jacobian takes a constant to 0")
        with kernels.use("reference"), quiet(x):
            v = case.rows(1)[0]
            p = case.p(x)
            pushed = kernels.reference.ENGINE.jvp(_on_rows(m), x[None], p[None], v[None])[0]
            near(pushed, want @ v, 2e-5 * size * case.n, "jvp is J v")
            plain = kernels.reference.ENGINE.differentiable(_on_rows(m), x[None])[0]
            near(plain, p, 1e-8, "differentiable gives the p of forward")


def loss(case: Case) -> None:
    """The Fenchel-Young loss is >= 0, is 0 at y = p(x), and has the gradient p - y; a map without one raises an error."""
    m, x = case.mapping, case.rows(1)[0]
    one_hot = np.eye(case.n)[0]
    if not case.facts.has_potential:
        need(np.isfinite(nll(m, x, 0)) or case.facts.sparse, "nll of a dense map is finite")
        try:
            fenchel_young(m, x, 0)
        except TypeError:
            return
        raise BrokenLaw("facts.has_potential is False: fenchel_young says which loss to use instead")
    soft = True
    try:
        with quiet(x):
            m.omega(one_hot[None], np)
    except TypeError:
        soft = False  # the regulariser has no closed form: class indices only
    targets = [t for t in np.eye(case.n) if np.allclose(case.p(1e6 * t), t)]
    if soft:
        targets += [case.p(v) for v in case.rows(2)]
    for x in case.smooth():
        p = case.p(x)
        for y in targets:
            need(fenchel_young(m, x, y) >= 0, "the loss is not negative")
            got = case.slopes(lambda v, y=y: fenchel_young(m, v, np.tile(y, (len(v), 1)), reduction="none"), x)
            near(got, p - y, 1e-5, "the gradient of the loss is p - y")
        if soft:
            near(fenchel_young(m, x, p), 0.0, 1e-9 * max(1.0, float(np.abs(x).max())), "the loss is 0 at y = p(x)")
    margin = case.facts.margin
    if margin is not None and case.mapping.sums_to_one and not case.mapping.params() and targets:
        lead = np.where(targets[0] > 0.5, margin * (1 + 1e-6), 0.0)
        near(fenchel_young(m, lead, targets[0]), 0.0, 1e-9, "facts.margin: the loss is 0 once the target leads by it")


def _on_rows(mapping: Mapping) -> Mapping:
    """The map with its arrays shaped for one row."""
    return mapping.replace(**{k: v.reshape(1, -1) if v.ndim else v for k, v in mapping.params().items()})
