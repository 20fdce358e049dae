"""One word for one thing in the signatures of all functions."""

import importlib
import inspect

import numpy as np
import pytest
import torch

import anymax as am
from anymax import distributed
from anymax._core.tables import entries, sections

MODULES = ("anymax", "anymax.distributed", "anymax.likelihood", "anymax.sampling", "anymax.linear", "anymax.routing")
PUBLIC = {
    f"{module}.{name}": getattr(importlib.import_module(module), name)
    for module in MODULES
    for name in importlib.import_module(module).__all__
}
X, TARGET = np.array([[1.0, 0.5, -2.0], [0.0, 0.0, 3.0]]), np.array([1, 0])


def parameters(path):
    return inspect.signature(PUBLIC[path]).parameters if inspect.isroutine(PUBLIC[path]) else {}


@pytest.mark.parametrize(
    "path",
    [p for p in PUBLIC if p.rpartition(".")[2].endswith(("loss", "nll", "fenchel_young", "log_prob", "_entropy"))],
)
def test_the_classes_that_are_asked_about_are_the_target(path):
    asks = path.rpartition(".")[2] not in (
        "contrastive_loss",
        "load_balancing_loss",
        "topk_log_prob",
        "router_z_loss",
        "segment_entropy",
    )
    assert ("target" in parameters(path)) == asks
    assert "y" not in parameters(path)


def test_y_is_another_name_of_the_target():
    np.testing.assert_array_equal(am.log_prob("softmax", X, y=TARGET), am.log_prob("softmax", X, target=TARGET))
    for got, want in zip(
        am.log_prob_entropy("softmax", X, y=TARGET), am.log_prob_entropy("softmax", X, TARGET), strict=True
    ):
        np.testing.assert_array_equal(got, want)
    with pytest.raises(TypeError, match="y= is another name of target, which is given too"):
        am.log_prob("softmax", X, TARGET, y=TARGET)
    with pytest.raises(TypeError, match="say target="):
        am.log_prob("softmax", X, labels=TARGET)


def test_y_is_another_name_of_the_target_over_processes(one_process):
    x, target = torch.tensor(X), torch.tensor(TARGET)
    for got, want in zip(
        distributed.log_prob_entropy("softmax", x, y=target), am.log_prob_entropy("softmax", x, target), strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("path", [p for p in PUBLIC if "chunk" in parameters(p)])
def test_a_chunk_counts_classes(path):
    words = entries(sections(PUBLIC[path].__doc__)["Parameters"])["chunk"]
    assert words.split("\n", 1)[1].strip().startswith("How many classes to compute at a time")
