"""Classes on several processes against the same call on one: the maps, the operands and the one runner of the tests of this room."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from own_maps import Moved
from processes import together

import anymax as A
from anymax import distributed as D
from anymax._core.names import as_mapping
from anymax.linear.job import loss_of
from anymax.losses.verbs import loss_of_kind
from anymax.transforms import compose, softcap, temperature

INF = math.inf
N, FEATURES = 37, 5
gloo = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="no gloo"
)


def numbers(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def finite(v):
    return torch.where(torch.isfinite(v), v, torch.zeros_like(v))


def same(got, want, rtol=1e-10, atol=1e-12):
    torch.testing.assert_close(got.double(), want.double(), rtol=rtol, atol=atol, equal_nan=True)


# -- where a call runs, and how its classes are cut --------------------------------------------------------------------------------


class Cut(NamedTuple):
    """The classes of each process, and whether a call says where they begin and how many there are."""

    sizes: tuple[int, ...]
    start: bool = False
    count: bool = False
    chunk: int | None = None  # classes of an output layer at a time


CUTS = {"20-17-0": Cut((20, 17, 0)), "0-15-1-21": Cut((0, 15, 1, 21), start=True, count=True)}
LAYER_CUTS = {"20-0-17": Cut((20, 0, 17), count=True), "20-0-17 by 4 classes": Cut((20, 0, 17), start=True, chunk=4)}
TWO = Cut((20, 17))


class Here:
    """One process of those that share the classes; without a group the only one, which has them all."""

    def __init__(self, cut=None, group=None):
        self.cut, self.group, self.chunk = cut, group, cut and cut.chunk

    def calls(self):
        return getattr(self.group, "calls", 0)

    def classes(self, a):
        return sum(self.cut.sizes) if self.group else a.shape[-1]

    def part(self, a, axis=-1):
        """What this process has of an array that is cut along an axis; None is an array that is not cut."""
        if self.group is None or a is None or axis is None:
            return a
        return a.narrow(axis, sum(self.cut.sizes[: self.group.rank]), self.cut.sizes[self.group.rank])

    def parts(self, options):
        """Options with the tensors of classes cut."""
        return {k: self.part(v) if torch.is_tensor(v) else v for k, v in options.items()}

    def call(self, verb, *arguments, **options):
        if self.group is None and verb in DENSE and not options.keys() & {"z_loss", "suppress"}:
            return dense(verb, *arguments, **options)
        if self.group is None:
            return getattr(A if hasattr(A, verb) else A.linear, verb)(*arguments, **options)
        options |= {"class_start": sum(self.cut.sizes[: self.group.rank])} if self.cut.start else {}
        options |= {"class_count": sum(self.cut.sizes)} if self.cut.count else {}
        options |= {"chunk": self.chunk} if self.chunk and verb.startswith("linear_") else {}
        return getattr(D, verb)(*arguments, group=self.group, **options)


class Outcome(NamedTuple):
    values: list
    gradients: list
    sent: tuple[int, int]  # collectives of the values, and of the gradients


def joined_of(joined, values):
    """For each value whether each process has it for its own classes."""
    return joined if isinstance(joined, tuple) else (joined,) * len(values)


def outcome(f, here, leaves, joined=False):
    """`f(here, *leaves)` and the gradients of one number that all values move; leaves: (array, the axis along which it is cut or None)."""
    mine = [here.part(a, axis).detach().clone().requires_grad_() for a, axis in leaves]
    calls = [here.calls()]
    values = f(here, *mine)
    values = values if isinstance(values, tuple) else (values,)
    calls.append(here.calls())
    moved = 0.0
    for i, (v, of_classes) in enumerate(zip(values, joined_of(joined, values), strict=True)):
        if v.requires_grad:
            shape = (*v.shape[:-1], here.classes(v)) if of_classes else v.shape
            moved = moved + (finite(v) * here.part(numbers(8 + i, *shape), -1 if of_classes else None)).sum()
    found = (
        torch.autograd.grad(moved, mine, allow_unused=True) if torch.is_tensor(moved) and mine else [None] * len(mine)
    )
    gradients = [torch.zeros_like(a) if g is None else g for a, g in zip(mine, found, strict=True)]
    return Outcome([v.detach() for v in values], gradients, (calls[1] - calls[0], here.calls() - calls[1]))


def agrees(here, f, leaves, want, joined=False, rtol=1e-8, atol=1e-9):
    """The values of one process, or of its classes where they are joined, and what this process has of each gradient."""
    found = outcome(f, here, leaves, joined)
    for got, one, of_classes in zip(found.values, want.values, joined_of(joined, want.values), strict=True):
        same(got, here.part(one, -1 if of_classes else None))
    for got, one, (_, axis) in zip(found.gradients, want.gradients, leaves, strict=True):
        same(got, here.part(one, axis), rtol=rtol, atol=atol)


def held(f, leaves, cut, joined=False, **tolerance):
    """Every process of `cut` agrees with one; gives the values of one."""
    want = outcome(f, Here(), leaves, joined)
    together(len(cut.sizes), lambda group: agrees(Here(cut, group), f, leaves, want, joined, **tolerance))
    return want.values


def sent(f, leaves, cut, calls=2):
    """Collectives of the last call: of the values, and of the gradients."""

    def one(group):
        return [outcome(f, Here(cut, group), leaves).sent for _ in range(calls)][-1]

    (counts,) = set(together(len(cut.sizes), one))
    return counts


# -- maps --------------------------------------------------------------------------------------------------------------------------


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
        total = xp.sum(e, axis=-1, keepdims=True)
        return e / xp.where(total > 0, total, 1.0)

    def vjp(self, x, p, g, xp):
        return p * (g - xp.sum(p * g, axis=-1, keepdims=True)) / self.heat

    def omega(self, q, xp):
        return self.heat * xp.sum(q * xp.log(xp.where(q > 0, q, 1.0)), axis=-1, keepdims=True)

    def omega_slope(self, q, xp):
        return self.heat * (xp.log(xp.where(q > 0, q, 1.0)) + 1.0)


class Map(NamedTuple):
    """A map of one parameter that learns, a number, one a row or one a class; or without one."""

    make: Callable[[Any], A.Mapping]
    value: torch.Tensor | None = None

    def leaves(self, *rows):
        """The parameter for rows of this shape, and the axis along which it is cut."""
        if self.value is None:
            return []
        value = self.value
        if value.ndim == 2:
            value = value[: math.prod(rows)].reshape(*rows, value.shape[-1])
        return [(value, -1 if value.shape[-1:] == (N,) else None)]


def exact(value):
    return torch.as_tensor(value, dtype=torch.float64)


ROW = numbers(60, 6, 1)
UPPER = 0.3 * torch.sigmoid(numbers(62, N))
INNER = (
    "softmax", "sparsemax", "entmax15", "entmax:alpha=3", "entmax:alpha=0.7", "budget:k=7", "normmax:alpha=2", "taylor", "sigsoftmax",
    "sparse_softmax:k=4", "sparse_softmax:p=0.8", "perturb_max", "fusedmax:strength=0.2",
)  # fmt: skip
OF_ONE = {
    "softmax": A.Softmax(), "sparsemax": A.Sparsemax(), "entmax15": A.Entmax(1.5), "entmax3": A.Entmax(3.0), "entmax07": A.Entmax(0.7),
    "entmax1": A.Entmax(1.0), "budget": A.Budget(k=7), "normmax": A.NormMax(2.0), "taylor": A.Taylor(2), "sigsoftmax": A.Sigsoftmax(),
    "relu": A.Ratio.relu(), "topk": A.SparseSoftmax(k=4), "topp": A.SparseSoftmax(p=0.8),
    "gumbel": A.PerturbMax("gumbel", scale=0.7), "normal": A.PerturbMax("normal"), "softpick": A.Softpick(), "moved": Moved(),
}  # fmt: skip
MAPS = {name: Map(lambda mapping=mapping: mapping) for name, mapping in OF_ONE.items()} | {
    "of no family": Map(Warm, exact(0.8)), "softplus": Map(Softplus, exact(1.3)), "normmax, learned": Map(A.NormMax, exact(2.3)),
    "entmax by row": Map(A.Entmax, 1.4 + 0.1 * ROW), "entmax, steep": Map(A.Entmax, exact(2.6)),
    "entmax, heavy": Map(A.Entmax, exact(0.7)), "budget by row": Map(A.Budget, 2.4 + 0.1 * ROW),
    "gumbel by row": Map(lambda v: A.PerturbMax("gumbel", scale=v), 0.7 + 0.1 * ROW),
    "normal, learned": Map(lambda v: A.PerturbMax("normal", scale=v), exact(1.3)),
    "sigmoid": Map(lambda v: A.Elementwise(tau=v), exact(0.3)),
    "relu of each": Map(lambda v: A.Elementwise("relu", v), 0.5 * ROW),
    "entmax of each": Map(lambda v: A.Elementwise(A.Entmax(v), 0.2), exact(1.6)),
    "fusedmax": Map(A.Fusedmax, exact(0.2)),
    "ranks": Map(A.Ranks, ROW.abs() + 0.5), "ranks, kl": Map(lambda v: A.Ranks(v, "kl"), exact(2.0)),
    "bounded": Map(A.Bounded, 0.1 + 0.2 * torch.sigmoid(ROW)), "bounded entmax": Map(lambda v: A.Bounded(0.2, v), exact(1.4)),
    "bounded softmax": Map(lambda v: A.Bounded(v, 1.0), exact(0.15)), "few bounds": Map(A.Bounded, exact(0.01)),
    "bounds of classes": Map(A.Bounded, UPPER), "bounds of classes, entmax": Map(lambda v: A.Bounded(v, 1.3), UPPER),
    "bounds of classes, softmax": Map(lambda v: A.Bounded(v, 1.0), UPPER),
    "bounds of rows and classes": Map(A.Bounded, torch.linspace(0.95, 1.0, 6, dtype=torch.float64)[:, None] * UPPER),
    "relaxed top-k": Map(lambda v: A.Budget(v, shape="sigmoid"), exact(4.3)),
    "LapSum": Map(lambda v: A.Budget(v, shape="laplace"), 4.0 + 2.0 * torch.sigmoid(ROW)),
} | {
    f"sink of {inner}{by_row}": Map(functools.partial(A.Sink, inner), score)
    for inner in INNER for by_row, score in (("", exact(0.4)), (" by row", 0.4 * numbers(50, 6, 1)))
}  # fmt: skip


# -- rows of scores ----------------------------------------------------------------------------------------------------------------


def rows(sigma=1.0):
    """Rows with masked classes, most of those of the first process, with ties, and one without classes."""
    x = sigma * numbers(0, 6, N)
    x[0, 3], x[0, 6:20], x[1], x[5] = -INF, -INF, 2.0, -INF
    return x


@functools.cache
def indices(name):
    """Classes that sparse maps keep, an ignored one, and where the map has a sink two that are the sink."""
    found = rows().argmax(-1)
    found[[4, 5]] = torch.tensor([-100, 1])
    if name.startswith("sink"):
        found[[1, 5]] = -1
    return found


@functools.cache
def shares(name, verb):
    """Points that the map reaches, of other scores (if p sums to 1 half of the classes have nothing), or for nll where its p is above 0."""
    x = rows()
    mapping = MAPS[name].make(*[v for v, _ in MAPS[name].leaves(6)])
    seen, other = x > -INF, 1.5 * x if verb == "nll" else numbers(61, 6, N)
    if mapping.sums_to_one and "bound" not in name and verb != "nll":
        seen &= numbers(4, 6, N) > 0
    return A.apply(mapping, torch.where(seen, other, -INF)).nan_to_num(0.0)


class Verb(NamedTuple):
    call: Callable[..., Any]  # of Here, the name of the map, the map and the scores
    joined: bool = False  # a value for each class
    rows: int = 6


def loss(verb, soft, **given):
    rows_of = 6 if given.get("reduction") == "none" and not soft else 5  # the last row's +inf would hide all others

    def call(here, name, mapping, x):
        target = here.part(shares(name, verb)) if soft else indices(name)
        options = here.parts(given)
        if "mask" in given:
            keep = (numbers(6, 6, N) > -1.0) | (shares(name, verb) > 0)
            keep[range(6), indices(name).clamp(0)] = True
            options["mask"] = here.part(keep[: len(x)])
        return here.call(verb, mapping, x, target[: len(x)], axis=-1, **options)

    return Verb(call, rows=rows_of)


FACTORS = numbers(5, N).abs()
LOSSES = {
    "weights": {"weight": FACTORS},
    "smoothing": {"label_smoothing": 0.1, "weight": FACTORS, "reduction": "sum"},
    "mask": {"mask": True, "reduction": "none"},
}
TOKENS = torch.randint(-1, N, (2, 6), generator=torch.Generator().manual_seed(7))
TOKENS[0, 2], TOKENS[1, 0] = -1, 3
TOKENS[1, 3], TOKENS[:, 4] = -100, -100
VERBS = {
    "apply": Verb(lambda here, name, m, x: here.call("apply", m, x), joined=True),
    "apply, flat": Verb(lambda here, name, m, x: here.call("apply", m, 0.02 * x), joined=True),
    "log_apply": Verb(lambda here, name, m, x: here.call("log_apply", m, x), joined=True),
    "log_prob_entropy": Verb(lambda here, name, m, x: here.call("log_prob_entropy", m, x, TOKENS)),
    "sample": Verb(lambda here, name, m, x: here.call("sample", m, x, generator=3, num_samples=50)),
    "threshold": Verb(lambda here, name, m, x: tuple(here.call("threshold", m, x))),
} | {
    f"{verb} of {kind}, {option}": loss(verb, kind == "shares", **given)
    for verb in ("fenchel_young", "nll") for kind in ("indices", "shares") for option, given in LOSSES.items()
}  # fmt: skip


def scores_case(verb, name):
    """(f, leaves) for the runner: a verb of the rows, the map's parameter and the scores learn."""
    call, _, rows_of = VERBS[verb]
    make = MAPS[name].make
    if verb.startswith("fenchel_young") and name in ("gumbel by row", "normal, learned"):
        rows_of = 5  # a row without classes gives their scale NaN, on one process too

    def f(here, x, *value):
        return call(here, name, make(*value), x)

    return f, [(rows()[:rows_of], -1), *MAPS[name].leaves(rows_of)]


