"""Makes constraints.txt, the versions that the README's commands and `.ci/run` install: `pip install uv && python -m tools.pins`.

uv resolves all of pyproject's extras to the newest releases that install on every Python and system at once, with markers for what only
some of them need; torch stays at the release that stands in the file. Then it asks whether each Python from 3.11 to 3.14 has all of these
as wheels on every system. What comes with torch for CUDA is left out: there torch's own pins decide.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "constraints.txt"
HEAD = """\
# What this repository is tested with: all that its extras install, on Python 3.11 to 3.14. `pip install uv && python -m tools.pins` writes
# this file anew. torch is chosen by hand: change its line, and then make the file again.
"""
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
SYSTEMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28", "aarch64-apple-darwin", "x86_64-pc-windows-msvc")
FOR_CUDA = re.compile(r"(nvidia|cuda)-")


def compiled(*options: str, constraints: str) -> str:
    """What uv resolves the extras to under these constraints, a line a package."""
    command = ["uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--no-config", "--all-extras"]
    command += ["--prerelease", "disallow", *options, "--constraints", "-", "pyproject.toml"]
    environment = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0"}  # torch has no wheels for an older one
    done = subprocess.run(
        command, cwd=ROOT, input=constraints, capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(options)}: {done.stderr}")
    return done.stdout


def main() -> int:
    torch = re.search(r"^torch==.*\n", FILE.read_text(encoding="utf-8"), re.M)
    if not torch:
        raise SystemExit(f"{FILE} has no line 'torch==<release>': that is the torch to resolve for")
    found = compiled("--universal", "--python-version", PYTHONS[0], "--fork-strategy", "fewest", constraints=torch[0])
    pins = "".join(line for line in found.splitlines(keepends=True) if not FOR_CUDA.match(line))
    for python in PYTHONS:
        for system in SYSTEMS:
            options = ("--python-version", python, "--python-platform", system, "--only-binary", ":all:")
            compiled(*options, constraints=pins)
    FILE.write_text(HEAD + pins, encoding="utf-8")
    print(f"{FILE.name}: {pins.count('==')} releases, as wheels for Python {PYTHONS[0]} to {PYTHONS[-1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
