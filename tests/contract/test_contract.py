"""The contract of a map, for maps of one's own: `check_mapping` and what it sees, upper bounds, parameters with one value a class."""

import contextlib
import dataclasses
from typing import Any

import laws
import numpy as np
import pytest
import scipy.optimize
import scipy.special
import scipy.stats
from cases import each_first
from kinds import KINDS, back, every_kind, jax_in_the_whole_battery

import anymax as am
from anymax._array import like, stop_gradient, total
from anymax.contract import LAWS, BrokenLaw
from anymax.contract.case import Case

torch = pytest.importorskip("torch")


@dataclasses.dataclass(frozen=True, eq=False)
class Capped(am.Separable):
    """The point nearest to x of `{0 <= p_i <= u_i, sum p = 1}`: constrained sparsemax (Martins and Kreutzer 2017)."""

    u: Any = 0.4

    name = "capped"
    per_class = ("u",)

    @property
    def facts(self):
        return am.Facts(monotone=np.ndim(self.u) == 0, shift_invariant=True, sparse=True, has_potential=True)

    def omega_terms(self, q, xp):
        return 0.5 * q * (q - 1.0)

    def link(self, t, xp):
        u = self.ceiling(t, xp) + xp.zeros_like(t)
        return xp.where(t < 0, xp.zeros_like(t), xp.where(t < u, t, u))

    def slope(self, q, xp):
        return q

    def curvature(self, q, xp):
        return xp.ones_like(q)

    def ceiling(self, x, xp):
        return like(self.u, x, xp)

    def loss(self, x, p, y, xp):
        """u moves the feasible set: d Omega* / du_i is what a full class lacks, x_i - tau - u_i."""
        u = self.ceiling(x, xp)
        keep = x != -xp.inf
        lack = stop_gradient(xp.where(keep, x, xp.zeros_like(x)) - self.threshold(x, xp) - u)
        lack = xp.where(keep & (lack > 0), lack, xp.zeros_like(lack))
        return super().loss(x, p, y, xp) + total((u - stop_gradient(u)) * lack, xp)


of_torch = pytest.mark.whole(lambda kind: kind != "torch")


def wide(kind):
    return pytest.importorskip("jax").enable_x64(True) if kind == "jax" else contextlib.nullcontext()


BOUNDS = np.array([0.1, 0.3, 0.2, 0.5, 0.9, 0.2, 0.15])


def capped(x, u):
    """By halving the threshold, in fp64."""
    low, high = x.min(-1, keepdims=True) - 2, x.max(-1, keepdims=True)
    for _ in range(200):
        tau = (low + high) / 2
        above = np.clip(x - tau, 0, u).sum(-1, keepdims=True) > 1
        low, high = np.where(above, tau, low), np.where(above, high, tau)
    return np.clip(x - low, 0, u)


# -- the maps of the catalogue, and of one's own, keep the contract --------------------------------------------------------------


@pytest.mark.whole(lambda case: case.id not in ("entmax-1.5", "taylor-2"))
@each_first
def test_the_maps_of_the_catalogue_keep_it(case):
    assert am.check_mapping(case.mapping) == tuple(law.__name__ for law in LAWS)


@pytest.mark.whole(lambda u: isinstance(u, float))
@pytest.mark.parametrize("u", [0.4, BOUNDS], ids=["number", "array"])
def test_a_map_of_ones_own_keeps_it(u):
    assert "parameters" in am.check_mapping(Capped(u))


def test_what_is_no_map():
    with pytest.raises(TypeError, match="expected a mapping"):
        am.check_mapping(am.softmax)


@pytest.mark.whole
def test_a_relu_of_ones_own_says_that_it_gives_zeros():
    def relu(x):
        return x * (x > 0)

    def step(x):
        return 1.0 * (x > 0)

    ratio = am.Ratio(relu, step, monotone=True, sparse=True)
    am.check_mapping(ratio)
    with pytest.raises(AssertionError, match=r"facts\.sparse is False"):
        am.check_mapping(ratio.replace(sparse=False))


# -- planted faults: each turns its law red ------------------------------------------------------------------------------------------


class _Sparsemax(am.Sparsemax):
    """Sparsemax by the generic solver, to plant faults in."""

    def closed(self, y, keep, xp):
        return None


def planted(base=_Sparsemax, **methods):
    return dataclasses.dataclass(frozen=True, eq=False)(type("Planted", (base,), {"name": "planted", **methods}))()


