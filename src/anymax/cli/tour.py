"""The tour: all maps on one vector, the same small classifier trained with each of them, and pictures."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from .. import plot
from .._core.mapping import Mapping
from ..functional import apply
from ..losses.verbs import loss_of_kind
from ..mappings import Budget
from . import names, progress, tables

SCORES = [2.0, 1.0, 0.1, -1.0]
NEEDS = {"torch": "torch", "sklearn": "sklearn", "matplotlib": "plot"}


@dataclasses.dataclass
class Result:
    """The results of the classifier with one map, on the test set."""

    mapping: Mapping
    loss: str
    accuracy: float
    support: float
    calibration_error: float
    seconds: float
    p: np.ndarray


class Digits(NamedTuple):
    """scikit-learn's handwritten digits as tensors; a third is held out."""

    x: Any
    y: Any
    test_x: Any
    test_y: np.ndarray


def check(out: Path, pictures: bool) -> None:
    """Check, before the work begins, that the packages are installed and the folder can be written."""
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None and (pictures or name != "matplotlib")]
    if missing:
        extras = ",".join(NEEDS[name] for name in missing)
        raise ImportError(f"the tour needs {' and '.join(missing)}; install with: pip install 'anymax[{extras}]'")
    if pictures:
        out.mkdir(parents=True, exist_ok=True)
        try:
            with tempfile.TemporaryFile(dir=out):
                pass
        except OSError as error:
            raise OSError(error.errno, f"this folder can't be written ({error.strerror})", str(out)) from error


def tour(console: Console, out: Path, *, quick: bool, seed: int, pictures: bool) -> None:
    maps = names.choose((), {})
    console.print(f"[bold]1. One vector[/]: every map on the scores {', '.join(map(tables.number, SCORES))}\n")
    tables.bars(console, SCORES, [(mapping, np.asarray(apply(mapping, np.asarray(SCORES)))) for mapping in maps])

    console.print("\n[bold]2. One classifier[/]: handwritten digits, 64 -> 64 -> 10, the same start for every map\n")
    results, y = compare([m for m in map(_classifier, maps) if _classifies(m)], epochs=8 if quick else 30, seed=seed)
    tables.grid(
        console,
        ["map", "loss", "accuracy", "support", "ECE", "seconds"],
        [
            [
                plot.label(r.mapping),
                r.loss,
                f"{r.accuracy:.1%}",
                f"{r.support:.2f}",
                f"{r.calibration_error:.3f}",
                f"{r.seconds:.1f}",
            ]
            for r in results
        ],
        numeric=2,
    )
    console.print(
        "\n[dim]accuracy: on the held-out third; support: mean number of classes with a probability above 0, of 10; "
        "ECE: calibration error, the mean gap between confidence and accuracy in 10 bins; one run each, so small gaps mean "
        "nothing.[/]"
    )
    if not pictures:
        return
    console.print("\n[bold]3. Pictures[/]\n")
    draw(console, out, results, y, resolution=101 if quick else 301)
    (out / "results.json").write_text(json.dumps([_row(r) for r in results], indent=2) + "\n", encoding="utf-8")
    console.print(f"\nAll in [bold]{out.resolve()}[/]", soft_wrap=True)


def _classifier(mapping: Mapping) -> Mapping:
    """Budget(1) instead of Budget(2), which would have to predict two digits."""
    return Budget(1) if isinstance(mapping, Budget) else mapping


def _classifies(mapping: Mapping) -> bool:
    """True if the map has a loss of one class."""
    try:
        loss_of_kind(mapping.own_loss, mapping, np.zeros((1, 10)), np.array([0]))
    except (TypeError, ValueError):  # a bound below 1, or an ordering as the target
        return False
    return True


def _row(result: Result) -> dict[str, Any]:
    row = {field.name: getattr(result, field.name) for field in dataclasses.fields(result) if field.name != "p"}
    return {**row, "mapping": plot.label(result.mapping)}


# -- training -----------------------------------------------------------------------------------------------------------


