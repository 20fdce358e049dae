"""Builds the explorer, `src/anymax/explorer/index.html`: one file, the kernels in it as WebAssembly, that needs no server and no internet.

    python tools/explorer.py            # compile csrc/ if it has changed, put the page together
    python tools/explorer.py --check    # only say whether the page is that of the sources

The compiler is Clang 14 or later with the C library for WebAssembly: on Debian and Ubuntu
`apt-get install clang lld wasi-libc libclang-rt-14-dev-wasm32 libc++-14-dev-wasm32`. `CLANG` names another one than `clang++`. `wasm-opt`
(of the package binaryen) makes the result quicker. Changes to the page alone need no compiler.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import hashlib
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
UNITS = (
    *sorted(f"units/{p.name}" for p in CSRC.glob("units/*.cpp")),
    "doors/abi.cpp",
    "doors/pool.cpp",
    *sorted(f"wasm/{p.name}" for p in CSRC.glob("wasm/*.cpp")),
)
NOT_COMPILED = ("xla_ffi.cpp", "xla_ffi_abi.h", "cpu.hpp")
STYLES = ("style.css", "narrow.css", "print.css")
# in the order in which they build on each other
MODULES = (
    "maps formula names scores story draws state history "
    "engine kernels python looks draw figures desk board entry settings choice closeup tour app"
).split()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 where the page is older than its sources")
    if parser.parse_args().check:
        stale = staleness()
        print(stale or "the page is that of its sources")
        return 1 if stale else 0
    old = INDEX.read_text(encoding="utf-8") if INDEX.exists() else ""
    if mark(old, "kernels") == kernels_fingerprint():
        wasm = wasm_of(old)
    else:
        wasm = compile_kernels()
    INDEX.write_text(assemble(wasm), encoding="utf-8")
    print(
        f"{INDEX.relative_to(ROOT)}: {INDEX.stat().st_size:,} bytes, the kernels {len(wasm):,} before they are packed"
    )
    return 0


def staleness() -> str:
    """Why the page has to be built again; empty where it is that of its sources."""
    page = INDEX.read_text(encoding="utf-8") if INDEX.exists() else ""
    changed = [
        what
        for what, now in (("kernels", kernels_fingerprint()), ("page", page_fingerprint()))
        if mark(page, what) != now
    ]
    if not changed:
        return ""
    return f"the sources of the {' and the '.join(changed)} have changed; run: python tools/explorer.py"


def mark(page: str, what: str) -> str | None:
    """The fingerprint that a page was built with."""
    found = re.search(rf'<meta name="anymax-{what}" content="(\w+)">', page)
    return found[1] if found else None


def kernels_fingerprint() -> str:
    files = [p for p in CSRC.rglob("*.[ch]*") if p.name not in NOT_COMPILED]
    return fingerprint(sorted(files), flags())


def page_fingerprint() -> str:
    names = ("page.html", *STYLES, *(f"{name}.mjs" for name in MODULES))
    return fingerprint([PAGE / name for name in names])


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
        linked += [
            "-Wl,--stack-first",
            "-Wl,-z,stack-size=1048576",
        ]  # an overflow traps, and does not run into the data
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


def assemble(wasm: bytes) -> str:
    template = (PAGE / "page.html").read_text(encoding="utf-8")
    version = re.search(r'"(.+)"', (ROOT / "src/anymax/_version.py").read_text(encoding="utf-8"))
    assert version
    pieces = {
        "MARKS": f'<meta name="anymax-kernels" content="{kernels_fingerprint()}">\n'
        f'<meta name="anymax-page" content="{page_fingerprint()}">',
        "VERSION": version[1],
        "STYLE": "\n".join((PAGE / name).read_text(encoding="utf-8") for name in STYLES),
        "SCRIPT": "\n".join(f"// -- {name} --\n{joined(PAGE / f'{name}.mjs')}" for name in MODULES),
        "KERNELS": base64.b64encode(gzip.compress(wasm, 9, mtime=0)).decode(),
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


def wasm_of(page: str) -> bytes:
    """The kernels that a page holds."""
    found = re.search(r'<script type="application/wasm\+gzip" id="kernels">([\w+/=\s]+)</script>', page)
    if not found:
        sys.exit(f"{INDEX} holds no kernels; delete it and build again")
    return gzip.decompress(base64.b64decode(found[1]))


if __name__ == "__main__":
    sys.exit(main())
