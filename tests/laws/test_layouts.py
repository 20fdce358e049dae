"""Which verb is there in which layout: rows, segments, output layers, classes on several processes; DTensors are in test_dtensor.py."""

import importlib.util
import inspect

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

from layout_cases import VERBS, verbs

import anymax as A

PREFIX = {"segments": (A.segments, "segment_"), "layer": (A.linear, "linear_"), "shards": (A.distributed, "")}


def test_every_verb_has_a_row():
    assert set(VERBS) == set(verbs())


@pytest.mark.parametrize("layout", PREFIX)
def test_every_function_of_a_layout_stands_in_the_table(layout):
    room, prefix = PREFIX[layout]
    there = {n for n in room.__all__ if n.startswith(prefix) and not n[:1].isupper() and not n.startswith("explain")}
    rows = {getattr(verb, layout) for verb in VERBS.values()} - {None}
    assert rows | ({verb.layer for verb in VERBS.values()} - {None} if layout == "shards" else set()) == there


@pytest.mark.parametrize("layout", PREFIX)
def test_a_verb_that_a_layout_does_not_have_is_an_error(layout):
    room, prefix = PREFIX[layout]
    for name, verb in VERBS.items():
        own = inspect.ismodule(vars(room).get(name))  # a file of the room
        if getattr(verb, layout) is None and f"{prefix}{name}" not in room.__all__ and not own:
            with pytest.raises(AttributeError, match=f"module '{room.__name__}' has no attribute '{prefix}{name}'"):
                getattr(room, f"{prefix}{name}")
