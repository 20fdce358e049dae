"""Whether the built site's search shows the right page first: asked of its own JavaScript, in Node."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

ASK = Path(__file__).with_name("ask.js")
FIRST = {  # what newcomers type, and where they want to be
    "learnable alpha": "generated/maps/entmax",
    "learned alpha": "generated/maps/entmax",
    "sparse attention": "attention",
    "linear attention": "attention",
    "top-p": "generated/scores/truncation",
    "top-k": "generated/scores/truncation",
    "label smoothing": "losses",
    "gumbel": "generated/scores/noise",
    "temperature": "generated/scores/temperature",
    "arcface": "generated/scores/margins",
    "install": "start",
    "huggingface": "huggingface",
    "gpu": "engines",
}


def entries(folder: Path) -> dict[str, set[str]]:
    """The main entries of the site's index, which pages make for their own words, with the pages that have them."""
    body = (folder / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(body[body.index("(") + 1 : body.rindex(")")])
    found: dict[str, set[str]] = {}
    for entry, places in index["indexentries"].items():
        for page, _, main in places:
            if main:
                found.setdefault(entry, set()).add(index["docnames"][page])
    return found


def ask(folder: Path, queries: list[str]) -> list[list[str]]:
    """For each query the pages that the search finds, best first."""
    node = shutil.which("node")
    if node is None:
        raise FileNotFoundError("node is not installed")
    said = subprocess.run(
        [node, str(ASK), str(folder)], input=json.dumps(queries), capture_output=True, text=True, check=False
    )
    if said.returncode:
        raise RuntimeError(f"the site's search does not run in Node: {said.stderr.strip()}")
    return json.loads(said.stdout)


def problems(folder: Path, first: dict[str, str] | None = None) -> list[str]:
    """A line for each query whose first result is another page: those of `first`, and each page's own entries."""
    first = FIRST if first is None else first
    wanted = entries(folder)
    out = [
        f"search: {len(pages)} pages have the entry {entry!r}: {', '.join(sorted(pages))}"
        for entry, pages in wanted.items()
        if len(pages) > 1
    ]
    wanted |= {query: {page} for query, page in first.items()}
    for (query, pages), found in zip(wanted.items(), ask(folder, list(wanted)), strict=True):
        if not found or found[0] not in pages:
            out.append(
                f"search: {query!r} finds {found[0] if found else 'nothing'} first, not {' or '.join(sorted(pages))}"
            )
    return out
