"""One number from NumPy is a scalar, as from NumPy's own reductions: no verb returns a 0-d array. torch and JAX have 0-d arrays."""

from __future__ import annotations

import inspect
import itertools

import numpy as np
import pytest
from kinds import KINDS, every_kind, jax_in_the_whole_battery

import anymax as am
from anymax import likelihood, routing, sampling, thresholds
from anymax.inspection import jacobian_norm
from anymax.linear import linear_threshold

X = np.array([2.0, 1.5, -1.0])
P = np.array([0.75, 0.25, 0.0])
W = np.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])  # an output layer of three classes
H = np.array([0.3, -0.2])
ROWS = np.stack([X, -X])
KEPT = (np.array([0, 1]), np.array([0, 2]))  # a support: classes, and the bounds of the one row
DRAFT, WANTED = np.array([[0.5, 0.5], [0.9, 0.1]]), np.array([[0.5, 0.5], [0.0, 1.0], [0.0, 1.0]])
TEACHER = np.log([0.7, 0.2])

# every verb that gives one number for a row, or for a batch, each called so that it gives one number
ONE = {
    "logsumexp": lambda a: am.logsumexp(a(X)),
    "logsumexp, temperature": lambda a: am.logsumexp(a(X), temperature=2.0),
    "logsumexp, axes": lambda a: am.logsumexp(a(ROWS), axis=(0, 1)),
    "mellowmax": lambda a: thresholds.mellowmax(a(X)),
    "threshold": lambda a: tuple(am.threshold("sparsemax", a(X))),
    "threshold, mapping without a kernel": lambda a: tuple(am.threshold(am.NormMax(3.0), a(X))),
    "entropy": lambda a: am.entropy(a(P)),
    "entropy, renyi": lambda a: am.entropy(a(P), "renyi", 3.0),
    "jacobian_norm": lambda a: jacobian_norm("sparsemax", a(X)),
    "log_prob": lambda a: am.log_prob("softmax", a(X), 1),
    "log_prob, sparse": lambda a: am.log_prob("sparsemax", a(X), a(np.array(1))),
    "log_prob_entropy": lambda a: am.log_prob_entropy("entmax15", a(X), 1),
    "log_prob, support": lambda a: am.log_prob("softmax", a(X), 1, support=tuple(map(a, KEPT))),
    "kl": lambda a: likelihood.kl("softmax", a(X), "softmax", a(-X)),
    "kl, sparse": lambda a: likelihood.kl("sparsemax", a(X), "softmax", a(-X)),
    "topk_kl": lambda a: am.topk_kl(a(X), a(np.array([0, 1])), a(TEACHER)),
    "sample": lambda a: am.sample("softmax", a(X), generator=_seed(a)),
    "sample, with log p": lambda a: am.sample("sparsemax", a(X), generator=_seed(a), return_log_prob=True)[:3],
    "sample, sink": lambda a: am.sample(am.Sink("softmax", 1.0), a(X), generator=_seed(a)),
    "gumbel_max": lambda a: am.gumbel_max(a(X), generator=_seed(a)),
    "perturb_argmax": lambda a: sampling.perturb_argmax(a(X), "uniform", generator=_seed(a)),
    "speculative_accept": lambda a: tuple(sampling.speculative_accept(a(DRAFT), a(WANTED), a(np.array([1, 0])), generator=_seed(a))),
    "linear_loss": lambda a: am.linear_loss(a(H[None]), a(W), a(np.array([1])), "sparsemax"),
    "linear_loss, a single row": lambda a: am.linear_loss(a(H), a(W), a(np.array(1)), "softmax", reduction="none"),
    "linear_kl": lambda a: am.linear_kl(a(H), a(W), a(-H), a(W)),
    "linear_kl, a mean": lambda a: am.linear_kl(a(H[None]), a(W), a(-H[None]), a(W), beta=0.5, reduction="mean"),
    "linear_log_prob": lambda a: am.linear_log_prob(a(H), a(W), a(np.array(1)), "softmax"),
    "linear_log_prob_entropy": lambda a: am.linear_log_prob_entropy(a(H), a(W), a(np.array(1)), "sparsemax"),
    "linear_topk_kl": lambda a: am.linear_topk_kl(a(H), a(W), a(np.array([0, 1])), a(TEACHER)),
    "linear_threshold": lambda a: tuple(linear_threshold(a(H), a(W), "sparsemax")),
    "contrastive_loss": lambda a: am.contrastive_loss(a(ROWS), a(-ROWS), temperature=1.0),
    "segment_loss": lambda a: am.segment_loss("softmax", a(X), a(np.array([0, 2])), lengths=a(np.array([2, 1]))),
    "multilabel_softmax_loss": lambda a: am.multilabel_softmax_loss(a(X), a(np.array([1, 0, 1]))),
    "multilabel_softmax_loss, none": lambda a: am.multilabel_softmax_loss(a(X), a(np.array([1, 0, 1])), reduction="none"),
    "margin_loss": lambda a: am.margin_loss("softmax", a(X / 2), a(np.array(0))),
    "load_balancing_loss": lambda a: routing.load_balancing_loss(a(np.abs(ROWS) / 10), a(np.array([[0], [1]]))),
    "router_z_loss": lambda a: routing.router_z_loss(a(ROWS)),
    "logit_gap": lambda a: am.logit_gap(a(np.array(0.5)), 10),
}  # fmt: skip
LOSSES = {
    "fenchel_young": ("sparsemax",), "nll": ("softmax",), "cross_entropy": (), "sparsemax_loss": (), "entmax_loss": (), "entmax15_loss": (),
    "taylor_softmax_loss": (), "normmax_loss": (), "perturb_max_loss": (), "accuracy_loss": ("softmax",), "smoothed_nll": ("sparsemax",),
    "stop_gradient_loss": ("softmax",), "sparse_softmax_loss": (),
}  # fmt: skip
OWN = {"smoothed_nll": {"epsilon": 1e-3}, "sparse_softmax_loss": {"k": 2}}
ARRAYS = {  # what gives an array for a row, a module, a transform or words
    "apply", "attention", "attention_varlen", "balance", "budget", "check_mapping", "choose", "compose", "cosine", "entmax", "entmax15",
    "expert_choice", "explain", "explain_attention", "explain_linear_loss", "facts", "gumbel_sinkhorn", "gumbel_softmax", "gumbel_topk",
    "jacobian", "limit_capacity", "linear_attention", "log_apply", "log_softmax", "mask", "minp", "mix", "normalize", "normmax",
    "perturb_max", "recovered_tokens", "prior",
    "route", "route_support", "segment_apply", "segment_entropy", "segment_log_apply", "segment_logsumexp",
    "segment_sample", "segment_support", "segment_threshold", "show_config", "sigsoftmax", "soft_permutation", "soft_rank", "soft_sort",
    "softmax", "sparse_softmax", "sparsemax", "support", "taylor_softmax", "temperature", "top", "topk", "topk_log_prob", "topp", "use",
}  # fmt: skip


