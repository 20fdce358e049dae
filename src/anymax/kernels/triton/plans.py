"""How rows are cut: rows a program, classes a tile, warps. The numbers are tuned on a GPU by tools/gpu.py."""

from __future__ import annotations

import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True)
class Plan:
    """A tile is [R rows, K, L]; `whole`: it holds the whole row."""

    R: int
    K: int
    L: int
    whole: bool
    warps: int
    parts: int = 0  # > 0: a row is cut in so many parts, with a program for each

    def wide(self, x: Any, wave: int = 32) -> int:
        """How many numbers of a part are read side by side, with 16 bytes a thread."""
        return max(self.L, min(self.K * self.L, self.warps * wave * 16 // x.element_size()))


@dataclasses.dataclass(frozen=True)
class Family:
    """How a kernel cuts rows that are too long for one warp."""

    held: int  # numbers that a warp holds
    whole: int  # the longest row that is one tile
    steps: tuple[tuple[float, int, int], ...]  # for longer rows: (up to so many classes, K, warps)
    most: int = 16  # the most warps for a row that is one tile
    paired: int = 0  # numbers of so many bytes or fewer: a warp takes two rows of HELD numbers, if they are aligned and without a mask
    two: int = 0  # rows of up to so many numbers that take several warps are taken two at a time


HELD = 1024  # numbers of a program of one warp: 32 a thread, four loads of 16 bytes in flight
# Measured on an H200, bf16. Two rows of HELD numbers a warp: top-k takes .8 of the time of one row, threshold maps of power 2 take 1.3.
# Two rows of 8,192 at a time: top-p takes .36, since a program of 8 warps fills a processor and waits for itself; top-k takes 1.4.
# 4096 x 50,257, steps of 2 (gradient) and of 8 warps (dense): .82 and .84 of what steps of 4 and of 16 warps take.
THREADS = 4  # threads for a row of few classes, whose sums then take two shuffles
FAMILIES = {
    "dense": Family(2048, 32768, ((65536, 8, 8), (math.inf, 4, 16))),
    "separable": Family(2048, 16384, ((32768, 8, 8), (math.inf, 8, 16))),
    # threshold maps of power 2 to 4 in half precision, whose loop is short
    "halves": Family(2048, 32768, ((math.inf, 8, 16),), most=8),
    "logarithmic": Family(1024, 16384, ((math.inf, 2, 16),)),  # threshold maps whose power is not 1, 2, 3 or 4
    "truncated": Family(2048, 16384, ((math.inf, 4, 16),), paired=2),
    "nucleus": Family(1024, 16384, ((math.inf, 2, 16),), two=8192),
    "backward": Family(1024, 16384, ((65536, 2, 16), (math.inf, 4, 16))),
    "slope": Family(1024, 4096, ((65536, 2, 8), (math.inf, 2, 16))),  # one pass, so that no row need stay in registers
}
LONGEST_TILE = max(family.whole for family in FAMILIES.values())
SHIFTED = 512  # unaligned rows with at least so many classes are read in packs of 16 bytes, in spite of their two ends
VERY_LONG, CROWD = 131_072, 128  # rows longer than VERY_LONG are cut in parts if there are at most CROWD
# those of top-p, whose search takes a program longer than others, from half as many classes on, up to half as many
# K, L and warps of a part; 16 to 32 parts have at most 16,384 lanes, from which one program solves the row
PART = (16, 512, 8)
LONG_BACKWARD, ROUND = 32_768, 264  # in the backward: rows from LONG_BACKWARD on, fewer than twice the multiprocessors
PERTURBED = 4096  # the widest tile of perturb max
LANED = ("separable", "halves", "logarithmic", "truncated", "nucleus")  # kernels that solve a row from its lanes
SOLVING = 16  # warps of the program that solves a row from the lanes of its parts
FEW = 256  # the most live lanes that are gathered to one tile
GATHERED = 8192  # the most classes of that tile
LISTED = 2048  # the most scores of an interval that are gathered to it
forced: dict[str, Plan] = {}  # plans by kernel, which the tuner and the tests set


def plan(
    kernel: str, rows: int, n: int, one_row: bool, sideways: bool, wave: int = 32, cut: bool = False, size: int = 4
) -> Plan:
    """The plan of a kernel for `rows` rows of n classes.

    `one_row`: the kernel takes one row a program; `sideways`: neighbours in memory are of different rows; `wave`: threads of a warp;
    `cut`: a row may be cut in parts; `size`: bytes of a number."""
    if kernel in forced:
        return forced[kernel] if cut else dataclasses.replace(forced[kernel], parts=0)
    most = 1024 // wave
    block = power_of_two(n)
    vector = wave * 16 // size  # numbers that a warp loads at once, 16 bytes a thread
    if kernel == "perturb":  # bound by arithmetic: 8 numbers a thread
        width = block if block <= PERTURBED else 1024
        side = 1 if one_row else max(1, min(1024 // width, power_of_two(rows)))
        return Plan(side, 1, width, block <= PERTURBED, min(max(4, width // 256), most))
    crowd = CROWD if n > VERY_LONG else CROWD // 2 if kernel == "nucleus" and n > VERY_LONG // 2 else 0
    if cut and kernel != "backward" and rows <= crowd:
        k, lanes, warps = PART
        if kernel not in LANED:
            k, lanes = 4, warps * vector
        parts = 16 if rows > CROWD // 4 else 32
        return Plan(1, k, lanes, False, min(warps, most), parts)
    if cut and kernel == "backward" and n >= LONG_BACKWARD and rows < ROUND:
        k, warps = 4, min(PART[2], most)
        lanes = warps * vector
        parts = min(32, power_of_two(-(-ROUND // rows)), power_of_two(n // (k * lanes)))
        return Plan(1, k, lanes, False, warps, parts)
    family = FAMILIES[kernel]
    if block > family.whole:
        k, warps = next((k, warps) for longest, k, warps in family.steps if block <= longest)
        warps = min(warps, most)
        return Plan(1, k, warps * vector, False, warps)
    if sideways and not one_row and rows > 1:
        side = max(1, min(32, 16384 // block, power_of_two(rows)))
        return Plan(side, 1, block, True, min(max(4, side * block // 1024), 16, most))
    if block <= HELD:  # one warp: no barrier
        held = 2 * HELD if block == HELD and size <= family.paired else HELD
        side = 1 if one_row else max(1, min(held // block, power_of_two(rows)))
        lanes = min(block, max(THREADS * 16 // size, vector // side))
        return Plan(side, block // lanes, lanes, True, 1)
    warps = max(2, min(block // family.held, family.most, most))
    lanes = min(block, warps * vector)
    return Plan(1 if one_row or block > family.two else min(2, rows), block // lanes, lanes, True, warps)


RAGGED = 16, 4, 8  # the most segments of a program, the largest K of a long segment, and of short ones


def loosened(p: Plan) -> Plan:
    """The plan for segments, which begin anywhere: each row keeps numbers in registers, and each score has an address. No load is wide,
    so for short segments each load of a thread is of the same segment, and the thread sums its entries alone."""
    rows, deep, short = RAGGED
    p = unpaired(p)
    if p.whole and p.R > 1 and p.warps == 1:
        k = min(p.K * p.L, short)
        return dataclasses.replace(p, R=min(p.R, rows), K=k, L=p.K * p.L // k)
    return dataclasses.replace(p, R=min(p.R, rows), K=p.K if p.whole else min(p.K, deep))


def unpaired(p: Plan) -> Plan:
    """The plan where each number takes more registers: a warp has HELD numbers of whole rows at most, if one row does."""
    return dataclasses.replace(p, R=1) if p.whole and p.R > 1 and HELD * p.warps < p.R * p.K * p.L else p


ANYWHERE = 4  # the largest K of a long unaligned row


def shallow(p: Plan) -> Plan:
    """The plan for unaligned rows, whose two ends take registers."""
    return unpaired(p) if p.whole or p.parts else dataclasses.replace(p, K=min(p.K, ANYWHERE))


def packed(n: int, pack: int) -> bool:
    """Whether unaligned rows are read in packs of `pack` numbers: not short rows, nor rows whose tile that would double."""
    return n >= SHIFTED and (n > LONGEST_TILE or power_of_two(n) == power_of_two(n + pack - 1))


def span(p: Plan, n: int) -> int:
    """The classes of a part, in whole steps. For a row that is not cut, n rounded up to 16, so that the compiler knows a divisor of the
    beginning of a part."""
    if not p.parts:
        return -(-n // 16) * 16
    step = p.K * p.L
    return -(-n // (p.parts * step)) * step


def few_lanes(p: Plan, n: int) -> tuple[int, int]:
    """(FEW, DEPTH): up to FEW live lanes of a row in steps or parts are gathered to one tile, with DEPTH classes each; (0, 1): never."""
    depth = power_of_two(-(-span(p, n) // p.L))
    few = min(FEW, p.L, GATHERED // depth)
    return (0, 1) if p.whole or p.R > 1 or few < 16 else (few, depth)


def power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
