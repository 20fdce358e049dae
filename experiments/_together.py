"""All claims of the saved results in one table: of so many some would come out by chance, which Holm's correction takes into account."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ._report import RESULTS
from ._statistics import CONFIDENCE, CONFIRMED, CONTRADICTED, NOT_TESTED, UNDECIDED

NO_SPREAD = "all seeds gave the same"
POWER = 0.8  # of the distance that an undecided test is said to have been able to see


@dataclasses.dataclass(frozen=True)
class Judged:
    """A claim of an experiment, beside all others."""

    experiment: str
    claim: str
    source: str
    verdict: str  # by itself
    p: float  # of a difference from the bound as large as this one, where there is none
    corrected: float  # the same after Holm's correction
    seen: str  # for an undecided claim: how far from its bound a figure had to be for tests of this size to see it, mostly
    apart: str = ""  # why it is not judged with the others: chance has no part in its verdict
    notes: tuple[str, ...] = ()

    @property
    def together(self) -> str:
        """The verdict that holds beside all others."""
        stays = self.corrected <= 1.0 - CONFIDENCE or self.verdict == NOT_TESTED or self.apart
        return self.verdict if stays else UNDECIDED

    @property
    def told(self) -> str:
        """That verdict, with what a reader must know of it."""
        more = [f"not judged with the others: {self.apart}"] if self.apart else []
        return "; ".join([self.together, *more, *self.notes])


def claims(folder: Path = RESULTS) -> list[Judged]:
    """Those of all full runs, in the order of their files."""
    found, tested = [], []
    for path in sorted(folder.glob("*.json")):
        known = json.loads(path.read_text(encoding="utf-8"))
        if known["quick"]:
            continue
        for claim in known.get("claims", ()):
            tests = [test for test in known.get("tests", ()) if test["claim"] == claim["key"]]
            p = _of_claim(claim["verdict"], tests)
            apart = claim.get("apart", "") or (NO_SPREAD if p == 0.0 else "")
            notes = tuple(claim.get("notes", ()))
            found.append(
                Judged(known["name"], claim["claim"], claim["source"], claim["verdict"], p, 1.0, "", apart, notes)
            )
            tested.append(tests)
    family = [i for i, one in enumerate(found) if not one.apart]
    corrected = dict(zip(family, holm([found[i].p for i in family]), strict=True))
    level = left([found[i].p for i in family])
    return [
        dataclasses.replace(
            one,
            corrected=corrected.get(i, one.p),
            seen=_seen(tests, level) if one.verdict == UNDECIDED and not one.apart else "",
        )
        for i, (one, tests) in enumerate(zip(found, tested, strict=True))
    ]


def left(p: Sequence[float]) -> float:
    """The level at which one claim more would be decided by Holm's correction, beside those that are."""
    decided = sum(corrected <= 1.0 - CONFIDENCE for corrected in holm(p))
    return (1.0 - CONFIDENCE) / max(1, len(p) - decided)