def compare(maps: Sequence[Mapping], *, epochs: int, seed: int) -> tuple[list[Result], np.ndarray]:
    """Train one classifier for each map."""
    results: list[Result] = []
    with progress.bars() as bars:
        loading = bars.add_task("loading torch and the digits", total=None)
        data = digits(seed)
        train(maps[0], data, 1, seed, lambda: None)  # what torch does only once is not timed
        bars.remove_task(loading)
        everything = bars.add_task("maps", total=len(maps))
        for mapping in maps:
            task = bars.add_task(plot.label(mapping), total=epochs)
            results.append(train(mapping, data, epochs, seed, lambda task=task: bars.advance(task)))
            bars.remove_task(task)
            bars.advance(everything)
    return results, data.test_y


def digits(seed: int) -> Digits:
    import torch  # late: an optional extra
    from sklearn.datasets import load_digits

    x, y = (np.asarray(a) for a in load_digits(return_X_y=True))
    order = np.random.default_rng(seed).permutation(len(y))
    x, y = (x[order] / 16.0).astype(np.float32), y[order].astype(np.int64)
    held_out = len(y) // 3
    train_x, train_y, test_x = (torch.from_numpy(a) for a in (x[held_out:], y[held_out:], x[:held_out]))
    return Digits(train_x, train_y, test_x, y[:held_out])


def train(mapping: Mapping, data: Digits, epochs: int, seed: int, tick: Callable[[], Any]) -> Result:
    import torch  # late: an optional extra

    x, y, test_x, test_y = data
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        start = time.perf_counter()
        for _ in range(epochs):
            for batch in torch.randperm(len(y)).split(64):
                optimizer.zero_grad()
                loss_of_kind(mapping.own_loss, mapping, model(x[batch]), y[batch]).backward()
                optimizer.step()
            tick()
        seconds = time.perf_counter() - start
    with torch.no_grad():
        p = apply(mapping, model(test_x)).numpy()
    return Result(
        mapping=mapping,
        loss="Fenchel-Young" if mapping.facts.has_potential else "-log p",
        accuracy=float((p.argmax(-1) == test_y).mean()),
        support=float((p > 0).sum(-1).mean()),
        calibration_error=plot.reliability(p, test_y)[3],
        seconds=seconds,
        p=p,
    )


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: so small a model gains nothing from more, and on a busy machine they wait for each other."""
    import torch  # late: an optional extra

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# -- pictures -----------------------------------------------------------------------------------------------------------


def draw(console: Console, out: Path, results: Sequence[Result], y: np.ndarray, resolution: int) -> None:
    from . import pictures  # late: matplotlib is an optional extra

    pictures.prepare()

    def calibration() -> Any:
        figure, axes = pictures.page(len(results), width=3.4, height=3.6, columns=4)
        for result, ax in zip(results, axes):
            plot.calibration(result.p, y, name=plot.label(result.mapping), ax=ax)
            if ax is not axes[0]:
                ax.get_legend().remove()
        return figure

    def support() -> Any:
        sparse = {plot.label(r.mapping): r.p for r in results if r.mapping.facts.sparse and r.support < r.p.shape[-1]}
        return plot.support_histogram(sparse).figure

    todo: list[tuple[str, str, Callable[[], Any]]] = [
        ("curves", "two classes: the probability of the first", lambda: pictures.draw("curves")),
        (
            "simplex",
            "three classes: where how many stay above 0",
            lambda: pictures.draw("simplex", resolution=resolution),
        ),
        ("losses", "the loss against the margin", lambda: pictures.draw("losses")),
        ("jacobians", "which score moves which probability", lambda: pictures.draw("jacobian")),
        ("calibration", "confidence and accuracy of the classifiers", calibration),
        ("support", "how many digits the sparse ones keep", support),
    ]
    for name, words, make in progress.each(todo, "pictures"):
        pictures.save(make(), out / f"{name}.png")
        console.print(f"  {name + '.png':16s} {words}")
