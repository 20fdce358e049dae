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
