"""Maps, operands, verbs and options for the tests of output layers, and all scores as their oracle."""

from __future__ import annotations

import dataclasses
import math

import laws
import numpy as np
import pytest
from kinds import KINDS, back
from loss_cases import OPTIONS as LOSS_OPTIONS

import anymax as A
from anymax import Entmax, NormMax, PerturbMax, Ratio, Sigsoftmax, Softmax, Sparsemax, SparseSoftmax, Taylor

INF, NAN = math.inf, math.nan
ROWS, FEATURES, CLASSES = 7, 5, 60


@dataclasses.dataclass(frozen=True, eq=False)
class Squares(A.Separable):
    """Sparsemax, as a map of a user's own."""

    name = "squares"
    facts = A.Facts(monotone=True, shift_invariant=True, sparse=True, has_potential=True, margin=1.0)

    def omega_terms(self, q, xp):
        return 0.5 * q * q

    def link(self, t, xp):
        return xp.where(t > 0, t, 0.0 * t)

    def slope(self, q, xp):
        return q

    def curvature(self, q, xp):
        return xp.ones_like(q)


MAPS = {
    "softmax": Softmax(), "sparsemax": Sparsemax(), "entmax15": Entmax(1.5), "entmax1": Entmax(1.0), "entmax3": Entmax(3.0),
    "entmax08": Entmax(0.8), "topk": SparseSoftmax(k=4), "topp": SparseSoftmax(p=0.8), "normmax": NormMax(2.0), "squares": Squares(),
    "taylor": Taylor(2), "sigsoftmax": Sigsoftmax(), "relu": Ratio.square(), "normal": PerturbMax("normal"),
    "gumbel": PerturbMax("gumbel"),
}  # fmt: skip
QUICK = (
    "softmax",
    "sparsemax",
    "entmax15",
    "entmax1",
    "entmax3",
    "topk",
    "squares",
)  # those that never need a whole row
SEVERAL = ("softmax", "entmax1", "sparsemax", "entmax15", "topk", "normmax", "taylor")
every_map = pytest.mark.parametrize("name", MAPS)


def tolerance(kind):
    return 2e-5 if kind == "jax" else 1e-10


def operands(seed=0, rows=ROWS, classes=CLASSES, sigma=0.8):
    rng = np.random.default_rng(seed)
    x, weight = rng.normal(size=(rows, FEATURES)), sigma * rng.normal(size=(classes, FEATURES))
    bias, y = rng.normal(size=classes), rng.integers(classes, size=rows)
    return x, weight, bias, y, rng.uniform(0.3, 2.0, classes), rng.random(classes) < 0.8


# -- the verbs, and what they give of all scores -------------------------------------------------------------------------------------


def further(mapping, scores, target, z_loss, suppress, weight, mask=None, ignore_index=-100, **_):
    """What z_loss= and suppress= add to each row, and the share of the row in a mean."""
    n, there = scores.shape[-1], np.asarray(back(target)) != ignore_index
    hot = np.eye(n, dtype=bool)[np.where(there, back(target), 0)]
    torch_too = hasattr(scores, "detach")
    there, hot = made("torch", there, hot) if torch_too else (there, hot)
    norm = there * 1.0 if weight is None else (hot * weight).sum(-1) * there
    more = z_loss * A.threshold(mapping, scores, mask=mask).tau ** 2 if z_loss else 0.0
    if suppress:
        q, out = A.softmax(scores), (A.apply(mapping, scores) == 0) & ~hot
        own, log = (q * hot).sum(-1), np.log(1.0 - back((q * out).sum(-1)))
        if torch_too:
            own, log = own.detach(), (1.0 - (q * out).sum(-1)).log()
        more = more - suppress * (1.0 - own) * log
    return more * norm, norm


def dense(mapping, scores, target, weight=None, *, z_loss=0.0, suppress=0.0, reduction="mean", **options):
    """The loss of all scores, as the map has it; z_loss= and suppress= by their formulas."""
    options = {"axis": -1, **options}
    if z_loss or suppress:
        value = dense(mapping, scores, target, weight, reduction="none", **options)
        more, norm = further(mapping, scores, target, z_loss, suppress, weight, **options)
        value = value + more
        return value if reduction == "none" else value.sum() / (norm.sum() if reduction == "mean" else 1.0)
    options["reduction"] = reduction
    if isinstance(mapping, SparseSoftmax):
        return A.sparse_softmax_loss(scores, target, weight, k=mapping.k, p=mapping.p, **options)
    loss = A.fenchel_young if mapping.facts.has_potential and not mapping.is_softmax else A.nll
    return loss(mapping, scores, target, weight, **options)


