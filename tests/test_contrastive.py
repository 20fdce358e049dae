"""The contrastive loss of pairs of embeddings."""

from __future__ import annotations

import numpy as np
import pytest
from kinds import KINDS, back
from laws import close
from linear_cases import MAPS, made, tolerance

import anymax as A


def embeddings(n=9, features=4, seed=0):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(2, n, features))
    return (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (a, b))


def dense(mapping, a, b, temperature, bidirectional, reduction="mean"):
    """The loss of all scores, whose targets are on the diagonal."""
    loss = A.cross_entropy if mapping.is_softmax else lambda *o, **k: A.fenchel_young(mapping, *o, **k)
    s, place = a @ b.T / temperature, np.arange(len(a))
    value = loss(s, place, reduction=reduction)
    return 0.5 * (value + loss(s.T, place, reduction=reduction)) if bidirectional else value


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "strict"])
@pytest.mark.parametrize("name", ["softmax", "sparsemax", "entmax15"])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_is_the_loss_of_all_scores(kind, name, bidirectional):
    a, b = embeddings()
    x, y = made(kind, a, b)
    for reduction in ("mean", "sum", "none"):
        want = dense(MAPS[name], a, b, 0.2, bidirectional, reduction)
        options = {"temperature": 0.2, "bidirectional": bidirectional, "reduction": reduction}
        close(back(A.contrastive_loss(x, y, mapping=MAPS[name], **options)), want, tolerance(kind))


@pytest.mark.parametrize("name", ["softmax", "entmax15"])
@pytest.mark.parametrize(("reduction", "held"), [("mean", 30), ("none", 0)])
def test_gradients_with_a_learned_temperature(name, reduction, held, monkeypatch):
    torch = pytest.importorskip("torch")
    from anymax.linear import torch_contrastive
    from anymax.linear.torch_candidates import BlockSize

    monkeypatch.setattr(torch_contrastive, "_SIZE", BlockSize(4, 3))  # several blocks, and a diagonal across them
    monkeypatch.setattr(torch_contrastive, "_HELD", held)
    a, b = (torch.tensor(v).requires_grad_() for v in embeddings())
    log_t = torch.tensor(-1.0, dtype=torch.float64).requires_grad_()
    free = a, b, log_t
    g = torch.linspace(-1, 2, 9, dtype=torch.float64) if reduction == "none" else None

    def loss(a, b, log_t):
        return A.contrastive_loss(a, b, mapping=MAPS[name], temperature=log_t.exp(), reduction=reduction)

    s = a @ b.T / log_t.exp()
    place = torch.arange(9)
    if name == "softmax":
        of = lambda s: torch.nn.functional.cross_entropy(s, place, reduction=reduction)  # noqa: E731
    else:
        of = lambda s: A.entmax15_loss(s, place, reduction=reduction)  # noqa: E731
    want = 0.5 * (of(s) + of(s.T))
    close(loss(*free).detach(), want.detach(), 1e-10)
    for one, other in zip(torch.autograd.grad(loss(*free), free, g), torch.autograd.grad(want, free, g)):
        close(one, other, 1e-9)
    assert torch.autograd.gradgradcheck(lambda *f: loss(*f).sum(), free, atol=1e-5)


def test_many_pairs_in_blocks():
    torch = pytest.importorskip("torch")
    a, b = (torch.tensor(v, dtype=torch.float32) for v in embeddings(2500, 8, seed=1))
    a.requires_grad_()
    s = a @ b.T / 0.05
    place = torch.arange(2500)
    want = 0.5 * (torch.nn.functional.cross_entropy(s, place) + torch.nn.functional.cross_entropy(s.T, place))
    got = A.contrastive_loss(a, b, temperature=0.05)
    close(got.detach(), want.detach(), 1e-5)
    close(torch.autograd.grad(got, a)[0], torch.autograd.grad(want, a)[0], 1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype):
    torch = pytest.importorskip("torch")
    a, b = (torch.tensor(v, dtype=getattr(torch, dtype)).requires_grad_() for v in embeddings(40, 16))
    got = A.contrastive_loss(a, b, temperature=0.5)
    want = dense(A.Softmax(), *(v.detach().double().numpy() for v in (a, b)), 0.5, True)
    assert got.dtype == torch.float32
    close(float(got.detach()), want, 2e-2)
    for g in torch.autograd.grad(got, (a, b)):
        assert g.dtype == a.dtype
        assert torch.isfinite(g).all()


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_compiles():
    torch = pytest.importorskip("torch")
    a, b = (torch.tensor(v, dtype=torch.float32).requires_grad_() for v in embeddings())
    step = torch.compile(lambda a, b: A.contrastive_loss(a, b, temperature=0.3), backend="aot_eager", fullgraph=True)
    want = A.contrastive_loss(a, b, temperature=0.3)
    close(step(a, b).detach(), want.detach(), 1e-5)
    close(torch.autograd.grad(step(a, b), a)[0], torch.autograd.grad(want, a)[0], 1e-5)


OVER = """
import anymax as A
g = torch.Generator().manual_seed(0)
a, b = torch.randn(2, 6, 4, generator=g, dtype=torch.float64)
t = torch.tensor(0.3, dtype=torch.float64)
for mapping in ("softmax", "entmax15"):
    free = [v.clone().requires_grad_() for v in (a, b, t)]
    want = A.contrastive_loss(free[0], free[1], temperature=free[2], mapping=mapping)
    grads = torch.autograd.grad(want, free)
    mine = slice(3 * rank, 3 * rank + 3)
    own = [a[mine].clone().requires_grad_(), b[mine].clone().requires_grad_(), t.clone().requires_grad_()]
    got = A.contrastive_loss(own[0], own[1], temperature=own[2], mapping=mapping, group=dist.group.WORLD)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    found = list(torch.autograd.grad(got, own))
    dist.all_reduce(found[2])  # each process has its part, as of the encoders
    for one, other in zip(found, (grads[0][mine], grads[1][mine], grads[2])):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
try:
    A.contrastive_loss(a[: 2 + rank], b[: 2 + rank], group=dist.group.WORLD)
except ValueError as error:
    assert "same number of pairs" in str(error), error
else:
    raise AssertionError
dist.destroy_process_group()
"""


@pytest.mark.whole
def test_over_processes():
    pytest.importorskip("torch")
    from processes import ended, started

    for status, _, error in ended(started(2, OVER)):
        assert status == 0, error[-3000:]


def test_what_is_refused():
    a, b = embeddings()
    with pytest.raises(ValueError, match="two arrays of embeddings of one shape"):
        A.contrastive_loss(a, b[:3])
    with pytest.raises(ValueError, match="temperature must be above 0"):
        A.contrastive_loss(a, b, temperature=0.0)
    with pytest.raises(ValueError, match="one number for all pairs"):
        A.contrastive_loss(a, b, temperature=np.ones(9))
    with pytest.raises(TypeError, match="say temperature="):
        A.contrastive_loss(a, b, tau=0.1)
    with pytest.raises(TypeError, match="torch tensor with group="):
        A.contrastive_loss(a, b, axis_name="pairs")
