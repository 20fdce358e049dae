"""What may be wrong with the built site: assets of another server, links to nowhere, a search that finds something else.

`python -m generator.site FOLDER` in `docs/`.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from . import search

_ASSETS = {**dict.fromkeys(("img", "script", "iframe", "source", "video", "audio", "embed"), "src"), "link": "href"}
# relations of <link> that load nothing
_NO_ASSETS = set("canonical next prev search index genindex author license help".split())
_FOREIGN = re.compile(r"""(?:@import\s*|url\()\s*["']?((?:https?:)?//[^"')\s;]+)""")


class _Page(HTMLParser):
    """The assets, links and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.assets: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self.assets += _FOREIGN.findall(given.get("style", ""))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif given.get(_ASSETS.get(tag, "")) and not set(given.get("rel", "").split()) & _NO_ASSETS:
            self.assets.append(given[_ASSETS[tag]])


def problems(folder: Path) -> list[str]:
    """A line for each asset that is foreign or missing, and for each link inside the site that leads nowhere."""
    pages = {
        path.resolve(): _Page(path.read_text(encoding="utf-8"))
        for path in sorted(folder.rglob("*.html"))
        if "_static" not in path.parts
    }
    found = []
    for path, page in pages.items():
        name = path.relative_to(folder.resolve())
        for asset in page.assets:
            if urlsplit(asset).netloc:
                found.append(f"{name}: asset of another server: {asset}")
            elif not asset.startswith("data:") and not _at(path, asset).exists():
                found.append(f"{name}: asset that is not there: {asset}")
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = _at(path, link)
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                found.append(f"{name}: link to nowhere: {link}")
            elif "=" in parts.fragment:  # a state that the page itself reads, as the explorer's #story=1
                continue
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{name}: link to an anchor that is not there: {link}")
    for path in sorted(folder.rglob("*.css")):
        found += [
            f"{path.relative_to(folder)}: asset of another server: {url}"
            for url in _FOREIGN.findall(path.read_text(encoding="utf-8"))
        ]
    return found


def _at(page: Path, link: str) -> Path:
    path = unquote(urlsplit(link).path)
    return (page.parent / path).resolve() if path else page


def main(folder: Path) -> int:
    wrong = problems(folder)
    try:
        wrong += search.problems(folder)
        searched = "the search finds each page by its own words"
    except FileNotFoundError as error:
        searched = f"the search was not tried: {error}"
    print("\n".join(wrong) or f"every asset is local, every link inside the site leads somewhere, {searched}")  # noqa: T201
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
