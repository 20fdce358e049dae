"""Parameters that learn, with classes on several processes: each process gets the gradient of one, in fp64, from every verb and map."""
# ruff: noqa: B023 (functions of a loop's variables are called before it goes on)

import importlib.util

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import dataclasses

import torch
from processes import together
from test_distributed import cut, finite, numbers, same

import anymax as A
from anymax import distributed as D

N, ROWS = 17, 4


@dataclasses.dataclass(frozen=True, eq=False)
class Softplus(A.RatioMap):
    """A ratio map of one's own with a parameter."""

    sharpness: object = 1.0
    name = "softplus"
    facts = A.Facts(monotone=True, shift_invariant=False, sparse=False, has_potential=False)

    def weights(self, x, keep, xp):
        return xp.log1p(xp.exp(self.sharpness * x)), self.sharpness / (1.0 + xp.exp(-self.sharpness * x))


@dataclasses.dataclass(frozen=True, eq=False)
class Warm(A.Mapping):
    """A map of no family with a potential and a parameter: softmax(x / heat)."""

    heat: object = 1.0
    name = "warm"
    facts = A.Facts(monotone=True, shift_invariant=True, sparse=False, has_potential=True)

    def forward(self, x, xp):
        keep = x != -xp.inf
        e = xp.where(keep, xp.exp(xp.where(keep, x, 0.0 * keep) / self.heat), 0.0)
        return e / xp.sum(e, axis=-1, keepdims=True)

    def vjp(self, x, p, g, xp):
        return p * (g - xp.sum(p * g, axis=-1, keepdims=True)) / self.heat

    def omega(self, q, xp):
        return self.heat * xp.sum(q * xp.log(xp.where(q > 0, q, 1.0)), axis=-1, keepdims=True)

    def omega_slope(self, q, xp):
        return self.heat * (xp.log(xp.where(q > 0, q, 1.0)) + 1.0)


MAPS = {
    "of no family": (Warm, 0.8),
    "entmax": (A.Entmax, 1.4), "entmax, steep": (A.Entmax, 2.6), "entmax, heavy": (A.Entmax, 0.7), "normmax": (A.NormMax, 2.3),
    "budget": (A.Budget, 2.4), "softplus": (Softplus, 1.3), "gumbel": (lambda v: A.PerturbMax("gumbel", scale=v), 0.7),
    "normal": (lambda v: A.PerturbMax("normal", scale=v), 1.3),
}  # fmt: skip
INDEX = torch.tensor([3, 16, 0, -100])
SHARES = torch.softmax(numbers(31, ROWS, N).index_fill(1, torch.tensor(5), -torch.inf), -1)


def losses(mapping, wide):
    """name: f(anymax or its distributed, the map, scores, what cuts, further options) for each loss and verb."""
    mass = 2.4 if mapping.name == "budget" else 1.0
    soft, factors = mass * SHARES, numbers(32, N).abs()

    def loss(verb, target, **given):
        def f(module, m, x, part, more):
            mine = {k: part(v) if torch.is_tensor(v) else v for k, v in given.items()}
            t = target if target is INDEX else part(target)
            return getattr(module, verb)(m, x, t, axis=-1, **mine, **more)

        return f

    out = {}
    for verb in ("fenchel_young", "nll") if mapping.facts.has_potential else ("nll",):
        if mapping.name != "budget" or verb == "nll":
            out[f"{verb} of indices"] = loss(verb, INDEX, weight=factors)
            out[f"{verb}, smoothed"] = loss(verb, INDEX, label_smoothing=0.2)
        out[f"{verb} of shares"] = loss(verb, soft, reduction="none")
        out[f"{verb} of shares, smoothed"] = loss(verb, soft, label_smoothing=0.2, reduction="sum", weight=factors)
    out["apply"] = lambda module, m, x, part, more: (module.apply(m, x, **more) * part(wide)).sum()
    out["log_apply"] = lambda module, m, x, part, more: (finite(module.log_apply(m, x, **more)) * part(wide)).sum()
    y = INDEX.clamp(0)
    out["log_prob_entropy"] = lambda module, m, x, part, more: sum(
        finite(v).sum() for v in module.log_prob_entropy(m, x, y, **more)
    )
    return out


def gradients(f, leaves):
    """d f / d leaves, zeros where there is none."""
    value = f(*leaves)
    found = torch.autograd.grad(finite(value).sum(), leaves, allow_unused=True)
    return [torch.zeros_like(a) if g is None else g for a, g in zip(leaves, found)]