def sinks(*inner):
    return tuple(f"sink of {name}{by_row}" for name in inner for by_row in ("", " by row"))


OF_EACH = ("sigmoid", "relu of each", "entmax of each", "ranks", "ranks, kl")
OF_SHAPE = ("taylor", "sigsoftmax", "relu", "softpick", "softplus", *sinks("taylor", "sigsoftmax"))
OF_BOUNDS = tuple(name for name in MAPS if "bound" in name)
# the cells that are empty: of which maps a verb has none, and what it says
EMPTY = [
    ("log_prob_entropy", OF_EACH, "gives each class a number of its own"),
    ("sample", OF_EACH, "gives each class a number of its own"),
    ("nll", OF_EACH, "gives each class a number of its own"),
    ("fenchel_young", OF_SHAPE, "no Fenchel-Young loss"),
    ("fenchel_young of indices", ("budget", "ranks", "ranks, kl", *sinks("budget:k=7")), "sums to .*, a class index to 1"),
    ("fenchel_young of indices", OF_BOUNDS, "no class more than its upper bound"),
    ("fenchel_young of indices, smoothing", ("topk", "topp", *sinks("sparse_softmax:k=4", "sparse_softmax:p=0.8")), "label_smoothing"),
    ("fenchel_young of shares, smoothing", ("topk", "topp", *sinks("sparse_softmax:k=4", "sparse_softmax:p=0.8")), "label_smoothing"),
    ("fenchel_young of shares", ("topp", *sinks("sparse_softmax:p=0.8")), "depend on the scores"),
    (
        "threshold",
        ("gumbel", "normal", "of no family", "gumbel by row", "normal, learned", "fusedmax", "ranks", "ranks, kl",
         *sinks("perturb_max", "fusedmax:strength=0.2"), *OF_SHAPE),
        "has no threshold",
    ),
]  # fmt: skip


