"""The two tables of `docs/choose.md`: the needs of `docs/needs.toml`, with figures and verdicts from the saved results."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from . import evidence, text

NEEDS = Path(__file__).parents[1] / "needs.toml"
KEYS = {"for", "map", "loss", "experiment", "effect"}  # of a need for another map
KEPT = {"for", "do", "experiment", "effect"}  # of one for which softmax stays
UNTRIED = {"for", "map", "loss", "page"}  # of one without an experiment
EFFECT = {"claim", "test", "says"}
HEADS = {"change": ("you need", "map", "loss", "effect", "page"), "keep": ("you need", "do this", "effect", "page")}


def needs(table: str) -> str:
    """A row for each need of the table; one that the saved results do not support as it is written is an error that names it."""
    results, judged, rows = {known["name"]: known for known in evidence.found()}, evidence.judged(), []
    for need in tomllib.loads(NEEDS.read_text(encoding="utf-8"))[table]:
        try:
            rows.append(_row(need, results, judged, KEYS if table == "change" else KEPT))
        except ValueError as error:
            raise ValueError(f"{NEEDS}, {need.get('for', need)}: {error}") from None
    return text.table(HEADS[table], rows)


def _row(need: dict[str, Any], results: dict[str, Any], judged: dict[str, Any], keys: set[str]) -> tuple[str, ...]:
    if "page" in need:
        _expect(need, UNTRIED)
        return need["for"], need["map"], need["loss"], "not measured", need["page"]
    _expect(need, keys)
    name = need["experiment"]
    if name not in results:
        raise ValueError(f"{name} has no saved results; there are {', '.join(results)}")
    verdicts = {claim["key"]: (claim, one.together) for claim, one in judged[name]}
    said = ";<br>".join(_effect(part, results[name]["tests"], verdicts) for part in need["effect"])
    page = f"[experiment](../experiments/results/{name}.md)"
    return (*(need[key] for key in ("for", "map", "loss", "do") if key in keys), said, page)


def _expect(given: dict[str, Any], keys: set[str]) -> None:
    if given.keys() != keys:
        raise ValueError(f"expected the keys {', '.join(sorted(keys))}, got {', '.join(sorted(given))}")


def _effect(
    part: str | dict[str, str], tests: list[dict[str, Any]], verdicts: dict[str, tuple[dict[str, Any], str]]
) -> str:
    """Plain words as they are; of a test its sentence, figure and interval, and the word "undecided" where it is."""
    if isinstance(part, str):
        return part
    _expect(part, EFFECT)
    if part["says"].count("{}") > 1:
        raise ValueError(f"says = {part['says']!r}: expected one {{}} at most, where the figure goes")
    own = [test for test in tests if test["claim"] == part["claim"]]
    meant = [test for test in own if test["what"] == part["test"]] or [t for t in own if part["test"] in t["what"]]
    words = {test["what"] for test in meant}
    if len(words) != 1:
        known = sorted(words) or [f"{test['claim']}: {test['what']}" for test in own or tests]
        raise ValueError(
            f"{len(words)} tests of the claim {part['claim']!r} have the words {part['test']!r}, expected one: {'; '.join(known)}"
        )
    claim, together = verdicts[part["claim"]]
    said = _sentence(part["says"], meant[0]["found"])
    if together not in ("confirmed", "contradicted"):
        if "{}" not in part["says"]:
            raise ValueError(
                f"says = {part['says']!r}: expected a figure, since the claim {part['claim']!r} is undecided"
            )
        return f"{said}: undecided"
    telling = evidence.telling(claim, own)
    if together == "contradicted" and telling not in meant:
        raise ValueError(
            f"another test contradicts the claim {part['claim']!r}; name it: {telling and telling['what']}"
        )
    return said


_OPPOSITE = {"above": "below", "higher": "lower", "more": "less"}


def _sentence(says: str, found: dict[str, Any]) -> str:
    """The words with figure and interval: a share is at most 100 %, and fewer points are so many "below" or "less"."""
    before, *rest = says.split("{}")
    if not rest:
        return says
    unit = re.match(r" %| points?| times", rest[0])
    at = unit.end() if unit else 0
    after = rest[0][at:]
    side = re.match(rf" ({'|'.join(_OPPOSITE)})\b", after)
    if side and found["mean"] < 0.0:
        after = f" {_OPPOSITE[side[1]]}{after[side.end() :]}"
        found = {
            name: None if found[other] is None else -found[other]
            for name, other in (("mean", "mean"), ("low", "high"), ("high", "low"))
        }
    figure, interval = evidence.figures(found)
    if rest[0][:at] == " %" and (found["high"] or 0.0) > 100.0 >= found["mean"]:
        interval = f"{interval.partition(' to ')[0]} to 100)"
    return f"{before}{figure}{rest[0][:at]}{interval}{after}"
