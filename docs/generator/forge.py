"""Pages that are read on a forge too: what a forge can't show stands in comments, and links lead to files.

`<!-- index: WORDS -->` finds the page in the search; `<!-- site ... -->` holds what only the site shows, such as contents. The site leaves
out a line that begins with `> In the repository`, and its links lead to the pages made of the files. `<a id="NAME"></a>` is a place that
links find on both.
"""

from __future__ import annotations

import re

from . import text

# where a file of the repository is on the site, seen from docs/
_PAGES = (
    (r"\]\((maps|scores)/README\.md", r"](generated/\1/index.md"),
    (r"\]\((maps|scores)/(\w+)\.md", r"](generated/\1/\2.md"),
    (r"\]\(gallery/", "](auto_gallery/index.rst"),
    (r"\]\(\.\./experiments/results/README\.md", "](evidence.md"),
    (r"\]\(\.\./experiments/results/(\w+)\.md", r"](generated/evidence/\1.md"),
    (r"\]\(\.\./benchmarks/results/README\.md", "](generated/benchmarks.md"),
)


def on_site(page: str) -> str:
    """The page with links to the site's pages, and with what the site alone shows."""
    for there, here in _PAGES:
        page = re.sub(there, here, page)
    page = re.sub(r'(?m)^<a id="([\w-]+)"></a>$', r"(\1)=", page)
    page = re.sub(r"(?m)^> In the repository.*\n", "", page)
    page = re.sub(r"<!-- index: (.*?) -->", lambda m: text.found_by(m[1]), page)
    return re.sub(r"(?s)<!-- site\n(.*?)\n-->", r"\1", page)


def read(app: object, name: str, source: list[str]) -> None:
    """For Sphinx's event `source-read`; pages in folders are written for the site."""
    if "/" not in name:
        source[0] = on_site(source[0])
