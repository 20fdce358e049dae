"""What the kernels of attention read: the arguments of a call, and of these a head's matrices, its window, and the terms of its scores."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# type checkers can't read the code that Triton traces

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class View(NamedTuple):
    """What queries see and what is added to their scores, as the compiler knows it."""

    CAUSAL: bool
    LEFT: bool  # a window to this side
    RIGHT: bool
    RANGED: bool  # each batch has lengths of its own
    CAP: bool
    ALIBI: bool
    SINK: bool
    BIAS: bool
    ADD: bool
    KEEP: bool
    DROP: bool
    FOLD: bool  # see `units`


class Arrays(NamedTuple):
    """What a call reads: addresses, that of the queries for an array that it doesn't have; in `Call` the Steps of all up to `param`."""

    q: Any
    k: Any
    v: Any
    bias: Any
    additive: Any
    keep: Any
    param: Any
    ranges: Any = 0  # [B, 3], see `window_of`
    heads: Any = 0  # [H, 2], ALiBi's slope and the sink
    seed: Any = 0


class Steps(NamedTuple):
    """The strides of an array [B, H, L, D] or [B, H, L, S], 0 for an axis of size 1."""

    b: Any
    h: Any
    i: Any
    j: Any = 0


class Call(NamedTuple):
    """The numbers of a call; `groups` heads of queries share a head of keys."""

    heads: Any
    groups: Any
    rows: Any
    keys: Any
    d: Any
    e: Any
    steps: Any  # Arrays
    offset: Any
    left: Any
    right: Any
    scale: Any
    cap: Any
    shape: Any  # alpha - 1, or the budget, where all rows have the same
    drop: Any


class Window(NamedTuple):
    """The keys that queries of a batch may see."""

    length: Any  # the number of keys
    count: Any  # the number of queries
    offset: Any
    left: Any
    right: Any


class Terms(NamedTuple):
    """What makes scores of a head from q k^T; each array has an address, and strides of queries and keys."""

    scale: Any
    cap: Any
    slope: Any
    pb: Any
    bi: Any
    bj: Any
    pa: Any
    ai: Any
    aj: Any
    pk: Any
    ki: Any
    kj: Any


class Matrix(NamedTuple):
    """Queries, keys, values or gradients of a head."""

    first: Any  # an address
    stride: Any
    count: Any
    width: Any


class Head(NamedTuple):
    """What a head of queries reads."""

    q: Any  # matrices
    k: Any
    v: Any
    at: Any  # a Window
    terms: Any


@triton.jit
def matrix_of(A, steps, b, h, count, width):
    return Matrix(A + b.to(tl.int64) * steps.b + h.to(tl.int64) * steps.h, steps.i, count, width)


@triton.jit
def load_block(a, first, N: tl.constexpr, D: tl.constexpr, WHOLE: tl.constexpr = False):
    """The rows first .. first + N - 1 of a matrix, [N, D], with zeros beyond its ends. WHOLE: all of these rows exist."""
    i = first + tl.arange(0, N)[:, None]
    c = tl.arange(0, D)[None, :]
    of = a.first + i.to(tl.int64) * a.stride + c
    if WHOLE:
        return tl.load(of, mask=c < a.width, other=0.0)
    else:
        return tl.load(of, mask=(i < a.count) & (c < a.width), other=0.0)


@triton.jit
def once_more(block, a, first, here, N: tl.constexpr, D: tl.constexpr):
    """The block that `load_block` loaded before a loop. Products of fp32 take operands from registers, too many to keep across the loop, so
    each step loads them again. `here` is always true, but the compiler can't know that before the step, so it can't hoist the load."""
    if block.dtype == tl.float32:
        return load_block(Matrix(a.first, a.stride, tl.where(here, a.count, 0), a.width), first, N, D)
    else:
        return block


@triton.jit
def window_of(arrays, call, b, VIEW: tl.constexpr):
    """The window of a batch; if RANGED, `ranges` has (keys, queries, offset) for each batch."""
    if VIEW.RANGED:
        own = arrays.ranges + b * 3
        length, count = tl.minimum(tl.load(own), call.keys), tl.minimum(tl.load(own + 1), call.rows)
        return Window(length, count, tl.load(own + 2), call.left, call.right)
    else:
        return Window(call.keys, call.rows, call.offset, call.left, call.right)


@triton.jit
def terms_of(arrays, call, b, h, factor, VIEW: tl.constexpr):
    """h has several heads where a tile has queries of several; `factor`: see `units`."""
    far_b, far_h = b.to(tl.int64), h.to(tl.int64)
    slope = 0.0
    if VIEW.ALIBI:
        slope = tl.load(arrays.heads + (b * call.heads + h) * 2)
    of_bias, of_added, of_keep = call.steps.bias, call.steps.additive, call.steps.keep
    bias = arrays.bias + far_b * of_bias.b + far_h * of_bias.h
    added = arrays.additive + far_b * of_added.b + far_h * of_added.h
    keep = arrays.keep + far_b * of_keep.b + far_h * of_keep.h
    return Terms(
        factor, call.cap, slope, bias, of_bias.i, of_bias.j, added, of_added.i, of_added.j, keep, of_keep.i, of_keep.j
    )


@triton.jit
def head_of(arrays, call, b, h, factor, VIEW: tl.constexpr):
    shared = h // call.groups
    return Head(
        matrix_of(arrays.q, call.steps.q, b, h, call.rows, call.d), matrix_of(arrays.k, call.steps.k, b, shared, call.keys, call.d),
        matrix_of(arrays.v, call.steps.v, b, shared, call.keys, call.e), window_of(arrays, call, b, VIEW),
        terms_of(arrays, call, b, h, factor, VIEW),
    )  # fmt: skip


@triton.jit
def block_of(call, M: tl.constexpr):
    """(block of queries, batch, head, head counted over all batches) of a program; under a causal mask, queries with the most keys come
    first."""
    tall = tl.cdiv(call.rows, M)
    head = tl.program_id(0) // tall
    return tall - 1 - tl.program_id(0) % tall, head // call.heads, head % call.heads, head


@triton.jit
def flags_of(FLAGS, call, head, coarse, M: tl.constexpr, N: tl.constexpr):
    """The table of a head in FLAGS, see `attention_forward`: [words of blocks of keys, blocks of queries]."""
    words = tl.cdiv(tl.cdiv(tl.cdiv(call.keys, N), coarse), 32)
    return FLAGS + head.to(tl.int64) * (words * tl.cdiv(call.rows, M))


@triton.jit
def sink_of(arrays, head, there, VIEW: tl.constexpr):
    """The sink's score of each query that is there; `head` is counted over all batches."""
    if VIEW.SINK:
        return tl.where(there, tl.load(arrays.heads + head * 2 + 1), float("-inf"))
    else:
        return tl.full(there.shape, float("-inf"), tl.float32)


@triton.jit
def seed_of(arrays, VIEW: tl.constexpr):
    return tl.load(arrays.seed) if VIEW.DROP else 0
