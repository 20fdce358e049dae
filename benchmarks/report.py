"""What was measured, as lines of a table, as JSON and as Markdown."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from .cases import GROUPS, OURS, WIDEST, Bar, Case, Workload
from .measure import Timing

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("torch", "triton", "numpy", "jax", "scipy", "entmax", "adasplash", "liger_kernel")
_ENVIRONMENT = re.compile(
    r"(ANYMAX|OMP|GOMP|KMP|MKL|OPENBLAS|THP|MALLOC|TORCH|ATEN|XLA|JAX)_|GLIBC_TUNABLES|NUMPY_MADVISE|LD_PRELOAD"
)


@dataclasses.dataclass(frozen=True)
class Reading:
    """One line of the table: a case against one peer."""

    group: str
    name: str
    verdict: str  # pass, miss, noisy, figure, wrong, error or skipped
    peer: str = ""
    at_most: float | None = None
    at_least: float | None = None
    ours_ms: float | None = None
    peer_ms: float | None = None
    ours_best_ms: float | None = None
    peer_best_ms: float | None = None
    ratio: float | None = None  # our time / the peer's, the median of the rounds
    low: float | None = None  # its quartiles
    high: float | None = None
    gb_per_s: float | None = None
    of_copy: float | None = None  # the time of a plain copy / our time
    engine: str = ""
    rounds: int = 0
    dropped: int = 0
    noisy: bool = False
    others: float | None = None  # CPUs that other processes used meanwhile
    message: str = ""

    @property
    def close(self) -> bool:
        """The bar lies between the quartiles."""
        if self.ratio is None or self.low is None or self.high is None:
            return False
        bar = self.at_most if self.at_most is not None else 1.0 / self.at_least if self.at_least else None
        return bar is not None and self.low <= bar <= self.high


def readings(case: Case, work: Workload, timing: Timing) -> list[Reading]:
    return [_reading(case, work, timing, bar) for bar in case.bars]


def _reading(case: Case, work: Workload, timing: Timing, bar: Bar) -> Reading:
    ours, peer, shown = OURS, bar.peer, bar.peer
    if bar.peer == WIDEST:
        ordered = sorted(timing.seconds, key=timing.median)
        ours, peer = ordered[-1], ordered[0]
        shown = f"{peer} (worst {ours})"
    ratio, low, high = timing.ratio(ours, peer)
    met = bar.met(ratio)
    gb = work.moved / timing.median(ours) / 1e9 if work.moved else None
    return Reading(
        group=case.group,
        name=case.name,
        verdict="figure" if met is None else "noisy" if timing.noisy else "pass" if met else "miss",
        peer=shown,
        at_most=bar.at_most,
        at_least=bar.at_least,
        ours_ms=timing.median(ours) * 1e3,
        peer_ms=timing.median(peer) * 1e3,
        ours_best_ms=timing.best(ours) * 1e3,
        peer_best_ms=timing.best(peer) * 1e3,
        ratio=ratio,
        low=low,
        high=high,
        gb_per_s=gb,
        of_copy=1.0 / timing.ratio(ours, "copy")[0] if "copy" in timing.seconds else None,
        engine=work.engine,
        rounds=timing.rounds,
        dropped=timing.dropped,
        noisy=timing.noisy,
        others=timing.others,
    )


def without_time(case: Case, verdict: str, message: str) -> list[Reading]:
    """The lines of a case that was not timed, and why."""
    bars = case.bars if verdict == "wrong" else case.bars[:1]
    return [
        Reading(case.group, case.name, verdict, b.peer, at_most=b.at_most, at_least=b.at_least, message=message)
        for b in bars
    ]


# -- words ------------------------------------------------------------------------------------------------------------


def show_ratio(r: Reading) -> str:
    if r.ratio is None:
        return ""
    if r.at_least is None:
        return f"{r.ratio:.3g}" if r.ratio < 100 else f"{r.ratio:.0f}"
    times = 1.0 / r.ratio
    return f"{times:.0%} of it" if r.at_least < 1 else f"{times:.3g}x faster" if times < 100 else f"{times:.0f}x faster"


def show_spread(r: Reading) -> str:
    if r.ratio is None or r.low is None or r.high is None:
        return ""
    return f"-{1 - r.low / r.ratio:.0%} +{r.high / r.ratio - 1:.0%}"


def show_bar(at_most: float | None, at_least: float | None) -> str:
    if at_most is not None:
        return f"<= {at_most:g}"
    if at_least is None:
        return ""
    return f">= {at_least:.0%}" if at_least < 1 else f">= {at_least:g}x"


def show_verdict(r: Reading) -> str:
    if r.noisy:
        return "noisy"
    words = "" if r.verdict == "figure" else r.verdict.upper() if r.verdict in ("miss", "wrong") else r.verdict
    return words + (" (close)" if r.close else "")


def show_ms(ms: float | None) -> str:
    if ms is None:
        return ""
    return f"{ms:.0f}" if ms >= 1000 else f"{ms:.3g}"


def show_share(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


COLUMNS = (
    ("case", 44), ("ms", 8), ("peer", 30), ("ms", 8), ("ratio", 13), ("quartiles", 13), ("bar", 9), ("verdict", 14),
    ("GB/s", 6), ("of copy", 7), ("engine", 9), ("rounds", 8),
)  # fmt: skip


def cells(r: Reading) -> list[str]:
    rounds = f"{r.rounds}-{r.dropped}" if r.dropped else f"{r.rounds}" if r.rounds else ""
    if r.noisy and r.ours_best_ms and r.peer_best_ms:
        rounds += f", best/best {r.ours_best_ms / r.peer_best_ms:.3g}"
    bandwidth = "" if r.gb_per_s is None else f"{r.gb_per_s:.3g}"
    return [
        r.name, show_ms(r.ours_ms), r.peer, show_ms(r.peer_ms), show_ratio(r), show_spread(r),
        show_bar(r.at_most, r.at_least), show_verdict(r), bandwidth, show_share(r.of_copy), r.engine, rounds,
    ]  # fmt: skip


def line(r: Reading) -> str:
    if r.ratio is None:
        return f"{r.name:44} {show_verdict(r)}: {r.message}"
    return aligned(cells(r))


def aligned(words: list[str]) -> str:
    right = {"ms", "ratio", "GB/s", "of copy"}
    return " ".join(
        f"{w:>{width}}" if title in right else f"{w:{width}}" for w, (title, width) in zip(words, COLUMNS)
    ).rstrip()


def titles(group: str) -> str:
    return f"\n{GROUPS[group]}\n{aligned([title for title, _ in COLUMNS])}"


def summary(rows: list[Reading]) -> str:
    count = {v: sum(r.verdict == v for r in rows) for v in ("pass", "miss", "wrong", "error", "skipped")}
    figures = sum(r.verdict == "figure" and not r.noisy for r in rows)
    text = f"\n{count['pass']} bars met, {count['miss']} missed, {figures} figures without a bar"
    for verdict in ("wrong", "error", "skipped"):
        text += f", {count[verdict]} {verdict}" if count[verdict] else ""
    noisy = sum(r.noisy for r in rows)
    text += f", {noisy} too noisy to say: measure those again on a quieter machine" if noisy else ""
    return text + "\n"


# -- the machine ------------------------------------------------------------------------------------------------------


def facts(threads: int) -> dict[str, Any]:
    return {
        "date": dt.date.today().isoformat(),
        "threads": threads,
        "hardware": _hardware(),
        "versions": _versions(),
        "environment": _environment(),
        "load_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def _hardware() -> dict[str, Any]:
    hardware: dict[str, Any] = {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "caches": _caches(),
        "system": f"{platform.system()} {platform.machine()}",
        "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "engines": _engines(),
    }
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    if flags:
        wide = r"(avx.*|fma|f16c|amx.*|asimd.*|sve.*|bf16)"
        hardware["instructions"] = sorted(w for w in flags[1].split() if re.fullmatch(wide, w))
    with contextlib.suppress(OSError, ValueError, AttributeError):
        hardware["memory_gib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    torch = sys.modules.get("torch")
    if torch is not None:
        hardware["torch_isa"] = torch.backends.cpu.get_cpu_capability()
        hardware["torch_threads"] = torch.get_num_threads()
    return hardware


def _cpu() -> str:
    text = _read("/proc/cpuinfo")
    found = {
        key: re.search(rf"^{key}\s*:\s*(.*)$", text, re.MULTILINE) for key in ("model name", "cpu family", "model")
    }
    if found["model name"]:
        name = found["model name"][1].strip()
        family, model = found["cpu family"], found["model"]
        plain = not re.search(r"\d", name)  # a virtual machine that hides which one it is
        return f"{name} family {family[1]} model {model[1]}" if plain and family and model else name
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(["sysctl", "-n", "machdep.cpu.brand_string"], text=True).strip()
    return platform.processor() or platform.machine()


def _caches() -> list[str]:
    found = []
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (_read(index / name) for name in ("level", "type", "size"))
        found.append(f"L{level} {kind.lower()} {size}")
    return found


def _engines() -> dict[str, dict[str, str]]:
    """The engines of anymax, in order, and what each tells of itself."""
    from anymax import kernels

    told: dict[str, dict[str, str]] = {one.name: {} for one in kernels.ENGINES}
    if isa := kernels.native.isa():
        told["native"] = {"isa": isa, "get_num_threads": str(kernels.native.get_num_threads())}
    return told


def _versions() -> dict[str, str]:
    import anymax

    versions = {"python": platform.python_version(), "anymax": anymax.__version__, "commit": commit()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def commit() -> str:
    """What the source was built from; `+changes` where files differ from it."""

    def git(*words: str) -> str:
        return subprocess.check_output(
            ["git", *words], cwd=Path(__file__).parent, text=True, stderr=subprocess.DEVNULL
        ).strip()

    try:
        changed = git("status", "--porcelain", "--", "../src", "../csrc")
        return git("rev-parse", "--short", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _environment() -> dict[str, str]:
    """The variables that bear on speed; of a path the last part, of no interest where it lies."""
    return {
        key: os.path.basename(value) if os.sep in value else value
        for key, value in sorted(os.environ.items())
        if _ENVIRONMENT.match(key)
    }


def _read(path: str | Path) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return ""


def header(known: dict[str, Any]) -> str:
    hardware, versions, environment = known["hardware"], known["versions"], known["environment"]
    engines = ", ".join(
        name + (f" ({', '.join(f'{k} {v}' for k, v in told.items())})" if told else "")
        for name, told in hardware["engines"].items()
    )
    lines = [
        f"{hardware['cpu']}, {hardware['cores']} cores, {hardware.get('memory_gib', '?')} GiB",
        ", ".join(hardware["caches"]) or "caches unknown",
        ", ".join(f"{name} {version}" for name, version in versions.items()),
        f"threads: {known['threads']}; engines: {engines}; torch uses {hardware.get('torch_isa', 'nothing')}",
        f"environment: {', '.join(f'{k}={v}' for k, v in environment.items()) or 'nothing set'}",
    ]
    if environment.get("THP_MEM_ALLOC_ENABLE") == "1":
        lines += [
            "Huge pages: this program started itself again with THP_MEM_ALLOC_ENABLE=1, so that torch asks for them,",
            "for its results and ours; NumPy does so by default; JAX runs with GLIBC_TUNABLES=glibc.malloc.hugetlb=1.",
            f"The system's setting: {hardware['huge_pages'] or 'unknown'}",
        ]
    return "\n".join(lines)


# -- files ------------------------------------------------------------------------------------------------------------


def as_json(known: dict[str, Any], rows: list[Reading]) -> str:
    body = [{k: _rounded(v) for k, v in dataclasses.asdict(r).items() if v not in (None, "")} for r in rows]
    return json.dumps({**known, "readings": body}, indent=1)


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def slug(text: str) -> str:
    text = re.sub(r"\((r|tm)\)|\bcpu\b|\bprocessor\b|@.*$|\b\d+-core\b", " ", text.lower())
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-")


def save(known: dict[str, Any], rows: list[Reading], part: str = "") -> Path:
    RESULTS.mkdir(exist_ok=True)
    name = f"{known['date']}-{slug(known['hardware']['cpu'])}-{known['threads']}t"
    path = RESULTS / f"{name}{'-' + slug(part)[:40] if part else ''}.json"
    path.write_text(as_json(known, rows) + "\n")
    return path


def load(path: Path) -> tuple[dict[str, Any], list[Reading]]:
    known = json.loads(path.read_text())
    fields = {f.name for f in dataclasses.fields(Reading)}
    rows = [Reading(**{k: v for k, v in row.items() if k in fields}) for row in known.pop("readings")]
    return known, rows


def render() -> Path:
    """Write results/README.md anew from the JSON files beside it: of each machine the newest."""
    newest: dict[tuple[str, int, str], Path] = {}
    older: list[Path] = []
    for path in sorted(RESULTS.glob("*.json")):  # by date
        known, _ = load(path)
        part = path.stem.split(f"-{known['threads']}t", 1)[-1]
        key = (known["hardware"]["cpu"], known["threads"], part)
        older += [newest[key]] if key in newest else []
        newest[key] = path
    text = ["# Results", "", "Written by `python -m benchmarks --render` from the JSON files in this folder.", ""]
    for path in newest.values():
        text += _markdown(path)
    if older:
        text += ["## Older runs", "", *(f"- [{path.stem}]({path.name})" for path in sorted(older)), ""]
    RESULTS.mkdir(exist_ok=True)
    target = RESULTS / "README.md"
    target.write_text("\n".join(text))
    return target


def _markdown(path: Path) -> list[str]:
    known, rows = load(path)
    text = [f"## {path.stem}", "", *(f"{part}  " for part in header(known).splitlines()), "", summary(rows).strip(), ""]
    for group, title in GROUPS.items():
        part = [r for r in rows if r.group == group]
        if not part:
            continue
        text += [
            f"### {title}",
            "",
            "| case | ours ms | peer | peer ms | ratio | quartiles | bar | verdict | of copy |",
        ]
        text += ["|---|---:|---|---:|---:|---|---|---|---:|"]
        for r in part:
            words = cells(r) if r.ratio is not None else [r.name, "", r.peer, "", "", "", "", r.verdict, "", ""]
            shown = [*words[:8], words[9]]
            text.append("| " + " | ".join(shown) + " |")
        text.append("")
    return text
