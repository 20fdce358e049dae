"""Pages that are read on a forge too: links to files of the repository, which on the site lead to the pages made of them.

A `%` line, which the site leaves out, says there where to read what the site includes.
"""

from __future__ import annotations

import re

# where a file of the repository is on the site, seen from docs/
_PAGES = (
    (r"\]\((maps|scores)/(\w+)\.md", r"](generated/\1/\2.md"),
    (r"\]\(\.\./experiments/results/README\.md", "](evidence.md"),
    (r"\]\(\.\./experiments/results/(\w+)\.md", r"](generated/evidence/\1.md"),
    (r"\]\(\.\./benchmarks/results/README\.md", "](generated/benchmarks.md"),
)


def on_site(page: str) -> str:
    """The page with links to the site's pages."""
    for there, here in _PAGES:
        page = re.sub(there, here, page)
    return page


def read(app: object, name: str, source: list[str]) -> None:
    """For Sphinx's event `source-read`; pages in folders are written for the site."""
    if "/" not in name:
        source[0] = on_site(source[0])
