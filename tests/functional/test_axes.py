"""Every verb with `axis` takes several axes as one row, or refuses them in one sentence."""

import importlib
import inspect

import jax
import numpy as np
import pytest
import torch

import anymax as am
from anymax import routing, sampling, transforms
from anymax.likelihood import kl

AXES = (3, 1)
X = np.random.default_rng(0).normal(size=(2, 3, 2, 4))
ROWS = np.moveaxis(X, AXES, (-2, -1)).reshape(2, 2, 12)
TARGET = np.random.default_rng(1).integers(12, size=(2, 2))
IDS = np.stack([TARGET, (TARGET + 1) % 12], axis=-1)
LOG_P = np.log(np.full(IDS.shape, 0.3))


def rows(a):
    """An array of the shape of X, with the classes last."""
    return np.moveaxis(a, AXES, (-2, -1)).reshape(2, 2, 12)


def of_scores(verb, **options):
    return lambda x, axis: verb(x, axis=axis, **options)


def of_map(verb, *others, **options):
    return lambda x, axis: verb("entmax15", x, *others, axis=axis, **options)


def of_loss(verb, *first, **options):
    return lambda x, axis: verb(*first, x, TARGET, axis=axis, reduction="none", **options)


JOINS = {  # (x, axis) -> the result
    "apply": of_map(am.apply), "log_apply": of_map(am.log_apply), "threshold": of_map(am.threshold), "jacobian": of_map(am.jacobian),
    "jacobian_norm": of_map(am.inspection.jacobian_norm), "softmax": of_scores(am.softmax), "log_softmax": of_scores(am.log_softmax),
    "logsumexp": of_scores(am.logsumexp), "sparsemax": of_scores(am.sparsemax), "entmax": of_scores(am.entmax),
    "entmax15": of_scores(am.entmax15), "taylor_softmax": of_scores(am.taylor_softmax), "sigsoftmax": of_scores(am.sigsoftmax),
    "sparse_softmax": of_scores(am.sparse_softmax, k=3), "perturb_max": of_scores(am.perturb_max), "budget": of_scores(am.budget, k=2),
    "normmax": of_scores(am.normmax, alpha=2.0), "soft_rank": of_scores(am.soft_rank), "soft_sort": of_scores(am.soft_sort),
    "soft_permutation": of_scores(am.soft_permutation),
    "entropy": lambda x, axis: am.entropy(am.softmax(x, axis=axis), axis=axis),
    "sample": of_map(am.sample, generator=0, num_samples=3, return_log_prob=True, return_support=True, transform=am.topk(5)),
    "gumbel_max": of_scores(am.gumbel_max, generator=0), "perturb_argmax": of_scores(sampling.perturb_argmax, generator=0),
    "gumbel_softmax": lambda x, axis: am.gumbel_softmax(
        x, am.logsumexp(x, axis=axis, keepdims=True), axis=axis, generator=0, hard=True, mapping="entmax15"
    ),
    "gumbel_topk": of_scores(sampling.gumbel_topk, k=3, generator=0, mapping="sparsemax", invalid="argmax"),
    "topk_log_prob": of_map(sampling.topk_log_prob, k=9, invalid="argmax"),
    "top": of_map(sampling.top, k=9, transform=am.temperature(0.5), invalid="argmax"),
    "log_prob": of_map(am.log_prob, TARGET), "log_prob_entropy": of_map(am.log_prob_entropy, TARGET),
    "kl": lambda x, axis: kl("softmax", x, "softmax", 2 * x, axis=axis),
    "topk_kl": lambda x, axis: am.topk_kl(x, IDS, LOG_P, axis=axis),
    "multilabel_softmax_loss": lambda x, axis: am.multilabel_softmax_loss(
        x, (x > 0) * 1, mask=x < 1, axis=axis, reduction="none", weight=np.arange(1.0, 13.0)
    ),
    "margin_loss": lambda x, axis: am.margin_loss(
        "softmax", x / 9, TARGET, margin=0.1, axis=axis, reduction="none"
    ), "normmax_loss": of_loss(am.normmax_loss, alpha=2.0),
    "sparse_softmax_loss": of_loss(am.sparse_softmax_loss, k=12), "smoothed_nll": of_loss(am.smoothed_nll, "softmax", epsilon=0.1),
    **{name: of_loss(getattr(am, name), "softmax") for name in ("accuracy_loss", "fenchel_young", "nll", "stop_gradient_loss")},
    **{
        name: of_loss(getattr(am, name))
        for name in ("cross_entropy", "sparsemax_loss", "entmax_loss", "entmax15_loss", "perturb_max_loss", "taylor_softmax_loss")
    },
}  # fmt: skip
REFUSE = {
    **{name: of_map(getattr(am, name), index=[0, 1]) for name in dir(am) if name.startswith("segment_")},
    "segment_loss": of_map(am.segment_loss, target=[0, 0], index=[0, 1]),
    "segment_support": lambda x, axis: am.segment_support(x, index=[0, 1], axis=axis),
    "segment_entropy": lambda x, axis: am.segment_entropy(x, index=[0, 1], axis=axis),
    "segment_logsumexp": lambda x, axis: am.segment_logsumexp(x, index=[0, 1], axis=axis),
    "route": of_scores(routing.route, k=1), "expert_choice": of_scores(routing.expert_choice, capacity=1),
    "route_support": of_scores(routing.route_support),
    "temperature": lambda x, axis: am.temperature(2.0, axis=axis)(x), "mask": lambda x, axis: am.mask(x > 0, axis=axis)(x),
    "topk": lambda x, axis: am.topk(2, axis=axis)(x), "topp": lambda x, axis: am.topp(0.5, axis=axis)(x),
    "minp": lambda x, axis: am.minp(0.5, axis=axis)(x), "normalize": lambda x, axis: am.normalize("l1", axis=axis)(x),
    "prior": lambda x, axis: am.prior(x, axis=axis)(x),
    "cosine": lambda x, axis: am.cosine(np.ones((5, 4)), axis=axis)(x),
}  # fmt: skip


