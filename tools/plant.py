"""Plants faults, one at a time, and tells which battery of tests sees them: `python -m tools.plant [words]`.

The faults are the table of `tools/faults.py`: of Python and of `csrc/` alike. A copy of the checkout gets one; of the tests that it names
the short battery runs in a child process, and where that stays green what only the whole one has. A fault of `csrc/` compiles what
includes its file, for one instruction set at -O1. What is found goes to `tools/plant-results.jsonl`, a line a fault.

    python -m tools.plant                     # all
    python -m tools.plant budget attention    # those with one of these words in their names, areas or files
    python -m tools.plant --new --short       # those of which the record says nothing, by the short battery alone
    python -m tools.plant --missed            # then what it did not see
    python -m tools.plant --check             # does every piece stand where it is said to, or elsewhere, once?
    python -m tools.plant --table             # the record by area
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

from tools.faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tools" / "plant-results.jsonl"
SOURCES = {"src": "*.py", "csrc": "*.[ch]*", "packaging": "*.[pm][yj]*"}
SEEN = ("short", "whole", "neither", "open")  # open: the short battery does not see it, and the whole one was not asked
# once, for all children; nothing that brings a plugin of pytest
PRELOADED = ("jax", "torch", "scipy.special", "mpmath")
NOT_FOR_ONE_SET = "tests/kernels/test_native_library.py::test_an_instruction_set_by_the_environment"


# -- where a piece stands ---------------------------------------------------------------------------------------------------


def place(fault: Fault, root: Path = ROOT) -> Path:
    """The file in which the piece of a fault stands once: the one that is named, or else any of the same tree."""
    named = root / fault.file
    here = named.read_text(encoding="utf-8").count(fault.old) if named.is_file() else 0
    if here == 1:
        return named
    tree = fault.file.split("/")[0]
    texts = ((path, path.read_text(encoding="utf-8")) for path in sorted((root / tree).rglob(SOURCES[tree])))
    found = {path: count for path, text in texts if (count := text.count(fault.old))}
    if sum(found.values()) == 1:
        return next(iter(found))
    where = ", ".join(f"{count} in {path.relative_to(root)}" for path, count in found.items()) or f"nowhere in {tree}/"
    raise LookupError(f"{fault.name}: {fault.file} has {here} times, and not once, {fault.old!r} (it stands {where})")


def file_of(name: str, root: Path) -> Path | None:
    """The file of tests that a fault calls by this name, in any room; None where there is none."""
    return next((root / "tests").rglob(f"test_{name}.py"), None)


def lost(root: Path = ROOT) -> list[str]:
    """A sentence for each fault that can't be planted as it is."""
    said = []
    for fault in every():
        try:
            place(fault, root)
        except LookupError as error:
            said.append(str(error))
        said += [f"{fault.name}: there is no test_{name}.py" for name in fault.tests.split() if not file_of(name, root)]
    return said


def every() -> Iterable[Fault]:
    return (fault for faults in FAULTS.values() for fault in faults)


def area_of(fault: Fault) -> str:
    return next(area for area, faults in FAULTS.items() if fault in faults)


# -- the record ----------------------------------------------------------------------------------------------------------------


def record() -> dict[str, dict]:
    """What is known of each fault, by its name."""
    lines = RECORD.read_text(encoding="utf-8").splitlines() if RECORD.exists() else []
    known = {line["name"]: line for line in map(json.loads, lines)}
    return {fault.name: known[fault.name] for fault in every() if fault.name in known}


def keep(found: dict) -> None:
    with RECORD.open("a+", encoding="utf-8") as file:  # others may be planting too
        fcntl.flock(file, fcntl.LOCK_EX)
        known = {**record(), found["name"]: found}
        file.truncate(0)
        file.writelines(json.dumps(known[fault.name]) + "\n" for fault in every() if fault.name in known)


