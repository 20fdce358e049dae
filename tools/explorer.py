"""Builds the explorer, `src/anymax/explorer/index.html`: one file, the kernels in it as WebAssembly, that needs no server and no internet.

    python tools/explorer.py                      # compile csrc/ if it has changed, put the page together
    python tools/explorer.py --check              # only say whether the page is what the sources make, byte for byte
    python tools/explorer.py --check --compile    # and whether its kernels are what csrc/ compiles to

The compiler is Clang 14 or later with the C library for WebAssembly: on Debian and Ubuntu
`apt-get install clang lld wasi-libc libclang-rt-14-dev-wasm32 libc++-14-dev-wasm32`. `CLANG` names another one than `clang++`. `wasm-opt`
(of the package binaryen) makes the result quicker. Changes to the page alone need no compiler. Those of Debian 12 give the same bytes
each time; `tools/explorer-kernels.json` has their digest, beside that of the sources, so that a change of either shows without a compiler.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CSRC, PAGE = ROOT / "csrc", ROOT / "src" / "anymax" / "explorer"
INDEX = PAGE / "index.html"
# the digests of the kernels and of the sources that they were compiled from
RECORD = ROOT / "tools" / "explorer-kernels.json"
UNITS = (
    *sorted(f"units/{p.name}" for p in CSRC.glob("units/*.cpp")),
    "doors/abi.cpp",
    "doors/pool.cpp",
    *sorted(f"wasm/{p.name}" for p in CSRC.glob("wasm/*.cpp")),
)
NOT_COMPILED = ("xla_ffi.cpp", "xla_ffi_abi.h", "cpu.hpp")
NOTICE = PAGE / "NOTICE.txt"  # of the libraries that are compiled into the kernels
STYLES = ("style.css", "narrow.css", "print.css")
# in the order in which they build on each other
MODULES = (
    "maps formula names scores story draws state history "
    "engine kernels python looks draw figures desk board entry settings choice closeup tour app"
).split()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 where the page is not what its sources make")
    parser.add_argument("--compile", action="store_true", help="compile csrc/ even if it has not changed")
    given = parser.parse_args()
    if given.check:
        wrong = staleness() or (given.compile and kernels_differ())
        print(wrong or "the page is that of its sources")
        return 1 if wrong else 0
    if given.compile or not INDEX.exists() or record().get("sources") != kernels_fingerprint():
        wasm = compile_kernels()
        packed = base64.b64encode(gzip.compress(wasm, 9, mtime=0)).decode()
        made = {"sources": kernels_fingerprint(), "wasm": hashlib.sha256(wasm).hexdigest()}
        RECORD.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    else:
        packed = packed_of(INDEX.read_text(encoding="utf-8"))
    INDEX.write_text(assemble(packed), encoding="utf-8", newline="\n")
    print(f"{INDEX.relative_to(ROOT)}: {INDEX.stat().st_size:,} bytes")
    return 0


def staleness() -> str:
    """Why the page is not what its sources make; empty where it is."""
    if not INDEX.exists():
        return "there is no page; run: python tools/explorer.py"
    page = INDEX.read_text(encoding="utf-8")
    if record().get("sources") != kernels_fingerprint():
        return "the sources of the kernels have changed; run: python tools/explorer.py"
    if hashlib.sha256(wasm_of(page)).hexdigest() != record().get("wasm"):
        return f"the kernels in the page are not those of {RECORD.relative_to(ROOT)}; run: python tools/explorer.py --compile"
    if page != assemble(packed_of(page)):
        return "the page is not what its sources make; run: python tools/explorer.py"
    return ""


def kernels_differ() -> str:
    """Why the recorded kernels are not what csrc/ compiles to, by the compiler of Debian 12; empty where they are."""
    found = hashlib.sha256(compile_kernels()).hexdigest()
    return "" if found == record().get("wasm") else f"csrc/ compiles to other kernels, with the digest {found}"


def record() -> dict[str, str]:
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def kernels_fingerprint() -> str:
    files = [p for p in CSRC.rglob("*.[ch]*") if p.name not in NOT_COMPILED]
    return fingerprint(sorted(files), flags())


def fingerprint(files: list[Path], *words: str) -> str:
    digest = hashlib.sha256("\n".join(words).encode())
    for file in files:
        text = file.read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"\0{file.relative_to(ROOT).as_posix()}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()[:32]


def flags() -> str:
    """Those of CMakeLists.txt, for 128-bit vectors and no threads; -O2, since the page is to be small."""
    found = re.search(r"^set\(ANYMAX_FLAGS (.*)\)$", (ROOT / "CMakeLists.txt").read_text(encoding="utf-8"), flags=re.M)
    if not found:
        sys.exit("CMakeLists.txt has no line set(ANYMAX_FLAGS ...), whose flags are those of the page's kernels too")
    return f"{found[1]} -O2 -std=c++17 -msimd128 -fno-exceptions -fno-rtti -fno-threadsafe-statics -fvisibility=hidden -Wall"


def compile_kernels() -> bytes:
    clang = shlex.split(os.environ.get("CLANG", "clang++"))
    if not shutil.which(clang[0]):
        sys.exit(f"there is no {clang[0]}, which compiles the kernels for the page; see the head of tools/explorer.py")
    defines = ["-DANYMAX_NO_THREADS", "-DANYMAX_MAPS_ALONE", "-DANYMAX_HAVE_SIMD128=1", "-DANYMAX_UNIT=simd128"]
    with tempfile.TemporaryDirectory() as folder:
        objects = []
        for unit in UNITS:
            objects.append(f"{folder}/{unit.replace('/', '-')}.o")
            run(
                *clang,
                "--target=wasm32-wasi",
                *flags().split(),
                f"-I{CSRC}",
                *defines,
                "-c",
                str(CSRC / unit),
                "-o",
                objects[-1],
            )
        result = f"{folder}/anymax.wasm"
        exports = [f"-Wl,--export={name}" for name in ("malloc", "free", *exported())]
        linked = ["-mexec-model=reactor", "-Wl,--no-entry", "-Wl,--gc-sections", "-Wl,--strip-all"]
        # an overflow traps, and does not run into the data
        linked += ["-Wl,--stack-first", "-Wl,-z,stack-size=1048576"]
        run(*clang, "--target=wasm32-wasi", *linked, *exports, *objects, "-o", result)
        if shutil.which("wasm-opt"):
            run("wasm-opt", "-O2", "--enable-simd", "--enable-bulk-memory", "--strip-producers", result, "-o", result)
        return Path(result).read_bytes()


def exported() -> list[str]:
    texts = [file.read_text(encoding="utf-8") for file in sorted(CSRC.glob("wasm/*.cpp"))]
    return [name for text in texts for name in re.findall(r"^EXPORT .*?((?:explorer|rows)_\w+)\(", text, flags=re.M)]


def run(*command: str) -> None:
    if subprocess.run(command).returncode:
        sys.exit(f"this failed: {shlex.join(command)}")


def assemble(packed: str) -> str:
    """The page, with these kernels, which are packed."""
    template = (PAGE / "page.html").read_text(encoding="utf-8")
    version = re.search(r'"(.+)"', (ROOT / "src/anymax/_version.py").read_text(encoding="utf-8"))
    assert version
    pieces = {
        "NOTICE": NOTICE.read_text(encoding="utf-8"),
        "VERSION": version[1],
        "STYLE": "\n".join((PAGE / name).read_text(encoding="utf-8") for name in STYLES),
        "SCRIPT": "\n".join(f"// -- {name} --\n{joined(PAGE / f'{name}.mjs')}" for name in MODULES),
        "KERNELS": packed,
    }
    missing = set(re.findall(r"\{\{(\w+)\}\}", template)) ^ set(pieces)
    if missing:
        sys.exit(f"page.html and tools/explorer.py disagree on {', '.join(sorted(missing))}")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: pieces[found[1]], template)


def joined(module: Path) -> str:
    """A module as part of one script, since file:// has no imports: a function of its own, and the names that it exports."""
    text = module.read_text(encoding="utf-8")
    text = re.sub(r"^import [^;]*;\n", "", text, flags=re.M)
    names = re.findall(r"^export (?:async )?(?:const|let|function|class) ([\w$]+)", text, flags=re.M)
    text = re.sub(r"^export ", "", text, flags=re.M)
    if "</script" in text:
        sys.exit(
            f"{module.name}: the letters of a closing script tag would end the page's script; write '<' + '/script'"
        )
    return f"const {{ {', '.join(names)} }} = (() => {{\n{text}return {{ {', '.join(names)} }};\n}})();"


def packed_of(page: str) -> str:
    """The kernels that a page holds, as it holds them."""
    found = re.findall(r'<script type="application/wasm\+gzip" id="kernels">([\w+/=]+)</script>', page)
    if len(found) != 1:
        sys.exit(f"{INDEX} does not hold kernels once; delete it and build again")
    return found[0]


def wasm_of(page: str) -> bytes:
    return gzip.decompress(base64.b64decode(packed_of(page), validate=True))


if __name__ == "__main__":
    sys.exit(main())
