"""Scores in, results of their shape out: `verbs` has `apply` and a function for each map, `ordering` soft ranks and soft sorting."""

from .verbs import (
    apply,
    budget,
    call,
    entmax,
    entmax15,
    log_apply,
    log_softmax,
    normmax,
    perturb_max,
    sigsoftmax,
    softmax,
    sparse_softmax,
    sparsemax,
    taylor_softmax,
)

__all__ = [
    "apply", "budget", "call", "entmax", "entmax15", "log_apply", "log_softmax", "normmax", "perturb_max", "sigsoftmax", "softmax",
    "sparse_softmax", "sparsemax", "taylor_softmax",
]  # fmt: skip
