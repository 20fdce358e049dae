"""What `explain` returns and prints: for each operation its engine, what that does, and what the engines' names mean."""

from __future__ import annotations

import dataclasses
import itertools
import re

from .._core.mapping import Mapping
from .engine import WORDS

ENGINES_ARE = {
    "native": "compiled C++ on the CPU",
    "order": "compiled C++ on the CPU, for soft ranks and soft sorting",
    "fused": "compiled C++ on the CPU, for Fusedmax",
    "tabled": "compiled C++ on the CPU, which reads a table of the map's formula",
    "triton": "compiled kernels on the GPU",
    "framework": "torch's own softmax",
    "xla": "compiled C++ on the CPU, called by JAX through XLA",
    "reference": "the map's formula in array operations; it serves every call",
    "none": "the engine that was asked for has no code for it: an error, unless it follows from p",
}
IMPLEMENTATIONS_ARE = {
    "sdpa": "torch's scaled_dot_product_attention",
    "triton": "compiled kernels on the GPU, which hold no matrix of scores",
    "blockwise": "torch, keys in blocks: it holds no matrix of scores",
    "linear": "linear attention, which computes no scores",
    "reference": "array operations, which hold the matrix of all scores",
}
_GROUPINGS = {"tile": "several rows at a time", "batch": "several rows at a time", "row": "one row at a time"}
_SOURCES = {
    "all classes": "over all classes",
    "candidates": "over the classes that can be above 0",
    "all classes or candidates": "over all classes or those that can be above 0",
    "saved support": "over the classes above 0",
}
_PLAN = re.compile(rf"({'|'.join(_GROUPINGS)}): ({'|'.join(_SOURCES)}) \(.*\) (\w+)")


def in_words(plan: str) -> str:
    """A plan of the C++ kernels (csrc/plan.hpp) as a user reads it; any other text as it is."""
    known = _PLAN.fullmatch(plan)
    return f"{_GROUPINGS[known[1]]}, {_SOURCES[known[2]]} ({known[3]})" if known else plan


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The result of `explain`: the engine of each operation, and why each engine before it refused. Print it to read it.

    Parameters
    ----------
    mapping
        The map.
    rows
        For each operation its name, the name of its engine ("none" if the one asked for can't), and a pair (engine, reason) for each
        engine that refused.
    plans
        For each operation how the engine computes it, or None; those of "native" name a rule of `csrc/plan.hpp`.
    verbose
        Whether the printed text has the reasons too.
    gathers_all
        Whether the functions of `anymax.distributed` gather all scores of a row on each process, since the map follows from no parts of it.

    Examples
    --------
    >>> with anymax.use("reference"):
    ...     anymax.explain(anymax.Sparsemax(), [2.0, 1.0]).rows[0][:2]
    ('forward', 'reference')
    """

    mapping: Mapping
    rows: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...]  # (op, engine, refusals)
    plans: tuple[str | None, ...] = ()
    verbose: bool = False
    gathers_all: bool = False

    def __str__(self) -> str:
        names = {op: WORDS.get(op, op) for op, _, _ in self.rows}
        width = max(map(len, names.values()), default=0)
        refused: dict[tuple[str, str], list[str]] = {}  # a refusal is printed once, at its first operation
        for op, _, refusals in self.rows:
            for refusal in refusals:
                refused.setdefault(refusal, []).append(op)
        lines = [repr(self.mapping)]
        for (op, engine, refusals), plan in itertools.zip_longest(self.rows, self.plans):
            lines.append(f"  {names[op].ljust(width)}  {engine}" + (f": {in_words(plan)}" if plan else ""))
            for name, reason in refusals if self.verbose else ():
                first, *others = refused[name, reason]
                also = f" (nor for {', '.join(names[other] for other in others)})" if others else ""
                lines.extend([f"      not {name}{also}: {reason}"] if first == op else [])
        if self.gathers_all:
            lines.append("  over processes, all scores of a row are gathered on each")
        return "\n".join([*lines, "", *self._legend()])

    __repr__ = __str__

    def _legend(self) -> list[str]:
        attends = [op for op, _, _ in self.rows] == ["attention"]
        meanings = IMPLEMENTATIONS_ARE if attends else ENGINES_ARE
        chosen = dict.fromkeys(engine for _, engine, _ in self.rows)
        lines = [f"{name}: {meanings[name]}" for name in chosen]
        if attends:
            return [*lines, "To force another: attention(..., implementation=NAME)."]
        if not self.verbose:
            lines.append("Why no other engine: explain(..., verbose=True), or --verbose on the command line.")
        return [*lines, 'To force one: with anymax.use("reference"): ...; what it cannot compute is then an error.']
