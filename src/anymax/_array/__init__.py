"""Arrays of any kind, the ground floor: one idea a file, and every name of them here. Imports no framework."""
# ruff: noqa: F401 (names are handed on)

from .convert import (
    adopt,
    asarray,
    beside,
    check_integer,
    check_number,
    dense,
    duplicate,
    in_memory,
    is_int,
    is_number,
    like,
    number,
    shown,
)
from .dtypes import (
    asked_for,
    counts,
    default_float,
    dtype_name,
    floating,
    is_double,
    is_floating,
    is_integer,
    narrow,
    upcast,
)
from .kinds import Array, Namespace, is_array, is_jax, is_ragged, is_torch, namespace, torch_loaded
from .rows import (
    check_axis,
    descending,
    dot,
    finish,
    finite_scores,
    fit_axes,
    from_last,
    pick_axis,
    poison,
    positions,
    running_sum,
    take,
    to_last,
    top,
    total,
)
from .safe import expm1_over, log, log1p_over, power, safe, xlogx
from .tracing import (
    ask_torch,
    batched,
    compiling,
    decides,
    differentiates,
    eager,
    exporting,
    known,
    known_any,
    known_largest,
    loop,
    modes,
    plain_backward,
    quiet,
    recorded,
    stop_gradient,
    transformed,
)
