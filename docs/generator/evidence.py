"""The pages of `experiments/results/`: whichever are there, with their pictures, each opened by its question, answer and effects.

The question and the answer are prose in `docs/answers/`. Its head has the verdicts on which they rest; a test holds them to the results.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import text

if TYPE_CHECKING:
    from experiments._together import Judged

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"
ANSWERS = Path(__file__).parents[1] / "answers"
COLOURS = {"confirmed": "success", "contradicted": "danger", "undecided": "muted", "not tested": "light"}
READ = (
    "Each effect has its 95 % interval. If a claim has several tests, the table shows the one on which its verdict rests. The verdicts "
    "are those that hold when {doc}`all claims </evidence>` are judged together."
)
NONE = "No experiment has been saved yet."


def found() -> list[dict[str, Any]]:
    """What was found, by experiment; quick runs show that a script works, and are no evidence."""
    out = []
    for path in sorted(RESULTS.glob("*.json")):
        known = json.loads(path.read_text(encoding="utf-8"))
        if known.get("claims") and not known["quick"] and path.with_suffix(".md").exists():
            out.append(known)
    return out


def answer(name: str) -> text.Prose:
    """The question and the answer of an experiment; one without them is an error that names the file to write."""
    path = ANSWERS / f"{name}.md"
    if not path.exists():
        raise FileNotFoundError(f"{name} has no answer: write docs/answers/{name}.md (question, verdicts, the answer)")
    return text.read(path, (), ())


def _experiments(module: str) -> Any:
    """A module of the experiments, which are no part of the package."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    return importlib.import_module(f"experiments.{module}")


def judged() -> dict[str, list[tuple[dict[str, Any], Judged]]]:
    """By experiment: its claims as they were saved, each with what is left of its verdict beside all others."""
    by_experiment: dict[str, list[Judged]] = {}
    for one in _experiments("_together").claims(RESULTS):
        by_experiment.setdefault(one.experiment, []).append(one)
    return {known["name"]: list(zip(known["claims"], by_experiment[known["name"]], strict=True)) for known in found()}


def counted(experiment: list[tuple[dict[str, Any], Judged]]) -> str:
    """How many claims have each verdict."""
    number = {verdict: sum(one.together == verdict for _, one in experiment) for verdict in COLOURS}
    return "<br>".join(f"{n} {verdict}" for verdict, n in number.items() if n)


def badge(verdict: str) -> str:
    return f"{{bdg-{COLOURS[verdict]}}}`{verdict}`"


def index() -> str:
    """How many claims have each verdict, in all and in each experiment, beside its question and the beginning of its answer."""
    every, rows = judged(), []
    for name, experiment in every.items():
        prose = answer(name)
        link = f"[{prose.keys['question']}](../experiments/results/{name}.md)"
        rows.append((link, beginning(prose.introduction), counted(experiment)))
    if not rows:
        return NONE
    claims = [claim for experiment in every.values() for claim in experiment]
    said = counted(claims).replace("<br>", ", ")
    return f"Our verdicts on {len(claims)} claims: {said}.\n\n{text.table(('question', 'answer', 'claims'), rows)}"


def beginning(words: str, least: int = 6) -> str:
    """The first sentence, and those after it that a short one needs."""
    taken = ""
    for sentence in re.split(r"(?<=[.:]) (?=[A-Z\d])", " ".join(words.split())):
        taken = f"{taken} {sentence}".strip()
        if len(taken.split()) >= least and taken.endswith("."):
            break
    return taken


def _blocks(kind: str, table: str) -> str:
    """A table whose rows `style.css` shows as blocks on a phone."""
    return f":::{{div}} {kind}\n\n{table}\n\n:::"


def remark(one: Judged) -> str:
    """What the correction took away, or what an undecided test could have seen."""
    if one.together != one.verdict:
        return f"{one.verdict} when judged alone"
    return f"seen in four runs of five: {one.seen}" if one.seen else ""


def reservations(one: Judged) -> list[str]:
    """What a reader must know of a claim beside its verdict."""
    return [*([f"not judged with the others: {one.apart}"] if one.apart else []), *one.notes]


