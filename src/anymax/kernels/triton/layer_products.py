"""Output layers: gradients as a sparse matrix times a dense one, and gradients times the factor of the caller."""

# pyright: reportAssignmentType=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# type checkers can't read the code that Triton traces

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def layer_products(VALUE, INDEX, STARTS, ROWS, OUT, d, r0, r1, o0, o1, E: tl.constexpr, F: tl.constexpr):  # fmt: skip
    """OUT [i] += sum of VALUE[e] ROWS[INDEX[e]] over e from STARTS[i] to STARTS[i + 1], E at a time."""
    i = tl.program_id(0).to(tl.int64)
    begin = tl.load(STARTS + i)
    end = tl.load(STARTS + i + 1)
    if begin < end:  # a row without entries is left alone
        f = tl.program_id(1).to(tl.int64) * F + tl.arange(0, F)
        inside = f < d
        acc = tl.zeros([F], tl.float32)
        for at in range(begin, end, E):
            e = at + tl.arange(0, E)
            value = tl.load(VALUE + e, mask=e < end, other=0.0)
            row = tl.load(INDEX + e, mask=e < end, other=0).to(tl.int64)
            mask = (e < end)[:, None] & inside[None, :]
            more = tl.load(ROWS + row[:, None] * r0 + f[None, :] * r1, mask=mask, other=0.0).to(tl.float32)
            acc += tl.sum(value[:, None] * more, 0)
        to = OUT + i * o0 + f * o1
        tl.store(to, (tl.load(to, mask=inside, other=0.0).to(tl.float32) + acc).to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def layer_scaled(A, G, n, L: tl.constexpr):
    """A [n] *= G [1], by a fixed number of programs; nothing is read or written if G is 1, as in most backward passes."""
    g = tl.load(G).to(tl.float32)
    if g != 1.0:
        first = tl.program_id(0).to(tl.int64) * L + tl.arange(0, L)
        for begin in range(0, tl.cast(n, tl.int64), tl.num_programs(0) * L):
            at = first + begin
            a = tl.load(A + at, mask=at < n, other=0.0).to(tl.float32)
            tl.store(A + at, (a * g).to(A.dtype.element_ty), mask=at < n)