def is_empty(verb, name):
    return any(verb.startswith(words) and name in names for words, names, _ in EMPTY)


CELLS = [(verb, name) for verb in VERBS for name in MAPS if not is_empty(verb, name)]


# -- output layers -----------------------------------------------------------------------------------------------------------------------

DENSE = ("linear_loss", "linear_log_prob", "linear_log_prob_entropy", "linear_threshold")


def dense(
    verb,
    x,
    layer,
    *target_and_map,
    linear_bias=0.0,
    transform=None,
    temperature=1.0,
    support=None,
    full=False,
    **options,
):
    """A verb of an output layer from all of its scores."""
    *target, mapping = target_and_map
    mapping = as_mapping(mapping, verb)
    each = temperature[..., None] if torch.is_tensor(temperature) and temperature.ndim else temperature
    scores = (x @ layer.T + linear_bias) / each
    scores = scores if transform is None else transform(scores)
    if verb == "linear_loss":
        of = loss_of(mapping.mapping if isinstance(mapping, A.Sink) else mapping)
        return loss_of_kind(of, mapping, scores, *target, axis=-1, **options)
    if verb == "linear_threshold":
        return A.threshold(mapping, scores, **options)
    pair = A.log_prob_entropy(mapping, scores, *target, support=support, **options)
    if verb == "linear_log_prob":
        return pair[0]
    return (pair, A.log_prob_entropy(mapping, scores, *target, **options)) if full else pair


