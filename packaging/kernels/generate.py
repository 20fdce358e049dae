"""Makes the package of Hugging Face's `kernels` hub from the GPU kernels: `python packaging/kernels/generate.py FOLDER`.

What people call is written by hand in `source/`, in the layout that the hub wants. The kernels are copied as they are from
`src/anymax/kernels`: all files that the hand-written ones reach. With `--build`, FOLDER/build has what kernel-builder would make of it:
a folder for each backend, with `_ops.py` and `metadata.json`, which `kernels.get_local_kernel` loads.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
SOURCE, ENGINE = HERE / "source", HERE.parents[1] / "src" / "anymax" / "kernels"
NAME, INSIDE = "anymax", "_kernels"  # the package; where the kernels lie in it
REPO_ID = "OWNER/anymax"  # where the hub would have it
BACKENDS = ("cuda", "rocm")
ROOMS = {
    "": "The kernels of anymax and what they know of maps, copied from src/anymax/kernels by packaging/kernels/generate.py.",
    "triton": "The row kernels, attention and routers in Triton, copied from src/anymax/kernels/triton.",
}
OPS = '''"""The namespace of this kernel's operations: its own for each build, since a process may load several."""

from __future__ import annotations

import torch


def get_backend() -> str:
    return "cuda" if torch.version.cuda is not None else "rocm" if torch.version.hip is not None else "cpu"


_OPS_NAME = f"_{NAME}_{{get_backend()}}_{UNIQUE}"

ops = getattr(torch.ops, _OPS_NAME)


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{{_OPS_NAME}}::{{op_name}}"
'''


def imported(path: Path, room: Path) -> Iterator[Path]:
    """The files under `room` that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parents[node.level - 1]
            target = folder.joinpath(*(node.module or "").split("."))
            for made in (target.with_suffix(".py"), *(target / f"{alias.name}.py" for alias in node.names)):
                if made.is_file() and made.is_relative_to(room):
                    yield made


def reached() -> list[Path]:
    """The files of the engine that the hand-written ones import, and those that these import, relative to its folder."""
    names = set()
    for path in (SOURCE / "torch-ext" / NAME).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 1 and (node.module or "").startswith(INSIDE):
                words = node.module.split(".")[1:]
                names |= {"/".join(words), *("/".join([*words, alias.name]) for alias in node.names)}
    left = [path for name in names if (path := ENGINE / f"{name}.py").is_file()]
    found: set[Path] = set()
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            left += imported(path, ENGINE)
    return sorted(path.relative_to(ENGINE) for path in found)


def generate(folder: Path, repo_id: str = REPO_ID) -> Path:
    """The package in a folder, which must be empty or new."""
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty; give a new folder")
    shutil.copytree(SOURCE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    build = folder / "build.toml"
    build.write_text(build.read_text().replace("@REPO_ID@", repo_id))
    shutil.copy(HERE.parents[1] / "LICENSE", folder / "LICENSE")
    inside = folder / "torch-ext" / NAME / INSIDE
    for room, words in ROOMS.items():
        (inside / room).mkdir(parents=True, exist_ok=True)
        (inside / room / "__init__.py").write_text(f'"""{words}"""\n')
    for path in reached():
        shutil.copy(ENGINE / path, inside / path)
    return folder


def files_of(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
            yield path.relative_to(folder).as_posix(), path.read_bytes()


def build(folder: Path, backends: tuple[str, ...] = BACKENDS) -> list[Path]:
    """The variants of a generated package, as `kernels` loads them."""
    code = folder / "torch-ext" / NAME
    version = re.search(r"^version = (\d+)$", (folder / "build.toml").read_text(), re.M)
    assert version
    unique = hashlib.sha1(b"".join(name.encode() + text for name, text in files_of(code))).hexdigest()[:7]
    made = []
    for backend in backends:
        variant = folder / "build" / f"torch-{backend}"
        shutil.copytree(code, variant, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        (variant / "_ops.py").write_text(OPS.format(NAME=NAME, UNIQUE=unique))
        digests = {name: base64.b64encode(hashlib.sha256(text).digest()).decode() for name, text in files_of(variant)}
        metadata = {
            "name": NAME,
            "id": f"_{NAME}_{backend}_{unique}",
            "version": int(version[1]),
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
            "digest": {"algorithm": "sha256", "files": digests},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
        made.append(variant)
    return made


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a new or empty folder")
    parser.add_argument("--repo-id", default=REPO_ID, help=f"the repository on the hub (default: {REPO_ID})")
    parser.add_argument("--build", action="store_true", help="make FOLDER/build too")
    given = parser.parse_args(words)
    generate(given.folder, given.repo_id)
    for variant in build(given.folder) if given.build else ():
        print(variant)


if __name__ == "__main__":
    main(sys.argv[1:])