def holm(p: Sequence[float]) -> list[float]:
    """p of each of several tests such that the chance of any false finding among all is at most the least that is believed."""
    out, least = [1.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        least = max(least, min(1.0, (len(p) - rank) * p[i]))
        out[i] = least
    return out


def _of_claim(verdict: str, tests: Sequence[Mapping[str, Any]]) -> float:
    """A claim is confirmed by all of its tests and contradicted by any, which gives chance as many tries as it has tests; of an undecided
    one nothing was found."""
    p = [_two_sided(test) for test in tests if test["verdict"] == verdict]
    if verdict == CONFIRMED:
        return max(p, default=1.0)
    return min(1.0, len(tests) * min(p)) if verdict == CONTRADICTED and p else 1.0


def _away(test: Mapping[str, Any]) -> tuple[float, float, float]:
    """How far a figure is from its bound, half of its interval, and the quantile that made it so wide."""
    from scipy.stats import norm, t  # late: listing the experiments needs no scipy

    found, bound = test["found"], test.get("at_most", test.get("at_least"))
    ends = [found["mean"], found["low"], found["high"], bound]
    if None in ends:
        return 0.0, math.inf, 1.0
    if found["method"].startswith("t of logarithms"):
        ends = [math.log(end) for end in ends]
    mean, low, high, bound = ends
    seeds = found["method"].startswith("t ")
    quantile = (
        (t.ppf(0.5 + CONFIDENCE / 2, found["n"] - 1) if seeds else norm.ppf(0.5 + CONFIDENCE / 2))
        if found["n"] > 1
        else 1.0
    )
    half = mean - low if bound < mean else high - mean  # towards the bound
    return abs(mean - bound), half, float(quantile)


def _two_sided(test: Mapping[str, Any]) -> float:
    from scipy.stats import norm, t  # late: as above

    away, half, quantile = _away(test)
    if half == 0.0:
        return 0.0  # no chance in it
    if math.isinf(half):
        return 1.0
    score = away / half * quantile
    seeds = test["found"]["method"].startswith("t ")
    return float(2 * (t.sf(score, test["found"]["n"] - 1) if seeds else norm.sf(score)))


def _seen(tests: Sequence[Mapping[str, Any]], level: float) -> str:
    """How far from their bounds the figures of undecided tests had to be, to be decided at this level in four runs of five of that size."""
    said = []
    for test in tests:
        if test["verdict"] != UNDECIDED or test.get("edge"):
            continue
        distance, many = detectable(test, level), f"{test['found']['n']:,} {_unit(test)}"
        if math.isinf(distance):
            said.append(f"nothing, with {many}")
        elif test["found"]["method"].startswith("t of logarithms"):
            said.append(f"a factor of {math.exp(distance):.3g} with {many}")
        else:
            said.append(f"{distance:.2g} with {many}")
    return ", ".join(dict.fromkeys(said))


def detectable(test: Mapping[str, Any], level: float) -> float:
    """How far from the bound (of a ratio, in logarithms) the test decides at this level with probability POWER, by the spread found."""
    from scipy.optimize import brentq  # late, as above
    from scipy.stats import nct, norm, t

    n, (_, half, quantile) = test["found"]["n"], _away(test)
    if half == 0.0 or math.isinf(half):
        return half
    error = half / quantile
    if not test["found"]["method"].startswith("t "):
        return error * float(norm.isf(level / 2) + norm.ppf(POWER))
    needed = float(t.isf(level / 2, n - 1))
    return error * float(brentq(lambda away: nct.sf(needed, n - 1, away) - POWER, 0.0, 4.0 * (needed + 1.0)))


def _unit(test: Mapping[str, Any]) -> str:
    named = re.match(r"t .*?over \d+ (\w+)", test["found"]["method"])
    return named[1] if named else "test rows"


def words() -> str:
    """The table as text."""
    rows = claims()
    family = sum(not one.apart for one in rows)
    lines = [
        f"{family} of {len(rows)} claims together. p: how probable a distance from the bound as large as this one is where there is none;",
        f"then after Holm's correction for {family} claims, and what is left of the verdict at {1 - CONFIDENCE:.0%}. Chance has no part in",
        "the verdicts of the others.",
        "",
        f"{'experiment':16} {'verdict':>12} {'p':>8} {'Holm':>8} {'together':>12}  claim",
    ]
    for one in rows:
        more = f" (seen in four runs of five: {one.seen})" if one.seen else ""
        figures = f"{'':>8} {'':>8}" if one.apart else f"{one.p:8.2g} {one.corrected:8.2g}"
        said = f" [{one.told.removeprefix(f'{one.together}; ')}]" if one.told != one.together else ""
        lines.append(f"{one.experiment:16} {one.verdict:>12} {figures} {one.together:>12}  {one.claim}{said}{more}")
    return "\n".join(lines)
