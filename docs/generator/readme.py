"""The table of maps in README.md, from the catalogue and the heads of `docs/maps/*.md`: `(cd docs && python -m generator.readme)`."""

from __future__ import annotations

from pathlib import Path

from anymax.cli import names

from . import maps, text

README = Path(__file__).parents[2] / "README.md"
HEAD = ("map", "exact zeros?", "loss", "when to use")


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


if __name__ == "__main__":
    text.save(README, written(README.read_text(encoding="utf-8")))
