"""`check_mapping` tests a map against the laws of the contract numerically, and names each law that it breaks."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from . import kernels
from ._array import Array, is_array, quiet
from ._core.facts import Facts
from ._core.mapping import Mapping
from ._core.names import as_mapping
from ._core.ratio_map import RatioMap
from ._core.separable import Separable
from .functional import apply
from .inspection import jacobian
from .losses.verbs import fenchel_young, nll
from .mappings import Ratio

_SPREADS = (0.02, 1.0, 30.0)


class BrokenLaw(AssertionError):
    """A law of the contract does not hold; the message says where."""


@dataclasses.dataclass(frozen=True)
class _Case:
    """A map with test rows and helpers for the laws, in float64 on NumPy."""

    mapping: Mapping
    n: int
    seed: int

    def rows(self, count: int, sigma: float = 1.0, n: int | None = None, dtype: Any = np.float64) -> np.ndarray:
        rng = np.random.default_rng([self.seed, count, int(100 * sigma)])
        return (sigma * rng.standard_normal((count, self.n if n is None else n))).astype(dtype)

    def p(self, x: Array) -> np.ndarray:
        return np.asarray(apply(self.mapping, x))

    @property
    def facts(self) -> Facts:
        return self.mapping.facts

    @property
    def mass(self) -> Any:
        return self.mapping.mass

    @property
    def widths(self) -> tuple[int, ...]:
        """The numbers of classes to try: only `n` if a parameter has one value per class."""
        return (self.n,) if self._by_class else tuple(n for n in (1, 2, self.n, 63) if self._takes(n))

    def _takes(self, n: int) -> bool:
        try:
            self.mapping.check(n)
        except ValueError:
            return False
        return True

    @property
    def _by_class(self) -> bool:
        return any(is_array(v) and v.ndim and v.shape[-1] != 1 for v in self.mapping.params().values())

    def smooth(self, count: int = 6, masked: int = 0) -> list[np.ndarray]:
        """Rows whose support does not change nearby, so that finite differences are derivatives; each has `masked` masked classes."""
        e = 1e-4 * np.eye(self.n)
        hidden = np.arange(self.n) % 3 < 1 if masked else np.zeros(self.n, bool)
        hidden = hidden & (np.cumsum(hidden) <= masked)

        def constant(x: np.ndarray) -> bool:
            p, most = self.p(np.concatenate([x[None], x + e, x - e])), self.ceiling(x)
            inside = (p > 0) & (p < most) if most is not None else p > 0
            return bool((inside == inside[0]).all())

        rows = np.where(hidden, -math.inf, np.concatenate([self.rows(count), self.rows(count, 0.3)]))
        return [x for x in rows if constant(x)]

    def ceiling(self, x: np.ndarray) -> Any:
        return self.mapping.ceiling(x, np)

    def slopes(self, function: Callable[[np.ndarray], Any], x: np.ndarray, h: float = 1e-5) -> np.ndarray:
        """d function / dx_j by central differences, with the classes last; `function` takes rows."""
        step = h * np.eye(len(x))
        out = np.asarray(function(np.concatenate([x + step, x - step]))).astype(np.float64)
        return np.moveaxis(out[: len(x)] - out[len(x) :], 0, -1) / (2 * h)


def _need(condition: Any, words: str) -> None:
    if not bool(np.all(condition)):
        raise BrokenLaw(words)


def _near(a: Any, b: Any, atol: float, words: str) -> None:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    worst = float(np.max(np.abs(a - b), initial=0.0)) if a.shape == b.shape else math.inf
    _need(worst <= atol, f"{words} (off by {worst:.3g}, allowed {atol:.3g})")


# -- the laws ---------------------------------------------------------------------------------------------------------------


def data(case: _Case) -> None:
    m = case.mapping
    _need(dataclasses.is_dataclass(m) and type(m).__dataclass_params__.frozen, "a map is a frozen dataclass")  # type: ignore[attr-defined]
    _need(isinstance(getattr(m, "name", None), str), "a map has a `name`")
    _need(isinstance(m.facts, Facts), "`facts` is an anymax.Facts")
    _need(m == m.replace() and hash(m) == hash(m), "a map equals itself and can be hashed")
    unknown = set(m.per_class) - {f.name for f in dataclasses.fields(m)}  # type: ignore[arg-type]
    _need(not unknown, f"`per_class` names fields of the map, not {', '.join(sorted(unknown))}")


def distribution(case: _Case) -> None:
    """p >= 0, and every row sums to the mass, for any width, spread and offset; a dense map never gives a row of zeros."""
    for dtype, atol in ((np.float64, 1e-9), (np.float32, 1e-4)):
        far = (0.0, -800.0, 800.0, 1e5, -1e5, 3e38 if dtype is np.float32 else 1e300)
        for n in case.widths:
            for sigma, offset in [(s, 0.0) for s in _SPREADS] + [(1.0, f) for f in far]:
                with np.errstate(over="ignore"):
                    x = case.rows(3, sigma, n, dtype) + dtype(offset)
                x = np.clip(x, np.finfo(dtype).min, np.finfo(dtype).max)
                p = case.p(x)
                where = f"at {n} classes, spread {sigma:g}, offset {offset:g}, {np.dtype(dtype).name}"
                _need(p.shape == x.shape and p.dtype == x.dtype, f"p has the shape and the dtype of the scores {where}")
                _need(np.isfinite(p), f"p is finite {where}, got {p[0, :4]}")
                _need(p >= 0, f"p is not negative {where}, got {p.min():.3g}")
                sums = p.sum(-1, dtype=np.float64)
                most = case.ceiling(x)
                reachable = n if most is None else np.sum(most * np.ones_like(x), -1)
                want = np.minimum(np.max(case.mass), reachable) * np.ones(3)
                if isinstance(case.mapping, Ratio) or (
                    isinstance(case.mapping, RatioMap) and case.facts.sparse
                ):  # every u is 0
                    want = np.where(sums == 0, 0.0, want)
                _near(sums, want, atol * float(np.max(np.abs(want), initial=1.0)), f"p sums to the mass {where}")


def masked(case: _Case) -> None:
    """A class with score -inf is masked: it has probability 0, and the others get the map of the rest; a fully masked row is zeros."""
    x = case.rows(4)
    x[1, 0] = x[2, -1] = -math.inf
    x[3] = -math.inf
    p = case.p(x)
    _need(p[np.isneginf(x)] == 0, "a masked class (-inf) has probability 0, and a fully masked row is zeros")
    _need(np.isfinite(p), "a masked class makes no NaN")
    for row in case.smooth(3, masked=2):
        want = case.slopes(case.p, row)
        got, size = np.asarray(jacobian(case.mapping, row)), max(1.0, float(np.abs(want).max()))
        _near(got, want, 2e-5 * size, "a masked class has no derivative, and changes none of the others")
    if not case._by_class and not case.mapping.params():
        _near(p[1, 1:], case.p(x[1, 1:]), 1e-9, "a masked class does not change the others")
    _near(p[0], case.p(x[:1])[0], 0.0, "a row does not depend on the other rows")


def poisoned(case: _Case) -> None:
    """A row with NaN or +inf becomes NaN, and the other rows do not change."""
    clean = case.p(case.rows(3))
    for bad in (math.nan, math.inf):
        for at in (0, case.n - 1):
            x = case.rows(3)
            x[1, at] = bad
            p = case.p(x)
            _need(np.isnan(p[1]), f"a row with {bad} is NaN")
            _near(p[[0, 2]], clean[[0, 2]], 0.0, f"a row with {bad} touches no other")


def permutation(case: _Case) -> None:
    """p(Px) = P p(x)."""
    if case._by_class:
        return
    x, order = case.rows(3), np.random.default_rng(case.seed).permutation(case.n)
    _near(case.p(x[:, order]), case.p(x)[:, order], 1e-9, "p follows a permutation of the classes")


def monotone(case: _Case) -> None:
    if case.facts.monotone:
        for sigma in (0.3, 3.0):
            rising = np.sort(case.rows(6, sigma), -1)
            for x in (rising, rising[:, ::-1], case.rows(6, sigma)):  # parameters may rise or fall along the classes
                p = np.take_along_axis(case.p(x), np.argsort(x, -1), -1)
                _need(np.diff(p) >= -1e-12, "facts.monotone: x_i > x_j implies p_i >= p_j, whichever classes they are")


def shift_invariant(case: _Case) -> None:
    if case.facts.shift_invariant:
        x = np.round(case.rows(4) * 2**20) / 2**20
        for c in (1.0, -37.0, 2.0**14):
            _near(case.p(x + c), case.p(x), 1e-8, f"facts.shift_invariant: p(x {c:+g}) = p(x)")


def sparse(case: _Case) -> None:
    near = case.p(case.rows(6))
    if not case.facts.sparse:
        _need(near > 0, "facts.sparse is False: no p_i of a moderate row is 0")
        return
    rows = [np.arange(case.n) - 1.0, *(case.rows(6, s) for s in (1.0, 30.0, 1e4, 1e8))]
    _need(any((case.p(x) == 0).any() for x in rows), "facts.sparse: some p_i is exactly 0 at a large spread")


def formulas(case: _Case) -> None:
    """The formulas agree: slope = omega', curvature = slope', link = the inverse of slope; and for a ratio map du is u'."""
    m = case.mapping
    if isinstance(m, Separable) and not case._by_class and not m.params():
        most = m.ceiling(np.ones((1, 1)), np)
        top = min(1.0, float(np.max(most))) if most is not None else 1.0
        q = top * np.linspace(0.1, 0.9, 9)[:, None]
        h = 1e-5 * q
        with quiet(q):
            around = (m.omega_terms(q + h, np) - m.omega_terms(q - h, np)) / (2 * h)
            slope, bend = m.slope(q, np), m.curvature(q, np) * np.ones_like(q)
            level = around - slope
            size = 1 + np.abs(slope)
            _near(level / size, level.mean() / size, 1e-6, "slope is the derivative of omega_terms, up to a constant")
            rate = (m.slope(q + h, np) - m.slope(q - h, np)) / (2 * h)
            rounding = 1e-15 * float(np.max(size / (h * bend)))
            _near(rate / bend, np.ones_like(q), 1e-5 + rounding, "curvature is the derivative of slope")
            if type(m).at is Separable.at:  # a map with its own `at` may have other levels
                _near(m.link(slope, np), q, 1e-9, "link is the inverse of slope")
    elif isinstance(m, RatioMap):
        for x in case.smooth():
            keep = np.ones(x.shape, bool)
            with quiet(x):
                u, du = m.weights(x, keep, np)
                _need(u >= 0, "weights() gives u >= 0")
                p = u / u.sum()
                want = (np.diag(du) - np.outer(p, du)) / u.sum()
            got = case.slopes(case.p, x)
            _near(got, want, 1e-6 * max(1.0, np.abs(got).max()), "weights() gives u and its derivative")