def _loss(name, reduction, target):
    loss = getattr(am, name)
    return lambda a: loss(*LOSSES[name], a(X), a(target), reduction=reduction, **OWN.get(name, {}))


for _name, _reduction in itertools.product(LOSSES, ("mean", "none", "sum")):
    ONE[f"{_name}, {_reduction}, index"] = _loss(_name, _reduction, np.array(1))
    ONE[f"{_name}, {_reduction}, soft"] = _loss(_name, _reduction, P)


def _seed(a):
    jax = pytest.importorskip("jax") if a is KINDS["jax"] else None
    return 0 if jax is None else jax.random.key(0)


def test_no_verb_is_left_out():
    modules = (am, am.sampling, am.routing, am.likelihood, am.linear, am.segments, am.transport, am.losses)
    verbs = {n for module in modules for n in module.__all__ if inspect.isfunction(getattr(module, n))}
    assert {name.partition(",")[0] for name in ONE} - {"mellowmax", "jacobian_norm"} == verbs - ARRAYS


@jax_in_the_whole_battery
@every_kind
@pytest.mark.parametrize("name", ONE)
def test_one_number(name, kind):
    drawn = ("sample", "speculative", "gumbel", "perturb_argmax", "segment")
    if kind == "strict" and name.startswith(drawn):
        pytest.skip("draws and segments are of NumPy, torch and JAX")
    found = ONE[name](KINDS[kind])
    for value in found if isinstance(found, tuple) else (found,):
        assert value.shape == ()
        if kind == "numpy":
            assert isinstance(value, np.generic), type(value)
        else:
            assert type(value) is type(KINDS[kind](X))
