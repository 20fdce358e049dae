"""Fixtures that several files share."""

import contextlib

import pytest

import anymax as am
from anymax.kernels import native


@pytest.fixture(params=["chosen", "reference"])
def engine(request):
    """Each test twice: by the engine that serves, and by the reference that every engine is held to."""
    if request.param == "chosen" and native.isa() is None:
        pytest.skip("no compiled engine: the reference serves")
    with am.use("reference") if request.param == "reference" else contextlib.nullcontext():
        yield request.param
