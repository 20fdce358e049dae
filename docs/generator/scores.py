"""A page for each family of transforms and margins: prose (`docs/scores/<name>.md`), pictures, examples."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import numpy as np

import anymax
from anymax import margins, transforms

from . import examples, pictures, text

PROSE = Path(__file__).parents[1] / "scores"
SECTIONS = ("Definition", "Gradient", "When it helps", "When it hurts", "Paper")
ORDER = ("temperature", "scalable", "mask", "prior", "normalize", "truncation", "tokens", "cosine", "noise", "margins")
KINDS = ("transform", "noise", "margin")  # how the picture is drawn and the example written
VECTOR = (2.0, 1.0, 0.1, -1.0)
ANGLES = np.linspace(0.0, np.pi, 361)


@dataclasses.dataclass(frozen=True)
class Page:
    name: str
    prose: text.Prose

    @property
    def made(self) -> Any:
        return eval(self.prose.keys["example"], vars(anymax).copy())

    @property
    def takes_scores(self) -> bool:
        """False where the example makes scores from an embedding."""
        return self.made(np.array(VECTOR)).shape == (len(VECTOR),)


def pages() -> list[Page]:
    found = {path.stem for path in PROSE.glob("*.md")}
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
        for n, f in vars(transforms).items()
        if inspect.isfunction(f) and not n.startswith("_") and f.__module__.startswith(transforms.__name__)
    }
    kinds = {
        n
        for n, c in vars(margins).items()
        if inspect.isclass(c) and issubclass(c, margins.Margin) and c is not margins.Margin
    }
    return made | kinds


def write(folder: Path, pictures: bool = True) -> None:
    found = pages()
    for page in found:
        text.save(folder / f"{page.name}.md", markdown(page))
        if pictures:
            draw(page, folder / f"{page.name}.svg")
    rows = [
        (f"[{page.prose.keys['title']}]({page.name}.md)", page.prose.introduction.replace("\n", " ")) for page in found
    ]
    listed = "\n".join(page.name for page in found)
    text.save(
        folder / "index.md",
        "# Transforms and margins\n\nA transform takes scores to scores, and composes with every map, loss and attention. A margin needs "
        "the target, and belongs to a loss.\n\n"
        + text.table(("", ""), rows)
        + f"\n\n```{{toctree}}\n:hidden:\n\n{listed}\n```\n",
    )


def markdown(page: Page) -> str:
    keys, kind = page.prose.keys, page.prose.keys["kind"]
    parts = [
        f"# {keys['title']}",
        text.found_by(keys.get("search", keys["title"])),
        page.prose.introduction,
        pictures.shown(f"{page.name}.svg", ALTERNATIVES[kind].format(keys["example"])),
    ]
    for title in SECTIONS[:-1]:
        parts.append(f"## {title}\n\n{page.prose.sections[title]}")
        if title == "Definition" and kind == "transform" and page.takes_scores:
            parts.append(on_one_vector(page))
    template = {"margin": MARGIN, "noise": TRANSFORM, "transform": TRANSFORM}[kind]
    parts += ["## In three frameworks", examples.tabs(templates=template, make=keys["example"])]
    parts += [f"## Paper\n\n{page.prose.sections['Paper']}"]
    module = "margins" if kind == "margin" else "transforms"
    parts.append(f"{{doc}}`API reference </generated/api/{module}>`")
    return "\n\n".join(parts) + "\n"


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


ALTERNATIVES = {
    "transform": "Bars: the softmax probabilities of six scores, before and after {}.",
    "noise": "Lines: for three classes, how often each has the largest noisy score, against the softmax and the PerturbMax probabilities.",
    "margin": "Two pictures against the angle between embedding and class: the cosine that the loss sees, and the loss, for five margins.",
}
SIX = np.array([2.0, 1.4, 1.0, 0.1, -0.5, -1.0])
WIDER = {  # the page's own example, for six scores
    "mask": transforms.mask(np.array([True, True, False, True, True, False])),
    "prior": transforms.prior(log_p=np.log([0.4, 0.3, 0.1, 0.1, 0.05, 0.05])),
    "truncation": transforms.topk(3),
    "cosine": transforms.cosine(np.eye(6)),
}


def draw(page: Page, target: Path) -> None:
    from anymax import plot

    made = [str(path) for path in Path(transforms.__file__).parent.glob("*.py")]
    modules = (plot.__file__, *made, margins.__file__, pictures.__file__, __file__)
    if pictures.old(target, (*modules, PROSE / f"{page.name}.md")):
        drawn = {"transform": _bars, "noise": _frequencies, "margin": _angles}[page.prose.keys["kind"]]
        pictures.save(target, lambda plt: drawn(page, plot, plt))


def _bars(page: Page, plot: Any, plt: Any) -> Any:
    figure, ax = plt.subplots(figsize=(6.0, 3.4), layout="constrained")
    transform = WIDER.get(page.name) or page.made
    after = anymax.softmax(transform(SIX))
    at = np.arange(len(SIX))
    name = page.prose.keys["example"].split("(")[0].removeprefix("transforms.")
    ax.bar(at - 0.2, anymax.softmax(SIX), 0.38, label="softmax", color=plot.style.COLOURS[0])
    ax.bar(
        at + 0.2, after, 0.38, label=f"{name}, then softmax", color=plot.style.COLOURS[1], hatch="//", edgecolor="white"
    )
    for i in np.flatnonzero(after == 0):
        ax.text(i + 0.2, 0.004, "0", ha="center", va="bottom", fontsize=9)
    ax.set_xticks(at, [f"{v:g}".replace("-", "−") for v in SIX])
    ax.set(xlabel="score", ylabel="probability")
    ax.legend(frameon=False)
    return figure


def _frequencies(page: Page, plot: Any, plt: Any) -> Any:
    figure, ax = plt.subplots(figsize=(6.0, 3.4), layout="constrained")
    t = np.linspace(-4.0, 4.0, 41)
    scores = np.stack([t, np.zeros_like(t), -np.ones_like(t)], axis=-1)
    for i, kind in enumerate(("gumbel", "normal", "uniform")):
        exact = anymax.perturb_max(scores, noise=kind)[:, 0]
        drawn = transforms.noise(kind, generator=i)(np.broadcast_to(scores, (2000, *scores.shape)))
        ax.plot(
            t,
            exact,
            label=f"{kind}: PerturbMax" + " = softmax" * (kind == "gumbel"),
            color=plot.style.COLOURS[i],
            linestyle=plot.style.DASHES[i],
        )
        ax.plot(t, (drawn.argmax(axis=-1) == 0).mean(axis=0), "osD"[i], color=plot.style.COLOURS[i], markersize=3.5)
    ax.set(xlabel="$t$, with the scores $(t, 0, -1)$", ylabel="how often the first class is largest")
    ax.legend(frameon=False, title="lines: exact; points: 2,000 draws", fontsize=8, title_fontsize=8)
    return figure


def _angles(page: Page, plot: Any, plt: Any) -> Any:
    figure, (above, below) = plt.subplots(2, 1, figsize=(6.0, 6.6), layout="constrained", sharex=True)
    cosines = np.stack([np.cos(ANGLES), np.zeros_like(ANGLES)], axis=-1)
    y = np.zeros(len(ANGLES), dtype=np.int64)
    shown = [
        ("none", margins.AM(0.0)),
        ("AM(0.35)", margins.AM(0.35)),
        ("ArcFace(0.5)", margins.ArcFace(0.5)),
        ("SphereFace(2)", margins.SphereFace(2)),
    ]
    for i, (name, margin) in enumerate(shown):
        line = {
            "color": plot.style.COLOURS[i],
            "linestyle": plot.style.DASHES[i % len(plot.style.DASHES)],
            "label": name,
        }
        above.plot(np.degrees(ANGLES), margin(cosines, y)[:, 0], **line)
        below.plot(
            np.degrees(ANGLES),
            anymax.margin_loss(anymax.Softmax(), cosines, y, margin=margin, scale=8.0, reduction="none"),
            **line,
        )
    sparse = anymax.margin_loss(anymax.Entmax(1.5), cosines, y, margin=margins.AM(0.35), scale=8.0, reduction="none")
    below.plot(
        np.degrees(ANGLES), sparse, color=plot.style.COLOURS[4], linewidth=2.6, alpha=0.8, label="AM(0.35), entmax 1.5"
    )
    above.set(ylabel="what the loss takes for its cosine")
    below.set(xlabel="angle to the target's class, degrees", ylabel="loss, two classes, scale 8")
    above.legend(frameon=False, fontsize=8)
    below.legend(frameon=False, fontsize=8)
    return figure


TRANSFORM = {
    "NumPy": """
        import numpy as np
        import anymax
        from anymax import transforms

        transform = {make}
        x = np.array([[2.0, 1.0, 0.1, -1.0]])
        print(transform(x).round(3))
        print(anymax.sparsemax(transform(x)).round(3))
    """,
    "PyTorch": """
        import torch
        import anymax
        from anymax import transforms

        transform = {make}
        x = torch.tensor([[2.0, 1.0, 0.1, -1.0]], requires_grad=True)
        p = anymax.softmax(transform(x))
        print(p)
        print(torch.autograd.grad(p[0, 0], x))
    """,
    "JAX": """
        import jax
        import jax.numpy as jnp
        import anymax
        from anymax import transforms

        transform = {make}
        x = jnp.array([[2.0, 1.0, 0.1, -1.0]])
        print(jax.jit(lambda s: anymax.softmax(transform(s)))(x))
        print(jax.grad(lambda s: anymax.softmax(transform(s))[0, 0])(x))
    """,
}
MARGIN = {
    "NumPy": """
        import numpy as np
        import anymax
        from anymax import Entmax, margins

        margin = {make}
        cosines = np.array([[0.9, 0.1, -0.3], [0.2, 0.5, 0.4]])
        y = np.array([0, 1])
        print(margin(cosines, y).round(3))
        loss = anymax.margin_loss(Entmax(1.5), cosines, y, margin=margin, scale=8.0)
        print(loss.round(3))
    """,
    "PyTorch": """
        import torch
        import anymax
        from anymax import Softmax, margins

        torch.manual_seed(0)
        head = anymax.nn.MarginHead(16, 3, Softmax(), margin={make}, scale=8.0)
        embeddings = torch.randn(4, 16, requires_grad=True)
        loss = head(embeddings, torch.tensor([0, 1, 2, 0]))
        loss.backward()
        print(loss)
        print(head.weight.grad.shape)
    """,
    "JAX": """
        import jax
        import jax.numpy as jnp
        import anymax
        from anymax import Softmax, margins

        margin = {make}
        cosines = jnp.array([[0.9, 0.1, -0.3], [0.2, 0.5, 0.4]])
        y = jnp.array([0, 1])
        loss = lambda c: anymax.margin_loss(Softmax(), c, y, margin=margin, scale=8.0)
        print(loss(cosines))
        print(jax.jit(jax.grad(loss))(cosines))
    """,
}
