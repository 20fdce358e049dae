"""A page for each family of transforms and margins: prose (`docs/scores/<name>.md`), pictures, examples."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import anymax
from anymax import margins, transforms

from . import examples, pictures, score_pictures, text

PROSE = Path(__file__).parents[1] / "scores"
SECTIONS = ("Definition", "Gradient", "When it helps", "When it hurts", "Paper")
ORDER = (
    "temperature",
    "scalable",
    "softcap",
    "mask",
    "prior",
    "normalize",
    "truncation",
    "tokens",
    "cosine",
    "noise",
    "margins",
)
VECTOR = (2.0, 1.0, 0.1, -1.0)


class Kind(NamedTuple):
    """How the pages of a kind differ."""

    module: str  # of the API reference
    templates: Mapping[str, str]
    draw: Callable[[Page, Any], Any]
    words: str  # for those who don't see the picture


KINDS = {
    "transform": Kind(
        "transforms", examples.TRANSFORM, score_pictures.bars,
        "Bars: the softmax probabilities of six scores, before and after {}.",
    ),
    "noise": Kind(
        "transforms", examples.TRANSFORM, score_pictures.frequencies,
        "Lines: for three classes, how often each has the largest noisy score, against the softmax and the PerturbMax probabilities.",
    ),
    "margin": Kind(
        "margins", examples.MARGIN, score_pictures.angles,
        "Two pictures against the angle between embedding and class: the cosine that the loss sees, and the loss, for five margins.",
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Page:
    name: str
    prose: text.Prose

    @property
    def kind(self) -> Kind:
        return KINDS[self.prose.keys["kind"]]

    @property
    def made(self) -> Any:
        return eval(self.prose.keys["example"], vars(anymax).copy())

    @property
    def takes_scores(self) -> bool:
        """False where the example makes scores from an embedding."""
        return self.made(np.array(VECTOR)).shape == (len(VECTOR),)


def pages() -> list[Page]:
    found = {path.stem for path in PROSE.glob("*.md")} - {"README"}
    if found != set(ORDER):
        raise FileNotFoundError(
            f"docs/scores/ has {sorted(found)}, the site wants {sorted(ORDER)}: name each once in ORDER"
        )
    out = [Page(name, text.read(PROSE / f"{name}.md", SECTIONS, SECTIONS)) for name in ORDER]
    for page in out:
        if page.prose.keys.get("kind") not in KINDS:
            raise ValueError(f"docs/scores/{page.name}.md: kind must be one of {', '.join(KINDS)}")
    return out


def public() -> set[str]:
    """The transforms and margins that a page must name."""
    made = {
        n
        for n in transforms.__all__
        if inspect.isfunction(f := vars(transforms)[n]) and f.__module__.startswith(transforms.__name__)
    }
    kinds = {
        n
        for n, c in vars(margins).items()
        if inspect.isclass(c) and issubclass(c, margins.Margin) and c is not margins.Margin
    }
    return made | kinds


def write(folder: Path, drawn: bool = True) -> None:
    found = pages()
    for page in found:
        text.save(folder / f"{page.name}.md", markdown(page))
        if drawn:
            draw(page, folder / f"{page.name}.svg")
    text.save(folder / "index.md", text.contents(PROSE / "README.md", [page.name for page in found]))


def index() -> str:
    """A line for each family."""
    rows = [
        (f"[{page.prose.keys['title']}]({page.name}.md)", page.prose.introduction.replace("\n", " "))
        for page in pages()
    ]
    return text.table(("", ""), rows)


def markdown(page: Page) -> str:
    keys, sections = page.prose.keys, page.prose.sections
    shown = [text.section(title, sections[title]) for title in SECTIONS]
    if keys["kind"] == "transform" and page.takes_scores:
        shown.insert(1, on_one_vector(page))  # after the definition
    parts = [
        f"# {keys['title']}",
        text.found_by(keys.get("search", keys["title"])),
        page.prose.introduction,
        pictures.shown(f"{page.name}.svg", page.kind.words.format(keys["example"])),
        *shown[:-1],
        text.section("In three frameworks", examples.tabs(page.kind.templates, make=keys["example"])),
        shown[-1],
        f"{{doc}}`API reference </generated/api/{page.kind.module}>`",
    ]
    return text.page(parts)


def on_one_vector(page: Page) -> str:
    x = np.array(VECTOR)
    moved = page.made(x)
    rows = [
        ("scores", *(f"{v:g}" for v in x)),
        ("softmax of them", *(f"{v:.3f}" for v in anymax.softmax(x))),
        (f"`{page.prose.keys['example']}`", *("masked" if np.isinf(v) else f"{v:.3f}" for v in moved)),
        ("softmax of that", *("**0**" if v == 0 else f"{v:.3f}" for v in anymax.softmax(moved))),
    ]
    return text.table(("", *(f"class {i + 1}" for i in range(len(x)))), rows, (1, 2, 3, 4))


def draw(page: Page, target: Path) -> None:
    from anymax import plot

    made = Path(transforms.__file__).parent.glob("*.py")
    sources = (plot.__file__, *made, margins.__file__, pictures.__file__, score_pictures.__file__)
    if pictures.old(target, (*sources, PROSE / f"{page.name}.md")):
        pictures.save(target, lambda plt: page.kind.draw(page, plt))
