"""What every experiment shares: its description, the command line, data, progress. Its figures go to `_report`."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import datetime as dt
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ._report import RESULTS, Claim, Findings, Refused, write

T = TypeVar("T")
ROOT = RESULTS.parents[1]
_PACKAGES = ("scikit-learn", "scipy", "transformers", "matplotlib")


class Missing(Exception):
    """Data or a package that is not there; the message says what to do."""


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What an experiment is about. `data` names for each file in ANYMAX_DATA its public original."""

    name: str
    title: str
    about: str
    claims: Mapping[str, Claim]
    seeds: int
    quick_seeds: int = 2
    data: Mapping[str, str] = dataclasses.field(default_factory=dict)
    needs: tuple[str, ...] = ("matplotlib", "scipy")
    options: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)  # for `add_argument`
    lengths: str = ""  # where its networks were trained for one length only: that, in a sentence
    free: tuple[str, ...] = ()  # those of them that no figure depends on: where the data lies, how many processes


@dataclasses.dataclass
class Settings:
    """How it is to be run: `quick`, the seeds, further options; where the data is; how far it has come."""

    experiment: Experiment
    quick: bool
    seeds: list[int]
    options: argparse.Namespace
    started: float = dataclasses.field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self.started), 60)
        print(f"[{self.experiment.name} {minutes}:{seconds:02d}] {text}", file=sys.stderr, flush=True)

    def track(self, items: Iterable[T], what: str, show: Callable[[T], Any] = str) -> Iterator[T]:
        """The items, one after the other, with a line of progress before each."""
        items = list(items)
        for i, item in enumerate(items, start=1):
            self.say(f"{what} {i}/{len(items)}: {show(item)}")
            yield item

    def data(self, path: str) -> Path:
        """The file `path` in the folder ANYMAX_DATA, or an error that names the public original."""
        original = self.experiment.data[path]
        folder = os.environ.get("ANYMAX_DATA")
        if not folder:
            problem = f"the environment variable ANYMAX_DATA is not set; it names a folder with {path}"
        elif not (Path(folder) / path).is_file():
            problem = f"{path} is not in the folder that ANYMAX_DATA names"
        else:
            return Path(folder) / path
        raise Missing(
            f"{self.experiment.name}: {problem}, made from {original}; --quick runs without it, on other data"
        )


def quick_on_one_thread(run: Callable[[Settings, Findings], None]) -> Callable[[Settings, Findings], None]:
    """A `run` whose quick form trains networks so small that torch's threads would only wait for each other."""

    @functools.wraps(run)
    def wrapped(settings: Settings, found: Findings) -> None:
        if not settings.quick:
            return run(settings, found)
        import torch  # late: listing the experiments needs no torch

        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return run(settings, found)
        finally:
            torch.set_num_threads(before)

    return wrapped


def walk(
    loss: Callable[[float], float], start: float, step: float, tie: float, most: int = 6
) -> tuple[float, dict[float, float], bool]:
    """From start to the next of start * step^i while its loss is less by more than `tie`, both sides always tried.

    Gives the value where it ends, the losses of all that were tried, and whether neither neighbour is better by more than `tie`.
    """
    at, tried = 0, {0: loss(start)}
    while True:
        for i in (at - 1, at + 1):
            tried[i] = tried[i] if i in tried else loss(start * step**i)
        side = min((at - 1, at + 1), key=lambda i: tried[i])
        inside = tried[side] >= tried[at] - tie
        if inside or abs(side) > most:
            return start * step**at, {start * step**i: v for i, v in sorted(tried.items())}, inside
        at = side


