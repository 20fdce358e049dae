"""The planted faults: every piece of the table is found, wherever it stands; `python -m tools.plant` plants them."""

import re
from pathlib import Path

import pytest

from tools import faults, plant

ROOT = Path(__file__).resolve().parents[2]


def test_every_piece_stands_somewhere_once():
    assert not plant.lost(), "\n".join(plant.lost())


def test_names_are_of_one_fault_each_and_every_fault_changes_something():
    names = [fault.name for fault in plant.every()]
    assert len(set(names)) == len(names)
    assert not [fault.name for fault in plant.every() if fault.old == fault.new]


def test_a_piece_that_has_moved_is_found_and_one_that_is_gone_is_named(tmp_path):
    fault = faults.Fault("a sign", "csrc/units/rows.cpp", "return -x;", "return x;", "native_rows")
    (tmp_path / "csrc" / "links").mkdir(parents=True)
    moved = tmp_path / "csrc" / "links" / "other.hpp"
    moved.write_text("double f(double x) { return -x; }\n")
    assert plant.place(fault, tmp_path) == moved
    (tmp_path / "csrc" / "units").mkdir()
    named = tmp_path / "csrc" / "units" / "rows.cpp"
    named.write_text("double g(double x) { return -x; }\n")
    assert plant.place(fault, tmp_path) == named
    named.write_text("nothing\n")
    moved.write_text("return -x; return -x;\n")
    with pytest.raises(
        LookupError, match=re.escape("a sign: csrc/units/rows.cpp has 0 times, and not once, 'return -x;'")
    ):
        plant.place(fault, tmp_path)
    moved.write_text("")
    with pytest.raises(LookupError, match="nowhere in csrc/"):
        plant.place(fault, tmp_path)


def test_contributing_says_what_the_record_says():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert plant.table() in text, "put what `python -m tools.plant --table` prints into CONTRIBUTING.md"
