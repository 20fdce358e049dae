"""Plants faults in the compiled engine, one at a time, and says which the short battery of tests catches and which only the whole one.

    python tools/plant_engine.py              # all of them; the short battery first, the whole one where that stays green
    python tools/plant_engine.py stride mask  # those with one of these words in their names
    python tools/plant_engine.py --list

A fault is a row of the table: a file, what stands there once, what stands there instead, and the files of tests that could see it. Others
are not run, so that the table takes minutes: what counts as missed might be seen elsewhere, what counts as caught is caught. The engine is
compiled at -O1, for one instruction set alone, by `CXX` (g++).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# name, file, what stands there, what is planted, the files of tests
FAULTS = (
    (
        "entmax 4/3",
        "csrc/links/powers.hpp",
        "(s0 - s0 / ::cbrt(s0)) / s1",
        "(s0 - s0 / sqrt(s0)) / s1",
        "test_native.py test_law_kkt.py",
    ),
    (
        "entmax near 1",
        "csrc/links/powers.hpp",
        "return near ? -1.0 / slope - level : -level / slope; }\n    double floor",
        "return near ? -1.0 / slope + level : -level / slope; }\n    double floor",
        "test_native.py",
    ),
    (
        "class cap of budget",
        "csrc/units/rows.cpp",
        "y[i] = t <= 0.0 ? 0.0 : t >= 1.0 ? 1.0 : t;",
        "y[i] = t <= 0.0 ? 0.0 : t;",
        "test_native.py",
    ),
    (
        "the rest of a row",
        "csrc/shapes/sparse.hpp",
        "for (; i < n && at <= limit; i += W) {",
        "for (; i + W <= n && at <= limit; i += W) {",
        "test_native.py",
    ),
    (
        "exponent of budget's weights",
        "csrc/shapes/backward.hpp",
        "F == BELOW && p[j] >= C(1)",
        "F == BELOW && p[j] > C(1)",
        "test_native.py",
    ),
    (
        "row stride of a result",
        "csrc/core/families.hpp",
        "(o * v.outer + i * v.inner) * size",
        "(o * v.outer + i) * size",
        "test_native.py",
    ),
    ("mask", "csrc/units/tile.cpp", "mask && !mask[k * call.mask.cls]", "mask && !mask[k]", "test_native.py"),
    (
        "loss of a masked target",
        "csrc/units/rows.cpp",
        "if (aim == -inf64 || !found.any) return inf64;",
        "if (!found.any) return inf64;",
        "test_native.py test_losses.py",
    ),
    (
        "few classes, the target's own",
        "csrc/shapes/few.hpp",
        "(t.any ? others : splat(C(1))) * -scale",
        "(t.any ? others : splat(C(0))) * -scale",
        "test_native.py test_losses.py",
    ),
    (
        "linear attention's causal sums",
        "csrc/linear/forward.hpp",
        "from = 0, to = keys;",
        "from = 0, to = keys - 1;",
        "test_linear_attention.py",
    ),
    (
        "perturb max's excess",
        "csrc/perturb/perturb.hpp",
        "value = (row.high - (double)x[target]) + scale * solver.excess();",
        "value = (row.high - (double)x[target]) + solver.excess();",
        "test_native.py test_perturb_max.py test_losses.py",
    ),
)

# pytest on the copy: an editable installation would bring its own sources
START = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__]
sys.path[:0] = [sys.argv.pop(1)]
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--list", action="store_true", help="the names of the faults")
    parser.add_argument("--short", action="store_true", help="the short battery alone")
    args = parser.parse_args()
    faults = [f for f in FAULTS if not args.words or any(word in f[0] for word in args.words)]
    if args.list:
        print("\n".join(name for name, *_ in faults))
        return 0
    found = {"short": 0, "whole": 0, "neither": 0}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", "results"))
        library = Library(copy, Path(folder) / "objects")
        for name, file, old, new, tests in faults:
            path = copy / file
            text = path.read_text(encoding="utf-8")
            if text.count(old) != 1:
                print(f"{name}: {file} has {text.count(old)} times {old!r}", flush=True)
                return 2
            path.write_text(text.replace(old, new), encoding="utf-8")
            begun = time.time()
            try:
                library.build(file)
                env = {"ANYMAX_LIBRARY": str(library.file)}
                by = "short" if red(copy, tests, env) else "neither"
                if by == "neither" and not args.short:
                    by = "whole" if red(copy, tests, env, "--all") else by
            finally:
                path.write_text(text, encoding="utf-8")
                library.restore()
            found[by] += 1
            print(f"{by:>8}  {name}  ({time.time() - begun:.0f} s)", flush=True)
    counts = "{short} caught by the short battery, {whole} by the whole one only, {neither} by neither".format(**found)
    print(f"{len(faults)} faults: {counts}")
    return 0


def red(copy: Path, tests: str, more: dict[str, str], *options: str) -> bool:
    """Does a test of these files fail?"""
    env = {**os.environ, **more, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(copy / "src")}
    files = [str(copy / "tests" / name) for name in tests.split()]
    flags = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(copy)]
    done = subprocess.run(
        [sys.executable, "-c", START, str(copy / "src"), *flags, *options, *files],
        cwd=copy, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode not in (0, 1, 2):
        sys.exit(done.stdout[-3000:])
    return done.returncode != 0


class Library:
    """The engine for one instruction set, at -O1; a fault compiles again what includes its file."""

    def __init__(self, copy: Path, objects: Path):
        self.csrc, self.objects, self.file = copy / "csrc", objects, objects / "_engine.so"
        cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
        self.unit = "avx2" if " avx2 " in cpu and " fma " in cpu else "baseline"
        lists = (copy / "CMakeLists.txt").read_text()
        flags = [
            re.search(rf"^set\(ANYMAX_FLAGS{part} ?(.*)\)$", lists, re.M)[1] for part in ("", f"_{self.unit.upper()}")
        ]  # type: ignore[index]
        common = flags[0].replace("-O3", "-O1").split() + [
            "-std=c++17",
            "-fPIC",
            "-fno-exceptions",
            "-fno-rtti",
            "-fvisibility=hidden",
            f"-I{self.csrc}",
            f"-I{sysconfig.get_paths()['include']}",
        ]
        self.command = [os.environ.get("CXX", "g++"), *common, f"-DANYMAX_HAVE_{self.unit.upper()}=1"]
        self.of_unit = [*flags[1].split(), f"-DANYMAX_UNIT={self.unit}"]
        self.kept: dict[Path, bytes] = {}
        objects.mkdir()
        self.compile(self.sources())

    def sources(self) -> list[Path]:
        return [p for folder in ("doors", "doors/python", "units") for p in self.csrc.glob(f"{folder}/*.cpp")]

    def object_of(self, source: Path) -> Path:
        return self.objects / f"{source.parent.name}_{source.stem}.o"

    def compile(self, sources: list[Path]) -> None:
        running = []
        for source in sources:
            target = self.object_of(source)
            own = self.of_unit if source.parent.name == "units" else []
            running.append(subprocess.Popen([*self.command, *own, "-c", str(source), "-o", str(target)]))
        codes = [p.wait() for p in running]
        if any(codes):
            raise SystemExit("a fault that does not compile is none")
        objects = [str(p) for p in self.objects.glob("*.o")]
        subprocess.run([self.command[0], "-shared", "-o", str(self.file), *objects, "-pthread"], check=True)

    def build(self, file: str) -> None:
        name, sources = file.removeprefix("csrc/"), []
        for source in self.sources():
            own = self.of_unit if source.parent.name == "units" else []
            said = subprocess.run(
                [*self.command, *own, "-MM", str(source)], capture_output=True, text=True, check=True
            ).stdout
            if f"/{name}" in said:
                sources.append(source)
        self.kept = {p: self.object_of(p).read_bytes() for p in sources}
        self.compile(sources)

    def restore(self) -> None:
        for source, content in self.kept.items():
            self.object_of(source).write_bytes(content)


if __name__ == "__main__":
    sys.exit(main())
