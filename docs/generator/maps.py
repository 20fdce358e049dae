"""A page for each map of the catalogue: its prose (`docs/maps/<name>.md`) with facts, pictures, examples and measurements."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch

import anymax
from anymax._array import is_number
from anymax.cli import names
from anymax.kernels.triton import refuse_map
from anymax.mappings import CATALOGUE

from . import examples, measured, pictures, text

PROSE = Path(__file__).parents[1] / "maps"
ALLOWED = ("Definition", "Loss", "Gradient", "When it helps", "When it hurts", "Paper")
VECTOR = (2.0, 1.0, 0.1, -1.0)


@dataclasses.dataclass(frozen=True)
class Page:
    """What the page of a map is made of."""

    kind: type[anymax.Mapping]
    prose: text.Prose

    @property
    def mapping(self) -> anymax.Mapping:
        return eval(self.prose.keys["example"], vars(anymax).copy())


def pages() -> list[Page]:
    """In the order of the catalogue; a map without prose is an error that names the file to write."""
    out = []
    for kind in CATALOGUE:
        path = PROSE / f"{kind.name}.md"
        if not path.exists():
            raise FileNotFoundError(
                f"{kind.__name__} has no page: write docs/maps/{kind.name}.md ({', '.join(ALLOWED)})"
            )
        page = Page(kind, text.read(path, ALLOWED, ALLOWED))
        if type(page.mapping) is not kind:
            raise ValueError(f"{path}: `example: {page.prose.keys['example']}` is not a {kind.__name__}")
        out.append(page)
    return out


def learnable(mapping: anymax.Mapping) -> list[str]:
    """The parameters that may be arrays and then have a gradient."""
    constants = mapping.constants().items()
    return [n for n, value in constants if is_number(value) and _takes_arrays(mapping, n) and _has_gradient(mapping, n)]


def _has_gradient(mapping: anymax.Mapping, name: str) -> bool:
    """Whether p depends smoothly on a parameter; on the k of a top-k it does not."""
    value = torch.tensor(float(mapping.constants()[name]), dtype=torch.float64, requires_grad=True)
    p = anymax.apply(mapping.replace(**{name: value}), torch.tensor(VECTOR, dtype=torch.float64))
    return p.requires_grad


def _takes_arrays(mapping: anymax.Mapping, name: str) -> bool:
    try:
        return name in mapping.replace(**{name: np.array([float(mapping.constants()[name])])}).params()
    except (TypeError, ValueError):
        return False


def generic_loss(mapping: anymax.Mapping) -> str:
    """The loss to call with the map as its first argument."""
    return "fenchel_young" if mapping.facts.has_potential else "nll"


def facts(page: Page) -> str:
    """The table that `tests/laws/test_facts.py` holds the map to."""
    f, mapping = page.mapping.facts, page.mapping
    short = names.loss(mapping.name)
    rows = [
        ("A larger score never gets a smaller probability", yes(f.monotone)),
        ("Adding a constant to all scores changes nothing", yes(f.shift_invariant)),
        ("Exact zeros", yes(f.sparse)),
        ("Fenchel-Young loss (symmetric Jacobian)", "yes" if f.has_potential else f"no: use `{mapping.own_loss}`"),
        ("The loss is exactly 0 once the target leads by", lead(f)),
        ("Loss to call", f"`{short}`, or `{generic_loss(mapping)}`" if short else f"`{generic_loss(mapping)}`"),
        ("Parameters with a gradient", ", ".join(f"`{n}`" for n in learnable(mapping)) or "none"),
        ("Compiled kernels", engines(mapping)),
    ]
    return text.table((f"`{page.prose.keys['example']}`", ""), rows)


def yes(fact: bool) -> str:
    return "yes" if fact else "no"


def lead(f: anymax.Facts) -> str:
    """The lead of the target at which the loss is 0."""
    return "never" if f.margin is None else f"{f.margin:g}"


def engines(mapping: Any) -> str:
    """Which compiled kernels a map has, and why not."""
    if mapping.kernel:
        return "CPU and GPU" if refuse_map("forward", mapping) is None else "CPU"
    if mapping.hidden is not None:
        return "those of the inner map"
    values = [getattr(mapping, field.name) for field in dataclasses.fields(mapping)]
    yours = any(callable(value) and not isinstance(value, anymax.Mapping) for value in values)
    return "none: the functions are yours" if yours else "none: its formulas run as they are"


def call(page: Page) -> str:
    """The shortest call of the map, and what it prints."""
    made, scores = page.prose.keys["example"], [float(v) for v in VECTOR]
    p = anymax.apply(page.mapping, np.array(VECTOR)).round(3) + 0.0
    kind = made.split("(")[0].split(".")[0]
    return f"```pycon\n>>> import anymax\n>>> from anymax import {kind}\n>>> anymax.apply({made}, {scores}).round(3)\n{p!r}\n```"


def on_one_vector(page: Page) -> str:
    """p, tau where there is one, and the support, at a vector of four scores."""
    p = anymax.apply(page.mapping, np.array(VECTOR))
    soft = anymax.softmax(np.array(VECTOR))
    cells = ["**0**" if v == 0 else f"{v:.3f}" for v in p]
    rows = [("`softmax`", *(f"{v:.3f}" for v in soft))] if page.kind is not anymax.Softmax else []
    return text.table(
        ("score", *(f"{v:g}" for v in VECTOR)), [*rows, (f"`{page.prose.keys['example']}`", *cells)], (1, 2, 3, 4)
    )


def promises() -> str:
    """The facts of every map in one table."""
    rows = []
    for page in pages():
        f = page.mapping.facts
        marks = map(yes, (f.monotone, f.shift_invariant, f.sparse, f.has_potential))
        link = f"[{page.prose.keys['example']}](maps/{page.kind.name}.md)"
        rows.append((link, *marks, lead(f), ", ".join(learnable(page.mapping))))
    head = (
        *("map", "keeps the order", "ignores a constant added to all scores", "exact zeros", "convex loss"),
        *("loss is 0 once the target leads by", "can be learned"),
    )
    return text.table(head, rows)


def write(folder: Path, drawn: bool = True) -> None:
    found = pages()
    for page in found:
        text.save(folder / f"{page.kind.name}.md", markdown(page))
        if drawn:
            draw(page, folder)
    text.save(folder / "index.md", text.contents(PROSE / "README.md", [page.kind.name for page in found]))


def index() -> str:
    """A line for each map."""
    rows = [
        (
            f"[{page.kind.__name__}]({page.kind.name}.md)",
            page.prose.introduction.split("\n\n")[0].replace("\n", " "),
            "yes" if page.mapping.facts.sparse else "",
            "yes" if page.mapping.facts.has_potential else "",
        )
        for page in pages()
    ]
    return text.table(("map", "", "exact zeros", "convex loss"), rows)


def markdown(page: Page) -> str:
    prose, name = page.prose, page.kind.name
    sections = {title: text.section(title, prose.sections[title]) for title in ALLOWED}
    words = {
        "kind": page.kind.__name__,
        "make": prose.keys["example"],
        "loss": generic_loss(page.mapping),
        "target": prose.keys.get("target", "[0, 1]"),
    }
    parts = [
        f"# {page.kind.__name__}",
        text.found_by(prose.keys.get("search", name.replace("_", " "))),
        prose.introduction,
        call(page),
        portrait(page),
        sections["Definition"],
        on_one_vector(page),
        text.section("Facts", facts(page)),
        "`tests/laws/test_facts.py` checks the first five lines with numbers.",
        *(sections[title] for title in ("Loss", "Gradient", "When it helps", "When it hurts")),
        text.section("In three frameworks", examples.tabs(examples.MAP, **words)),
        text.section("Measured", measured.of_map(name)),
        sections["Paper"],
        f"{{py:class}}`API reference <anymax.{page.kind.__name__}>`",
    ]
    return text.page(parts)


PANELS = {  # what the page shows of its map, with the words for those who don't see it; `anymax plot` has them in one picture
    "curves": "The probability of one class of {map} against its lead over the others, with softmax in grey.",
    "simplex": "The largest of three probabilities of {map} over the plane of scores, with the regions where 1, 2 or 3 are above 0.",
    "losses": "The loss of {map} against the lead of the target, beside four classic losses.",
    "jacobian": "The Jacobian of {map} at four scores, as a table of numbers.",
}


def portrait(page: Page) -> str:
    """The Markdown of the panels: side by side, or on a phone one below the other."""
    items = [
        f":::{{grid-item}}\n{pictures.shown(f'{page.kind.name}-{name}.svg', words.format(map=page.prose.keys['example']))}\n:::"
        for name, words in PANELS.items()
    ]
    return "\n".join(["::::{grid} 1 2 2 2\n:gutter: 2", *items, "::::"])


def draw(page: Page, folder: Path) -> None:
    """Drawn anew where the code of the pictures or of the map is newer."""
    from anymax import plot

    panels = plot.maps.panels(page.mapping)

    def panel(plt: Any, name: str) -> Any:
        figure, ax = plt.subplots(figsize=(4.6, 3.9), layout="constrained")
        panels[name](ax)
        return figure

    own = (Path(anymax.__file__).parent / "mappings" / f"{page.kind.name}.py", PROSE / f"{page.kind.name}.md")
    for name in PANELS:
        target = folder / f"{page.kind.name}-{name}.svg"
        if pictures.old(target, (*pictures.code(), anymax.__file__, pictures.__file__, __file__, *own)):
            pictures.save(target, functools.partial(panel, name=name))
