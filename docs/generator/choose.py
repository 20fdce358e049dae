"""The first table of `docs/choose.md`: the needs of `docs/needs.toml`, with figures and verdicts from the saved results."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from . import evidence, text

NEEDS = Path(__file__).parents[1] / "needs.toml"
KEYS = {"for", "map", "loss", "experiment", "effect"}
EFFECT = {"claim", "test", "says"}


def needs() -> str:
    """A row for each need; one that the saved results do not support as it is written is an error that names it."""
    results, judged, rows = {known["name"]: known for known in evidence.found()}, evidence.judged(), []
    for need in tomllib.loads(NEEDS.read_text(encoding="utf-8"))["need"]:
        try:
            _expect(need, KEYS)
            name = need["experiment"]
            if name not in results:
                raise ValueError(f"{name} has no saved results; there are {', '.join(results)}")
            verdicts = {claim["key"]: (claim, one.together) for claim, one in judged[name]}
            said = [_effect(part, results[name]["tests"], verdicts) for part in need["effect"]]
        except ValueError as error:
            raise ValueError(f"{NEEDS}, {need.get('for', need)}: {error}") from None
        page = f"{{doc}}`experiment </generated/evidence/{name}>`"
        rows.append((need["for"], need["map"], need["loss"], "<br>".join(said), page))
    return text.table(("you need", "map", "loss", "effect", "page"), rows)


def _expect(given: dict[str, Any], keys: set[str]) -> None:
    if given.keys() != keys:
        raise ValueError(f"expected the keys {', '.join(sorted(keys))}, got {', '.join(sorted(given))}")


def _effect(
    part: str | dict[str, str], tests: list[dict[str, Any]], verdicts: dict[str, tuple[dict[str, Any], str]]
) -> str:
    """Plain words as they are; of a test its sentence, figure, interval and verdict, or that no effect was shown."""
    if isinstance(part, str):
        return part
    _expect(part, EFFECT)
    if part["says"].count("{}") != 1:
        raise ValueError(f"says = {part['says']!r}: expected one {{}}, where the figure goes")
    own = [test for test in tests if test["claim"] == part["claim"]]
    meant = [test for test in own if test["what"] == part["test"]] or [t for t in own if part["test"] in t["what"]]
    words = {test["what"] for test in meant}
    if len(words) != 1:
        known = sorted(words) or [f"{test['claim']}: {test['what']}" for test in own or tests]
        raise ValueError(
            f"{len(words)} tests of the claim {part['claim']!r} have the words {part['test']!r}, expected one: {'; '.join(known)}"
        )
    claim, together = verdicts[part["claim"]]
    figure, interval = evidence.figures(meant[0]["found"])
    if together not in ("confirmed", "contradicted"):
        claimed = " and ".join(evidence.bound(test) for test in meant)
        return f"{evidence.badge('undecided', 'no effect shown')} {text.plain(words.pop())}: {figure}{interval}; claimed: {claimed}"
    telling = evidence.telling(claim, own)
    if together == "contradicted" and telling not in meant:
        raise ValueError(
            f"another test contradicts the claim {part['claim']!r}; name it: {telling and telling['what']}"
        )
    return f"{evidence.badge(together)} {part['says'].replace('{}', figure)}{interval}"
