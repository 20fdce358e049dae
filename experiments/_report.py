"""What an experiment found, as JSON, Markdown and pictures."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import NAMES
from ._statistics import (
    CONFIDENCE,
    CONFIRMED,
    NOT_TESTED,
    UNDECIDED,
    Interval,
    all_of,
    from_json,
    number,
    signs,
    verdict,
)

RESULTS = Path(__file__).parent / "results"
ANSWERS = Path(__file__).parents[1] / "docs" / "answers"
INDEX = (  # the words of the folder's README.md
    "A claim is *confirmed* if the whole 95 % interval of the measured figure meets the bound, *contradicted* if no part of it does, and",
    "*undecided* otherwise. Among so many claims, a few would be decided by chance. So the last column judges all of them together, with",
    "Holm's correction at 5 %, but for those in whose verdict chance has no part. The documentation gives advice only on what this column",
    "decides.",
    "",
    "The experiments write this file from the JSON files in this folder.",
)
VERDICTS = (
    "Judged alone, a claim is confirmed where the whole interval of each figure that tests it meets the bound, contradicted where all of "
    "one interval misses it, else undecided. Judged together with the claims of all experiments, by Holm's correction, it keeps that "
    "verdict only where chance can hardly be its reason; else it is undecided."
)
TESTS = ("test", "figure", "bound", "judged alone")
MOST_TESTS, MOST_TABLES = 24, 8  # that a page shows; more are folded
CHOOSING = re.compile(r"\b(chosen|chose|choosing)\b", re.IGNORECASE)  # titles of tables that a reader needs last
_PER_CENT = re.compile(r"(?<!\d)(?<!\d )%|\bper ?cent\b")


class Refused(Exception):
    """A run that saved results may not come from; the message says why."""


@dataclasses.dataclass(frozen=True)
class Claim:
    """One sentence that the figures can confirm or contradict, and who made it.

    needs: another claim, without which this one has no meaning: where that is not confirmed, this one is not tested.
    apart: why chance has no part in its verdict (a theorem, what the tuning aims at), if so: it is then not judged together with others.
    notes: what a reader must know of it: that it came after figures, that it was tried at one length of training.
    """

    text: str
    source: str
    needs: str = ""
    apart: str = ""
    notes: tuple[str, ...] = ()

    def words(self) -> dict[str, Any]:
        """What stands of it in the JSON file, but for its key and its verdict."""
        more = {"apart": self.apart, "notes": list(self.notes)}
        return {"claim": self.text, "source": self.source, **{k: v for k, v in more.items() if v}}


@dataclasses.dataclass
class Findings:
    """Filled by an experiment's `run`: tables, tests of its claims, figures beside the paper's, pictures, notes.

    `partial` says that a run ended early: it does not take the place of saved results. `strict` ends a run whose choice is no optimum.
    """

    name: str
    claims: Mapping[str, Claim]
    folder: Path
    data: str = ""  # one sentence: what it was run on
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    tables: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    tests: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    paper: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    pictures: list[dict[str, str]] = dataclasses.field(default_factory=list)
    partial: bool = False
    strict: bool = False

    def chosen(self, what: str, value: float, tried: Iterable[float], ends: Iterable[float] = ()) -> None:
        """What was chosen must lie strictly inside of what was tried, or a full run fails at once; at `ends` there is nothing beyond."""
        tried = sorted(tried)
        if self.strict and not (tried[0] < value < tried[-1] or value in tuple(ends)):
            raise Refused(
                f"{self.name}: {what}: {value:.4g} was chosen among {', '.join(f'{one:.4g}' for one in tried)}. Nothing is written: an "
                "optimum at the edge of what was tried is none"
            )

    def table(self, title: str, rows: Sequence[Mapping[str, Any]], note: str = "") -> None:
        """A table; a row is column -> text, number, Interval or None."""
        self.tables.append({"title": title, "note": note, "rows": [dict(row) for row in rows]})

    def test(
        self,
        claim: str,
        what: str,
        found: Interval,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        edge: str = "",
    ) -> str:
        """One test of a claim: `found` against its bound. The verdict follows from the interval.

        edge: why the figure comes from a training that was not over, if it does. Such a figure decides nothing.
        """
        if claim not in self.claims:
            raise KeyError(f"{self.name}: no claim {claim!r}; it has {', '.join(self.claims)}")
        said = verdict(found, at_most=at_most, at_least=at_least)
        bound = {"at_most": at_most} if at_most is not None else {"at_least": at_least}
        self.tests.append({"claim": claim, "what": what, "found": found, **bound, "verdict": said})
        cut(self.tests[-1:], {(claim, what): edge})
        return self.tests[-1]["verdict"]

    def against_paper(self, what: str, paper: float, here: Interval | float, note: str = "") -> None:
        """A figure beside the one that the paper prints."""
        here = here if isinstance(here, Interval) else Interval(float(here), math.nan, math.nan, 1, "one run")
        self.paper.append({"what": what, "paper": paper, "here": here, "difference": here.mean - paper, "note": note})

    def picture(
        self, draw: Callable[[Any], None], size: tuple[float, float] = (9.0, 4.5), part: str = "", caption: str = ""
    ) -> Path:
        """`draw(figure)` as NAME.png, or NAME-part.png where there are several."""
        from matplotlib.figure import Figure  # late: listing the experiments needs no matplotlib

        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        path = self.folder / f"{self.name}{'-' + part if part else ''}.png"
        self.folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110, metadata={"Software": None})
        self.pictures.append({"file": path.name, "caption": caption})
        return path

    def verdicts(self) -> dict[str, str]:
        """Each claim's verdict, from all of its tests; a claim that nothing tested is undecided."""
        return verdicts(self.claims, self.tests)


