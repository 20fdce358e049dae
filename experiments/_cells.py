"""Cells of a run that is too long for one go: each is kept in a folder, and a run that is started again takes what is there."""

from __future__ import annotations

import importlib.metadata
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ._common import Settings, sources

OPTION = {
    "type": Path, "metavar": "FOLDER",
    "help": "finished cells are kept and found here (default: a temporary folder that no later run finds)",
}  # fmt: skip


class Cells:
    """What a function gave for each key, in files of a folder.

    `trainer` is the module of the function: a cell is taken where it, the library, torch, NumPy and the `recipe` are those of then. What an
    experiment tells of its cells may change.
    """

    def __init__(self, settings: Settings, trainer: str, recipe: Mapping[str, Any]) -> None:
        self.folder = settings.options.cells or Path(tempfile.mkdtemp(prefix="anymax-cells-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        versions = {name: importlib.metadata.version(name) for name in ("torch", "numpy")}
        self.origin = {"sources": sources(trainer, shared=False), "versions": versions, "recipe": dict(recipe)}
        self.say = settings.say
        self.taken, self.seconds = 0, 0.0

    def get(self, key: Sequence[Any], work: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
        """The cell of `key`, a dictionary of arrays and of what JSON can hold: from its file, or `work(*given)`, which is then kept."""
        path = self.folder / f"{'_'.join(str(part).replace(' ', '-').replace('/', '-') for part in key)}.npz"
        if path.is_file():
            with np.load(path) as file:
                known = json.loads(str(file["cell"]))
                if known["origin"] == json.loads(json.dumps(self.origin)):
                    self.taken += 1
                    self.seconds += known["seconds"]
                    self.say(f"taken from {path.name}, {known['seconds']:.0f} s")
                    return {**known["plain"], **{name: file[name] for name in file.files if name != "cell"}}
            self.say(f"{path.name} comes from other sources and is made anew")
        begun = time.process_time()
        found = work(*given)
        seconds = round(time.process_time() - begun, 1)
        self.seconds += seconds
        arrays = {name: value for name, value in found.items() if isinstance(value, np.ndarray)}
        plain = {name: value for name, value in found.items() if name not in arrays}
        words = json.dumps({"origin": self.origin, "seconds": seconds, "plain": plain})
        draft = path.with_name(f".{os.getpid()}.npz")
        np.savez_compressed(draft, cell=np.array(words), **arrays)
        draft.replace(path)
        return {**json.loads(words)["plain"], **arrays}

    def told(self) -> dict[str, str]:
        """For the page: how long the cells took, and how many an earlier run had left."""
        return {"cells": f"{self.seconds / 3600:.1f} hours of processor time; {self.taken} taken from an earlier run"}