def facts_of(base, **changes):
    return property(lambda self: dataclasses.replace(base.facts.fget(self), **changes))


def parent(name, change, base=_Sparsemax):
    return lambda self, *args: change(getattr(base, name)(self, *args), *args)


FAULTS = {
    "data": planted(per_class=("alpha",)),
    "distribution": planted(forward=parent("forward", lambda p, x, xp: 1.01 * p)),
    "masked": planted(forward=parent("forward", lambda p, x, xp: xp.where(x == -xp.inf, 0 * p + 0.1, p))),
    "poisoned": planted(forward=parent("forward", lambda p, x, xp: xp.where(xp.isnan(p), xp.zeros_like(p), p))),
    "permutation": planted(forward=lambda self, x, xp: am.Sparsemax.forward(self, x + 0.1 * (np.arange(x.shape[-1]) == 1), xp)),
    "monotone": planted(forward=parent("forward", lambda p, x, xp: xp.flip(p, axis=-1))),
    "shift_invariant": planted(am.Sigsoftmax, facts=facts_of(am.Sigsoftmax, shift_invariant=True)),
    "sparse": planted(facts=facts_of(am.Sparsemax, sparse=False)),
    "formulas": planted(curvature=lambda self, q, xp: 2.0 * xp.ones_like(q), sensitivity=am.Budget.sensitivity),
    "derivative": planted(vjp=parent("vjp", lambda v, *args: 1.01 * v)),
    "loss": planted(omega=parent("omega", lambda v, *args: 1.05 * v)),
    "frameworks": planted(am.Softmax, vjp=parent("vjp", lambda v, *args: stop_gradient(v), am.Softmax)),
}  # fmt: skip


def lost(self, x, xp, held=None):
    """The derivative of the last term is 0, and NaN at a masked class."""
    return am.Sparsemax.differentiable(self, x, xp, held) + 0.0 * xp.sqrt(xp.exp(x))


def branch(self, x, xp, held=None):
    """What it computes depends on values."""
    return am.Sparsemax.differentiable(self, x if bool(xp.all(x < 1e9)) else x - 1e9, xp, held)


def in_two(self, x, xp, held=None):
    torch._dynamo.graph_break()
    return am.Sparsemax.differentiable(self, x, xp, held)


FAULTS["traced"] = planted(differentiable=lost)


class Forgetful(Capped):
    """Its loss leaves out that u moves the feasible set."""

    loss = am.Separable.loss


FAULTS["parameters"] = Forgetful(BOUNDS)


def test_every_law_has_a_fault():
    assert set(FAULTS) == {law.__name__ for law in LAWS}


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_a_planted_fault_turns_its_law_red(law):
    said = "the gradient of the loss in u .* needs a loss of its own" if law.__name__ == "parameters" else "."
    with pytest.raises(BrokenLaw, match=said):
        law(Case(FAULTS[law.__name__], 7, 0))


@pytest.mark.parametrize(
    ("differentiable", "words"),
    [
        (lost, "gradient under torch.func.vjp, 0 at masked"),
        (branch, "under torch.vmap: "),
        (in_two, "under torch.compile: "),
    ],
)
def test_programs_and_masked_gradients_are_asked_for(differentiable, words):
    """What no eager call with its own vjp shows."""
    with pytest.raises(AssertionError, match=f"breaks 1 of {len(LAWS)} laws\n  traced: .*{words}"):
        am.check_mapping(planted(differentiable=differentiable, iterative=False))


def test_monotone_holds_for_all_classes_alike():
    """Bounds that rise from class to class keep the order of rising scores alone."""
    rising = type("Rising", (Capped,), {"facts": dataclasses.replace(Capped(0.4).facts, monotone=True)})
    assert rising(0.4).facts.monotone
    (monotone,) = (law for law in LAWS if law.__name__ == "monotone")
    with pytest.raises(BrokenLaw):
        monotone(Case(rising(np.sort(BOUNDS)), 7, 0))


@dataclasses.dataclass(frozen=True, eq=False)
class Underflowing(am.RatioMap):
    """Dense, but far below 0 all of its weights round to 0."""

    name = "underflowing"
    facts = am.Facts(monotone=True, shift_invariant=False, sparse=False, has_potential=False)

    def weights(self, x, keep, xp):
        u = 0.5 + 0.5 * xp.tanh(0.5 * x)
        return u, u * (1.0 - u)


