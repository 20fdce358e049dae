"""The commands. Results go to stdout; errors are one line on stderr, with exit code 2 for wrong arguments."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console

from .. import _config, kernels, transforms
from .._version import __version__
from ..functional import apply
from ..losses.options import name_of_kind
from ..plot.words import label
from . import names, tables
from .scores import Score, rows_of


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Turn the library's errors about wrong values into usage errors."""
    try:
        yield
    except ImportError as error:
        raise Missing(str(error)) from error
    except OSError as error:
        raise click.UsageError(f"{error.filename or 'file'}: {error.strerror or error}") from error
    except (TypeError, ValueError, RuntimeError) as error:
        raise click.UsageError(str(error)) from error


class Missing(click.ClickException):
    """Something is not installed."""

    exit_code = 1


choice = click.option(
    "--mapping",
    "-m",
    "mappings",
    multiple=True,
    metavar="NAME",
    help="A map, as in entmax or entmax:alpha=1.2; may be given many times. Default: one of each family. "
    "A parameter goes to every map that has it.",
)


class Name(click.ParamType):
    """A map's name, or a picture's."""

    name = "name"

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "For example: sparsemax."


class Number(click.ParamType):
    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | float:
        found = names.number(str(value))
        if isinstance(found, (str, bool)):
            self.fail(f"{value!r} is not a number", param, ctx)
        return found


OWN_NAMES = ("scores", "mappings", "temperature", "as_json", "json", "out", "name")  # other arguments of the commands


MEANINGS = {  # of the maps' parameters
    "alpha": "1 is softmax, 2 sparsemax; a larger one makes normmax more even",
    "k": "how many classes to choose",
    "shape": "linear, sigmoid or laplace",
    "upper": "the most that a class may get",
    "strength": "a larger one brings neighbours, or ranks, closer together",
    "regularization": "l2 or kl",
    "order": "the degree of the polynomial, an even number",
    "p": "the share of softmax's mass to keep, such as 0.9",
    "noise": "normal, gumbel, logistic, uniform, laplace or exponential",
    "nodes": "how many points the integral is computed at",
    "scale": "the width of the noise",
    "score": "the score of the sink",
    "bound": "the most that the sink may get",
    "tau": "the threshold",
    "epsilon": "a number added to the denominator",
}


def parameters(command: Any) -> Any:
    """Add an option for each parameter of the maps, except names that a command uses itself."""
    for key, maps in reversed(names.options().items()):
        if key in OWN_NAMES:
            continue
        defaults = [names.fields(name)[key].default for name in maps]
        kind = click.STRING if any(isinstance(d, str) for d in defaults) else Number()
        kind = click.FLOAT if all(isinstance(d, float) for d in defaults) else kind
        says = f"Of {', '.join(maps)}: {MEANINGS[key]}." if key in MEANINGS else f"A parameter of {', '.join(maps)}."
        option = click.option(f"--{key}", key, type=kind, help=says)
        command = option(command)
    return command


def chosen_options(**options: Any) -> dict[str, Any]:
    out = {key: value for key, value in options.items() if value is not None}
    if "k" in out and float(out["k"]).is_integer():
        out["k"] = int(out["k"])
    return out


def dump(document: Any) -> None:
    click.echo(json.dumps(_finite(document), indent=2, ensure_ascii=False))


def _finite(value: Any) -> Any:
    """Replace infinities and NaN by null, since JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    if isinstance(value, (np.generic, np.ndarray)):
        return _finite(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


class Program(click.Group):
    """A group that lists its commands if it is given an unknown one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if args[0].startswith("-"):
                raise
            if names.is_map(args[0]):
                compare = " ".join(("anymax compare -m", *args))
                raise click.UsageError(f"{args[0]} is a map, not a command; write {compare}", ctx) from None
            message = f"{error.format_message()} The commands are {', '.join(self.list_commands(ctx))}."
            raise click.UsageError(message, ctx) from None


