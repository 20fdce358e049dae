"""Tables and pictures from `benchmarks/results/`: of each machine the newest run."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from . import text

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ACCURACY = RESULTS / "accuracy"
NAMES = {
    "entmax": ("entmax15", "entmax 4/3", "entmax 1.25"),
    "softmax": ("softmax", "cross_entropy"),
}  # as the benchmarks call them
REPOSITORY = "the folder `benchmarks/results/` of the repository"


class Run(NamedTuple):
    name: str
    facts: dict[str, Any]
    readings: list[dict[str, Any]]

    @property
    def machine(self) -> str:
        hardware, versions = self.facts["hardware"], self.facts["versions"]
        known = [name for name in ("torch", "numpy", "jax", "scipy", "entmax") if name in versions]
        packages = ", ".join(f"{name} {versions[name]}" for name in known)
        device = self.facts.get("gpu") or hardware["cpu"]
        own = f"anymax {versions['anymax']} ({versions['commit']})"
        return f"{device}, {self.facts['threads']} threads; {packages}; {own}; {self.facts['date']}"


@cache
def runs() -> tuple[Run, ...]:
    """The newest run of each machine, number of threads and part."""
    newest: dict[tuple[str, int, str], Run] = {}
    for path in sorted(RESULTS.glob("*.json")):
        facts = json.loads(path.read_text(encoding="utf-8"))
        readings = facts.pop("readings", None)
        if readings is None or "hardware" not in facts:
            continue
        part = path.stem.split(f"-{facts['threads']}t", 1)[-1]
        newest[facts["hardware"]["cpu"], facts["threads"], part] = Run(path.stem, facts, readings)
    return tuple(newest.values())


def ratio(reading: dict[str, Any]) -> str:
    """Our time over the peer's; what was too noisy says so."""
    if reading.get("ratio") is None:
        return reading.get("message") or "not measured"
    if reading["noisy"]:
        return "noisy"
    value = reading["ratio"]
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def ms(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def of_map(name: str) -> str:
    """The speed and the error of one map, where they were measured."""
    parts = [speed_of_map(name), errors_of_map(name)]
    return (
        "\n\n".join(part for part in parts if part)
        or "Not measured yet: `python -m benchmarks` has no case of this map."
    )


def speed_of_map(name: str) -> str:
    mine = [n for kin in NAMES.get(name, (name,)) for n in (kin, f"{kin}_loss")]
    groups = {"forward": "forward", "softmax": "forward", "backward": "backward", "loss": "loss and gradient"}
    out = []
    for run in runs():
        rows = []
        for r in run.readings:
            match = re.fullmatch(r"(.+?) (1024x1024|64x32000|4096x32000) normal( out=)?", r["name"])
            if (
                match
                and r["group"] in groups
                and match[1] in mine
                and r["peer"] != "copy"
                and r.get("ratio") is not None
            ):
                rows.append(
                    (
                        f"`{match[1]}`",
                        groups[r["group"]],
                        match[2],
                        ms(r["ours_ms"]),
                        f"`{r['peer']}`",
                        ms(r["peer_ms"]),
                        ratio(r),
                    )
                )
        if rows:
            head = ("", "what", "scores", "ms", "against", "ms", "time, ours / theirs")
            out.append(
                text.table(head, rows, (3, 5, 6))
                + f"\n\nfp32, scores N(0, 1). {run.machine}. All of it: {{doc}}`/performance`."
            )
    return "\n\n".join(out)


@cache
def accuracy() -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(path.read_text(encoding="utf-8")) for path in sorted(ACCURACY.glob("*.json")))


def errors_of_map(name: str) -> str:
    found = accuracy()
    rows = [r for r in found[-1]["rows"] if r["map"] == name] if found else []
    if not rows:
        return ""
    return (
        "Largest error to 50 digits, in units of the last place of the largest probability: "
        + "; ".join(f"{r['case']} {r['fp32']:.2g} in fp32, {r['fp64']:.2g} in fp64" for r in rows)
        + ". How: {doc}`/numerics`."
    )
