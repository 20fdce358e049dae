"""Verbs by layouts: the names of each public verb where rows are segments, products of an output layer, or on several processes.

A verb is a public function of rows of scores. It takes DTensors, or refuses them by a sentence; so does a transform.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any, NamedTuple

import torch
from transform_cases import ALL as TRANSFORMS

import anymax as A
from anymax import inspection, likelihood, routing, sampling, thresholds, transport

ROOMS = (
    "anymax",
    "anymax.likelihood",
    "anymax.sampling",
    "anymax.thresholds",
    "anymax.inspection",
    "anymax.routing",
    "anymax.transport",
)
Y, W = torch.tensor([0, 3, 1, 2]), torch.ones(4, 5, dtype=torch.float64)
SHARES = torch.full((4, 5), 0.2, dtype=torch.float64)


class Verb(NamedTuple):
    """A verb of rows in each layout: a call of scores [4, 5], and the names of its like; None where there is none."""

    call: Any
    dtensor: str | None = None  # the sentence that refuses a DTensor; None for a verb that takes them
    segments: str | None = None  # in anymax
    layer: str | None = None  # in anymax.linear and anymax.distributed
    shards: str | None = None  # in anymax.distributed


def _refused(name: str) -> str:
    return f"{name} takes no DTensor"


def verbs() -> dict[str, Any]:
    """The public functions of rows by name: those with an axis of the classes, or with scores first."""
    found = {}
    for room in map(importlib.import_module, ROOMS):
        for name in getattr(room, "__all__", None) or [n for n in vars(room) if not n.startswith("_")]:
            f = getattr(room, name)
            if (
                not inspect.isfunction(f)
                or not f.__module__.startswith("anymax.")
                or name.startswith(("segment_", "linear_"))
            ):
                continue
            names = list(inspect.signature(f).parameters)
            rows = "axis" in names or names[0] in ("x", "scores", "p", "p_draft")
            imported = not hasattr(room, "__all__") and f.__module__ != room.__name__
            if rows and not imported and not f.__module__.startswith(("anymax.transforms", "anymax._")):
                found[name] = f
    return found


VERBS = {
    "apply": Verb(lambda x: A.apply("sparsemax", x), segments="segment_apply", shards="apply"),
    "log_apply": Verb(lambda x: A.log_apply("entmax15", x), segments="segment_log_apply", shards="log_apply"),
    "softmax": Verb(A.softmax), "log_softmax": Verb(A.log_softmax), "sparsemax": Verb(A.sparsemax), "entmax15": Verb(A.entmax15),
    "entmax": Verb(lambda x: A.entmax(x, 1.3)), "budget": Verb(lambda x: A.budget(x, 2)), "normmax": Verb(lambda x: A.normmax(x, 2.0)),
    "taylor_softmax": Verb(A.taylor_softmax), "sigsoftmax": Verb(A.sigsoftmax), "perturb_max": Verb(A.perturb_max),
    "sparse_softmax": Verb(lambda x: A.sparse_softmax(x, k=2)),
    "threshold": Verb(
        lambda x: A.threshold("sparsemax", x), segments="segment_threshold", layer="linear_threshold", shards="threshold"
    ),
    "logsumexp": Verb(lambda x: A.logsumexp(x, temperature=0.5), segments="segment_logsumexp", shards="logsumexp"),
    "mellowmax": Verb(lambda x: thresholds.mellowmax(x, 2.0)),
    "entropy": Verb(lambda x: A.entropy(A.softmax(x)), segments="segment_entropy"),
    "support": Verb(lambda x: A.support(A.sparsemax(x)), segments="segment_support"),
    "fenchel_young": Verb(
        lambda x: A.fenchel_young("sparsemax", x, Y), segments="segment_loss", layer="linear_loss", shards="fenchel_young"
    ),
    "nll": Verb(lambda x: A.nll("softmax", x, Y), shards="nll"),
    "cross_entropy": Verb(lambda x: A.cross_entropy(x, SHARES)), "sparsemax_loss": Verb(lambda x: A.sparsemax_loss(x, Y)),
    "entmax_loss": Verb(lambda x: A.entmax_loss(x, Y, alpha=1.3)), "entmax15_loss": Verb(lambda x: A.entmax15_loss(x, Y)),
    "normmax_loss": Verb(lambda x: A.normmax_loss(x, Y, alpha=2.0)), "perturb_max_loss": Verb(lambda x: A.perturb_max_loss(x, Y)),
    "sparse_softmax_loss": Verb(lambda x: A.sparse_softmax_loss(x, Y, k=2)),
    "taylor_softmax_loss": Verb(lambda x: A.taylor_softmax_loss(x, Y)),
    "accuracy_loss": Verb(lambda x: A.accuracy_loss("softmax", x, Y)),
    "smoothed_nll": Verb(lambda x: A.smoothed_nll("softmax", x, Y, epsilon=0.1)),
    "stop_gradient_loss": Verb(lambda x: A.stop_gradient_loss("softmax", x, Y)),
    "margin_loss": Verb(lambda x: A.margin_loss("softmax", torch.tanh(x), Y)),
    "multilabel_softmax_loss": Verb(lambda x: A.multilabel_softmax_loss(x, (SHARES > 1).double()), _refused("multilabel_softmax_loss")),
    "log_prob": Verb(lambda x: A.log_prob("softmax", x, Y), layer="linear_log_prob"),
    "log_prob_entropy": Verb(
        lambda x: A.log_prob_entropy("sparsemax", x, Y), layer="linear_log_prob_entropy", shards="log_prob_entropy"
    ),
    "topk_kl": Verb(lambda x: A.topk_kl(x, Y[:, None], -0.5 * W[:, :1]), _refused("topk_kl"), layer="linear_topk_kl"),
    "kl": Verb(lambda x: likelihood.kl("softmax", x, "softmax", x), _refused("kl"), layer="linear_kl"),
    "jacobian": Verb(lambda x: A.jacobian("softmax", x), _refused("jacobian")),
    "jacobian_norm": Verb(lambda x: inspection.jacobian_norm("softmax", x), _refused("jacobian_norm")),
    "sample": Verb(lambda x: A.sample("softmax", x, generator=0), _refused("sample"), segments="segment_sample", shards="sample"),
    "gumbel_max": Verb(lambda x: A.gumbel_max(x, generator=0), _refused("gumbel_max")),
    "gumbel_softmax": Verb(lambda x: A.gumbel_softmax(x, 1.0, generator=0), _refused("gumbel_softmax")),
    "gumbel_topk": Verb(lambda x: sampling.gumbel_topk(x, 2, generator=0), _refused("gumbel_topk")),
    "perturb_argmax": Verb(lambda x: sampling.perturb_argmax(x, generator=0), _refused("perturb_argmax")),
    "speculative_accept": Verb(lambda x: sampling.speculative_accept(x, x, Y), _refused("speculative_accept")),
    "recovered_tokens": Verb(lambda x: sampling.recovered_tokens(x, x, Y), _refused("recovered_tokens")),
    "top": Verb(lambda x: sampling.top("softmax", x, 2), _refused("top")),
    "topk_log_prob": Verb(lambda x: sampling.topk_log_prob("softmax", x, 2), _refused("topk_log_prob")),
    "soft_rank": Verb(A.soft_rank, _refused("soft_rank")), "soft_sort": Verb(A.soft_sort, _refused("soft_sort")),
    "soft_permutation": Verb(A.soft_permutation, _refused("soft_permutation")),
    "route": Verb(lambda x: routing.route(x, 2), _refused("route")),
    "route_support": Verb(lambda x: routing.route_support(x, "sparsemax"), _refused("route_support")),
    "expert_choice": Verb(lambda x: routing.expert_choice(x, 2), _refused("expert_choice")),
    "balance": Verb(lambda x: routing.balance(x, 2), _refused("balance")),
    "load_balancing_loss": Verb(lambda x: routing.load_balancing_loss(x, Y[:, None]), _refused("load_balancing_loss")),
    "router_z_loss": Verb(routing.router_z_loss, _refused("router_z_loss")),
    "gumbel_sinkhorn": Verb(lambda x: transport.gumbel_sinkhorn(x, generator=0), _refused("gumbel_sinkhorn")),
}  # fmt: skip


def _whole(found: Any) -> list[Any]:
    parts = found if isinstance(found, tuple) else (found,)
    return [v.full_tensor() if hasattr(v, "full_tensor") else v for v in parts]


def wrong_cells(mesh: Any) -> list[Any]:
    """The verbs and transforms that give another result for a DTensor than for a tensor, or refuse it by another sentence."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts = [
        t
        for t in TRANSFORMS.values()
        if not any(getattr(v, "shape", ())[:1] == (3,) for _, v in getattr(t, "params", ()))
    ]
    cells = [(verb.call, verb.dtensor) for verb in VERBS.values()]
    cells += [
        (t, _refused(t.name) if getattr(t, "random", False) or not getattr(t, "by_rows", True) else None) for t in parts
    ]
    wrong = []
    for call, sentence in cells:
        want = None if sentence else _whole(call(x))
        for place in (Shard(0), Shard(1)):
            try:
                got = call(distribute_tensor(x, mesh, [place]))
            except TypeError as error:
                if sentence is None or not str(error).startswith(sentence):
                    wrong.append((call, place, error))
                continue
            told = all(isinstance(v, DTensor) for v in (got if isinstance(got, tuple) else (got,)))
            close = want is not None and all(torch.allclose(a.double(), b.double()) for a, b in zip(_whole(got), want))
            if not (told and close):
                wrong.append((call, place, got))
    return wrong
