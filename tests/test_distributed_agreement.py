"""Processes that are asked for different things, or of which one fails: one error, with the same words, on all of them, and no waiting."""

import importlib.util
import re

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from processes import all_right, together
from test_distributed import cut, gloo, numbers

import anymax as A
from anymax import distributed as D
from anymax.autodiff.torch_group import TorchGroup as TorchGroup

INDEX, SHARES = torch.tensor([0, 3, 1]), torch.full((3, 2), 0.25, dtype=torch.float64)
FEATURES, CENTRES = numbers(50, 3, 5), numbers(51, 2, 5)


def loss(g, x, t=INDEX, verb="nll", mapping="softmax", start=True, **given):
    start = 2 * g.rank if start else None
    return getattr(D, verb)(mapping, x, t, axis=-1, group=g, class_start=start, **given)


def layer(g, x=FEATURES, t=INDEX, mapping="sparsemax", **given):
    return D.linear_loss(x, CENTRES, t, mapping, group=g, **given)


def learned(value=1.5):
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


# (what a process of rank r does with its scores [3, 2]; what all of them say)
ODD = {
    "reduction": (lambda g, x, r: loss(g, x, reduction="mean" if r else "sum"), "reduction is 'sum' on process 0, 'mean' on process 1"),
    "ignore_index": (lambda g, x, r: loss(g, x, ignore_index=-1 - r), "ignore index is -1 on process 0, -2 on process 1"),
    "weight": (lambda g, x, r: loss(g, x, weight=torch.ones(2) if r else None), "weight is not given on process 0, given on process 1"),
    "smoothing": (lambda g, x, r: loss(g, x, label_smoothing=0.1 * r), "label smoothing is 0.0 on process 0, 0.1 on process 1"),
    "a word that is none": (lambda g, x, r: loss(g, x, reduction="average" if r else "mean"), "process 1: reduction must be"),
    "target's shape": (lambda g, x, r: loss(g, x, INDEX[: 3 - r]), r"process 1: target of shape \(2,\)"),
    "without class_start": (lambda g, x, r: loss(g, x, INDEX[: 3 - r], start=False), r"shape \(3,\) on process 0, .*\(2,\) on process 1"),
    "weight's size": (lambda g, x, r: loss(g, x, weight=torch.ones(2 + r)), r"process 1: weight of shape \(3,\)"),
    "weight's size, without class_start": (
        lambda g, x, r: loss(g, x, weight=torch.ones(2 + r), start=False), r"process 1: weight of shape \(3,\)",
    ),
    "rows": (lambda g, x, r: D.apply("softmax", x[r:], group=g), r"rows is of shape \(3,\) on process 0, of shape \(2,\) on process 1"),
    "dtype": (lambda g, x, r: D.apply("softmax", x.float() if r else x, group=g), "dtype is torch.float64 on process 0, torch.float32"),
    "kind of target": (lambda g, x, r: loss(g, x, SHARES if r else INDEX), "target is class indices .* a part of distributions"),
    "verb": (
        lambda g, x, r: D.apply("softmax", x, group=g) if r else D.logsumexp(x, group=g), "verb is logsumexp on process 0, apply on",
    ),
    "num_samples": (lambda g, x, r: D.sample("softmax", x, num_samples=r + 1, group=g), "num samples is 1 on process 0, 2 on process 1"),
    "targets": (lambda g, x, r: loss(g, x, INDEX + r * (INDEX == 1)), "target must be the same on every process; its entry 2 is 1"),
    "y out of range": (
        lambda g, x, r: D.log_prob_entropy("softmax", x, INDEX + 90 * r, group=g), "y must be the same on every process; its entry 0 is",
    ),
    "who learns": (lambda g, x, r: D.apply(A.Entmax(learned() if r else learned().detach()), x, group=g), "alpha is an array .* a learned"),
    "a layer's chunk": (lambda g, x, r: layer(g, chunk=1 + r), "chunk is 1 on process 0, 2 on process 1"),
    "a layer's reduction": (lambda g, x, r: layer(g, reduction="sum" if r else "mean"), "reduction is 'mean' on process 0"),
    "a layer's rows": (lambda g, x, r: layer(g, FEATURES[r:], INDEX[r:]), r"rows is of shape \(3,\) on process 0"),
    "a layer's target": (lambda g, x, r: layer(g, t=INDEX[r:]), r"process 1: linear_loss: target of shape \(2,\)"),
    "a layer's weight": (lambda g, x, r: layer(g, weight=torch.ones(2 + r), chunk=2), r"linear_loss: process 1: weight of shape \(3,\)"),
    "a layer's features": (
        lambda g, x, r: layer(g, FEATURES.clone().requires_grad_() if r else FEATURES), "x is 5 features, an array .* 5 features, a le",
    ),
}  # fmt: skip


def said(f, ranks=2):
    """What each process says, by (kind, words)."""

    def one(group):
        with pytest.raises((RuntimeError, ValueError, TypeError, IndexError)) as caught:
            f(group)
        return caught.type, str(caught.value)

    return together(ranks, one)


@pytest.mark.parametrize("name", ODD)
def test_what_differs_is_one_error_on_all_processes(name):
    """Also after calls of which all are the same."""
    f, words = ODD[name]
    x = numbers(52, 3, 4)

    def both(group):
        for _ in range(2):
            f(group, cut(x, (2, 2), group.rank), 0)
        f(group, cut(x, (2, 2), group.rank), group.rank)

    first, second = said(both)
    assert first == second
    assert re.search(words, first[1]), first
    assert first == said(lambda g: f(g, cut(x, (2, 2), g.rank), g.rank))[0]


def test_an_error_of_all_is_each_ones_own():
    for kind, words in said(lambda g: D.apply("softmax", torch.zeros(3, 2).bool(), group=g)):
        assert kind is TypeError
        assert words.startswith("scores: expected real floating-point")


def test_many_processes_are_named_by_what_they_say():
    def f(g):
        D.nll("softmax", torch.zeros(2, 3), torch.tensor([0, 1]), group=g, reduction="sum" if g.rank == 1 else "mean")

    words = {words for _, words in said(f, 7)}
    assert len(words) == 1
    assert "reduction is 'mean' on processes 0, 2, 3, 4 and 2 more, 'sum' on process 1" in words.pop()


def test_a_collective_more_only_where_a_call_is_another_than_before():
    x, t = numbers(53, 3, 4), INDEX
    calls = [
        lambda g, a: D.apply("softmax", a, group=g),
        lambda g, a: D.apply("softmax", a, group=g),
        lambda g, a: D.nll("softmax", a, t, axis=-1, group=g, class_start=2 * g.rank),
        lambda g, a: D.logsumexp(a[:2], group=g),
    ]

    def one(group):
        counts = []
        for _ in range(3):
            group.calls = 0
            for f in calls:
                f(group, cut(x, (2, 2), group.rank))
            counts.append(group.calls)
        return counts

    for counts in together(2, one):
        assert counts[-1] == len(calls)
        assert counts[0] <= 2 * len(calls)


REAL = """
import test_distributed_agreement as T
x = T.cut(T.numbers(52, 3, 4), (2, 2), rank)
for name, (f, words) in T.ODD.items():
    f(T.TorchGroup(dist.group.WORLD), x, 0)
    try:
        f(T.TorchGroup(dist.group.WORLD), x, rank)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        assert T.re.search(words, str(error)), (name, error)
    else:
        raise AssertionError(name)
print("right")
dist.destroy_process_group()
"""


@gloo
@pytest.mark.whole
def test_processes_of_gloo_are_not_ended_by_what_differs():
    all_right(2, REAL)
