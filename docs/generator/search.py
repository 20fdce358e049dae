"""What the site's search knows of its pages, and whether the built site's shows the right ones: asked of its own JavaScript, in Node."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from . import text

ASK = Path(__file__).with_name("ask.js")
FIRST = {  # what newcomers type, and where they want to be
    "learnable alpha": "learn_alpha",
    "learned alpha": "learn_alpha",
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
    "softmax": "generated/maps/softmax",
    "attention": "attention",
    "calibration": "generated/scores/temperature",
    "learn alpha": "learn_alpha",
    "mask": "generated/scores/mask",
    "alpha": "generated/maps/entmax",
    "zeros": "generated/maps/sparsemax",
    "distributed": "many_machines",
    "many machines": "many_machines",
    "sample": "decoding",
    "sampling": "decoding",
    "decoding": "decoding",
    "speculative decoding": "decoding",
    "gradient": "losses",
    "torch": "start",
    "loss": "losses",
    "cross entropy": "losses",
    "memory": "large_vocabularies",
    "large vocabulary": "large_vocabularies",
    "router": "routers",
    "mixture of experts": "routers",
    "graph": "segments",
    "ragged": "segments",
    "sinkhorn": "transport",
    "optimal transport": "transport",
    "doubly stochastic": "transport",
    "hyper-connections": "transport",
    "log prob": "distributions",
    "sklearn": "sklearn",
    "jax": "jax",
    "jit": "jax",
    "onnx": "export",
    "export": "export",
    "pandas": "pandas",
    "kl": "distributions",
    "reproducible seed": "decoding",
    "supported versions": "versions",
    "windows": "versions",
    "vllm": "vllm",
    "entmax15": "generated/maps/entmax",
    "which map": "choose",
}
# pages that record what was measured, tried or changed: how their names begin. The search shows them after those that explain.
RECORDS = ("generated/benchmarks", "generated/evidence/", "evidence", "sklearn_defaults", "changelog", "contributing")
COMMON = (  # words of many pages, for which no record may come first
    "accuracy", "classes", "cpu", "distribution", "faster", "gradient", "jax", "label", "memory", "model", "numpy", "probability",
    "scores", "sparse", "torch", "training",
)  # fmt: skip


def write(folder: Path) -> None:
    """`records.js`, by which `docs/_static/found.js` knows the records."""
    text.save(folder / "records.js", f"const RECORDS = {json.dumps(RECORDS)};\n")


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
    """A line for each query whose first result is another page: those of `first`, and each page's own entries. A line, too, for each
    that lists a page twice, and for each common word with a record first."""
    first = FIRST if first is None else first
    wanted = entries(folder)
    out = [
        f"search: {len(pages)} pages have the entry {entry!r}: {', '.join(sorted(pages))}"
        for entry, pages in wanted.items()
        if len(pages) > 1
    ]
    wanted |= {query: {page} for query, page in first.items()}
    queries = [*wanted, *(word for word in COMMON if word not in wanted)]
    for query, found in zip(queries, ask(folder, queries), strict=True):
        pages = wanted.get(query)
        if pages and (not found or found[0] not in pages):
            out.append(
                f"search: {query!r} finds {found[0] if found else 'nothing'} first, not {' or '.join(sorted(pages))}"
            )
        if not pages and found and found[0].startswith(RECORDS):
            out.append(f"search: {query!r} finds the record {found[0]} first")
        twice = sorted({page for page in found if found.count(page) > 1})
        if twice:
            out.append(f"search: {query!r} lists {', '.join(twice)} more than once")
    return out
