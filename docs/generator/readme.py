"""The tables in README.md and in pages that are read on a forge, kept as they should be: `(cd docs && python -m generator.readme)`."""

from __future__ import annotations

import re
from pathlib import Path

from anymax.cli import names

from . import choose, evidence, maps, measured, migrating, scores, text

DOCS = Path(__file__).parents[1]
README = DOCS.parent / "README.md"
HEAD = ("map", "exact zeros?", "loss", "when to use")
# what stands in a page between `<!-- made: NAME -->` and `<!-- end -->`
MADE = {
    "promises": maps.promises,
    "change": lambda: choose.needs("change"),
    "keep": lambda: choose.needs("keep"),
    "costs": measured.costs,
    "learned": measured.learned,
    "runs": measured.outcomes,
    "errors": measured.errors,
    "evidence": evidence.index,
    "maps": maps.index,
    "scores": scores.index,
    "migrating": migrating.rows,
}


def table() -> str:
    """A row a map: `shown` or the example, `zeros` or the fact, the loss to call, `when`."""
    rows = []
    for page in maps.pages():
        keys, sparse = page.prose.keys, page.mapping.facts.sparse
        rows.append(
            (
                keys.get("shown", f"`{keys['example']}`"),
                keys.get("zeros", "yes" if sparse else "no"),
                f"`{names.loss(page.kind.name) or maps.generic_loss(page.mapping)}`",
                keys["when"],
            )
        )
    return text.table(HEAD, rows)


def written(readme: str) -> str:
    """The README with the table as it should be."""
    before, after = readme.split("| " + " | ".join(HEAD) + " |\n", 1)
    return before + table() + "\n\n" + after.split("\n\n", 1)[1]


def written_pages() -> list[Path]:
    """The pages that may have such tables."""
    return [*DOCS.glob("*.md"), *DOCS.glob("*/README.md")]


def renewed(page: str) -> str:
    """A page of docs/ with its tables as they should be."""
    return re.sub(r"(?s)(<!-- made: (\w+) -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}\n{MADE[m[2]]()}\n\n{m[3]}", page)


if __name__ == "__main__":
    text.save(README, written(README.read_text(encoding="utf-8")))
    for path in written_pages():
        text.save(path, renewed(path.read_text(encoding="utf-8")))
