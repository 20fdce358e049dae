"""The conda recipe for a release, whose source is the file on PyPI: python tools/conda.py dist/anymax-0.1.0.tar.gz > recipe.yaml"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "packaging" / "conda" / "recipe.yaml"
CHECKOUT = "source:\n  path: ../..\n"
RELEASE = """source:
  url: https://pypi.org/packages/source/a/anymax/anymax-${{{{ version }}}}.tar.gz
  sha256: {digest}
"""


def main() -> int:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(recipe(Path(sys.argv[1])), end="")
    return 0


def recipe(archive: Path) -> str:
    text = RECIPE.read_text(encoding="utf-8")
    version = re.search(r'^  version: "(.*)"$', text, flags=re.M)
    if not version or archive.name != f"anymax-{version[1]}.tar.gz":
        sys.exit(f"{archive.name} is not the release of {RECIPE}, anymax-{version and version[1]}.tar.gz")
    if text.count(CHECKOUT) != 1:
        sys.exit(f"{RECIPE} does not have its source in the two lines that this script replaces:\n{CHECKOUT}")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    head = "# Made by tools/conda.py of anymax.\n"
    return head + text[text.index("schema_version") :].replace(CHECKOUT, RELEASE.format(digest=digest))


if __name__ == "__main__":
    sys.exit(main())