# features, weight and bias, with the axis along which they are cut
OPERANDS = [(numbers(1, 2, 3, FEATURES), None), (numbers(2, N, FEATURES), 0), (numbers(3, N), -1)]
KEEP = torch.ones(2, 3, N, dtype=torch.bool)  # with padding classes, and a row that has none
KEEP[..., -3:] = False
KEEP[1, 1] = False
TARGET = torch.tensor([[5, 0, 33], [-1, 12, 35]])  # of each process; one is ignored or the sink
# ids of each row: of one process, of two, of none; with the row's token, without it, and of a row whose token is -1
KEPT = ([30, 5, 2, 21], [1, 36, 0], [9], [3, 22, 35], [], [20, 4, 7, 19, 36])
SUPPORT = torch.tensor([i for k in KEPT for i in k]), torch.tensor([0, *(len(k) for k in KEPT)]).cumsum(0)
# the teacher's classes, on all processes, and log-probabilities that sum to .8; one row has a class fewer
TEACHER = torch.stack(
    [torch.randperm(N - 3, generator=torch.Generator().manual_seed(i))[:4] for i in range(6)]
).reshape(2, 3, 4)
TEACHER[0, 2, -1] = -1
TEACHER_LOG_P = torch.log_softmax(numbers(4, 2, 3, 4), -1) + math.log(0.8)