# None is 1 there
LOSSES = {name for name in JOINS if name.endswith("loss")} | {"nll", "smoothed_nll", "fenchel_young", "cross_entropy"}
# these take classes of the shape of the rows
ALL = sorted(JOINS.keys() - LOSSES - {"log_prob", "log_prob_entropy", "topk_kl"})


def verbs():
    modules = [
        importlib.import_module(f"anymax{m}") for m in ("", ".sampling", ".likelihood", ".routing", ".inspection")
    ]
    public = {name: getattr(m, name) for m in modules for name in getattr(m, "__all__", ("jacobian_norm",))}
    return {name for name, f in public.items() if callable(f) and "axis" in inspect.signature(f).parameters}


def test_every_verb_with_an_axis_stands_here():
    assert verbs() == {*JOINS, *REFUSE}


def close(a, b):
    np.testing.assert_allclose(a, b, atol=1e-12)


def arrays(out):
    out = out if isinstance(out, tuple) else (out,)
    return [a for part in out for a in (arrays(part) if isinstance(part, tuple) else [part]) if a is not None]


@pytest.mark.parametrize("name", sorted(JOINS))
def test_several_axes_are_one_row(name):
    got, want = JOINS[name](X, AXES), JOINS[name](ROWS, -1)
    for a, b in zip(arrays(got), arrays(want), strict=True):
        close(rows(a) if np.shape(a) == X.shape else a, b)


@pytest.mark.parametrize("name", ALL)
def test_none_is_all_axes_where_the_last_is_the_default(name):
    got, want = JOINS[name](X, None), JOINS[name](X.reshape(-1), -1)
    for a, b in zip(arrays(got), arrays(want), strict=True):
        close(np.reshape(a, np.shape(b)), b)


@pytest.mark.parametrize("name", sorted(REFUSE))
@pytest.mark.parametrize("axis", [(0, 1), [0, 1]])
def test_several_axes_without_a_meaning_are_refused(name, axis):
    with pytest.raises(
        TypeError, match="several axes, or None for all, have no meaning here: reshape them to one axis first"
    ):
        REFUSE[name](X, axis)


@pytest.mark.parametrize("name", transforms.__all__)
def test_transforms_refuse_several_axes(name):
    arguments = {
        "temperature": (2.0,), "topk": (2,), "topp": (0.5,), "minp": (0.5,), "mink": (2,), "toph": (0.5,), "typical": (0.5,), "eta": (0.1,),
        "epsilon_cutoff": (0.1,), "topnsigma": (1.0,), "xtc": (0.5, 0.1), "normalize": ("l1",), "softcap": (3.0,), "pless": (),
        "dynamic_temperature": (1.0, 2.0), "noise": ("gumbel",), "logit_bias": ({0: 1.0},),
    }.get(name)  # fmt: skip
    if arguments is not None:
        with pytest.raises(TypeError, match="several axes, or None for all, have no meaning here"):
            getattr(transforms, name)(*arguments, axis=(0, 1))(X)


@pytest.mark.parametrize("verb", [am.sample, am.jacobian, sampling.top])
def test_masks_and_parameters_of_several_axes(verb):
    keep = X < 1
    alpha = np.array([1.2, 1.8])[:, None, None, None]
    options = {"k": 2} if verb is sampling.top else {"generator": 0} if verb is am.sample else {}
    got = verb(am.Entmax(alpha), X, axis=AXES, mask=keep, **options)
    want = verb(am.Entmax(alpha[..., 0]), ROWS, mask=rows(keep), **options)
    for a, b in zip(arrays(got), arrays(want), strict=True):
        close(a, b)


@pytest.mark.parametrize("make", [torch.tensor, jax.numpy.asarray], ids=["torch", "jax"])
@pytest.mark.parametrize(
    "name", ["entropy", "jacobian", "multilabel_softmax_loss", "soft_permutation", "topk_log_prob"]
)
def test_several_axes_in_every_framework(make, name):
    got, want = JOINS[name](make(X), AXES), JOINS[name](ROWS, -1)
    for a, b in zip(arrays(got), arrays(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5, atol=1e-6)