def derivative(case: _Case) -> None:
    """vjp and jvp are the derivative of forward, and the Jacobian has the symmetries that the facts promise."""
    m = case.mapping
    rows = case.smooth()
    for x in rows:
        j, want = np.asarray(jacobian(m, x)), case.slopes(case.p, x)
        size = max(1.0, float(np.abs(want).max()))
        _near(j, want, 2e-5 * size, "vjp is the transpose of the derivative of forward")
        if case.facts.has_potential:
            _near(j, j.T, 1e-8 * size, "facts.has_potential: the Jacobian is symmetric")
        if case.facts.shift_invariant:
            _near(j.sum(1), np.zeros(case.n), 1e-8 * size, "facts.shift_invariant: the Jacobian takes a constant to 0")
        with kernels.use("reference"), quiet(x):
            v = case.rows(1)[0]
            p = case.p(x)
            _near(
                kernels.reference.ENGINE.jvp(_on_rows(m), x[None], p[None], v[None])[0],
                want @ v,
                2e-5 * size * case.n,
                "jvp is J v",
            )
            plain = kernels.reference.ENGINE.differentiable(_on_rows(m), x[None])[0]
            _near(plain, p, 1e-8, "differentiable gives the p of forward")


def loss(case: _Case) -> None:
    """The Fenchel-Young loss is >= 0, is 0 at y = p(x), and has the gradient p - y; a map without one raises an error."""
    m, x = case.mapping, case.rows(1)[0]
    one_hot = np.eye(case.n)[0]
    if not case.facts.has_potential:
        _need(np.isfinite(nll(m, x, 0)) or case.facts.sparse, "nll of a dense map is finite")
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
            _need(fenchel_young(m, x, y) >= 0, "the loss is not negative")
            got = case.slopes(lambda v, y=y: fenchel_young(m, v, np.tile(y, (len(v), 1)), reduction="none"), x)
            _near(got, p - y, 1e-5, "the gradient of the loss is p - y")
        if soft:
            _near(fenchel_young(m, x, p), 0.0, 1e-9 * max(1.0, float(np.abs(x).max())), "the loss is 0 at y = p(x)")
    margin = case.facts.margin
    if margin is not None and np.max(case.mass) == 1.0 and not case.mapping.params() and targets:
        lead = np.where(targets[0] > 0.5, margin * (1 + 1e-6), 0.0)
        _near(fenchel_young(m, lead, targets[0]), 0.0, 1e-9, "facts.margin: the loss is 0 once the target leads by it")


