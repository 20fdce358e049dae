"""docs/mathematics.md: every numbered statement has its check in `mathematics/`, and every check its statement."""

import re
from pathlib import Path

import pytest

pytest.importorskip("scipy")
pytest.importorskip("sympy")
pytest.register_assert_rewrite("mathematics")

import mathematics
from mathematics import entmax, losses, noise, ratios, scores, softmax, thresholds  # noqa: F401, importing them registers the checks

PATH = Path(__file__).parents[2] / "docs" / "mathematics.md"
if not PATH.exists():
    pytest.skip("the pages are in the repository only", allow_module_level=True)
PAGE = PATH.read_text(encoding="utf-8")
STATEMENTS = re.findall(r"^<a id=\"([a-z0-9-]+)\"></a>\n\*\*(\d+)\.(\d+) [^*]+\*\*", PAGE, flags=re.M)
SHORT = ("1", "3", "4", "5", "8")  # sections that the short battery takes
NUMBER = {name: f"{section}.{item}" for name, section, item in STATEMENTS}


@pytest.mark.whole(lambda name: NUMBER[name].partition(".")[0] not in SHORT)
@pytest.mark.parametrize("name", NUMBER)
def test_statement(name):
    assert name in mathematics.CHECKS, f"statement {NUMBER[name]} ({name}) has no check in tests/mathematics"
    mathematics.CHECKS[name]()


def test_every_check_has_its_statement():
    assert set(mathematics.CHECKS) <= set(NUMBER)


def test_numbers_are_in_order():
    assert len(NUMBER) == len(STATEMENTS) == len(re.findall(r"^<a id=.*></a>$", PAGE, flags=re.M))
    expected, section, item = [], 0, 0
    for _, own, _ in STATEMENTS:
        section, item = (section, item + 1) if int(own) == section else (section + 1, 1)
        expected.append((str(section), str(item)))
    assert [(a, b) for _, a, b in STATEMENTS] == expected
    assert re.findall(r"^## (\d+)\.", PAGE, flags=re.M) == [str(i + 1) for i in range(section)]


def test_references_say_the_number_of_what_they_point_to():
    references = re.findall(r"\[([^\][]+)\]\(#([^)]+)\)", PAGE)
    assert len(references) > 20
    for number, name in references:
        assert NUMBER[name] == number
