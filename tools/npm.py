"""Puts together the npm package `anymax`, the library's engine in WebAssembly: python tools/npm.py [--out FOLDER] [--pack]

The engine is the one that the explorer's page holds (tools/explorer.py compiles it), so that no compiler is needed here. What is written by
hand is in packaging/npm/; the codes of maps and operations are read from csrc/anymax.h. `--pack` makes the archive that `npm publish` would
send, beside the folder, and says what is in it.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tools import explorer  # noqa: E402

SOURCES = ROOT / "packaging" / "npm"
WRITTEN = (
    "package.json",
    "README.md",
    "anymax.d.ts",
    "anymax.mjs",
    "browser.mjs",
    "maps.mjs",
    "node.mjs",
    "perturbed.mjs",
)
MADE = ("LICENSE", "NOTICE.txt", "anymax.wasm", "codes.mjs", "engine.mjs")  # from elsewhere in the repository
MOST = 550_000  # bytes of the archive
ENUMERATIONS = {"MAP": "map", "OP": "op", "DTYPE": "dtype", "NOISE": "noise"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=ROOT / "build" / "npm", type=Path, metavar="FOLDER")
    parser.add_argument("--pack", action="store_true")
    given = parser.parse_args()
    if stale := explorer.staleness():
        print(stale)
        return 1
    make(given.out)
    print(f"{given.out}: {sum(file.stat().st_size for file in given.out.iterdir()):,} bytes")
    return packed(given.out) if given.pack else 0


def make(out: Path) -> None:
    """The package's files in the folder `out`, which is new, empty, or has an older package and no other file."""
    if out.exists() and (not out.is_dir() or (strange := {file.name for file in out.iterdir()} - {*WRITTEN, *MADE})):
        what = f"has {min(strange)}, which is not of the package" if out.is_dir() else "is a file"
        sys.exit(f"{out} {what}; give a folder that is new or empty")
    out.mkdir(parents=True, exist_ok=True)
    for file in out.iterdir():
        file.unlink()
    for name in WRITTEN:
        shutil.copy(SOURCES / name, out)
    shutil.copy(explorer.PAGE / "engine.mjs", out)
    shutil.copy(explorer.NOTICE, out)
    shutil.copy(ROOT / "LICENSE", out)
    (out / "codes.mjs").write_text(codes((ROOT / "csrc" / "anymax.h").read_text(encoding="utf-8")), encoding="utf-8")
    (out / "anymax.wasm").write_bytes(explorer.wasm_of(explorer.INDEX.read_text(encoding="utf-8")))


def codes(header: str) -> str:
    """A module of the enumerations of the C ABI that the package sends: names of noises as users write them."""
    lines = ["// From csrc/anymax.h, by tools/npm.py."]
    for constant, enumeration in ENUMERATIONS.items():
        found = re.search(rf"enum anymax_{enumeration} \{{(.*?)\}};", header, flags=re.S)
        if not found:
            sys.exit(f"csrc/anymax.h has no enum anymax_{enumeration}, whose codes the package sends")
        body = re.sub(r"/\*.*?\*/", "", found[1], flags=re.S)
        pairs = re.findall(r"ANYMAX_(?!MAPS|OPS)(\w+) = (\d+)", body)
        named = {name.lower() if constant == "NOISE" else name: int(code) for name, code in pairs}
        lines.append(f"export const {constant} = {json.dumps(named)};")
    return "\n".join(lines) + "\n"


def packed(out: Path) -> int:
    npm = shutil.which("npm")
    if not npm:
        sys.exit("there is no npm, which makes the archive; it comes with Node")
    done = subprocess.run(
        [npm, "pack", "--json", "--offline", "--pack-destination", str(out.parent.resolve())],
        cwd=out,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"npm pack failed: {done.stderr}")
    [said] = json.loads(done.stdout)
    print(*sorted(file["path"] for file in said["files"]), sep="\n")
    print(f"{said['filename']}: {said['size']:,} bytes, of {MOST:,} at most; {said['unpackedSize']:,} unpacked")
    return int(said["size"] > MOST)


if __name__ == "__main__":
    sys.exit(main())