def table() -> str:
    """The record by area, and the names of what the short battery misses, as the Markdown of CONTRIBUTING.md."""
    known = record()
    lines = [
        "| faults in | planted | the short battery sees | only the whole one | neither | not yet asked of the whole one |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for area, faults in [*FAULTS.items(), ("all", tuple(every()))]:
        counts = [sum(known.get(f.name, {}).get("seen") == seen for f in faults) for seen in SEEN]
        lines.append(f"| {area} | {sum(counts)} | {' | '.join(map(str, counts))} |")
    for seen, said in (
        ("whole", "Only the whole battery sees"),
        ("neither", "Neither sees"),
        ("open", "Not yet asked of the whole battery"),
    ):
        names = [
            f.name + (f" ({f.reason})" if f.reason and seen == "neither" else "")
            for f in every()
            if known.get(f.name, {}).get("seen") == seen
        ]
        lines += ["", f"{said}: {'; '.join(names)}."] if names else []
    return "\n".join(lines)


# -- planting -------------------------------------------------------------------------------------------------------------------


def copied(folder: Path) -> None:
    """The checkout as it is, without what git ignores."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    for name in subprocess.run(listing, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    # in the way of an editable install's finder
    (folder / "src" / "_editable_skbc_anymax.py").write_text("")


_ENGINE = re.compile(r"_engine\..*(so|pyd)")


def installed() -> str:
    """The engine of this environment; asked of a child, for this process is to load no anymax but the copy's."""
    code = "from anymax.kernels import library; print(library.path() or '')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


class Library:
    """The engine of a copy, for one instruction set and at -O1. CMake knows what includes which file."""

    def __init__(self, copy: Path):
        self.build, self.sound = copy / "build", copy.parent / "sound"
        cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
        lists = copy / "CMakeLists.txt"
        text = lists.read_text(encoding="utf-8").replace("-O3", "-O1")
        if " avx2 " in cpu and " fma " in cpu:
            text = text.replace("candidates baseline avx2 avx512", "candidates avx2")
        lists.write_text(text, encoding="utf-8")
        configure = ["cmake", "-S", str(copy), "-B", str(self.build), "-DCMAKE_BUILD_TYPE=Release"]
        if shutil.which("ninja"):
            configure += ["-G", "Ninja"]
        subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
        self.make()
        shutil.copytree(self.build, self.sound)

    def make(self) -> None:
        done = subprocess.run(["cmake", "--build", str(self.build)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(f"it does not compile, so that it is no fault:\n{done.stdout[-2000:]}")

    def restore(self) -> None:
        """What was built before the fault, with the times that it was built at."""
        shutil.copytree(self.sound, self.build, dirs_exist_ok=True)

    @property
    def file(self) -> Path:
        return next(path for path in self.build.rglob("*") if _ENGINE.fullmatch(path.name))


def tested(folder: Path, files: str, *options: str, library: str) -> tuple[int, str, float]:
    """pytest's code, the test that failed first, seconds of the processor; in a child that has all frameworks loaded already."""
    log = folder / "pytest.log"
    before = os.times()
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.chdir(folder)
            more = list(options)
            if library:
                os.environ["ANYMAX_LIBRARY"] = library
                more.append(f"--deselect={NOT_FOR_ONE_SET}")
            os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
            sys.dont_write_bytecode = False  # the tests are compiled once, for all children
            # an editable install finds its own files first
            sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__.lower()]
            for name in [m for m in sys.modules if m.split(".")[0] == "tools"]:
                del sys.modules[name]
            sys.path[:] = [str(folder / "src"), str(folder), *(p for p in sys.path if Path(p or ".").resolve() != ROOT)]
            import pytest

            names = [str(file_of(name, folder)) for name in files.split()]
            code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *names, *more]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    after = os.times()
    said = log.read_text(errors="replace")
    seconds = sum(after[2:4]) - sum(before[2:4])
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # a fault in csrc/ can end the process; faulthandler says in which test
        at = re.search(r'File ".*?(tests/\w+/test_\w+\.py)", line \d+ in (test_\w+)', said)
        return 1, f"{at[1]}::{at[2]}, by signal {-code}" if at else said[-300:], round(seconds, 1)
    if code not in (0, 1, 2, 5):
        raise RuntimeError(f"pytest did not run (its code is {code}):\n{said[-3000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.M)
    return code, failed[1] if failed else said[-300:], round(seconds, 1)


def seen(folder: Path, fault: Fault, engine: Library | None, short: bool, wide: bool) -> dict:
    """Which battery sees a fault, and by which test."""
    path = folder / place(fault).relative_to(ROOT)
    sound, stamp = path.read_text(encoding="utf-8"), path.stat()
    path.write_text(sound.replace(fault.old, fault.new), encoding="utf-8")
    os.utime(path, (time.time(), time.time()))
    rounds = [("short", fault.tests, ()), ("whole", fault.tests, ("--rest",))]
    if wide:
        rounds.insert(1, ("short", "", ("--ignore=tests/project/test_plant.py",)))
    if short:
        rounds = rounds[:1]
    found, spent = {"name": fault.name, "seen": "open" if short else "neither", "by": ""}, 0.0
    try:
        if engine:
            engine.make()
        for battery, tests, options in rounds:
            code, first, seconds = tested(folder, tests, *options, library=str(engine.file) if engine else "")
            spent += seconds
            if code not in (0, 5):  # 5: this battery has no test here
                found |= {"seen": battery, "by": first}
                break
    finally:
        path.write_text(sound, encoding="utf-8")
        os.utime(path, (stamp.st_atime, stamp.st_mtime))
        if engine:
            engine.restore()
    return {**found, "s": round(spent, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only faults in whose name, area or file one of these is")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th fault from the i-th on")
    parser.add_argument("--new", action="store_true", help="only faults of which the record says nothing")
    parser.add_argument("--missed", action="store_true", help="only those that the short battery did not see")
    parser.add_argument("--short", action="store_true", help="only the short battery: what it does not see stays open")
    parser.add_argument(
        "--wide", action="store_true", help="what its own files do not see goes to all of the short battery"
    )
    parser.add_argument(
        "--unchecked", action="store_true", help="do not ask whether the tests are green without a fault"
    )
    parser.add_argument("--check", action="store_true", help="only say which pieces are not found")
    parser.add_argument("--table", action="store_true", help="only print the record by area")
    asked = parser.parse_args()
    if asked.table:
        print(table())
        return 0
    gone = lost()
    print(*gone, sep="\n", end="\n" if gone else "")
    if asked.check:
        return bool(gone)
    known, (first, step) = record(), map(int, asked.part.split("/"))
    chosen = [f for f in every() if not asked.words or any(w in f"{f.name} {area_of(f)} {f.file}" for w in asked.words)]
    chosen = [f for f in chosen if not (asked.new and f.name in known) and not any(f.name in said for said in gone)]
    chosen = [f for f in chosen if not asked.missed or known.get(f.name, {}).get("seen") in SEEN[1:]][first::step]
    with tempfile.TemporaryDirectory(prefix="plant-") as temporary:
        folder = Path(temporary) / "checkout"
        copied(folder)
        os.environ |= {"PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
        os.environ.setdefault("ANYMAX_LIBRARY", installed())
        engine = Library(folder) if any(f.file.startswith("csrc/") for f in chosen) else None
        for module in PRELOADED:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)

        for compiled in () if asked.unchecked else (False, True):
            own = {n for f in chosen if f.file.startswith("csrc/") is compiled for n in f.tests.split()}
            for name in sorted(own):
                code, failed, _ = tested(folder, name, library=str(engine.file) if engine and compiled else "")
                if code:
                    raise SystemExit(f"without a fault: test_{name}.py fails: {failed}")
        counts = dict.fromkeys(SEEN, 0)
        for fault in chosen:
            try:
                found = seen(folder, fault, engine if fault.file.startswith("csrc/") else None, asked.short, asked.wide)
            except ValueError as error:
                print(f"{fault.name}: {error}", flush=True)
                continue
            counts[found["seen"]] += 1
            print(f"{found['seen']:8s} {found['s']:6.1f} s  {fault.name}  {found['by'][:120]!r}", flush=True)
            keep(found)
    told = "{short} seen by the short battery, {whole} by the whole one alone, {neither} by neither, {open} left open".format(
        **counts
    )
    print(f"{len(chosen)} faults: {told}")
    return bool(gone)


if __name__ == "__main__":
    sys.exit(main())