def parameters(case: _Case) -> None:
    """If torch is loaded: the derivatives of p and of the loss in each parameter that may be a tensor."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    m = case.mapping
    named = {f.name: getattr(m, f.name) for f in dataclasses.fields(m)}  # type: ignore[arg-type]
    named = {k: v for k, v in named.items() if is_array(v) or isinstance(v, float)}
    x = torch.as_tensor(np.stack(case.smooth()[:3] or [case.rows(1)[0]]))
    w = torch.as_tensor(case.rows(len(x), 0.7))
    with torch.no_grad():
        y = apply(m.replace(**{k: torch.as_tensor(v) for k, v in m.params().items()}), x.flip(-1))
    for name, start in named.items():
        others = {k: torch.as_tensor(v) for k, v in m.params().items() if k != name}
        value = torch.as_tensor(np.asarray(start, np.float64)).clone().requires_grad_()
        try:
            m.replace(**others, **{name: value})
        except (TypeError, ValueError):
            continue  # the parameter takes numbers only

        def verbs(v: Any, others: Any = others, name: str = name) -> dict[str, Any]:
            own = m.replace(**others, **{name: v})
            out = {"p": (apply(own, x) * w).sum()}
            if case.facts.has_potential:
                with contextlib.suppress(TypeError):
                    out["the loss"] = fenchel_young(own, x, y, reduction="sum")
            return out

        bent = _parameter(verbs, value, name)
        for step in (1e-3, -1e-3) if bent else ():  # on both sides of a kink, where there is one derivative
            beside = (value.detach() + step * (1.0 + value.detach().abs())).requires_grad_()
            with contextlib.suppress(TypeError, ValueError):  # the value may be out of range
                _parameter(verbs, beside, name)


def _parameter(verbs: Callable[[Any], dict[str, Any]], value: Any, name: str) -> bool:
    """Checks the derivatives in a parameter at one value, by differences. At a kink the gradient must be between both sides; then True."""
    torch, h, bent = sys.modules["torch"], 1e-6, False
    for verb, out in verbs(value).items():
        got = torch.autograd.grad(out, value, allow_unused=True)[0] if out.requires_grad else None
        got = 0.0 if got is None else float(got.sum())
        with torch.no_grad():
            up, here, down = (float(verbs(value + s * h)[verb]) for s in (1, 0, -1))
        left, right, want = (here - down) / h, (up - here) / h, (up - down) / (2 * h)
        atol = 1e-4 * max(1.0, abs(left), abs(right))
        if abs(right - left) > 10 * atol:
            bent, want = True, min(max(got, min(left, right)), max(left, right))
        hint = "; a parameter that changes the feasible set needs a loss of its own" if verb != "p" else ""
        _near(got, want, atol, f"the gradient of {verb} in {name} is its derivative{hint}")
    return bent


def frameworks(case: _Case) -> None:
    """If torch or JAX is loaded: p and its gradient agree with NumPy, and on torch the second derivative is right."""
    m, rows = case.mapping, np.stack(case.smooth()[:4] or [case.rows(1)[0]])
    v, w = case.rows(len(rows), 0.7), case.rows(len(rows), 0.9)
    p = case.p(rows)
    back = np.stack([np.asarray(jacobian(m, x)).T @ g for x, g in zip(rows, v)])
    torch = sys.modules.get("torch")
    if torch is not None:
        own = m.replace(**{k: torch.as_tensor(np.asarray(a)) for k, a in m.params().items()})
        x, vt, wt = torch.as_tensor(rows).requires_grad_(), torch.as_tensor(v), torch.as_tensor(w)
        out = apply(own, x)
        _near(out.detach(), p, 1e-8, "torch gives the p of NumPy")
        (first,) = torch.autograd.grad((out * vt).sum(), x, create_graph=True)
        size = max(1.0, float(np.abs(back).max()))
        _near(first.detach(), back, 1e-6 * size, "the gradient of torch is vjp")
        second = torch.autograd.grad((first * wt).sum(), x)[0] if first.requires_grad else torch.zeros_like(x)

        def slope(x: np.ndarray) -> float:
            return sum(float((np.asarray(jacobian(m, r)).T @ a) @ b) for r, a, b in zip(x, v, w))

        h, move = 1e-5, case.rows(len(rows), 0.5)
        want = (slope(rows + h * move) - slope(rows - h * move)) / (2 * h)
        _near(
            float((second * torch.as_tensor(move)).sum()),
            want,
            1e-3 * max(1.0, abs(want)),
            "torch's second derivative is that of p",
        )
    jax = sys.modules.get("jax")
    if jax is not None and hasattr(jax, "numpy"):
        own = m.replace(**{k: jax.numpy.asarray(a) for k, a in m.params().items()})
        x = jax.numpy.asarray(rows)
        wide = x.dtype == np.float64
        size = max(1.0, float(np.abs(back).max()))

        def value(x: Any) -> Any:
            out = apply(own, x)
            return (out * v).sum(), out

        got, out = jax.jit(jax.grad(value, has_aux=True))(x)
        _near(out, p, 1e-8 if wide else 1e-4, "JAX gives the p of NumPy")
        _near(got, back, (1e-6 if wide else 1e-2) * size, "the gradient of JAX is vjp")


def traced(case: _Case) -> None:
    """If torch or JAX is loaded: p and its gradient are the same under vmap, torch.func and torch.compile, where values can't be read,
    also with masked classes."""
    rows = np.stack([*case.smooth(3)[:3], *case.smooth(3, masked=2)[:3]] or [case.rows(1)[0]])
    weight, p = case.rows(len(rows), 0.7), case.p(rows)
    back = np.stack([np.asarray(jacobian(case.mapping, x)).T @ g for x, g in zip(rows, weight)])

    def same(how: str, both: Callable[[], tuple[Any, Any]], loose: float = 1e-8) -> None:
        try:
            out, got = both()
        except Exception as error:
            raise BrokenLaw(f"under {how}: {type(error).__name__}: {error}") from None
        _near(out, p, loose, f"the same p under {how}")
        _near(
            got,
            back,
            100 * loose * max(1.0, float(np.abs(back).max())),
            f"the same gradient under {how}, 0 at masked classes",
        )

    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None:
        own = case.mapping.replace(**{k: torch.as_tensor(np.asarray(a)) for k, a in case.mapping.params().items()})
        x, g = torch.as_tensor(rows), torch.as_tensor(weight)

        def product(x: Any, g: Any) -> Any:
            out, pull = torch.func.vjp(lambda v: apply(own, v), x)
            return out, pull(g)[0]

        same("torch.func.vjp", lambda: product(x, g))
        same("torch.vmap", lambda: torch.vmap(product)(x, g))
        if torch._dynamo.is_dynamo_supported():
            same("torch.compile", lambda: _compiled(torch, own, x, g))
    if jax is not None and hasattr(jax, "numpy"):
        it = case.mapping.replace(**{k: jax.numpy.asarray(a) for k, a in case.mapping.params().items()})
        y, h = jax.numpy.asarray(rows), jax.numpy.asarray(weight)

        def pulled(x: Any, g: Any) -> Any:
            out, pull = jax.vjp(lambda v: apply(it, v), x)
            return out, pull(g)[0]

        same("jax.vmap", lambda: jax.jit(jax.vmap(pulled))(y, h), 1e-8 if y.dtype == np.float64 else 1e-4)


def _compiled(torch: Any, mapping: Mapping, x: Any, g: Any) -> tuple[Any, Any]:
    """p and the gradient of <g, p> by torch.compile, without graph breaks."""
    torch.compiler.reset()  # programs of other maps are cached under the same name
    x = x.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own code
        out = torch.compile(lambda v: apply(mapping, v), fullgraph=True, backend="eager")(x)
        got = torch.autograd.grad((out * g).sum(), x)[0] if out.requires_grad else torch.zeros_like(x)
    return out.detach(), got


LAWS: tuple[Callable[[_Case], None], ...] = (
    data, distribution, masked, poisoned, permutation, monotone, shift_invariant, sparse, formulas, derivative, loss, parameters,
    frameworks, traced,
)  # fmt: skip


def _on_rows(mapping: Mapping) -> Mapping:
    """The map with its arrays shaped for one row."""
    return mapping.replace(**{k: v.reshape(1, -1) if v.ndim else v for k, v in mapping.params().items()})


def check_mapping(mapping: Mapping, *, n: int = 7, seed: int = 0) -> tuple[str, ...]:
    """Tests your own map numerically against the laws that every map obeys.

    Use it while you write a map, and in its tests. It checks sums, masks, NaN, the facts, whether the formulas agree, the Jacobian, the
    loss and its gradient, and parameters. It runs on NumPy, and on torch and JAX if you have imported them, there also with vmap, masked
    gradients and torch.compile.

    Parameters
    ----------
    mapping
        The map, such as `MyMap()`.
    n
        The number of classes of the test rows; it must fit a parameter with one value per class.
    seed
        The seed of the random scores, an integer of at least 0.

    Returns
    -------
    tuple[str, ...]
        The names of the laws. If the map breaks any, it raises an `AssertionError` that names each and says where.

    Examples
    --------
    >>> anymax.check_mapping(anymax.Sparsemax())[:3]
    ('data', 'distribution', 'masked')
    """
    mapping = as_mapping(mapping, "check_mapping")
    case, broken = _Case(mapping, n, seed), []
    for law in LAWS:
        try:
            law(case)
        except BrokenLaw as error:
            broken.append(f"{law.__name__}: {error}")
        except Exception as error:
            broken.append(f"{law.__name__}: {type(error).__name__}: {error}")
    if broken:
        raise BrokenLaw(
            f"{mapping!r} breaks {len(broken)} of {len(LAWS)} laws\n" + "\n".join(f"  {line}" for line in broken)
        )
    return tuple(law.__name__ for law in LAWS)