def test_a_dense_map_gives_no_row_of_zeros():
    (distribution,) = (law for law in LAWS if law.__name__ == "distribution")
    with pytest.raises(BrokenLaw, match="p sums to what"):
        distribution(Case(Underflowing(), 7, 0))


@dataclasses.dataclass(frozen=True, eq=False)
class Kinked(am.RatioMap):
    """`exp(|s| x)`, normalised: its derivative in s jumps at 0."""

    s: Any = 0.0
    share: float = 1.0  # how much of the derivative in s it has

    name = "kinked"
    facts = am.Facts(monotone=True, shift_invariant=True, sparse=False, has_potential=False)

    def __post_init__(self):
        if not isinstance(self.share, float):
            raise TypeError("share must be a number")

    def weights(self, x, keep, xp):
        s = like(self.s, x, xp) + 0.0 * x[..., :1]
        s = xp.abs(self.share * s + (1.0 - self.share) * stop_gradient(s))
        y = s * xp.where(keep, x, xp.zeros_like(x))
        u = xp.exp(y - stop_gradient(xp.max(xp.where(keep, y, -xp.inf * xp.ones_like(y)), axis=-1, keepdims=True)))
        return u, s * u


def test_a_kink_in_a_parameter_is_no_wrong_gradient():
    """A gradient at a kink is one of the two derivatives, or between them; beside it there is one, which a map that lacks it shows."""
    parameters, case = LAWS[11], lambda share: Case(Kinked(0.0, share), 7, 0)
    assert parameters.__name__ == "parameters"
    parameters(case(1.0))
    with pytest.raises(BrokenLaw, match="the gradient of p in s is its derivative"):
        parameters(case(0.9))


def test_every_broken_law_is_named_at_once():
    with pytest.raises(AssertionError) as seen:
        am.check_mapping(FAULTS["distribution"])
    said = str(seen.value).splitlines()
    assert said[0] == f"Planted() breaks {len(said) - 1} of {len(LAWS)} laws"
    assert {"distribution", "derivative"} <= {line.split(":")[0].strip() for line in said[1:]}


# -- a link with an upper bound ------------------------------------------------------------------------------------------------------


@of_torch
@every_kind
@pytest.mark.parametrize("u", [0.4, 0.15, 1.0, BOUNDS], ids=["0.4", "0.15", "1", "array"])
@pytest.mark.parametrize("sigma", [0.02, 1.0, 30.0, 1e4])
def test_an_upper_bound_is_kept(kind, u, sigma):
    x = laws.scores(6, 7, sigma=sigma, seed=5)
    with wide(kind):
        to = KINDS[kind]
        p = back(am.apply(Capped(u if isinstance(u, float) else to(u)), to(x)))
    laws.close(p, capped(x, u), 1e-14 * max(1.0, sigma))
    assert (p <= u).all()


@dataclasses.dataclass(frozen=True, eq=False)
class Sigmoids(am.Separable):
    """`p_i = u_i sigmoid(x_i - tau)`: a class comes to its ceiling in the limit only. Its Omega has the binary entropies."""

    u: Any = 1.0

    name = "sigmoids"
    per_class = ("u",)
    facts = am.Facts(monotone=False, shift_invariant=True, sparse=False, has_potential=True)
    mass = 2.5
    law = staticmethod(scipy.special.expit)

    def link(self, t, xp):
        e = xp.exp(-xp.abs(t))
        return like(self.u, t, xp) * xp.where(t > 0, 1.0 / (1.0 + e), e / (1.0 + e))

    def slope(self, q, xp):
        r = q / like(self.u, q, xp)
        return xp.log(r) - xp.log1p(-r)

    def curvature(self, q, xp):
        return like(self.u, q, xp) / (q * (like(self.u, q, xp) - q))

    def omega_terms(self, q, xp):
        def part(v):
            return xp.where(v > 0, v * xp.log(xp.where(v > 0, v, xp.ones_like(v))), xp.zeros_like(v))

        r = q / like(self.u, q, xp)
        return like(self.u, q, xp) * (part(r) + part(1.0 - r))

    def ceiling(self, x, xp):
        return self.u


