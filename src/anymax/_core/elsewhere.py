"""The answer to a name that a module does not have: what another package's name is here, or the name that was probably meant."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from .names import ALIASES, classes, ratios, required
from .providers import providers
from .spelling import nearest


def tables() -> list[dict[str, Any]]:
    """What calls of other packages are here, a table for each package; the page "Migrating" shows them and a test runs them."""
    import json  # late, as pathlib: needed only for this error
    from pathlib import Path

    return json.loads(Path(__file__).with_name("migrating.json").read_text(encoding="utf-8"))


def old_name(call: str) -> str:
    """The function or class of another package that a row of the tables calls.

    Examples
    --------
    >>> old_name("jax.vmap(optax.projections.projection_simplex)(x)"), old_name("top_p")
    ('projection_simplex', 'top_p')
    """
    dotted = [name for name in re.findall(r"[A-Za-z_][\w.]*", call) if name not in ("jax.vmap", "jax.jit", "lambda")]
    return next((name for name in dotted if "." in name), dotted[0]).rpartition(".")[2]


def listed(module: str) -> list[str]:
    """The `__all__` of a module, which is not imported for it."""
    import ast  # late, as the rest
    import sys
    from importlib.util import find_spec

    if module in sys.modules:
        return sys.modules[module].__all__
    spec = find_spec(module)
    source: Any = spec and spec.loader and spec.loader.get_source(module)  # type: ignore[attr-defined]
    written = re.search(r"^__all__ = (\[.*?\])", source or "", flags=re.M | re.S)
    return ast.literal_eval(written[1]) if written else []


class UnknownName(AttributeError):
    """The error for `module.name`. Its hint is looked up when the message is read, since `hasattr` raises many that nobody reads.

    Examples
    --------
    >>> str(UnknownName("anymax", "entmax_bisect", anymax.__all__))
    "module 'anymax' has no attribute 'entmax_bisect'; write anymax.entmax(x, alpha=1.3) for entmax.entmax_bisect(x, alpha=1.3)"
    """

    def __init__(self, module: str, name: str, known: Iterable[str]) -> None:
        super().__init__(module, name, tuple(known))
        self.name = name

    def __str__(self) -> str:
        module, name, known = self.args
        hint = None if name.startswith("_") else _hint(module, name, known)
        return f"module {module!r} has no attribute {name!r}{f'; {hint}' if hint else ''}"


def answering(module: str, known: Iterable[str]) -> Callable[[str], NoReturn]:
    """The `__getattr__` of a module that has nothing but the names `known`."""

    def answer(name: str) -> NoReturn:
        raise UnknownName(module, name, known)

    return answer


def _hint(module: str, name: str, known: Iterable[str]) -> str | None:
    """What the name means in another package or in another module of this one, or the nearest name of these."""
    rows = {old_name(row["old"]): row for table in reversed(tables()) for row in reversed(table["rows"])}
    if name in rows:
        return _answer(rows[name])
    if module == "anymax.nn" and name in (kind.__name__ for kind in classes().values()):
        return f"write anymax.nn.Activation(anymax.{name}(...)) for the module, or anymax.{name}(...) for the map alone"
    public = providers.public_names()
    for other, names in public.items():
        if other != module and name in names:
            return f"it is {other}.{name}"
    verb = name.removeprefix("log_")
    if verb != name and verb in public["anymax"]:
        return f"write anymax.log_apply({verb!r}, x)"
    attends = name.removesuffix("_attention")
    if attends in {**classes(), **ratios(), **ALIASES}:
        spec = _spec(attends)
        return f"write anymax.apply({spec!r}, x)" if attends == name else f"write anymax.attention(q, k, v, {spec!r})"
    near = nearest(name, known, 0.75)
    if near:
        return f"did you mean {module}.{near}?"
    paths = {each: f"{other}.{each}" for other, names in reversed(public.items()) for each in names}
    near = nearest(name, paths, 0.8)
    if near:
        return f"did you mean {paths[near]}?"
    near = nearest(name, rows, 0.8)
    return _answer(rows[near]) if near else None


def _spec(name: str) -> str:
    """A map by its name, with values for the parameters that it needs."""
    kind = classes().get(name)
    needs = ",".join(f"{key}={kind.example[key]}" for key in required(kind)) if kind else ""
    return f"{name}:{needs}" if needs else name


def _answer(row: dict[str, Any]) -> str:
    """A row of the tables as a sentence."""
    note = f" ({row['note'].replace('`', '')})" if "note" in row else ""
    return f"write {row['new']} for {row['old']}{note}"