@click.group(
    cls=Program,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="For example: anymax compare 2 1 0.1 -1",
)
@click.version_option(__version__, prog_name="anymax", message="%(prog)s %(version)s")
@click.pass_context
def program(context: click.Context) -> None:
    """Softmax and fifteen alternatives: compare their probabilities, draw them, and see which code computes them."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@program.command(context_settings={"ignore_unknown_options": True})  # so that -1 is a score
@click.argument("scores", nargs=-1, type=Score())
@choice
@parameters
@click.option(
    "--temperature", type=float, default=1.0, show_default=True, help="The scores are divided by it; 0 is argmax."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; for standard input, a list. null is -inf.")
def compare(
    scores: tuple[Any, ...], mappings: tuple[str, ...], temperature: float, as_json: bool, **options: Any
) -> None:
    """Print what every map gives for a row of scores.

    SCORES are numbers, such as 2 1 0.1 -1.

    Commas between numbers are ignored. Without SCORES, or with a single -, they are read from standard input, one row per line, with
    numbers separated by spaces, or all by commas, semicolons or tabs. Lines of one number each are together one row.
    """
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise click.UsageError(f"--temperature: must be finite and at least 0, got {temperature:g}")
    vectors = rows_of(scores, piped=True)
    if not vectors:
        raise click.UsageError("Missing argument 'SCORES...': give numbers, such as 2 1 0.1 -1, or pipe them in.")
    found = []
    with plain_errors():
        for vector in vectors:
            x = transforms.temperature(temperature)(np.asarray(vector, dtype=np.float64))
            maps = names.choose(mappings, chosen_options(**options), len(vector))
            found.append((x, [(mapping, np.asarray(apply(mapping, x))) for mapping in maps]))
    if as_json:
        documents = [_document(vector, temperature, rows) for vector, (_, rows) in zip(vectors, found)]
        dump(documents[0] if scores and "-" not in scores else documents)
        return
    console = Console(highlight=False)
    for i, (x, rows) in enumerate(found, start=1):
        if len(found) > 1:
            console.print(f"{'' if i == 1 else chr(10)}[dim]row {i}[/]")
        tables.bars(console, x.tolist(), rows)


def _document(scores: list[float], temperature: float, rows: list[tuple[Any, np.ndarray]]) -> dict[str, Any]:
    """One vector under all maps, for JSON."""
    return {
        "scores": scores,
        "temperature": temperature,
        "mappings": [
            {
                "name": mapping.name,
                "parameters": names.parameters(mapping),
                "p": p,
                "support": int(np.asarray(p > 0).sum()),
            }
            for mapping, p in rows
        ],
    }


@program.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inventory(as_json: bool) -> None:
    """List all maps and their properties."""
    maps = names.choose((), {})
    rows = []
    for mapping in maps:
        facts = mapping.facts
        rows.append(
            {
                "name": mapping.name,
                "class": type(mapping).__name__,
                "example": names.parameters(mapping),
                "monotone": facts.monotone,
                "shift_invariant": facts.shift_invariant,
                "sparse": facts.sparse,
                "has_potential": facts.has_potential,
                "margin": facts.margin,
                "loss": name_of_kind(mapping.own_loss),
                "definition": definition(mapping),
            }
        )
    if as_json:
        dump(rows)
        return

    def say(value: bool | float | None) -> str:
        words = {True: "yes", False: "no", None: "-"}
        return words[value] if value is None or isinstance(value, bool) else f"{value:g}"

    console = Console(highlight=False)
    tables.grid(
        console,
        ["map", "exact zeros", "keeps order", "ignores shifts", "lead", "loss"],
        [
            [
                label(mapping),
                *(say(row[key]) for key in ("sparse", "monotone", "shift_invariant", "margin")),
                names.loss(mapping.name) or f"{row['loss']}(map, ...)",
            ]
            for mapping, row in zip(maps, rows, strict=True)
        ],
        numeric=None,
    )
    console.print()
    for line in LEGEND:
        console.print(line)


LEGEND = (
    "exact zeros: a probability can be exactly 0.",
    "keeps order: a larger score never gets a smaller probability.",
    "ignores shifts: adding one number to all scores changes nothing.",
    "lead: how far the target's score must lead for a loss of exactly 0; - if no lead is enough.",
    "loss: the function of anymax to train with; with (map, ...) the map is its first argument.",
)


def definition(mapping: Any) -> str:
    """The first paragraph of a map's documentation."""
    return " ".join((type(mapping).__doc__ or "").split("\n\n")[0].split())


