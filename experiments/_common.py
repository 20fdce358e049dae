"""What every experiment shares: its description, the command line, data, progress. Its figures go to `_report`."""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import functools
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ._report import RESULTS, Claim, Findings, write

T = TypeVar("T")
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

    def within(self, minutes: float | None) -> Iterator[int]:
        """The seeds; none that would end after `minutes`, if each takes as long as those before. The first always runs."""
        begun = time.monotonic()
        for i, seed in enumerate(self.seeds):
            needed = (time.monotonic() - begun) * (i + 1) / max(i, 1) / 60
            if minutes is not None and i and needed > minutes:
                self.say(f"{i} of {len(self.seeds)} seeds: another would end {needed - minutes:.0f} minutes late")
                return
            yield seed

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


def main(
    experiment: Experiment, run: Callable[[Settings, Findings], None], arguments: Sequence[str] | None = None
) -> int:
    """The command `python -m experiments.NAME`: run, write NAME.md, NAME.json and the pictures, print the verdicts."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser(experiment).parse_args(words)
    folder = options.out or (_scratch() if options.quick else RESULTS)
    seeds = list(range(options.seeds or (experiment.quick_seeds if options.quick else experiment.seeds)))
    settings = Settings(experiment, options.quick, seeds, options)
    found = Findings(experiment.name, experiment.claims, folder)
    try:
        for package in experiment.needs:
            if importlib.util.find_spec(package) is None:
                raise Missing(
                    f"{experiment.name}: needs {package}; pip install 'anymax[test]' brings all that it needs"
                )
        run(settings, found)
    except Missing as error:
        print(error, file=sys.stderr)
        return 2
    if not found.data:
        raise RuntimeError(f"{experiment.name}: run() must say in `data` what it was run on")
    extra = {k: v for k, v in vars(options).items() if k not in ("quick", "seeds", "out")}
    head = {
        "name": experiment.name,
        "title": experiment.title,
        "quick": options.quick,
        "command": " ".join(["python -m", f"experiments.{experiment.name}", *_public(words)]),
        "seconds": round(time.monotonic() - settings.started, 1),
        "settings": {"seeds": seeds, **_public_values(extra)},
        **_machine(),
    }
    paths = write(head, found)
    said = found.verdicts()
    print(*(f"{said[key]:>12}: {claim.text}" for key, claim in experiment.claims.items()), sep="\n")
    print("written:", *paths, *(folder / p["file"] for p in found.pictures))
    return 0


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
