"""Under a dispatch mode of torch (fake tensors, make_fx, a counter of operations) every verb is seen by it, and still right."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import anymax as A
from anymax import Entmax, Ratio, Sparsemax
from anymax._array import modes
from anymax.kernels import arrays

BEFORE = {"before dispatch": True, "dispatch": False}
when = pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE.keys())


class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def qkv(seed, n=40, d=4):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(2, n, d, generator=g) for _ in range(3)]


VERBS = {
    "apply": lambda q, k, v: A.sparsemax(q),
    "apply, a map of its own": lambda q, k, v: A.apply(Entmax(1.3), q, 1),
    "apply, a function": lambda q, k, v: A.apply(Ratio(lambda x: x * x + 1), q),
    "attention": lambda q, k, v: A.attention(q, k, v, Entmax(1.3)),
    "attention in blocks": lambda q, k, v: A.attention(q, k, v, Sparsemax(), implementation="blockwise", is_causal=True),
    "linear attention": lambda q, k, v: A.linear_attention(q, k, v),
    "causal linear attention": lambda q, k, v: A.linear_attention(q, k, v, is_causal=True),
    "one head": lambda q, k, v: A.linear_attention(q[0], k[0], v[0], is_causal=True),
    "state": lambda q, k, v: A.LinearState.of(k, v).attend(q),
}  # fmt: skip


@when
@pytest.mark.parametrize("verb", VERBS)
def test_a_trace_holds_for_other_numbers(verb, before):
    f = VERBS[verb]
    graph = make_fx(f, pre_dispatch=before)(*qkv(0))
    torch.testing.assert_close(graph(*qkv(1)), f(*qkv(1)), rtol=1e-5, atol=1e-6)
    if "linear" in verb or verb in ("one head", "state"):  # nothing is written to in place, which a graph may not move
        assert not [node for node in graph.graph.nodes if str(node.target).split(".")[0].endswith("_")]
        assert "out =" not in graph.code


TRACED = {name: VERBS[name] for name in ("apply", "apply, a map of its own", "attention")} | {
    "loss": lambda q, k, v: A.nll("taylor", q, torch.zeros(2, 4, dtype=torch.int64)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("verb", TRACED)
def test_a_trace_of_what_records_a_gradient_holds_no_result(verb, tmp_path):
    """torch.jit.trace checks itself without a gradient: the graph must be the same."""
    f = TRACED[verb]
    traced = torch.jit.trace(f, tuple(a.requires_grad_() for a in qkv(0, n=5)))
    torch.jit.save(traced, str(tmp_path / "traced.pt"))
    new = [a.requires_grad_() for a in qkv(1, n=5)]
    got, expected = traced(*new), f(*new)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    by_trace, by_call = (torch.autograd.grad((out * out).sum(), new[0]) for out in (got, expected))
    torch.testing.assert_close(by_trace, by_call, rtol=1e-4, atol=1e-5)


@when
def test_the_question_has_one_answer(before):
    heard = []

    def f(x):
        heard.append((modes(), arrays.refuse_tensor(torch.ones(3))))
        return x + 1

    make_fx(f, pre_dispatch=before)(torch.ones(3))
    with Watch():
        f(torch.ones(3))
    assert [on for on, _ in heard] == [True, True]
    assert all("plain operations are to be seen" in reason for _, reason in heard)
    assert not modes()
    assert arrays.refuse_tensor(torch.ones(3)) is None


@pytest.mark.parametrize("verb", VERBS)
def test_a_watch_sees_and_changes_nothing(verb):
    f = VERBS[verb]
    leaves = [a.requires_grad_() for a in qkv(2)]
    with Watch() as watch:
        out = f(*leaves)
    assert watch.seen
    want = f(*leaves)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)
    got, wanted = (torch.autograd.grad(o.square().sum(), leaves, allow_unused=True) for o in (out, want))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
