"""One word for one thing in the signatures of all functions."""

import importlib
import inspect

import jax
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


def word_for_a_map(path):
    return next((name for name in ("mapping", "scoring") if name in parameters(path)), None)


@pytest.mark.parametrize(
    "path", [p for p in PUBLIC if word_for_a_map(p) and not p.startswith("anymax.distributed") and p != "anymax.choose"]
)
def test_other_words_for_a_map_are_answered_with_the_word_of_the_function(path):
    word = word_for_a_map(path)
    for other in {"map", "mapping", "scoring"} - {word}:
        with pytest.raises(TypeError, match=f"has no option '{other}' \\(say {word}=\\)"):
            PUBLIC[path](**{other: "softmax"})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: am.soft_permutation("softmax", X),
            r"got ndarray of shape \(2, 3\); write soft_permutation\(x, mapping\)",
        ),
        (lambda: am.gumbel_softmax(X, mapping=X), r"write gumbel_softmax\(x, mapping=...\)"),
        (lambda: am.linear_attention(X, X, X, 2), r"got 2; write linear_attention\(q, k, v, mapping\)"),
        (lambda: am.routing.route(X, "softmax", 2), r"got 2; write route\(scores, k, scoring\)"),
        (lambda: am.routing.route_support("entmax15", X), r"write route_support\(scores, scoring\)"),
        (lambda: am.sampling.top(X, 2, "softmax"), "^top: .*; the mapping comes first, the scores after it"),
        (lambda: am.apply(2, X), "^apply: .* got 2$"),
        (lambda: am.sparsemax(X, mapping="softmax"), "anymax.apply and anymax.fenchel_young take any map"),
    ],
)
def test_where_a_map_stands(call, words):
    with pytest.raises(TypeError, match=words):
        call()


@pytest.mark.parametrize("path", [p for p in PUBLIC if "chunk" in parameters(p)])
def test_a_chunk_counts_classes(path):
    words = entries(sections(PUBLIC[path].__doc__)["Parameters"])["chunk"]
    assert words.split("\n", 1)[1].strip().startswith("How many classes to compute at a time")


# -- padding -------------------------------------------------------------------------------------------------------------------

PADDED = np.array([1, -100])
WEIGHT = np.array([[1.0, 0.0, 0.5], [0.0, 2.0, 0.0], [0.3, 0.3, 1.0], [-1.0, 0.5, 0.5]])
SUPPORT = np.array([0, 1, 2, 3]), np.array([0, 3, 4])
OF_TARGETS = {  # (map, the kind of array, target) -> log p
    "log_prob": lambda m, a, t: am.log_prob(m, a(X), t),
    "log_prob_entropy": lambda m, a, t: am.log_prob_entropy(m, a(X), t)[0],
    "log_prob, a support": lambda m, a, t: am.log_prob(m, a(X), t, support=(a([0, 1, 2]), a([0, 2, 3]))),
    "linear_log_prob": lambda m, a, t: am.linear_log_prob(a(X), a(WEIGHT), t, m),
    "linear_log_prob_entropy": lambda m, a, t: am.linear_log_prob_entropy(a(X), a(WEIGHT), t, m)[0],
    "linear_log_prob, a support": lambda m, a, t: am.linear_log_prob(
        a(X), a(WEIGHT), t, m, support=tuple(map(a, SUPPORT))
    ),
}
OVER_PROCESSES = {
    "log_prob_entropy": lambda m, a, t: distributed.log_prob_entropy(m, a(X), t)[0],
    "linear_log_prob": lambda m, a, t: distributed.linear_log_prob(a(X), a(WEIGHT), t, m),
    "linear_log_prob, a support": lambda m, a, t: distributed.linear_log_prob(
        a(X), a(WEIGHT), t, m, support=tuple(map(a, SUPPORT))
    ),
    "linear_log_prob_entropy": lambda m, a, t: distributed.linear_log_prob_entropy(a(X), a(WEIGHT), t, m)[0],
}
MAPS = [am.Softmax(), am.Entmax(1.5), am.Sink("entmax15")]


def of_padding(verb, mapping, a):
    got = np.asarray(verb(mapping, a, a(PADDED)))
    np.testing.assert_allclose(got[0], np.asarray(verb(mapping, a, a(np.array([1, 0]))))[0], atol=1e-6)
    assert got[1] == 0
    none = np.asarray(verb(mapping, a, a(np.array([1, -1]))))[1]
    assert (none == 0) == (not isinstance(mapping, am.Sink))  # -1 is the sink


@pytest.mark.parametrize("mapping", MAPS, ids=repr)
@pytest.mark.parametrize("a", [np.asarray, torch.tensor, jax.numpy.asarray], ids=["numpy", "torch", "jax"])
@pytest.mark.parametrize("name", OF_TARGETS)
def test_padding_of_targets(name, a, mapping):
    if "linear" in name and "support" in name and isinstance(mapping, am.Sink):
        pytest.skip("a layer with a sink takes no support")
    of_padding(OF_TARGETS[name], mapping, a)


@pytest.mark.parametrize("mapping", MAPS, ids=repr)
@pytest.mark.parametrize("name", OVER_PROCESSES)
def test_padding_of_targets_over_processes(one_process, name, mapping):
    if "linear" in name and isinstance(mapping, am.Sink) and "support" in name:
        pytest.skip("a layer with a sink takes no support")
    of_padding(OVER_PROCESSES[name], mapping, torch.tensor)


@pytest.mark.parametrize("mapping", MAPS, ids=repr)
def test_padding_has_no_gradient(mapping):
    x = torch.tensor(X, requires_grad=True)
    am.log_prob(mapping, x, torch.tensor(PADDED)).sum().backward()
    assert x.grad[0].abs().sum() > 0
    assert (x.grad[1] == 0).all()
    found = jax.jit(jax.grad(lambda x, t: am.log_prob(mapping, x, t).sum()))(jax.numpy.asarray(X), PADDED)
    np.testing.assert_allclose(found, x.grad, atol=1e-6)


OF_TOKENS = {
    "repetition_penalty": lambda tokens: am.transforms.repetition_penalty(tokens, 2.0)(ROWS),
    "dry": lambda tokens: am.transforms.dry(tokens, allowed_length=1)(ROWS),
    "sequence_bias": lambda tokens: am.transforms.sequence_bias(tokens, {(1, 2): 3.0, (0, 1): 2.0, (3,): 0.5})(ROWS),
    "speculative_accept": lambda tokens: am.sampling.speculative_accept(P, P[:, ::-1, :], tokens, generator=0),
    "recovered_tokens": lambda tokens: am.sampling.recovered_tokens(P, P[:, ::-1, :], tokens, generator=0),
}
ROWS = np.array([[0.5, 1.0, -1.0, 2.0], [1.0, 0.0, 0.5, -0.5]])
P = am.softmax(np.random.default_rng(0).normal(size=(2, 3, 4)))


@pytest.mark.parametrize("name", OF_TOKENS)
def test_padding_of_tokens(name):
    tokens = np.array([[1, 2, 1], [0, 1, -1]])
    got, want = (OF_TOKENS[name](np.where(tokens == -1, mark, tokens)) for mark in (-100, -1))
    np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match="tokens are 0 to 3, and -100, or -1, where a"):
        OF_TOKENS[name](np.where(tokens == -1, -2, tokens))