class LayerVerb(NamedTuple):
    call: Callable[..., Any]  # of Here, the name of the map, the map, features, weight, bias and what learns besides
    maps: tuple[str, ...]
    more: tuple = ()


def layer_loss(kind=None, **given):
    def call(here, name, mapping, x, w, b):
        if kind == "soft":
            target = A.apply(mapping, numbers(5, 2, 3, N)).detach()
            options = {**given}
        else:
            target, options = TARGET, {**given} if name.startswith("sink") else {"ignore_index": -1, **given}
        if "mask" in given:
            options["mask"] = KEEP.scatter(-1, TARGET.clamp(0)[..., None], True)
        options = here.parts(options)
        return here.call("linear_loss", x, w, here.part(target) if kind else target, mapping, linear_bias=b, **options)

    return call


def further_loss(**given):
    """The loss, and what the further loss adds to it; where a target is masked both are infinite, and 0 here."""

    def call(here, name, mapping, x, w, b):
        keep = KEEP.clone()
        keep[1, 1], keep[1, 2, :20] = True, False
        options = {
            "ignore_index": -1,
            "linear_bias": b,
            "mask": here.part(keep),
            "transform": softcap(3.0),
            **here.parts(given),
        }
        value = here.call("linear_loss", x, w, TARGET, mapping, **options)
        options |= {k: 0.0 for k in ("z_loss", "suppress") if k in given}
        plain = here.call("linear_loss", x, w, TARGET, mapping, **options)
        return torch.where(plain.isfinite(), value, 0.0), torch.where(plain.isfinite(), value - plain, 0.0)

    return call


