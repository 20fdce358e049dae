"""How attention is cut: the tiles of queries and keys, and the parts of the keys. The numbers are tuned on a GPU by tools/gpu.py."""

from __future__ import annotations

import dataclasses

from .plans import power_of_two


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """A tile of attention is [M queries, N keys], the same in the forward and the backward, which share the lists of tiles."""

    M: int
    N: int
    warps: int
    stages: int
    part: int = 0  # queries that the gradient kernel of keys and values takes at a time, a divisor of M; 0: all
    # the most of a thread in that kernel and the forward, so that three programs fit a processor; 0: no limit
    registers: int = 0


forced_blocks: list[BlockPlan] = []  # set by the tuner and the tests


def blocks(width: int, size: int, rows: int, hip: bool, long: bool) -> BlockPlan:
    """`width`: the larger number of features, of q or v; `size`: bytes of a number; `long`: the map does much work for each score."""
    if forced_blocks:
        return forced_blocks[-1]
    if size > 2:
        m, n, warps, stages = (64 if width <= 64 else 32), (32 if width <= 128 else 16), 8, 1
    elif width <= 128:
        m, n, warps, stages = 64, 64, 4, 2
    else:
        m, n, warps, stages = 64, 32, 8, 1
    if long:
        m, n, warps = min(m, 64), min(n, 32), 8 if width > 128 or size > 2 else 4
    if hip:  # it has 64 KB of shared memory
        m, n, warps, stages = min(m, 64), min(n, 32 if width > 64 else 64), 4, 1
    pairs = m == n == 64  # one group of four warps, the unit of wgmma, holds a tile and its transpose
    part, registers = 32 if pairs else 0, 168 if pairs and width <= 64 else 0
    while m > 16 and m // 2 >= rows:  # under torch.compile `rows` may be a symbol
        m, warps, part = m // 2, max(1, warps // 2), 0
    return BlockPlan(m, n, warps, stages, part, 0 if hip else registers)


@dataclasses.dataclass(frozen=True)
class Split:
    """Attention of few queries: tiles are [M queries of the heads that share keys, N keys]; each program takes every `parts`-th tile."""

    M: int
    N: int
    parts: int
    warps: int
    stages: int
    solve_tops: int = 1024  # maxima of blocks, and scores, that the solver of a query reads at a time
    solve_scores: int = 4096
    value_tops: int = 64  # maxima that a tile reads at a time
    merged: int = 16  # parts that are merged at a time


LISTED = 2048  # the most blocks of keys that are listed for a block of queries
KEPT = 256  # blocks of queries that are listed for a block of keys at a time
SKIPPED = 2048  # from so many keys on, blocks are skipped by their centres
TILE = 64  # the most queries of a tile; a call with more is not decoding
FEWEST_KEYS = 1024
MOST_SCORES = 2**26  # the most scores kept, in fp32, between the passes of a threshold map
RESIDENT = 4  # programs for each processor, so that one computes while others read
MOST_PARTS = 128
forced_split: list[Split | None] = []  # set by the tuner and the tests; M is still that of the call


def split(
    width: int, size: int, shared: int, groups: int, rows: int, keys: int, processors: int, hip: bool, dense: bool
) -> Split | None:
    """How the keys are cut, or None. `shared`: heads of keys in all batches, each for `groups` heads of `rows` queries; `width`, `size`
    and `hip`: see `blocks`; `dense`: no scores are kept, as for softmax."""
    if rows > TILE:
        return None
    m = min(TILE, max(16, power_of_two(groups * rows)))
    if forced_split:
        forced = forced_split[-1]
        return None if forced is None else dataclasses.replace(forced, M=m)
    programs = shared * -(-groups * rows // m)
    if keys < FEWEST_KEYS or programs >= processors or (not dense and shared * groups * rows * keys > MOST_SCORES):
        return None
    n = (64 if width <= 128 else 32) // (2 if size > 2 else 1)  # so many keys take 16 KB or less
    parts = min(MOST_PARTS, -(-RESIDENT * processors // programs), -(-keys // n) // 2)
    return Split(m, n, parts, 8 if m > 16 and width > 128 else 4, 1 if hip else 3)
