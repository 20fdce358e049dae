"""Tables of options: what functions show of them, and that those which spell an option out agree with its row."""

import dataclasses
import importlib
import inspect
import sys
import typing
from typing import Annotated, TypedDict, Unpack

import pytest

from anymax._attention.call import AttentionOptions
from anymax._attention.call import Options as AttentionRecord
from anymax._core import tables
from anymax._core.tables import Between, Default, Integer, OneOf
from anymax._core.typing import LossKeywords, SampleKeywords
from anymax.losses.options import LossOptions


class Sizes(TypedDict, total=False):
    """The words.

    Parameters
    ----------
    x
        The scores.
    size
        How many.
    kind
        Of what.

    Returns
    -------
    Array
        The result.
    """

    size: "Annotated[int, Default(3), Between(1, 5)]"
    kind: "str | None"


def test_the_rows_of_a_table():
    assert tables.rows(Sizes)["kind"] == tables.Row("str | None")
    assert tables.rows(Sizes)["size"][:2] == ("int", 3)


def test_a_function_shows_the_options_of_its_table():
    def verb(x, *, own=1, **options: "Unpack[Sizes]"):
        """A verb.

        Parameters
        ----------
        kind
            Its own.

        Examples
        --------
        >>> 1
        1
        """

    def helper(x):
        """No sections, no words."""

    verb.__module__ = helper.__module__ = "room"
    tables.document({"__name__": "room", "verb": verb, "helper": helper, "foreign": test_the_rows_of_a_table}, Sizes)
    assert str(inspect.signature(verb)) == "(x, *, own=1, size: 'int' = 3, kind: 'str | None' = None)"
    said = "Parameters\n----------\nx\n    The scores.\nsize\n    How many.\nkind\n    Its own.\n\n"
    returned = "Returns\n-------\nArray\n    The result.\n\n"
    assert inspect.getdoc(verb) == f"A verb.\n\n{said}{returned}Examples\n--------\n>>> 1\n1"
    assert helper.__doc__ == "No sections, no words."


@pytest.mark.parametrize(
    ("check", "right", "wrong", "error", "words"),
    [
        (OneOf("sum", "none", all="sum"), "none", "all", ValueError, "verb: a must be 'sum' or 'none', got 'all'; it is called 'sum' here"),
        (OneOf("sum", "none"), "sum", 3, ValueError, "verb: a must be 'sum' or 'none', got 3"),
        (Integer("a place"), -100, 2.0, TypeError, "verb(a=2.0): a must be an integer, a place"),
        (Between(0, 1), 0.5, 1.5, ValueError, "verb: a must be a number from 0 to 1, got 1.5"),
    ],
)  # fmt: skip
def test_checks(check, right, wrong, error, words):
    row = {"a": tables.Row("", None, (check,))}
    assert tables.read(row, "verb", {"a": right}) == {"a": right}
    with pytest.raises(error) as raised:
        tables.read(row, "verb", {"a": wrong})
    assert str(raised.value) == words


# -- functions that spell an option out ----------------------------------------------------------------------------------------------

# each sequence's end; several Axes, one for each head
OTHERWISE = {
    ("attention_varlen", "offset"),
    ("attention", "ax"),
    ("linear_kl", "reduction"),
    ("linear_kl_of_one", "reduction"),
}


for room in ("distributed", "plot", "routing"):  # the others are there
    importlib.import_module(f"anymax.{room}")
MODULES = [module for name, module in sys.modules.items() if f"{name}.".startswith("anymax.")]
ROOMS = {
    table: table.__module__.rpartition(".")[0]
    for module in MODULES
    for table in vars(module).values()
    if typing.is_typeddict(table) and table.__module__.startswith("anymax.") and table.__module__ != "anymax._core.typing"
} | {SampleKeywords: "anymax"}  # fmt: skip


def differing(table, room):
    """The options of public functions of the room whose type or default is not that of the row of their name."""
    rows = tables.rows(table)
    for module in MODULES:
        for name, function in vars(module).items():
            public = inspect.isfunction(function) and ">>> " in (function.__doc__ or "")
            if public and f"{module.__name__}.".startswith(f"{room}.") and function.__module__.startswith(room):
                for p in inspect.signature(function).parameters.values():
                    spelled = p.kind is p.KEYWORD_ONLY and p.name in rows and (name, p.name) not in OTHERWISE
                    if spelled and (p.annotation, p.default) != rows[p.name][:2]:
                        yield f"{module.__name__}.{name}({p})"


@pytest.mark.parametrize("table", ROOMS, ids=lambda table: f"{table.__module__}.{table.__name__}")
def test_an_option_is_the_same_wherever_it_is_spelled_out(table):
    assert not list(differing(table, ROOMS[table]))


def test_records_have_the_options_of_their_tables():
    theirs = [row.default for name, row in tables.rows(LossKeywords).items() if name != "dim"]
    assert [*LossOptions._field_defaults.values()] == [None, *theirs]  # of the weight, and of the others in this order
    assert {*LossOptions().words()} == {"weight", *SampleKeywords.__annotations__}  # processes compare these
    record = {field.name: field.default for field in dataclasses.fields(AttentionRecord) if field.kw_only}
    assert record == {"need_weights": False, "return_threshold": False} | {
        n: row.default for n, row in tables.rows(AttentionOptions).items()
    }
