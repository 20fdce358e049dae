"""Pictures in two versions, for the light and the dark theme: the same drawing twice, with another ink and without a ground."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

INK = "#dfe3e8"  # of what is neutral, on the dark ground of the theme
DARK = {
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "hatch.color"), INK
    ),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
}


BRIGHTER = {"#0072b2": "#2f8fd6", "#5a5a5a": "#9a9a9a"}  # colours that are too dark on that ground


def dark(target: Path) -> Path:
    """Where the version for the dark theme lies."""
    return target.with_stem(f"{target.stem}-dark")


def old(target: Path, sources: Iterable[str | Path | None]) -> bool:
    """Whether the picture is missing in one of its versions, or a source is newer than it."""
    drawn = [path.stat().st_mtime for path in (target, dark(target)) if path.exists()]
    return len(drawn) < 2 or min(drawn) < max(Path(path).stat().st_mtime for path in sources if path)


def code() -> list[Path]:
    """The files that draw the pictures of maps."""
    from anymax import plot

    return sorted(Path(plot.__file__).parent.glob("*.py"))


def save(target: Path, picture: Callable[[Any], Any], **settings: Any) -> None:
    """What `picture` draws with pyplot, in both versions."""
    one(target, picture, **settings)
    one(dark(target), picture, **{**DARK, **settings})
    drawn = dark(target).read_text(encoding="utf-8")
    for colour, brighter in BRIGHTER.items():
        drawn = drawn.replace(colour, brighter)
    dark(target).write_text(drawn, encoding="utf-8")


def one(target: Path, picture: Callable[[Any], Any], **settings: Any) -> None:
    """What `picture` draws with pyplot, in a file that is the same for the same picture."""
    from anymax import plot
    from anymax.cli import pictures

    pictures.prepare()
    plt = plot.style.pyplot()
    with plt.rc_context({"svg.hashsalt": target.stem, **settings}):
        figure = picture(plt)
        figure.savefig(target, metadata={"Date": None})
    plt.close(figure)


def shown(path: str, words: str, kind: str = "portrait") -> str:
    """The Markdown that shows both, each under its theme."""
    versions = (("light", Path(path)), ("dark", dark(Path(path))))
    return "\n\n".join(
        f"```{{image}} {where.as_posix()}\n:alt: {words}\n:class: only-{theme} {kind}\n```" for theme, where in versions
    )
