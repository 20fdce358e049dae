"""The contrastive loss of pairs of embeddings."""

from __future__ import annotations

import numpy as np
import pytest
from kinds import KINDS, back
from laws import close
from linear_cases import MAPS, made, same, tolerance

import anymax as A


def embeddings(n=9, features=4, seed=0, negatives=0):
    """Of n pairs, and of negatives after the second ones."""
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(2, n, features))
    b = np.concatenate([b, rng.normal(size=(negatives, features))])
    return (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (a, b))


def false_negatives(n, columns, seed=1):
    """A mask that leaves out some pairs, and two on the diagonal, which count all the same."""
    mask = np.random.default_rng(seed).random((n, columns)) < 0.7
    mask[0, 0] = mask[n - 1, n - 1] = False
    return mask


def dense(mapping, a, b, temperature, bidirectional=True, reduction="mean", mask=None):
    """The loss of all scores, whose targets are on the diagonal."""
    loss = A.cross_entropy if mapping.is_softmax else lambda *o, **k: A.fenchel_young(mapping, *o, **k)
    s, n = a @ b.T / temperature, len(a)
    place, keep = np.arange(n), np.ones(s.shape, bool) if mask is None else mask | np.eye(*s.shape, dtype=bool)
    if hasattr(a, "detach"):
        place, keep = made("torch", place, keep)
    value = loss(s, place, reduction=reduction, mask=keep)
    return 0.5 * (value + loss(s[:, :n].T, place, reduction=reduction, mask=keep[:, :n].T)) if bidirectional else value


NEGATIVES = {"none": (0, False), "hard": (5, False), "false": (0, True), "hard and false": (5, True)}
ROWS = [("none", "mean"), ("none", "sum"), *((of, "none") for of in NEGATIVES)]


@pytest.mark.whole(
    lambda kind, name, negatives, reduction: kind == "jax" and (negatives, reduction) != ("none", "mean")
)
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "strict"])
@pytest.mark.parametrize("name", ["softmax", "sparsemax", "entmax15"])
@pytest.mark.parametrize(("negatives", "reduction"), ROWS)
@pytest.mark.parametrize("bidirectional", [True, False])
def test_is_the_loss_of_all_scores(kind, name, bidirectional, negatives, reduction):
    count, masked = NEGATIVES[negatives]
    a, b = embeddings(negatives=count)
    mask = false_negatives(9, 9 + count) if masked else None
    want = dense(MAPS[name], a, b, 0.2, bidirectional, reduction, mask)
    x, y, keep = made(kind, a, b, mask)
    options = {"temperature": 0.2, "bidirectional": bidirectional, "reduction": reduction, "mask": keep}
    close(back(A.contrastive_loss(x, y, mapping=MAPS[name], **options)), want, tolerance(kind))


def test_is_the_multiple_negatives_ranking_loss():
    """That of sentence-transformers: the cross-entropy of the scores of all candidates, each row's own one among them."""
    a, b = embeddings(6, negatives=6)
    s = 20.0 * a @ b.T
    want = np.mean(np.log(np.exp(s).sum(1)) - s[np.arange(6), np.arange(6)])
    close(A.contrastive_loss(a, b, temperature=0.05, bidirectional=False), want, 1e-12)
    close(A.linear_loss(20.0 * a, b, np.arange(6)), want, 1e-12)
    same = np.arange(6) % 3  # the labels of GIST's guide: others of one label are no negatives
    s[(same[:, None] == np.tile(same, 2)) & ~np.eye(6, 12, dtype=bool)] = -np.inf
    want = np.mean(np.log(np.exp(s).sum(1)) - s[np.arange(6), np.arange(6)])
    mask = same[:, None] != np.tile(same, 2)
    close(A.contrastive_loss(a, b, temperature=0.05, bidirectional=False, mask=mask), want, 1e-12)


