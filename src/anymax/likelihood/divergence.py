"""Divergences between two distributions over the same classes, a student's and a teacher's, from the scores of both."""

from __future__ import annotations

import math
from typing import Any

from .. import _array
from .._array import Array, Namespace, as_dtype, quiet, total, upcast
from .._core.mapping import Mapping
from ..autodiff import bridge
from ..functional.draws import log_p_of_draw
from ..mappings import Softmax
from .teacher import check_direction
from .terms import kl_of_sums, kl_sums

_SOFTMAX = Softmax()


def read_beta(who: str, direction: Any, beta: Any) -> float:
    """The share of the teacher in the mixture M: 0 for KL(teacher || student), "forward", and 1 for KL(student || teacher), "reverse"."""
    check_direction(who, direction)
    if beta is None:
        return 1.0 if direction == "reverse" else 0.0
    if direction == "reverse":
        raise ValueError(
            f"{who}: direction='reverse' and beta={beta!r} both say which divergence; leave one out (beta=1 is the reverse one)"
        )
    words = "a number from 0, KL(teacher || student), to 1, KL(student || teacher), with Jensen-Shannon between"
    return float(_array.check_scalar(f"{who}: beta", beta, lambda v: 0 <= v <= 1, words))


def divergence_rows(mapping: Mapping, s: Array, t: Array, beta: float, xp: Namespace) -> Array:
    """`beta KL(T || M) + (1 - beta) KL(S || M)` with `M = (1 - beta) S + beta T`; KL(T || S) for beta 0, KL(S || T) for 1.

    s, t: the scores of student and teacher, [..., classes]. The result, without that axis, is in the dtype of s; fp32 for half precision.
    """
    s = upcast(s, xp)
    t = as_dtype(upcast(t, xp), s.dtype, xp)
    return bridge(s).divergence(s, t, beta) if mapping.is_softmax else of_map(mapping, s, t, beta, xp)


def of_map(mapping: Mapping, s: Array, t: Array, beta: float, xp: Namespace) -> Array:
    """`divergence_rows` of scores in one dtype, in plain operations."""
    with quiet(s):
        log_s, log_t = log_p_of_draw(mapping, s, xp, none=True), log_p_of_draw(mapping, t, xp, none=True)
        sums = divergence_sums((log_s, log_t), (s, t), beta, xp)
        return of_sums([total(a, xp) for a in sums], beta, xp)[..., 0]


def plain(s: Array, t: Array, beta: float) -> Array:
    """`of_map` for softmax."""
    return of_map(_SOFTMAX, s, t, beta, _array.namespace(s))


def divergence_sums(
    log_p: tuple[Array, Array], scores: tuple[Array, Array], beta: float, xp: Namespace, always: bool = False
) -> list[Array]:
    """What `of_sums` needs of each row, as arrays whose sums along the last axis are wanted, over all processes if there are several.

    log_p, scores: those of student and teacher. always: the number of arrays must not depend on values.
    """
    if 0.0 < beta < 1.0:
        return [_mixed(*log_p, beta, xp)]
    first, second = (0, 1) if beta else (1, 0)
    return kl_sums(log_p[first], log_p[second], scores[second], xp, always)


def of_sums(sums: list[Array], beta: float, xp: Namespace) -> Array:
    """The divergence of each row from the sums of `divergence_sums`."""
    return sums[0] if 0.0 < beta < 1.0 else kl_of_sums(sums)


def _mixed(log_s: Array, log_t: Array, beta: float, xp: Namespace) -> Array:
    """`beta t (log t - log m) + (1 - beta) s (log s - log m)` of each class, with derivatives that are never NaN."""
    zero = xp.zeros_like(log_s)
    there_s, there_t = log_s != -math.inf, log_t != -math.inf
    a, b = xp.where(there_s, log_s, zero), xp.where(there_t, log_t, zero)
    s, t = xp.where(there_s, xp.exp(a), zero), xp.where(there_t, xp.exp(b), zero)
    m = (1.0 - beta) * s + beta * t
    log_m = xp.log(xp.where(m == 0, xp.ones_like(m), m))
    return beta * t * (b - log_m) + (1.0 - beta) * s * (a - log_m)