def telling(claim: dict[str, Any], tests: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The test on which the verdict of a claim rests.

    Of those that agree with the verdict, it is the nearest to its bound; where they contradict the claim, the farthest.
    """
    own = [test for test in tests if test["claim"] == claim["key"] and test["verdict"] == claim["verdict"]]
    choose = max if claim["verdict"] == "contradicted" else min
    return choose(own, key=_away) if own else None


def _away(test: dict[str, Any]) -> float:
    """How far the figure is from its bound, in widths of its interval."""
    found, bound = test["found"], test.get("at_most", test.get("at_least"))
    if found["low"] is None or found["high"] is None:
        return 0.0
    width = found["high"] - found["low"]
    return abs(found["mean"] - bound) / width if width else math.inf


def opening(known: dict[str, Any], experiment: list[tuple[dict[str, Any], Judged]]) -> str:
    """The question, the answer, and a row for each claim: its effect with the interval, the bound, the verdict beside all others."""
    prose = answer(known["name"])
    rows = []
    first = known.get("pictures", ())[:1]
    picture = [f"![{one['caption'] or known['title']}]({one['file']})" for one in first]
    for claim, one in experiment:
        test = telling(claim, known.get("tests", []))
        more = "; ".join(
            words for words in (remark(one) if one.together != one.verdict else "", *reservations(one)) if words
        )
        told = f"{badge(one.together)} {text.plain(more)}".rstrip()
        rows.append((f"{_words(claim['claim'])}<br>*{_words(claim['source'])}*", told, *_cells(test)))
    table = _blocks("claims", text.table(("claim", "verdict", "effect", "bound", "measured"), rows))
    return text.page([f"**{prose.keys['question']}**", prose.introduction, *picture, table, READ])


def _cells(test: dict[str, Any] | None) -> tuple[str, str, str]:
    """The effect with its interval, the bound, and what was measured."""
    if test is None:
        return "", "", ""
    return "".join(figures(test["found"])), _experiments("_report").bound(test), _words(test["what"])


def _words(plain: str) -> str:
    return _experiments("_statistics").signs(text.plain(plain))


def figures(found: dict[str, Any]) -> tuple[str, str]:
    """A figure, and its interval in brackets with two digits of its width; where there is none, the figure in three digits."""
    ends = [found[k] for k in ("mean", "low", "high")]
    width = 0.0 if None in ends else ends[2] - ends[1]
    number = _experiments("_statistics").number
    if width <= 0.0:
        return number(float(f"{ends[0]:.3g}")), ""
    mean, low, high = (number(end, width) for end in ends)
    return mean, f" ({low} to {high})"


def _local(page: str, kept: set[str]) -> str:
    """The page with links to what is not on the site as plain words."""

    def link(match: re.Match[str]) -> str:
        return match[0] if match[2].partition("#")[0] in {f"{name}.md" for name in kept} else match[1]

    return re.sub(r"(?<!!)\[([^\]\n]+)\]\((?!https?:|#)([^)\s]+)\)", link, page)


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    kept, together = {known["name"] for known in found()}, judged()
    for known in found():
        page = (RESULTS / f"{known['name']}.md").read_text(encoding="utf-8")
        title, _, rest = _local(page, kept).replace("$", "\\$").partition("\n\n")
        rest = rest.partition("## Data\n\n")[2]
        rest = re.sub(r"(?s)## Claims\n.*?(?=## Tests\n)", "", rest, count=1)  # they stand above, with their verdicts
        rest = re.sub(r"(?:\| .*\n)+", lambda table: _blocks("tests", table[0].rstrip()) + "\n", rest, count=1)
        opened = opening(known, together[known["name"]])
        text.save(folder / f"{known['name']}.md", f"{title}\n\n{opened}\n## Data\n\n{rest}")
        for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page):
            shutil.copy(RESULTS / picture, folder)
    for stale in folder.glob("*.md"):
        if stale.stem not in kept:
            stale.unlink()
