"""Verbs over classes that lie on several processes (or devices of JAX): each has its shard, and no process has all scores."""
from __future__ import annotations
from typing import Any
from ._shard import Call
from ._ways import solve

def apply(mapping, x, axis=-1, *, mask=None, group=None, axis_name=None, class_start=None, class_count=None):
    found = solve(Call.of("apply", mapping, x, axis, mask, group, axis_name, class_start, class_count))
    return found.shard.back(found.p())

def log_apply(mapping, x, axis=-1, *, mask=None, group=None, axis_name=None, class_start=None, class_count=None):
    found = solve(Call.of("log_apply", mapping, x, axis, mask, group, axis_name, class_start, class_count))
    return found.shard.back(found.log_p())

from ._losses import Options, loss as _loss
from .._targets import class_axis

def _losses(nll, mapping, scores, target, weight=None, *, axis=None, mask=None, ignore_index=-100, reduction="mean", label_smoothing=0.0, group=None, axis_name=None, class_start=None, class_count=None):
    o=Options.of("fenchel_young", weight, ignore_index, reduction, label_smoothing, True, nll)
    c=Call.of("fenchel_young", mapping, scores, class_axis(scores, axis, None), mask, group, axis_name, class_start, class_count)
    c.words=o.words()
    return _loss(c, target, o)
def fenchel_young(*a, **k): return _losses(False,*a,**k)
def nll(*a, **k): return _losses(True,*a,**k)