def main(
    experiment: Experiment, run: Callable[[Settings, Findings], None], arguments: Sequence[str] | None = None
) -> int:
    """The command `python -m experiments.NAME`: run, write NAME.md, NAME.json and the pictures, print the verdicts.

    The saved results come from the default command and a clean tree, whole, with every choice strictly inside of what was tried.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser(experiment)
    options = parser.parse_args(words)
    extra = {k: v for k, v in vars(options).items() if k not in ("quick", "seeds", "out")}
    free = {flag.removeprefix("--").replace("-", "_") for flag in experiment.free}
    default = options.seeds is None and all(v == parser.get_default(k) for k, v in extra.items() if k not in free)
    folder = options.out or (RESULTS if default and not options.quick else _scratch())
    seeds = list(range(options.seeds or (experiment.quick_seeds if options.quick else experiment.seeds)))
    settings = Settings(experiment, options.quick, seeds, options)
    commit, sources_then = _commit(), sources(experiment.name)  # as the run begins: files may change while it goes on
    draft = Path(tempfile.mkdtemp(prefix="anymax-"))
    found = Findings(experiment.name, experiment.claims, draft, strict=not options.quick)
    try:
        if folder.resolve() == RESULTS.resolve():
            _allowed(experiment, default and not options.quick)
        for package in experiment.needs:
            if importlib.util.find_spec(package) is None:
                raise Missing(
                    f"{experiment.name}: needs {package}; pip install 'anymax[test]' brings all that it needs"
                )
        settings.say(f"{len(seeds)} seed{'s' * (len(seeds) != 1)}; {_expected(experiment)}")
        run(settings, found)
        if not found.data:
            raise RuntimeError(f"{experiment.name}: run() must say in `data` what it was run on")
        if found.partial and folder.resolve() == RESULTS.resolve():
            folder = _scratch()
        folder.mkdir(parents=True, exist_ok=True)
        for picture in found.pictures:
            shutil.move(draft / picture["file"], folder / picture["file"])
    except (Missing, Refused) as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    found.folder = folder
    head = {
        "name": experiment.name,
        "title": experiment.title,
        "lengths": experiment.lengths,
        "quick": options.quick,
        "command": " ".join(["python -m", f"experiments.{experiment.name}", *_public(words)]),
        "seconds": round(time.monotonic() - settings.started, 1),
        "settings": {"seeds": seeds, **_public_values(extra)},
        **_machine(),
        "sources": sources_then,
    }
    head["versions"]["commit"] = commit
    paths = write(head, found)
    said = found.verdicts()
    print(*(f"{said[key]:>12}: {claim.text}" for key, claim in experiment.claims.items()), sep="\n")
    print("written:", *paths, *(folder / p["file"] for p in found.pictures))
    return 0


def _allowed(experiment: Experiment, default: bool) -> None:
    """An error where a run may not write into the saved results."""
    if not default:
        raise Refused(
            f"{experiment.name}: only `python -m experiments.{experiment.name}` writes the saved results, and this run has other options; "
            "name another folder by --out"
        )
    try:
        changed = subprocess.check_output(
            ["git", "status", "--porcelain", "--", "src", "csrc", "benchmarks", "experiments", ":!experiments/results"],
            cwd=RESULTS.parents[1], text=True, stderr=subprocess.DEVNULL,
        ).splitlines()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return  # no repository: the page says that the commit is unknown
    if changed:
        raise Refused(
            f"{experiment.name}: saved results come from code as it was committed, and these files differ: "
            f"{', '.join(line[3:] for line in changed)}; commit them, or name another folder by --out"
        )


def _expected(experiment: Experiment) -> str:
    saved = RESULTS / f"{experiment.name}.json"
    if not saved.is_file():
        return "no saved run says how long a full one takes"
    known = json.loads(saved.read_text(encoding="utf-8"))
    return f"the saved full run, of {known['date']}, took {known['seconds'] / 60:.0f} minutes"


def _parser(experiment: Experiment) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m experiments.{experiment.name}", description=experiment.about)
    parser.add_argument("--quick", action="store_true", help="under a minute, without ANYMAX_DATA; no evidence")
    parser.add_argument(
        "--seeds", type=_positive, metavar="N", help=f"default {experiment.seeds}, quick {experiment.quick_seeds}"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="default experiments/results; of a quick run a temporary folder"
    )
    for flag, how in experiment.options.items():
        parser.add_argument(flag, **how)
    return parser


def _positive(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {word!r}")
    return int(word)


def _scratch() -> Path:
    return Path(tempfile.gettempdir()) / "anymax-experiments"


def _public(words: Sequence[str]) -> list[str]:
    """The words of the command; of a path the last part, of no interest where it lies."""
    return [Path(word).name if os.sep in word else word for word in words]


def _public_values(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.name if isinstance(v, Path) else v for k, v in values.items()}


def sources(name: str, shared: bool = True) -> dict[str, str]:
    """A digest of what an experiment runs: its script with the modules of this folder that it imports, the library and its engine.

    It says of any checkout, whatever has become of the commit, whether it has the same. `shared` adds what all experiments share.
    """
    trees = {
        "the experiment": [Path(__file__).parent / f"{own}.py" for own in _own(name, shared)],
        "src/anymax": sorted((ROOT / "src" / "anymax").rglob("*.py")),
        "csrc": [path for path in sorted((ROOT / "csrc").rglob("*")) if path.suffix in (".h", ".hpp", ".cpp")],
    }
    return {tree: _digest(paths) for tree, paths in trees.items()}


def _own(name: str, shared: bool = True) -> list[str]:
    """The module `name` of this folder and all that it imports of it, the imports within functions too."""
    known: set[str] = set()
    left = ["_common", name] if shared else [name]
    while left:
        module = left.pop()
        path = Path(__file__).parent / f"{module}.py"
        if not path.is_file():
            continue
        known.add(module)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                named = [node.module] if node.module else [alias.name for alias in node.names]
                left += [one for one in named if one not in known]
    return sorted(known)


def _digest(paths: Iterable[Path]) -> str:
    whole = hashlib.sha256()
    for path in paths:
        whole.update(f"{path.relative_to(ROOT).as_posix()}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()[:16]


def _commit() -> str:
    from benchmarks.report import commit  # late, as below

    return commit()


def _machine() -> dict[str, Any]:
    from benchmarks.report import facts  # late: listing the experiments needs no torch

    torch = sys.modules.get("torch")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads() if torch is not None else int(os.environ.get("OMP_NUM_THREADS") or usable)
    known = facts(threads)
    versions = known["versions"]
    for name in _PACKAGES:
        if importlib.util.find_spec("sklearn" if name == "scikit-learn" else name) is not None:
            versions[name] = importlib.metadata.version(name)
    date = dt.datetime.now(dt.UTC).date().isoformat()
    return {"date": date, "threads": threads, "hardware": known["hardware"], "versions": versions}