def verdicts(claims: Mapping[str, Claim], tests: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    said = {key: all_of([t["verdict"] for t in tests if t["claim"] == key]) for key in claims}
    lacking = [k for k, c in claims.items() if c.needs and said[c.needs] != CONFIRMED]
    return said | dict.fromkeys(lacking, NOT_TESTED)


def cut(tests: Sequence[dict[str, Any]], edges: Mapping[tuple[str, str], str]) -> None:
    """Tests whose claim and words are in `edges` decide nothing: their figures come from trainings that were not over."""
    for test in tests:
        edge = edges.get((test["claim"], test["what"]))
        if edge:
            test |= {"verdict": UNDECIDED, "edge": edge}


def as_json(head: Mapping[str, Any], found: Findings) -> dict[str, Any]:
    said = found.verdicts()
    claims = [{"key": k, **c.words(), "verdict": said[k]} for k, c in found.claims.items()]
    return _plain(
        {
            **head,
            "data": found.data,
            "settings": {**head["settings"], **found.settings},
            "claims": claims,
            "tests": found.tests,
            "against_the_paper": found.paper,
            "tables": found.tables,
            "pictures": found.pictures,
            "notes": found.notes,
        }
    )


def as_markdown(known: Mapping[str, Any], together: Mapping[str, str]) -> str:
    """The page of saved results (those of `as_json`), with what is left of each claim's verdict beside all others."""
    text = [f"# {known['title']}", ""]
    if known["quick"]:
        text += ["**A quick run: it shows that the script works, and is no evidence for or against a claim.**", ""]
    else:
        text += [*_answer(known["name"])]
    first, *others = known["pictures"] or [None]
    text += _picture(first, known)
    text += [
        "## Data",
        "",
        known["data"],
        "",
        *([known["lengths"], ""] if known.get("lengths") else []),
        "## Claims",
        "",
    ]
    text += _markdown([
        {"claim": c["claim"], "source": c["source"], "judged alone": c["verdict"], "judged together": together.get(c["claim"], "")}
        for c in known["claims"]
    ])  # fmt: skip
    text += [VERDICTS, "", "## Tests", "", f"Intervals of {100 * CONFIDENCE:.0f} %: {_methods(known)}.", ""]
    tests = _tests(known)
    text += _folded(f"{len(known['tests'])} tests of the claims", tests) if len(known["tests"]) > MOST_TESTS else tests
    for picture in others:
        text += _picture(picture, known)
    chosen = [table for table in known["tables"] if CHOOSING.search(table["title"])]
    shown = [table for table in known["tables"] if table not in chosen]
    if len(shown) > MOST_TABLES:
        text += ["## Tables", "", *(line for table in shown for line in _folded(table["title"], _table(table)))]
    else:
        text += [line for table in shown for line in (f"## {table['title']}", "", *_table(table))]
    if known["against_the_paper"]:
        text += ["## Beside the paper's figures", "", *_beside(known["against_the_paper"])]
    if known["notes"]:
        text += ["## Notes", "", *(f"- {signs(note)}" for note in known["notes"]), ""]
    took = known["settings"].get("cells") or _duration(known["seconds"])
    text += ["## How it was run", "", f"`{known['command']}`, {known['date']}, {took}.", ""]
    text += [line for table in chosen for line in _folded(table["title"], _table(table))]
    return "\n".join([*text, *_folded("Settings, machine and versions", _machine(known))]).rstrip() + "\n"


def _tests(known: Mapping[str, Any]) -> list[str]:
    """A table in which the tests of each claim stand below its words, and why some of them decide nothing."""
    rows: list[dict[str, Any]] = []
    edges = list(dict.fromkeys(test["edge"] for test in known["tests"] if test.get("edge")))
    for claim in known["claims"]:
        rows.append(dict.fromkeys(TESTS) | {"test": f"**{claim['claim']}**", "judged alone": f"**{claim['verdict']}**"})
        for test in known["tests"]:
            if test["claim"] == claim["key"]:
                reason = f" ({edges.index(test['edge']) + 1})" if test.get("edge") else ""
                cells = (test["what"], test["found"], bound(test), test["verdict"] + reason)
                rows.append(dict(zip(TESTS, cells, strict=True)))
    reasons = [f"({i}) Undecided, since trainings were not over: {edge}." for i, edge in enumerate(edges, start=1)]
    return [*_markdown(rows), *(line for reason in reasons for line in (reason, ""))]


def bound(test: Mapping[str, Any]) -> str:
    """What the figure of a test must keep, in the unit that its words name."""
    value, sign = (test["at_most"], "≤") if "at_most" in test else (test["at_least"], "≥")
    words = test["what"]
    unit = "points" if re.search(r"\bpoints\b", words) else "%" if _PER_CENT.search(words) else ""
    unit = "point" if unit == "points" and abs(value) == 1 else unit
    return "\N{NO-BREAK SPACE}".join([sign, number(value), *([unit] * bool(unit))])


def _beside(figures: Sequence[Mapping[str, Any]]) -> list[str]:
    """The paper's figures and ours; a difference has the decimals that the paper prints."""
    step = 10.0 ** -max(len(repr(float(one["paper"])).partition(".")[2]) for one in figures)
    rows = [{**one, **{k: number(one[k], 10.0 * step) for k in ("paper", "difference")}} for one in figures]
    return _markdown(rows, {"paper", "difference"})


def _table(table: Mapping[str, Any]) -> list[str]:
    return [*([signs(table["note"]), ""] if table["note"] else []), *_markdown(table["rows"])]


def _folded(summary: str, lines: Sequence[str]) -> list[str]:
    return ["<details>", f"<summary>{summary}</summary>", "", *lines, "</details>", ""]


def _machine(known: Mapping[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in known["versions"].items())
    sources = ", ".join(f"{name} {digest}" for name, digest in known.get("sources", {}).items())
    return [
        f"{known['hardware']['cpu']}, {known['threads']} thread{'s' * (known['threads'] != 1)}; {versions}."
        + (f" SHA-256 of the sources: {sources}." if sources else ""),
        "",
        *_markdown([{"setting": k, "value": said} for k, v in known["settings"].items() if (said := _words(v))]),
    ]


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 120 else f"{seconds / 60:.0f} minutes"


def _picture(picture: Mapping[str, str] | None, known: Mapping[str, Any]) -> list[str]:
    return [f"![{picture['caption'] or known['title']}]({picture['file']})", ""] if picture else []


def _answer(name: str) -> list[str]:
    """The answer to the experiment's question, where the documentation has one."""
    path = ANSWERS / f"{name}.md"
    if not path.is_file():
        return []
    words = " ".join(path.read_text(encoding="utf-8").partition("\n\n")[2].split())
    plain = re.sub(r"\{doc\}`/?([^`<]+?)(?: <[^>]+>)?`|\[([^\]]+)\]\([^)]+\)", lambda link: link[1] or link[2], words)
    return [plain, ""]


def write(head: Mapping[str, Any], found: Findings) -> list[Path]:
    """NAME.json, and the pages of its folder."""
    found.folder.mkdir(parents=True, exist_ok=True)
    target = found.folder / f"{found.name}.json"
    save(target, as_json(head, found))
    return [target, *pages(found.folder)]


def save(path: Path, known: Mapping[str, Any]) -> None:
    """As JSON, a list of numbers on one line."""
    text = json.dumps(_plain(known), indent=1, ensure_ascii=False, allow_nan=False)
    text = re.sub(
        r"\[\n[-+.,\deE\s]+\]",
        lambda numbers: re.sub(r"\s+", " ", numbers[0]).replace("[ ", "[").replace(" ]", "]"),
        text,
    )
    _replace(path, text + "\n")


def pages(folder: Path) -> list[Path]:
    """NAME.md of each JSON file of a folder, and README.md: every claim with its verdict, alone and beside all others."""
    from ._together import claims  # late: it imports this module

    together: dict[str, dict[str, str]] = {}
    for one in claims(folder):
        together.setdefault(one.experiment, {})[one.claim] = one.told
    written, rows = [], []
    for path in sorted(folder.glob("*.json"), key=lambda p: (*NAMES, p.stem).index(p.stem)):
        known = json.loads(path.read_text(encoding="utf-8"))
        name, beside = known["name"], together.get(known["name"], {})
        written.append(path.with_suffix(".md"))
        _replace(written[-1], as_markdown(known, beside))
        quick = " (quick run: no evidence)" if known["quick"] else ""
        for claim in known["claims"]:
            verdicts = {"judged alone": claim["verdict"] + quick, "judged together": beside.get(claim["claim"], "")}
            rows.append({"experiment": f"[{name}]({name}.md)", "claim": claim["claim"], **verdicts})
    target = folder / "README.md"
    _replace(target, "\n".join(["# Results", "", *INDEX, "", *_markdown(rows)]).rstrip() + "\n")
    return [*written, target]


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def _methods(known: Mapping[str, Any]) -> str:
    """How intervals were made; those that differ in their number only are named once."""
    cells = [t["found"] for t in known["tests"]] + [p["here"] for p in known["against_the_paper"]]
    cells += [cell for table in known["tables"] for row in table["rows"] for cell in row.values()]
    with_ends = [cell for cell in cells if isinstance(cell, Mapping) and cell["low"] != cell["high"]]
    numbers: dict[str, set[int]] = {}
    for cell in with_ends:
        named = re.sub(r"^t ", "Student's t ", cell["method"].removesuffix(", paired"))
        numbers.setdefault(re.sub(r"\d+", "{}", named, count=1), set()).add(cell["n"])
    said = [of.format(" or ".join(number(n) for n in sorted(each))) for of, each in sorted(numbers.items())]
    said += ["paired where two are compared"] * any(cell["method"].endswith(", paired") for cell in with_ends)
    return "; ".join(said) or "none"


def _markdown(rows: Sequence[Mapping[str, Any]], right: Collection[str] = ()) -> list[str]:
    """A table of the columns in which something stands; numbers and the columns of `right` are aligned to the right."""
    rows = [{k: from_json(v) if isinstance(v, Mapping) else v for k, v in row.items()} for row in rows]
    cells = [{k: text for k, v in row.items() if (text := _cell(v))} for row in rows]
    columns = [c for c in dict.fromkeys(c for row in rows for c in row) if any(c in row for row in cells)]
    if not columns:
        return []
    figures = {c for c in columns if all(isinstance(r.get(c), (int, float, Interval, type(None))) for r in rows)}
    lines = [[signs(c) for c in columns], ["---:" if c in figures or c in right else "---" for c in columns]]
    lines += [[row.get(c, "") for c in columns] for row in cells]
    return [f"| {' | '.join(line)} |" for line in lines] + [""]


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = number(value) if isinstance(value, (int, float)) else signs(str(value))
    text = text.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")  # in a narrow column too they stay together
    return text.replace("|", "\\|").replace("\n", " ")


def _words(value: Any) -> str:
    """A setting; whole numbers that follow each other by their ends."""
    if not isinstance(value, (list, tuple)):
        return _cell(value)
    if len(value) > 3 and {*map(type, value)} == {int} and list(value) == list(range(value[0], value[-1] + 1)):
        return f"{value[0]} to {value[-1]}"
    return ", ".join(_words(v) for v in value)


def _plain(value: Any) -> Any:
    """What JSON can hold, numbers with six digits."""
    if isinstance(value, Interval):
        return _plain(value.as_json())
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [_plain(v) for v in value]
    if hasattr(value, "item"):  # NumPy's numbers
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