@program.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show_config(as_json: bool) -> None:
    """Show versions, engines and threads, for a bug report."""
    found = _config.config()
    if as_json:
        dump(found)
    else:
        click.echo(_config.text(found), nl=False)


FRAMEWORKS = {"numpy": None, "torch": "torch:from_numpy", "jax": "jax.numpy:asarray"}


@program.command(context_settings={"ignore_unknown_options": True})
@click.argument("name", type=Name())
@click.argument("scores", nargs=-1, type=Score())
@parameters
@click.option(
    "--framework",
    type=click.Choice([*FRAMEWORKS, "all"]),
    default="numpy",
    show_default=True,
    help="Whose arrays the call gets; torch and jax take seconds to load.",
)
@click.option("--verbose", is_flag=True, help="Say also why the other engines do not compute it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list, one framework each, with all reasons.")
def explain(name: str, scores: tuple[Any, ...], framework: str, verbose: bool, as_json: bool, **options: Any) -> None:
    """Say which engine computes each operation of a map.

    An engine is code, such as compiled C++ (native) or array operations (reference).

    NAME is the map, such as sparsemax or entmax:alpha=1.3.

    SCORES are a row of the call: the engine may depend on their number. Without them, it is a row of four. A single - reads rows
    from standard input.
    """
    rows = rows_of(scores) or [[2.0, 1.0, 0.1, -1.0]]
    documents = []
    if len({len(row) for row in rows}) > 1:
        raise click.UsageError(f"rows of one call have the same length, got {', '.join(str(len(row)) for row in rows)}")
    with plain_errors():
        mapping = names.choose([name], chosen_options(**options))[0]
        x = np.asarray(rows if len(rows) > 1 else rows[0], dtype=np.float32)
        console = Console(highlight=False, soft_wrap=True)
        for i, each in enumerate(FRAMEWORKS if framework == "all" else (framework,)):
            if i and not as_json:
                console.print()
            array = of_framework(each, x)
            found = None if array is None else kernels.explain(mapping, array, verbose=verbose)
            if as_json:
                documents.append({"framework": each, "shape": x.shape, "operations": _operations(found)})
            elif found is None:
                console.print(f"[bold]{each}[/]: not installed", markup=True)
            else:
                console.print(f"[bold]{each}[/], float32 of shape {tuple(x.shape)}", markup=True)
                console.print(str(found), markup=False)
    if as_json:
        dump(documents)


def _operations(found: kernels.Explanation | None) -> list[dict[str, Any]] | None:
    """An explanation for JSON; None for a framework that is not installed."""
    return found and [
        {"operation": op, "engine": engine, "plan": plan, "refusals": dict(refusals)}
        for (op, engine, refusals), plan in zip(found.rows, found.plans, strict=True)
    ]


def of_framework(framework: str, x: np.ndarray) -> Any:
    """x as an array of a framework; None if that is not installed."""
    maker = FRAMEWORKS[framework]
    if maker is None:
        return x
    module, _, attribute = maker.partition(":")
    if importlib.util.find_spec(framework) is None:
        return None
    return getattr(importlib.import_module(module), attribute)(x)


PICTURES = ("curves", "bars", "simplex", "losses", "jacobian")