def terms(verb="linear_log_prob_entropy", masked=True, **given):
    def call(here, name, mapping, x, w, b, t):
        mask = {"mask": here.part(KEEP)} if masked else {}
        found = here.call(verb, x, w, TARGET, mapping, linear_bias=b, temperature=t, **mask, **given)
        return sum(found, ()) if given.get("full") else found

    return call


def divergence(tail, direction):
    def call(here, name, mapping, x, w, b, log_p):
        mask = here.part(torch.arange(N) < N - 3)
        options = {"linear_bias": b, "mask": mask, "temperature": 2.0, "tail": tail, "direction": direction}
        return here.call("linear_topk_kl", x, w, TEACHER, log_p, mapping, **options)

    return call


def of_two(mask=None, **given):
    """A reference that learns too; with a temperature of each row, if there is one."""

    def call(here, name, mapping, x, w, b, y, v, c, t=None):
        options = {"linear_bias": b, "linear_bias_ref": c, "temperature": t, **given}
        options |= {} if mask is None else {"mask": here.part(mask)}
        return here.call("linear_kl", x, w, y, v, mapping, **options)

    return call


def capped(verb, *arguments, **given):
    """With a cap that learns, whose gradient is the sum over the processes, and a temperature after it."""

    def call(here, name, mapping, x, w, b, cap):
        options = {"linear_bias": b, "transform": compose(softcap(cap), temperature(0.7)), **here.parts(given)}
        return here.call(verb, x, w, *arguments, mapping, **options)

    return call


def tau(here, name, mapping, x, w, b):
    return here.call("linear_threshold", x, w, mapping, linear_bias=b).tau


def tau_masked(here, name, mapping, x, w, b):
    return here.call("linear_threshold", x, w, mapping, linear_bias=b, mask=here.part(KEEP)).tau


