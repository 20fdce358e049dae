"""The examples in docstrings say what happens."""

import doctest
import importlib
import pkgutil

import pytest

import anymax

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
    return [test for test in finder.find(module, name) if test.examples]


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