@program.command(context_settings={"ignore_unknown_options": True})
@click.argument("name", type=Name())
@click.argument("scores", nargs=-1, type=Score())
@choice
@parameters
@click.option(
    "--out",
    type=click.Path(),
    help="The file to write, whose ending says the format (default: .png), or a folder for it. Default: NAME.png",
)
def plot(name: str, scores: tuple[Any, ...], mappings: tuple[str, ...], out: str | None, **options: Any) -> None:
    """Draw a picture of maps to a file, and print its name.

    NAME is curves, simplex, losses, bars or jacobian, or a map, for a page with all of its pictures.

    SCORES are the row that bars, jacobian and a map's page show. A single - reads them from standard input.
    """
    from . import pictures  # late: matplotlib is an optional extra

    kind = name.lower()
    with plain_errors():
        values = chosen_options(**options)
        rows = rows_of(scores)
        if len(rows) > 1:
            raise ValueError(f"a picture shows one row of scores, got {len(rows)}")
        x = rows[0] if rows else pictures.SCORES
        if kind in PICTURES:
            if scores and kind not in ("bars", "jacobian"):
                raise ValueError(f"{kind} takes no scores, got {len(x)}; bars, jacobian and the pictures of a map do")
            maps = names.choose(mappings, values) if mappings or values else None
            pictures.prepare()
            figure = pictures.draw(kind, maps, x)
        else:
            mapping = _mapping_to_draw(name, mappings, values)
            pictures.prepare()
            figure = pictures.portrait(mapping, x)
        path = destination(out, kind.replace(":", "-"))
        pictures.save(figure, path)
    click.echo(str(path))


def _mapping_to_draw(name: str, mappings: tuple[str, ...], values: dict[str, Any]) -> Any:
    """The map that NAME says in place of a picture."""
    try:
        mapping = names.choose([name], {} if mappings else values)[0]
    except names.UnknownMap:
        raise ValueError(f"{name!r} is neither a picture ({', '.join(PICTURES)}) nor a map") from None
    if mappings:
        raise ValueError(
            f"a map's name ({name}) and --mapping don't combine; with --mapping, NAME is one of {', '.join(PICTURES)}"
        )
    return mapping


def destination(out: str | None, name: str) -> Path:
    """The file to write: `out` with an ending, or NAME.png in the folder `out`."""
    if out is None:
        return Path(f"{name}.png")
    if out.endswith(("/", os.sep)) or Path(out).is_dir():
        Path(out).mkdir(parents=True, exist_ok=True)
        return Path(out) / f"{name}.png"
    return Path(out) if os.path.splitext(out)[1] not in ("", ".") else Path(f"{out.rstrip('.')}.png")


@program.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("anymax-tour"),
    show_default=True,
    help="Folder of the pictures.",
)
@click.option("--quick", is_flag=True, help="Shorter training, smaller pictures.")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**31 - 1),
    default=0,
    show_default=True,
    help="Seed of the first weights and of the split of the data.",
)
@click.option("--no-pictures", is_flag=True, help="Tables only.")
def tour(out: Path, quick: bool, seed: int, no_pictures: bool) -> None:
    """Show the maps on scores, in a classifier and in pictures.

    It needs torch and scikit-learn, and matplotlib for the pictures.
    """
    from . import tour as run  # late: it needs torch and scikit-learn

    with plain_errors():
        run.check(out, pictures=not no_pictures)
    run.tour(Console(highlight=False), out, quick=quick, seed=seed, pictures=not no_pictures)


EXPLORER = Path(__file__).parents[1] / "explorer" / "index.html"


@program.command()
@click.option("--print-path", "--no-browser", "print_path", is_flag=True, help="Only say where the page is.")
def explore(print_path: bool) -> None:
    """Open the explorer in a browser: drag scores, watch maps."""
    import webbrowser  # late: no other command needs it

    if not EXPLORER.is_file():
        raise Missing(f"the page {EXPLORER} is not there; install anymax again")
    if print_path:
        click.echo(str(EXPLORER))
    elif not webbrowser.open(EXPLORER.as_uri()):
        raise Missing(f"there is no browser to open on this machine; open this file in one: {EXPLORER}")
