"""Two results of `python -m benchmarks` side by side: `python -m benchmarks.compare old.json new.json`, as Markdown.

A ratio of a reading is our time over the peer's in the same run, so that two runs compare although the machine was not equally quick in
both. What is printed is how much the ratio has changed.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from .cases import GROUPS


def readings(path: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """The readings that have a ratio, by group, case and peer."""
    found = json.loads(path.read_text(encoding="utf-8"))["readings"]
    return {(r["group"], r["name"], r.get("peer", "")): r for r in found if r.get("ratio")}


def noisy(reading: dict[str, Any]) -> bool:
    return bool(reading.get("noisy")) or reading["verdict"] == "noisy"


def change(old: dict[str, Any], new: dict[str, Any]) -> float:
    return new["ratio"] / old["ratio"]


def mean(changes: list[float]) -> float:
    return math.exp(sum(map(math.log, changes)) / len(changes))


def compare(before: Path, after: Path) -> str:
    """The table of groups, the bars won and lost, and the cases that changed most."""
    old, new = readings(before), readings(after)
    both = [key for key in old if key in new]
    quiet = [key for key in both if not noisy(old[key]) and not noisy(new[key])]
    lines = [
        f"{len(both)} readings are in both, {len(quiet)} of them quiet in both. Change: of the ratio to the peer, below 1 is faster.",
        "",
        "| group | quiet readings | change (geometric mean) | best | worst |",
        "|---|---:|---:|---:|---:|",
    ]
    for group in [*GROUPS, None]:
        changes = sorted(change(old[key], new[key]) for key in quiet if group in (None, key[0]))
        if changes:
            title = GROUPS[group] if group else "**all**"
            lines.append(f"| {title} | {len(changes)} | {mean(changes):.2f} | {changes[0]:.2f} | {changes[-1]:.2f} |")
    for title, was, now in (
        ("met before and missed now", "pass", "miss"),
        ("missed before and met now", "miss", "pass"),
    ):
        keys = [key for key in both if (old[key]["verdict"], new[key]["verdict"]) == (was, now)]
        lines += ["", f"Bars {title}: {len(keys)}", ""]
        lines += [f"- {said(key, old, new)}, bar {bar(new[key])}" for key in keys]
    lines += ["", "Most slowed, of the quiet ones:", ""]
    lines += [f"- {said(key, old, new)}" for key in sorted(quiet, key=lambda key: -change(old[key], new[key]))[:10]]
    return "\n".join(lines) + "\n"


def bar(reading: dict[str, Any]) -> str:
    most, least = reading.get("at_most"), reading.get("at_least")
    return f"at most {most:g}" if most is not None else f"at least {least:g}" if least is not None else "none"


def said(key: tuple[str, str, str], old: Any, new: Any) -> str:
    group, name, peer = key
    was, now = old[key], new[key]
    return f"{GROUPS.get(group, group)}: {name} against {peer}: {was['ratio']:.3g} before, {now['ratio']:.3g} now"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    chosen = parser.parse_args()
    print(compare(chosen.before, chosen.after), end="")