@pytest.mark.parametrize(
    ("name", "reduction", "held", "negatives"),
    [
        ("softmax", "mean", 30, 5),
        ("softmax", "none", 0, 5),
        ("softmax", "none", 30, 0),
        ("entmax15", "mean", 0, 0),
        ("entmax15", "none", 0, 5),
    ],
)
def test_gradients_with_a_learned_temperature(name, reduction, held, negatives, monkeypatch):
    torch = pytest.importorskip("torch")
    from anymax.linear import torch_contrastive
    from anymax.linear.torch_blocks import BlockSize

    monkeypatch.setattr(torch_contrastive, "_SIZE", BlockSize(4, 3))  # several blocks, and a diagonal across them
    monkeypatch.setattr(torch_contrastive, "_SAVED", held)
    a, b = (torch.tensor(v).requires_grad_() for v in embeddings(negatives=negatives))
    mask = torch.tensor(false_negatives(9, 9 + negatives)) if negatives else None
    log_t = torch.tensor(-1.0, dtype=torch.float64).requires_grad_()
    free = a, b, log_t
    g = torch.linspace(-1, 2, 9, dtype=torch.float64) if reduction == "none" else None

    def loss(a, b, log_t):
        return A.contrastive_loss(a, b, mapping=MAPS[name], temperature=log_t.exp(), reduction=reduction, mask=mask)

    want = dense(MAPS[name], a, b, log_t.exp(), reduction=reduction, mask=None if mask is None else mask.numpy())
    same(loss(*free), want, free, 1e-9, g)
    assert torch.autograd.gradgradcheck(lambda *f: loss(*f).sum(), free, atol=1e-5, fast_mode=True)


@pytest.mark.parametrize(
    ("dtype", "pairs", "negatives", "temperature", "bound"),
    [("float32", 2500, 0, 0.05, 1e-4), ("float64", 9, 3, 5e-4, 1e-9)], ids=["many pairs in blocks", "large scores of negatives"],
)  # fmt: skip
def test_gradients(dtype, pairs, negatives, temperature, bound):
    torch = pytest.importorskip("torch")
    free = [torch.tensor(v, dtype=getattr(torch, dtype)).requires_grad_() for v in embeddings(pairs, 8, 1, negatives)]
    want = dense(A.Softmax(), *free, temperature)
    same(A.contrastive_loss(*free, temperature=temperature), want, free, bound)


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


def test_a_learned_temperature_of_embeddings_in_half_precision():
    torch = pytest.importorskip("torch")
    a, b = (torch.tensor(v, dtype=torch.bfloat16) for v in embeddings(40, 16))

    def gradient(a, b):
        t = torch.tensor(0.05, dtype=torch.float32).requires_grad_()
        return torch.autograd.grad(A.contrastive_loss(a, b, temperature=t), t)[0]

    close(gradient(a, b), gradient(a.double(), b.double()), 1e-4)


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_compiles():
    torch = pytest.importorskip("torch")
    a, b = (torch.tensor(v, dtype=torch.float32).requires_grad_() for v in embeddings())
    step = torch.compile(lambda a, b: A.contrastive_loss(a, b, temperature=0.3), backend="aot_eager", fullgraph=True)
    want = A.contrastive_loss(a, b, temperature=0.3)
    same(step(a, b), want, [a, b], 1e-5)


@pytest.mark.parametrize("name", ["softmax", "entmax15"])
@pytest.mark.parametrize(("negatives", "masked"), [(0, False), (3, True), (0, True), (3, False)])
def test_over_processes(name, negatives, masked):
    """With the negatives and masks of all of them; the columns of a mask are process by process."""
    torch = pytest.importorskip("torch")
    from processes import together

    size, n = 3, 4
    a, b = (torch.tensor(v) for v in embeddings(size * n, negatives=size * negatives))
    t = torch.tensor(0.3, dtype=torch.float64)
    mask = torch.tensor(false_negatives(size * n, size * (n + negatives))) if masked else None
    of_process = torch.arange(size)[:, None]
    first, more = (of_process * k + torch.arange(k) for k in (n, negatives))
    columns = torch.cat([first, size * n + more], 1)  # those of each process, its pairs before its negatives

    def call(free, mask, **more):
        a, b, t = free
        return A.contrastive_loss(a, b, temperature=t, mapping=name, mask=mask, **more)

    free = [v.clone().requires_grad_() for v in (a, b, t)]
    want = call(free, mask)
    grads = torch.autograd.grad(want, free)

    def one(group):
        rows, r = slice(n * group.rank, n * group.rank + n), group.rank
        own = [v.clone().requires_grad_() for v in (a[rows], b[columns[r]], t)]
        got = call(own, mask[rows][:, columns.flatten()] if masked else None, group=group)
        return got.detach(), *torch.autograd.grad(got, own)

    found = together(size, one)
    for r, (value, of_a, of_b, _) in enumerate(found):
        close(value, want.detach(), 1e-9)
        close(of_a, grads[0][n * r : n * r + n], 1e-9)
        close(of_b, grads[1][columns[r]], 1e-9)
    close(sum(f[3] for f in found), grads[2], 1e-9)  # each process has its part, as of the encoders