LEARNED = ("entmax by row", "gumbel by row", "normmax, learned", "softplus")
OF_SINK = sinks(*(inner for inner in INNER if not inner.startswith("budget")))
TOKENS_OF = (
    "softmax",
    "entmax15",
    "sparsemax",
    "sigsoftmax",
    "taylor",
    "normmax",
    "topk",
    "topp",
    "normal",
    "entmax by row",
)
TRAINED = ("softmax", "sparsemax", "entmax15", "taylor", "normmax", *LEARNED, *OF_SINK)
SOFT = tuple(name for name in TRAINED if "sparse_softmax" not in name)
SEVERAL = ("sigmoid", "softpick", "fusedmax", "ranks, kl", "relaxed top-k")
WITH_TAU = ("softmax", "entmax15", "sparsemax", "normmax", "topk", "topp", "budget", "entmax07", "entmax by row")
KL_OF = ("softmax", "sigsoftmax", "entmax15", "taylor", "entmax by row")
WARMTH, CAP = ((numbers(5, 2, 3).abs() + 0.5, None),), ((exact(1.5), None),)
REFERENCE = ((numbers(6, 2, 3, 4), None), (numbers(7, N, 4), 0), (numbers(8, N), -1))
PAIRED = (*KL_OF, "sparsemax", "topk", "softpick")
PADDED = torch.arange(N) < N - 1
LAYER_VERBS = {
    "loss": LayerVerb(layer_loss(), (*TRAINED, "topk")),
    "loss, none": LayerVerb(layer_loss(reduction="none", label_smoothing=0.1), SOFT),
    "loss, weights": LayerVerb(layer_loss(weight=FACTORS), (*TRAINED, "topk")),
    "loss, weights and mask": LayerVerb(layer_loss(weight=FACTORS, mask=True), (*TRAINED, "topk")),
    "loss, soft": LayerVerb(layer_loss("soft"), (*SOFT, *SEVERAL)),
    "loss, soft, weights and z_loss": LayerVerb(layer_loss("soft", weight=FACTORS, z_loss=0.3), ("softmax", "entmax15")),
    "log_prob": LayerVerb(terms("linear_log_prob"), (*TOKENS_OF, *OF_SINK), WARMTH),
    "log_prob_entropy": LayerVerb(terms(), (*TOKENS_OF, *OF_SINK), WARMTH),
    "log_prob_entropy, all classes": LayerVerb(terms(masked=False), ("budget", "softmax"), WARMTH),
    "support": LayerVerb(
        terms(masked=False, support=SUPPORT, full=True), (*TOKENS_OF, *sinks("softmax", "entmax15")), WARMTH
    ),
    **{
        f"kl, {tail}, {direction}": LayerVerb(divergence(tail, direction), KL_OF, ((TEACHER_LOG_P, None),))
        for tail in ("ignore", "one class") for direction in ("forward", "reverse")
    },
    **{
        f"two layers, {beta}": LayerVerb(of_two(beta=beta, mask=KEEP), PAIRED, (*REFERENCE, *WARMTH)) for beta in (0.0, 0.3, 1.0)
    },
    "two layers, all classes": LayerVerb(of_two(beta=0.3), ("budget", "softmax"), (*REFERENCE, *WARMTH)),
    "two layers with a sink": LayerVerb(of_two(beta=0.3), ("sink of softmax", "sink of entmax15"), REFERENCE),
    "two layers, a mean": LayerVerb(of_two(beta=0.5, where=TARGET > 0, reduction="mean"), ("softmax", "entmax15"), REFERENCE),
    "two layers, support": LayerVerb(of_two(beta=0.5, support=SUPPORT, transform=softcap(3.0)), ("softmax", "entmax15"), REFERENCE),
    "cap, log_prob_entropy": LayerVerb(capped("linear_log_prob_entropy", TARGET, mask=PADDED), ("softmax", "entmax15"), CAP),
    "cap, support": LayerVerb(capped("linear_log_prob_entropy", TARGET, support=SUPPORT), ("softmax", "entmax15"), CAP),
    "cap, kl": LayerVerb(capped("linear_topk_kl", TEACHER, TEACHER_LOG_P, tail="one class", mask=PADDED), ("softmax", "entmax15"), CAP),
    "cap, loss": LayerVerb(capped("linear_loss", TARGET, ignore_index=-1, mask=PADDED), ("softmax", "entmax15"), CAP),
    "z_loss": LayerVerb(further_loss(z_loss=0.3), ("softmax",)),
    "z_loss, weights": LayerVerb(further_loss(z_loss=0.3, weight=FACTORS), ("softmax",)),
    "z_loss, none": LayerVerb(further_loss(z_loss=0.3, weight=FACTORS, label_smoothing=0.1, reduction="none"), ("softmax",)),
    "suppress": LayerVerb(further_loss(suppress=0.3), ("sparsemax", "topk")),
    "suppress, weights": LayerVerb(further_loss(suppress=0.3, weight=FACTORS), ("sparsemax", "topk")),
    "suppress, none": LayerVerb(further_loss(suppress=0.3, weight=FACTORS, reduction="none"), ("sparsemax", "topk")),
    "suppress, smoothing": LayerVerb(further_loss(suppress=0.3, label_smoothing=0.1), ("sparsemax",)),
    "tau": LayerVerb(tau, WITH_TAU),
    "tau, masked": LayerVerb(tau_masked, tuple(name for name in WITH_TAU if name != "budget")),
    "tau squared": LayerVerb(
        layer_loss(z_loss=0.3), tuple(name for name in WITH_TAU if name not in ("budget", "topp"))
    ),
    "tau squared, none": LayerVerb(
        layer_loss(z_loss=0.3, transform=softcap(2.0), reduction="none"),
        tuple(name for name in WITH_TAU if name not in ("budget", "topp")),
    ),
}  # fmt: skip
LAYER_CELLS = [(verb, name) for verb, row in LAYER_VERBS.items() for name in row.maps]


def layer_case(verb, name):
    """(f, leaves) for the runner: the operands, the map's parameter and what the verb has besides learn."""
    call, _, more = LAYER_VERBS[verb]
    make, parameter = MAPS[name].make, MAPS[name].leaves(2, 3)

    def f(here, x, w, b, *rest):
        value, others = rest[: len(parameter)], rest[len(parameter) :]
        return call(here, name, make(*value), x, w, b, *others)

    return f, [*OPERANDS, *parameter, *more]
