"""What `help` says: the options of every signature, a line for every argument, and examples that say what happens."""

import contextlib
import doctest
import importlib
import inspect
import pickle
import pkgutil
import types
import typing

import numpy as np
import pytest

import anymax
from anymax._core import tables

NO_DOCSTRINGS = ("__main__", "_engine")  # a program, and the compiled library
MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(anymax.__path__, "anymax.")
    if name.rpartition(".")[2] not in NO_DOCSTRINGS
]


def examples(name):
    """Of this module, and not of what it imports."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        pytest.skip(str(error))
    finder = doctest.DocTestFinder(exclude_empty=True)
    return [test for test in finder.find(module, name, extraglobs={"anymax": anymax}) if test.examples]


@pytest.mark.whole
@pytest.mark.parametrize("name", MODULES)
def test_examples_of_a_module(name):
    said = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, verbose=False)
    for test in examples(name):
        runner.run(test, out=said.append)
    assert not runner.summarize(verbose=False).failed, "".join(said)


def test_an_example_that_lies_is_found():
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "lie", "lie", 0)
    assert doctest.DocTestRunner(verbose=False).run(test, out=lambda _: None).failed == 1


# -- signatures and arguments -----------------------------------------------------------------------------------------------------


OWN = ("distributed", "margins", "nn", "hf", "sklearn", "plot")  # modules whose own names are public


def public():
    """The functions and classes that are public."""
    things = {name: getattr(anymax, name) for name in anymax.__all__}
    for module in OWN:
        with contextlib.suppress(ImportError):  # what it needs is not installed
            found = vars(importlib.import_module(f"anymax.{module}"))
            listed = found.get("__all__") or [name for name in found if not name.startswith("_")]
            mine = {f"{module}.{name}": found[name] for name in listed}
            things |= {
                name: thing for name, thing in mine.items() if getattr(thing, "__module__", "").startswith("anymax.")
            }
    return {name: thing for name, thing in things.items() if inspect.isclass(thing) or inspect.isfunction(thing)}


PUBLIC = public()
FUNCTIONS = {name: thing for name, thing in PUBLIC.items() if inspect.isfunction(thing)}


def missing(thing):
    """What `help` does not say of a public name."""
    said = tables.sections(inspect.getdoc(thing) or "")
    base = inspect.isabstract(thing)  # its parameters are those of its subclasses
    parameters = [] if base else inspect.signature(thing).parameters.values()
    described = tables.entries(said.get("Parameters", ()))
    for p in parameters:
        if p.kind is p.VAR_KEYWORD and p.name not in described:
            yield f"the options behind {p}"
        elif "\n    " not in described.get(p.name, ""):
            yield f"a line for {p.name}"
    if not any(line.startswith(">>> ") for line in said.get("Examples", ())):
        yield "an example"
    if not inspect.isclass(thing) and next(iter(said.get("Returns", ())), "None") == "None":
        yield "what is returned"


@pytest.mark.parametrize("name", PUBLIC)
def test_help_says_everything(name):
    assert not list(missing(PUBLIC[name]))


def test_names_of_modules_are_public_too():
    names = public()
    assert {"margins.ArcFace", "entmax", "Entmax"} <= names.keys()
    assert "margins.math" not in names


def test_what_help_leaves_out_is_found():
    def f(x, mask=None, **options):
        """Words.

        Parameters
        ----------
        x
            The scores.
        """

    assert list(missing(f)) == ["a line for mask", "the options behind **options", "an example", "what is returned"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_signature_has_the_options_that_type_checkers_see(name):
    function = FUNCTIONS[name]
    own = inspect.signature(function).parameters
    code = inspect.unwrap(function).__code__
    said = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    if code.co_flags & inspect.CO_VARKEYWORDS and hasattr(function, "__signature__"):
        (options,) = typing.get_type_hints(function, include_extras=True)["options"].__args__
        said |= typing.get_type_hints(options).keys()
    assert said == {p.name for p in own.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


X, Y = np.array([[2.0, 1.0, -1.0], [0.3, 0.1, 0.2], [0.0, 4.0, 1.0]]), np.array([0, -100, 2])
GIVEN = {
    "mapping": anymax.Softmax(), "x": X, "p": np.eye(3), "scores": X, "cosines": np.tanh(X), "target": Y, "k": 2,
    "linear_weight": np.eye(3),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",  # tests/distributed/test_distributed.py has the functions that need a group of processes
    [n for n, f in FUNCTIONS.items() if hasattr(f, "__signature__") and not n.startswith("distributed.")],
)
def test_the_defaults_that_are_shown_are_those_in_effect(name):
    """Said out loud, every default gives what it gives unsaid."""
    function = FUNCTIONS[name]
    parameters = inspect.signature(function).parameters.values()
    given = {p.name: GIVEN[p.name] for p in parameters if p.name in GIVEN and (p.default is p.empty or p.name == "k")}
    if name == "multilabel_softmax_loss":
        given["target"] = (X > 0.5).astype(int)
    if name in ("attention", "explain_attention"):
        given = dict.fromkeys("qkv", X)
    if name.startswith("segment_"):
        given["index"] = np.array([0, 0, 1])
        given |= {"target": np.array([[0.5], [0.5], [1.0]]) * np.ones(3)} if "target" in given else {}
        given |= {"generator": 7} if name == "segment_sample" else {}
    defaults = {p.name: p.default for p in parameters if p.name not in given}
    np.testing.assert_array_equal(function(**given), function(**given, **defaults))


@pytest.mark.parametrize("as_indented", [str, inspect.cleandoc], ids=["indented", "as from Python 3.13 on"])
def test_spelled_says_what_the_other_function_says(as_indented):
    def host(x, axis=-1, *, mask=None, out=None):
        """Host.

        Parameters
        ----------
        x
            The scores,
            an array.
        axis
            Theirs.
        mask, out
            Two at once.

        Returns
        -------
        Array
            p.

        Examples
        --------
        >>> 1
        1
        """

    def guest(x, k, axis=0, *, own=3, **options):
        """Guest.

        Prose.

        Parameters
        ----------
        axis
            Ours.

        Examples
        --------
        >>> 2
        2
        """

    before = guest
    host.__doc__, guest.__doc__ = as_indented(host.__doc__), as_indented(guest.__doc__)
    assert tables.documented_like(host)(guest) is before
    assert str(inspect.signature(guest)) == "(x, k, axis=0, *, own=3, mask=None, out=None)"
    head = "Guest.\n\nProse.\n\nParameters\n----------\n"
    said = "x\n    The scores,\n    an array.\naxis\n    Ours.\nmask, out\n    Two at once.\n\n"
    assert inspect.getdoc(guest) == f"{head}{said}Returns\n-------\nArray\n    p.\n\nExamples\n--------\n>>> 2\n2"


def test_spelled_without_docstrings():
    """As `python -OO` has it."""

    def host(*, mask=None): ...

    def guest(**options): ...

    assert str(inspect.signature(tables.documented_like(host)(guest))) == "(*, mask=None)"
    assert guest.__doc__ is None


def test_a_spelled_function_is_pickled_by_its_name():
    assert pickle.loads(pickle.dumps(anymax.entmax)) is anymax.entmax
    assert isinstance(anymax.entmax, types.FunctionType)
