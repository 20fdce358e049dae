"""The addresses of the project, from `[project.urls]` of pyproject.toml: one setting puts them into the top bar and on the start page."""

from __future__ import annotations

import tomllib
from pathlib import Path

from . import text

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
OWN = ("documentation", "homepage")  # this site itself
SOURCES = ("source", "repository", "source code", "github")  # what the field calls the home of the code
ICONS = {
    **dict.fromkeys(SOURCES, "fa-solid fa-code-branch"),
    "issues": "fa-solid fa-bug",
    "changelog": "fa-solid fa-clock-rotate-left",
}


def urls(pyproject: Path = PYPROJECT) -> dict[str, str]:
    """Their names and addresses, without those of this site; empty while the project has none."""
    known = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"].get("urls", {})
    return {name: url for name, url in known.items() if name.lower() not in OWN}


def icons(pyproject: Path = PYPROJECT) -> list[dict[str, str]]:
    """For the top bar: those that have an icon."""
    return [
        {"name": name, "url": url, "icon": ICONS[name.lower()]}
        for name, url in urls(pyproject).items()
        if name.lower() in ICONS
    ]


def links(pyproject: Path = PYPROJECT) -> str:
    """For the start page: a line, or nothing."""
    return " · ".join(f"[{text.plain(name)}]({url})" for name, url in urls(pyproject).items())