@dataclasses.dataclass(frozen=True, eq=False)
class Laplaces(Sigmoids):
    """`p_i = F(x_i - tau)` of the Laplace distribution, whose F has two pieces."""

    name = "laplaces"
    law = staticmethod(scipy.stats.laplace.cdf)

    def link(self, t, xp):
        e = 0.5 * xp.exp(-xp.abs(t))
        return like(self.u, t, xp) * xp.where(t > 0, 1.0 - e, e)

    def slope(self, q, xp):
        r = q / like(self.u, q, xp)
        return xp.where(r < 0.5, xp.log(2.0 * r), -xp.log(2.0 - 2.0 * r))

    def curvature(self, q, xp):
        r = q / like(self.u, q, xp)
        return 1.0 / (like(self.u, q, xp) * xp.where(r < 0.5, r, 1.0 - r))


@of_torch
@every_kind
@pytest.mark.parametrize("mass", [0.4, 2.0, 2.5, 6.9])
@pytest.mark.parametrize("u", [1.0, np.array([0.5, 1.0, 2.0, 0.7, 1.0, 1.3, 0.9])], ids=["number", "array"])
@pytest.mark.parametrize("base", [Sigmoids, Laplaces])
def test_a_ceiling_that_is_reached_in_the_limit_only(base, u, mass, kind):
    mapping = type("Open", (base,), {"mass": mass})
    x = np.concatenate([laws.scores(2, 7, sigma=s, seed=11) for s in (0.02, 1.0, 30.0, 1e3)])
    with wide(kind):
        to = KINDS[kind]
        p = back(am.apply(mapping(u if isinstance(u, float) else to(u)), to(x)))
    for row, got in zip(x, p):
        tau = scipy.optimize.brentq(lambda t, row=row: (u * base.law(row - t)).sum() - mass, -1e4, 1e4, xtol=1e-13)
        laws.close(got, u * base.law(row - tau), 1e-11 * max(1.0, np.abs(row).max()))


def test_open_ceilings_that_are_not_reached():
    """As many classes as the sum, or fewer: each has its ceiling, and no derivative. The sum may miss so many ceilings by rounding."""
    sums = am.apply(type("Open", (Sigmoids,), {"mass": 0.8999999999999999})(0.3), np.zeros((1, 4))).sum()
    laws.close(sums, 0.9, 1e-14)
    x = np.array([[0.3, -1.0, -np.inf, -np.inf], [0.3, -1.0, 2.0, -np.inf]])
    laws.close(am.apply(Sigmoids(), x), [[1, 1, 0, 0], [*am.apply(Sigmoids(), x[1, :3]), 0]], 1e-15)
    s = torch.tensor(x, requires_grad=True)
    am.apply(Sigmoids(), s)[:, 0].sum().backward()
    assert s.grad[0].tolist() == [0, 0, 0, 0]
    assert (s.grad[1, :3] != 0).all()


@pytest.mark.whole
def test_a_map_with_open_ceilings_keeps_the_contract():
    assert "frameworks" in am.check_mapping(Sigmoids())


def test_what_the_bounds_can_not_reach():
    """As Budget, whose bound is 1: every class gets its bound."""
    x = np.array([[3.0, 1.0, 0.5, -9.0], [3.0, 1.0, -np.inf, -np.inf]])
    laws.close(am.apply(Capped(0.2), x), [[0.2] * 4, [0.2, 0.2, 0, 0]], 0)
    laws.close(am.apply(Capped(np.array([0.2, 0.3, 0.1, 0.3])), x), [[0.2, 0.3, 0.1, 0.3], [0.2, 0.3, 0, 0]], 0)


@dataclasses.dataclass(frozen=True, eq=False)
class Undeclared(_Sparsemax):
    """Its link ends at 0.4, and it does not say so."""

    def link(self, t, xp):
        return xp.where(t < 0, xp.zeros_like(t), xp.where(t < 0.4, t, 0.4 * xp.ones_like(t)))


def test_a_link_that_falls_short_is_an_error():
    """It broke its own bound in silence: a class of .515 under .4."""
    x = np.array([3.0, 1.0, 0.5, -9.0])
    with pytest.raises(ValueError, match=r"Undeclared\(\): its link doesn't reach the sum 1 .* define ceiling"):
        am.apply(Undeclared(), x)
    laws.close(am.apply(Undeclared(), np.array([0.1, 0.3, 0.2, 0.2])).sum(), 1.0, 1e-15)
    jax = pytest.importorskip("jax")
    p = jax.jit(lambda x: am.apply(Undeclared(), x))(jax.numpy.asarray([x, [0.1, 0.3, 0.2, 0.2]]))
    assert np.isnan(p[0]).all(), "where no value may be asked for"
    laws.close(p[1].sum(), 1.0, 1e-6)