@pytest.mark.parametrize("name", MAPS)
def test_every_verb_gives_a_parameter_the_gradient_of_one_process(name):
    (make, value), rows = MAPS[name], name in ("entmax", "budget", "gumbel")  # these with one value a row
    x, sizes = 0.8 * numbers(33, ROWS, N), (9, 0, 8)
    x[1, 5] = -torch.inf
    at = torch.full((ROWS, 1) if rows else (), value, dtype=torch.float64)
    for verb, f in losses(make(value), numbers(35, ROWS, N)).items():
        leaves = [at.clone().requires_grad_(), x.clone().requires_grad_()]
        want = gradients(lambda v, a: f(A, make(v), a, lambda w: w, {}), leaves)

        def one(group):
            part = lambda w: cut(w, sizes, group.rank)  # noqa: E731
            mine = [at.clone().requires_grad_(), part(x).clone().requires_grad_()]
            return gradients(lambda v, a: f(D, make(v), a, part, {"group": group}), mine)

        found = together(len(sizes), one)
        for got, _ in found:
            torch.testing.assert_close(got, want[0], rtol=1e-7, atol=1e-9, msg=lambda m: f"{verb}: {m}")
        same(torch.cat([g for _, g in found], -1), want[1], rtol=1e-7, atol=1e-9)


def test_a_temperature_that_learns():
    x, sizes = 0.8 * numbers(33, ROWS, N), (9, 0, 8)
    x[1, 5] = -torch.inf
    at = numbers(34, ROWS, 1).abs() + 0.3
    leaves = [at.clone().requires_grad_(), x.clone().requires_grad_()]
    want = gradients(lambda v, a: A.logsumexp(a, temperature=v), leaves)

    def one(group):
        mine = [at.clone().requires_grad_(), cut(x, sizes, group.rank).clone().requires_grad_()]
        return gradients(lambda v, a: D.logsumexp(a, temperature=v, group=group), mine)

    found = together(len(sizes), one)
    for got, _ in found:
        same(got, want[0], rtol=1e-9)
    same(torch.cat([g for _, g in found], -1), want[1], rtol=1e-9)


@pytest.mark.parametrize("name", ["entmax", "normmax", "gumbel", "softplus"])
def test_an_output_layer_gives_a_parameter_the_gradient_of_one_process(name):
    make, value = MAPS[name]
    x, weight, sizes = numbers(36, ROWS, 3), numbers(37, N, 3), (9, 0, 8)
    at = torch.tensor(value, dtype=torch.float64)
    for target, given in ((INDEX, {}), (INDEX, {"label_smoothing": 0.2}), (SHARES, {})):
        leaves = [at.clone().requires_grad_(), x.clone().requires_grad_()]
        want = gradients(lambda v, a: A.linear_loss(a, weight, target, make(v), **given), leaves)

        def one(group):
            mine = [at.clone().requires_grad_(), x.clone().requires_grad_()]
            part = cut(weight.T, sizes, group.rank).T
            t = target if target is INDEX else cut(target, sizes, group.rank)
            return gradients(lambda v, a: D.linear_loss(a, part, t, make(v), group=group, chunk=3, **given), mine)

        for got in together(len(sizes), one):
            for mine, whole in zip(got, want, strict=True):
                same(mine, whole, rtol=1e-7, atol=1e-9)


def test_a_parameter_of_rows_that_are_searched_with_sums():
    x, at, sizes = 1e-3 * numbers(38, 2, 9000), torch.tensor(1.4, dtype=torch.float64), (4000, 5000)
    t, wide = torch.tensor([3, 8000]), numbers(39, 2, 9000)
    calls = [
        lambda module, m, a, part, more: module.fenchel_young(m, a, t, axis=-1, **more),
        lambda module, m, a, part, more: (module.apply(m, a, **more) * part(wide)).sum(),
    ]
    for f in calls:
        want = gradients(lambda v: f(A, A.Entmax(v), x, lambda w: w, {}), [at.clone().requires_grad_()])[0]

        def one(group):
            part = lambda w: cut(w, sizes, group.rank)  # noqa: E731
            mine = [at.clone().requires_grad_()]
            return gradients(lambda v: f(D, A.Entmax(v), part(x), part, {"group": group}), mine)[0]

        for got in together(2, one):
            same(got, want, rtol=1e-6)
