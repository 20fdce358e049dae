"""Tables of the newest run on each machine, from `benchmarks/results/`; `speed.py` draws pictures of them."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from . import text

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ACCURACY = RESULTS / "accuracy"
# as the benchmarks call them
NAMES = {"entmax": ("entmax15", "entmax 4/3", "entmax 1.25"), "softmax": ("softmax", "cross_entropy")}
NONE = "No benchmark has been saved yet."


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
        threads = "1 thread" if self.facts["threads"] == 1 else f"{self.facts['threads']} threads"
        return f"{device}, {threads}; {packages}; {own}; {self.facts['date']}"


def is_sound(reading: dict[str, Any]) -> bool:
    """Whether the reading has a ratio that a picture may show."""
    return bool(reading.get("ratio")) and not reading["noisy"]


def case_of(reading: dict[str, Any], ending: str = "") -> tuple[str, str]:
    """(name, shape) of a reading of normal scores, two empty strings of any other."""
    match = re.fullmatch(rf"(.+?) (\d+x\d+) normal{ending}( out=)?", reading["name"])
    return (match[1], match[2]) if match else ("", "")


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
    """A row for each pass, a column for each shape: our time, and its ratio to the peer's."""
    mine = [n for kin in NAMES.get(name, (name,)) for n in (kin, f"{kin}_loss")]
    passes = {"forward": "forward", "softmax": "forward", "backward": "backward", "loss": "loss and gradient"}
    shapes = ("1024x1024", "64x32000", "4096x32000")
    out = []
    for run in runs():
        cells: dict[tuple[str, str, str], dict[str, str]] = {}
        for r in run.readings:
            kin, shape = case_of(r)
            if shape in shapes and r["group"] in passes and kin in mine and r["peer"] != "copy" and r.get("ratio"):
                row = cells.setdefault((kin, passes[r["group"]], r["peer"]), {})
                row[shape] = f"{ms(r['ours_ms'])} ms, {ratio(r)}"
        if cells:
            some = [s for s in shapes if any(s in row for row in cells.values())]
            rows = [
                (f"`{n}`", what, f"`{peer}`", *(row.get(s, "") for s in some)) for (n, what, peer), row in cells.items()
            ]
            head = ("", "", "against", *(s.replace("x", " × ") for s in some))
            words = "Our time, and its ratio to the peer's: below 1 we are faster. fp32, scores N(0, 1)."
            out.append(
                f"{text.table(head, rows, (3, 4, 5))}\n\n{words} {run.machine}. All figures: {{doc}}`/performance`."
            )
    return "\n\n".join(out)


@cache
def accuracy() -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(path.read_text(encoding="utf-8")) for path in sorted(ACCURACY.glob("*.json")))


def errors_of_map(name: str) -> str:
    found = [r for r in accuracy()[-1]["errors"] if r["map"] == name] if accuracy() else []
    if not found:
        return ""
    unit = "tv" if found[0]["quadrature"] else "ulps"
    words = "in total variation" if unit == "tv" else "in units of the last place of the largest probability"
    rows = [(f"`{r['case']}`", f"{r['fp32'][unit]:.2g}", f"{r['fp64'][unit]:.2g}") for r in found]
    table = text.table(("largest error", "fp32", "fp64"), rows, (1, 2))
    return f"{table}\n\nThe error against results of 50 digits, {words}; {{doc}}`/numerics` says how it is measured."


# -- the pages of performance and choice ------------------------------------------------------------------------------------

MAIN = ("1024x1024", "64x32000")
COLUMNS = {"forward": ("forward", "softmax"), "backward": ("backward",), "loss": ("loss",)}


def main_run() -> Run | None:
    """The newest run on a CPU that has the forward pass."""
    return _newest("forward")


def gpu_run() -> Run | None:
    """The newest run on a GPU."""
    return _newest("gpu")


def _newest(group: str) -> Run | None:
    """The newest run with a group of this name, or of one that begins with it."""
    found = [run for run in runs() if any(r["group"].startswith(group) for r in run.readings)]
    return max(found, key=lambda run: run.facts["date"], default=None)


def costs() -> str:
    """A row for each map: our time over the peer's, for the three passes and two shapes."""
    run = main_run()
    if run is None:
        return NONE
    cells: dict[str, dict[tuple[str, str], str]] = {}
    for r in run.readings:
        name, shape = case_of(r)
        column = next((c for c, groups in COLUMNS.items() if r["group"] in groups), None)
        if column and shape in MAIN and r["peer"] in ("torch.softmax", "F.cross_entropy"):
            name = {"cross_entropy": "softmax"}.get(name, name.removesuffix("_loss"))
            cells.setdefault(name, {})[column, shape] = ratio(r)
    heads = [(column, shape) for column in COLUMNS for shape in MAIN]
    heads = [head for head in heads if any(head in row for row in cells.values())]
    rows = [(f"`{name}`", *(row.get(head, "") for head in heads)) for name, row in cells.items()]
    titles = ("", *(f"{column}, {shape.replace('x', ' × ')}" for column, shape in heads))
    return text.table(titles, rows, tuple(range(1, len(titles)))) + f"\n\n{run.machine}. Empty: not measured."


def learned() -> str:
    """A row for each case of a learned parameter: its time, and its ratio to the peer's."""
    for run in reversed(runs()):
        found = [r for r in run.readings if r["group"] == "learned" or (r["group"] == "jax" and "learned" in r["name"])]
        if found:
            break
    else:
        return NONE
    rows = []
    for r in found:
        name = r["name"].replace(" normal", "").removesuffix(" learned").replace(" learned,", ",")
        name = name.removesuffix(" package") + (", JAX under jit" if r["group"] == "jax" else "")
        rows.append((name, ms(r["ours_ms"]), r["peer"], ms(r["peer_ms"]), ratio(r)))
    head = ("", "our ms", "against", "their ms", "our time / theirs")
    return f"{text.table(head, rows, (1, 3, 4))}\n\n{run.machine}."