# -- a parameter with one value a class --------------------------------------------------------------------------------------------


def test_only_a_declared_parameter_varies_along_the_classes():
    x = laws.scores(2, 3)
    with pytest.raises(ValueError, match=r"entmax: alpha .* varies along the classes"):
        am.entmax(x, np.array([1.1, 1.5, 2.0]))
    q, k = laws.scores(2, 4), laws.scores(3, 4, seed=1)
    with pytest.raises(ValueError, match=r"entmax: alpha .* varies along the classes"):
        am.attention(q, k, k, am.Entmax(np.array([1.1, 1.5, 2.0])))
    u = np.array([0.9, 0.1, 0.4])
    weights = am.attention(q, k, k, Capped(u), need_weights=True)[1]
    laws.close(weights, capped(q @ k.T / 2, u), 1e-14)
    laws.close(am.apply(Capped(u[:, None]), x.T, axis=0), capped(x, u).T, 1e-14)
    with pytest.raises(ValueError, match="does not broadcast"):
        am.apply(Capped(np.ones(4)), x)


def test_its_gradient_is_that_of_differences():
    x, g = laws.scores(3, 7, seed=8), laws.scores(3, 7, seed=9)
    u = torch.tensor(BOUNDS, requires_grad=True)
    am.apply(Capped(u), torch.tensor(x)).mul(torch.tensor(g)).sum().backward()
    h = 1e-6 * np.eye(7)
    want = [((capped(x, BOUNDS + d) - capped(x, BOUNDS - d)) * g).sum() / 2e-6 for d in h]
    laws.close(u.grad, want, 1e-7)
    j = am.jacobian(Capped(BOUNDS), x[0])
    laws.close(j, np.stack([(capped(x[0] + d, BOUNDS) - capped(x[0] - d, BOUNDS)) / 2e-6 for d in h], -1), 1e-7)


# -- NaN and what is negative ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mapping", [_Sparsemax(), Capped(), am.Budget(2), am.Entmax(1.5)], ids=lambda m: m.name)
def test_sensitivity_keeps_nan(mapping):
    p = np.array([0.3, np.nan, 0.0, 0.2])
    s = am.Separable.sensitivity(mapping, p, np)
    assert np.isnan(s).tolist() == [False, True, False, False]
    assert np.isnan(mapping.sensitivity(p, np)).tolist() == [False, True, False, False]
    assert s[2] == 0


@dataclasses.dataclass(frozen=True, eq=False)
class Unfit(_Sparsemax):
    """Another map's regulariser."""

    def omega(self, q, xp):
        return 4.0 * super().omega(q, xp)


@jax_in_the_whole_battery
@every_kind
def test_a_negative_loss_is_an_error_that_names_the_map(kind):
    """It was shown as 0."""
    if kind == "strict":
        pytest.skip("losses take NumPy, torch and JAX")
    to = KINDS[kind]
    x = np.array([[1.0, 0.9, 0.8], [5.0, 0.0, 0.0]])
    with pytest.raises(ValueError, match=r"Unfit\(\): its Fenchel-Young loss is -.*check_mapping"):
        am.fenchel_young(Unfit(), to(x), to(np.array([[0.4, 0.3, 0.3], [1.0, 0.0, 0.0]])))
    part = type(
        "Part", (Unfit,), {"omega": lambda self, q, xp: Unfit.omega(self, q, xp) + 0.0 * xp.sqrt(0.7 - q[..., :1])}
    )
    with np.errstate(invalid="ignore"), pytest.raises(ValueError, match=r"loss is -0\.\d+, and"):  # of one row NaN
        am.fenchel_young(part(), to(x), to(np.array([[0.4, 0.3, 0.3], [1.0, 0.0, 0.0]])))
    values = am.fenchel_young(am.Sparsemax(), to(x), to(np.array([0, 0])), reduction="none")
    assert (back(values) >= 0).all()
    assert back(values)[1] == 0


def test_a_negative_loss_under_tracing_is_seen():
    jax = pytest.importorskip("jax")
    x, y = jax.numpy.asarray([[1.0, 0.9, 0.8]]), jax.numpy.asarray([[0.4, 0.3, 0.3]])
    assert jax.jit(lambda x: am.fenchel_young(Unfit(), x, y))(x) < -0.01