VERBS = {  # name: (of x, weight, target, map; of map, scores, target)
    "loss": (A.linear_loss, dense),
    "log p": (A.linear_log_prob, A.log_prob),
    "entropy": (lambda *o, **k: A.linear_log_prob_entropy(*o, **k)[1], lambda *o, **k: A.log_prob_entropy(*o, **k)[1]),
    "tau": (
        lambda x, w, y, m, **k: A.linear.linear_threshold(x, w, m, **k).tau, lambda m, s, y, **k: A.threshold(m, s, **k).tau,
    ),
    "support": (
        lambda x, w, y, m, **k: A.linear.linear_threshold(x, w, m, **k).support,
        lambda m, s, y, **k: A.threshold(m, s, **k).support,
    ),
}  # fmt: skip
OF_LAYERS = (
    "chunk",
    "invariant",
    "transform",
    "least",
    "linear_bias",
)  # keywords that change how, or what the scores are


def of_all_scores(verb, x, linear_weight, bias, y, mapping, **given):
    """What a verb gives of all scores."""
    scores = x @ linear_weight.T if bias is None else x @ linear_weight.T + bias
    scores = given["transform"](scores) if "transform" in given else scores
    return VERBS[verb][1](mapping, scores, y, **{k: v for k, v in given.items() if k not in OF_LAYERS})


# the options of all losses but where the classes are, and those that output layers have beside them
OPTIONS = {name: given for name, given in LOSS_OPTIONS.items() if name not in ("axis", "dim")} | {
    "chunk": {"chunk": 16, "reduction": "none"},
    "all in blocks": {**LOSS_OPTIONS["all"], "chunk": 16},
    "transform": {"transform": A.transforms.softcap(2.0)},
    "transform in blocks": {"transform": A.temperature(2.0), "chunk": 20, "reduction": "sum"},
    "z_loss": {"z_loss": 0.3, "reduction": "none"},
    "z_loss and all": {**LOSS_OPTIONS["all"], "z_loss": 0.3, "chunk": 16},
    "z_loss of a transform": {"z_loss": 0.3, "transform": A.transforms.softcap(2.0), "reduction": "sum"},
    "invariant": {"invariant": True, "reduction": "none"},
    "invariant and all": {**LOSS_OPTIONS["all"], "invariant": True, "z_loss": 0.3},
    "suppress": {"suppress": 0.7, "reduction": "none"},
    "suppress and z_loss": {"suppress": 0.3, "z_loss": 0.3, "ignore_index": LOSS_OPTIONS["ignore_index"]["ignore_index"]},
}  # fmt: skip


def takes(mapping, given):
    """Whether a map has a loss with these options."""
    return (
        (not given.get("z_loss") or mapping.has_threshold)
        and (not given.get("suppress") or mapping.facts.sparse)
        and (not isinstance(mapping, SparseSoftmax) or "target" not in given or given["target"].__name__ != "_soft")
    )


# -- comparing -----------------------------------------------------------------------------------------------------------------------


def numbers(got, want, atol, *said):
    """Close where it is finite, and the same where it is not."""
    got, want = (np.asarray(back(a), np.float64) for a in (got, want))
    lost = ~np.isfinite(want)
    laws.same(got[lost], want[lost], *said)
    laws.close(np.where(lost, 0.0, got), np.where(lost, 0.0, want), atol, *said)


def same(got, want, free, atol, pull=None, everywhere=False):
    """A value and its gradients by what is free. Rows without a finite value pull at nothing, unless `everywhere`."""
    torch = pytest.importorskip("torch")
    numbers(got, want, atol)
    if pull is None:
        pull = torch.linspace(0.5, 2.0, want.numel(), dtype=want.dtype).reshape(want.shape)
    pull = pull if everywhere else pull * want.detach().isfinite()
    gradients = [torch.autograd.grad(v, free, pull.to(v.dtype), retain_graph=True) for v in (got, want)]
    for of, one, other in zip(free, *gradients, strict=True):
        assert one.dtype is of.dtype
        laws.close(one.double(), other.double(), atol, tuple(of.shape))


def made(kind, *arrays):
    return [KINDS[kind](a) if isinstance(a, np.ndarray) else a for a in arrays]


def torch_operands(dtype="float64", seed=0, **sizes):
    torch = pytest.importorskip("torch")
    x, weight, bias, y, *_ = operands(seed, **sizes)
    free = [torch.tensor(a, dtype=getattr(torch, dtype)).requires_grad_() for a in (x, weight, bias)]
    return torch, free, torch.tensor(y)