def _two_digits(value: float) -> str:
    return f"{value:.2g}" if value < 99.5 else f"{float(f'{value:.2g}'):.0f}"


def growth() -> str:
    """A row for each verb: how its time grows, its ratio to the peer at three sizes, and the memory at the largest."""
    paths = sorted((RESULTS / "growth").glob("*.json"))
    if not paths:
        return NONE
    facts = json.loads(paths[-1].read_text(encoding="utf-8"))
    found: dict[str, list[dict[str, Any]]] = {}
    for r in facts.pop("growth"):
        found.setdefault(r["verb"], []).append(r)
    rows = []
    for verb, sizes in found.items():
        small, large = sizes[0], sizes[-1]
        grown = math.log(large["ours_ms"] / small["ours_ms"]) / math.log(
            math.prod(large["size"]) / math.prod(small["size"])
        )
        ratios = " / ".join(_two_digits(r["ratio"]) + ("?" if r["noisy"] else "") for r in sizes)
        memory = ["" if m is None else f"{m:.1f}" for m in (large["memory"], large["peer_memory"])]
        shapes = " / ".join(" × ".join(f"{n:,}" for n in r["size"]) for r in sizes)
        rows.append((verb, shapes, f"{grown:.2f}", ratios, large["peer"], *memory))
    head = (
        "",
        "sizes",
        "time grows as size to the power",
        "our time / theirs",
        "against",
        "our memory",
        "their memory",
    )
    return f"{text.table(head, rows, (2, 3, 5, 6))}\n\n{Run(paths[-1].stem, facts, []).machine}."


def outcomes() -> str:
    """A row for each run: how many of its figures met their bars, and how many did not."""
    rows = []
    for run in runs():
        count = {v: sum(r["verdict"] == v for r in run.readings) for v in ("pass", "miss", "wrong", "error")}
        noisy = sum(bool(r.get("noisy")) for r in run.readings)
        rows.append(
            (run.machine, len(run.readings), count["pass"], count["miss"], count["wrong"] + count["error"], noisy)
        )
    if not rows:
        return NONE
    head = ("machine", "figures", "bars met", "missed", "wrong result or error", "too noisy")
    return text.table(head, rows, (1, 2, 3, 4, 5))


def gpu() -> str:
    """The newest run on a GPU: for each pass, map and shape its share of copy speed and its speed against a peer; then attention."""
    run = gpu_run()
    if run is None:
        return "No benchmark on a GPU has been saved yet."
    rows, attention = [], []
    for r in run.readings:
        if not r.get("ratio"):
            continue
        name = f"`{r['name'].replace(' normal', '').replace('local ', '')}`"
        if r["group"] in ("gpu attention", "gpu decoding"):
            attention.append((name, ms(r["ours_ms"]), r["peer"], ms(r["peer_ms"]), ratio(r)))
        elif r["peer"] != "copy" and r.get("of_copy") and "compile" not in r["peer"]:
            what = r["group"].removeprefix("gpu ")
            rows.append((what, name, ms(r["ours_ms"]), f"{r['of_copy']:.0%}", f"`{r['peer']}`", ratio(r)))
    head = ("", "case", "our ms", "of copy speed", "against", "our time / theirs")
    parts = [text.table(head, rows, (2, 3, 5))] if rows else []
    if attention:
        parts.append(
            text.table(
                ("attention, causal", "our ms", "against", "their ms", "our time / theirs"), attention, (1, 3, 4)
            )
        )
    return "\n\n".join([*parts, f"{run.machine}. Calls in CUDA graphs, over buffers larger than the L2 cache."])


def all_figures() -> str:
    """Every table of `benchmarks/results/README.md`, which `python -m benchmarks --render` writes."""
    path = RESULTS / "README.md"
    if not path.exists():
        return text.page(["# All benchmark figures", NONE])
    body = path.read_text(encoding="utf-8").partition("## Older runs")[0]
    body = re.sub(r"^# .*\n", "# All benchmark figures\n", body)
    return re.sub(r"\[([^\]]+)\]\(([^)]+\.json)\)", r"`\2`", body)


DTYPES = ("fp32", "fp64")


def _size(error: float) -> str:
    return f"{error:,.0f}" if error >= 100 else f"{error:.2g}"


def errors() -> str:
    """The table of `python -m benchmarks.accuracy`."""
    if not accuracy():
        return "Not measured yet."
    found = accuracy()[-1]
    rows = []
    for r in found["errors"]:
        peer = r.get("peer")
        unit, note = ("tv", " (total variation)") if r["quadrature"] else ("ulps", "")
        theirs = (f"`{peer['name']}`", *(_size(peer[dtype][unit]) for dtype in DTYPES)) if peer else ("", "", "")
        rows.append((f"`{r['case']}`{note}", *(_size(r[dtype][unit]) for dtype in DTYPES), *theirs))
    versions = found["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in ("torch", "entmax", "numpy") if name in versions)
    own = f"engine {found['engine']}, anymax {versions['anymax']} ({versions['commit']})"
    head = ("map", "fp32, ulp", "fp64, ulp", "another package", "fp32, ulp", "fp64, ulp")
    return text.table(head, rows, (1, 2, 4, 5)) + f"\n\n{found['hardware']['cpu']}, {own}; {packages}; {found['date']}."
