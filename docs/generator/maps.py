"""A page for each map of the catalogue: its prose (`docs/maps/<name>.md`) with facts, pictures, examples and measurements."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

import anymax
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

    @property
    def loss(self) -> str:
        return "fenchel_young" if self.mapping.facts.has_potential else self.mapping.instead


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
    found = []
    for field in dataclasses.fields(mapping):  # type: ignore[arg-type]
        value = getattr(mapping, field.name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            try:
                found += (
                    [field.name]
                    if field.name in mapping.replace(**{field.name: np.array([float(value)])}).params()
                    else []
                )
            except (TypeError, ValueError):
                continue
    return found


def sugar(name: str) -> str:
    """The short name of the map's loss, where there is one."""
    short = {"softmax": "cross_entropy", "taylor": "taylor_softmax_loss"}.get(name, f"{name}_loss")
    return short if hasattr(anymax, short) else ""


def facts(page: Page) -> str:
    """The table that `tests/test_facts.py` holds the map to."""
    f, mapping = page.mapping.facts, page.mapping
    short = sugar(mapping.name)
    rows = [
        ("A larger score never gets a smaller probability", "yes" if f.monotone else "no"),
        ("Adding a constant to all scores changes nothing", "yes" if f.shift_invariant else "no"),
        ("Exact zeros", "yes" if f.sparse else "no"),
        ("Fenchel-Young loss (symmetric Jacobian)", "yes" if f.has_potential else f"no: use `{mapping.instead}`"),
        ("The loss is exactly 0 once the target leads by", "never" if f.margin is None else f"{f.margin:g}"),
        ("Loss to call", f"`{short}`, or `{page.loss}`" if short else f"`{page.loss}`"),
        ("Parameters with a gradient", ", ".join(f"`{n}`" for n in learnable(mapping)) or "none"),
        ("Compiled kernels", engines(mapping)),
    ]
    return text.table((f"`{page.prose.keys['example']}`", ""), rows)


def engines(mapping: Any) -> str:
    """Which compiled kernels a map has, and why not."""
    if mapping.kernel:
        return "CPU and GPU"
    yours = any(callable(getattr(mapping, field.name)) for field in dataclasses.fields(mapping))
    return "none: the functions are yours" if yours else "none: its formulas run as they are"


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
        marks = ("yes" if fact else "no" for fact in (f.monotone, f.shift_invariant, f.sparse, f.has_potential))
        link = f"{{doc}}`{page.prose.keys['example']} </generated/maps/{page.kind.name}>`"
        rows.append(
            (link, *marks, "never" if f.margin is None else f"{f.margin:g}", ", ".join(learnable(page.mapping)))
        )
    head = (
        "map",
        "keeps the order",
        "ignores a common constant",
        "exact zeros",
        "convex loss",
        "loss is 0 at a lead of",
        "learnable",
    )
    return text.table(head, rows)


def write(folder: Path, pictures: bool = True) -> None:
    found = pages()
    for page in found:
        text.save(folder / f"{page.kind.name}.md", markdown(page))
        if pictures:
            draw(page, folder)
    rows = [
        (
            f"[{page.kind.__name__}]({page.kind.name}.md)",
            page.prose.introduction.split("\n\n")[0].replace("\n", " "),
            "yes" if page.mapping.facts.sparse else "",
            "yes" if page.mapping.facts.has_potential else "",
        )
        for page in found
    ]
    listed = "\n".join(page.kind.name for page in found)
    text.save(
        folder / "index.md",
        "# Maps\n\nA map turns a vector of scores into a probability distribution. `anymax.apply`, the losses, `anymax.sample`, "
        "`anymax.attention` and `anymax.jacobian` work with every one of them. {doc}`Which one should I use? </choose>` compares "
        "them.\n\n"
        + text.table(("map", "", "exact zeros", "convex loss"), rows)
        + f"\n\n```{{toctree}}\n:hidden:\n\n{listed}\n```\n",
    )


def markdown(page: Page) -> str:
    prose, name = page.prose, page.kind.name
    words = {
        "kind": page.kind.__name__,
        "make": prose.keys["example"],
        "loss": page.loss,
        "target": prose.keys.get("target", "[0, 1]"),
    }
    parts = [
        f"# {page.kind.__name__}",
        text.found_by(prose.keys.get("search", name.replace("_", " "))),
        prose.introduction,
        pictures.shown(f"{name}.svg", alternative(page)),
        section(page, "Definition"),
        on_one_vector(page),
        "## Facts",
        facts(page),
        "Each line is checked by numbers in `tests/test_facts.py`.",
        section(page, "Loss"),
        section(page, "Gradient"),
        section(page, "When it helps"),
        section(page, "When it hurts"),
        "## In three frameworks",
        examples.tabs(**words),
        "## Measured",
        measured.of_map(name),
        section(page, "Paper"),
        f"{{py:class}}`API reference <anymax.{page.kind.__name__}>`",
    ]
    return "\n\n".join(parts) + "\n"


def section(page: Page, title: str) -> str:
    return f"## {title}\n\n{page.prose.sections[title]}"


def alternative(page: Page) -> str:
    """What the picture shows, for those who don't see it."""
    return (
        f"Four pictures of {page.prose.keys['example']}: the probability of the first of two classes against its lead, the largest "
        "of three probabilities over the plane of scores, the loss against the margin beside four classic losses, and a Jacobian."
    )


def draw(page: Page, folder: Path) -> None:
    """The portrait that `anymax plot` draws too; made anew where the code of the pictures or of the map is newer."""
    from anymax import plot
    from anymax.cli import pictures as portraits

    target = folder / f"{page.kind.name}.svg"
    own = (Path(anymax.__file__).parent / "mappings" / f"{page.kind.name}.py", PROSE / f"{page.kind.name}.md")
    if not pictures.old(target, (plot.__file__, portraits.__file__, anymax.__file__, *SOURCES, *own)):
        return

    def portrait(plt: Any) -> Any:
        figure = portraits.portrait(page.mapping, portraits.SCORES)
        figure.set_size_inches(8.8, 7.4)  # smaller, so that the words are larger
        return figure

    pictures.save(target, portrait)


SOURCES = (__file__, pictures.__file__)
README = Path(__file__).parents[1] / "_static" / "readme.svg"
THREE = (anymax.Softmax(), anymax.Entmax(1.5), anymax.Sparsemax())


def front(target: Path) -> None:
    """README's picture, which is kept in the repository: `cd docs && python -m generator.maps` draws it anew."""
    from anymax import plot

    def picture(plt: Any) -> Any:
        figure, (left, right) = plt.subplots(1, 2, figsize=(9.0, 3.6), layout="constrained", width_ratios=(1.1, 1))
        plot.bars(THREE, ax=left)
        plot.curves(THREE, ax=right)
        return figure

    pictures.one(target, picture, **{"font.size": 11})


def hero(target: Path) -> str:
    """The picture of the start page: the row of scores of its example under three maps. The Markdown that shows it."""
    from anymax import plot

    def picture(plt: Any) -> Any:
        figure, ax = plt.subplots(figsize=(5.2, 3.4), layout="constrained")
        plot.bars(THREE, ax=ax)
        return figure

    if pictures.old(target, (plot.__file__, *SOURCES)):
        pictures.save(target, picture, **{"font.size": 11})
    words = (
        "Bars: the probabilities that softmax, entmax and sparsemax give to four scores. Softmax gives every class some, entmax leaves "
        "one out, sparsemax two."
    )
    return pictures.shown(f"/generated/{target.name}", words, "hero")


if __name__ == "__main__":
    front(README)
