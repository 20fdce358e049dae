"""The contrastive loss of pairs of embeddings."""

from __future__ import annotations

import numpy as np
import pytest
from kinds import KINDS, back
from laws import close
from linear_cases import MAPS, made, tolerance

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


def dense(mapping, a, b, temperature, bidirectional, reduction="mean", mask=None):
    """The loss of all scores, whose targets are on the diagonal."""
    loss = A.cross_entropy if mapping.is_softmax else lambda *o, **k: A.fenchel_young(mapping, *o, **k)
    s, place = a @ b.T / temperature, np.arange(len(a))
    if mask is not None:
        s[~mask & ~np.eye(*s.shape, dtype=bool)] = -np.inf
    value = loss(s, place, reduction=reduction)
    return 0.5 * (value + loss(s[:, : len(a)].T, place, reduction=reduction)) if bidirectional else value


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


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "strict"])
@pytest.mark.parametrize("name", ["softmax", "sparsemax"])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_hard_negatives_and_false_ones(kind, name, bidirectional):
    for negatives, masked in ((5, False), (0, True), (5, True)):
        a, b = embeddings(negatives=negatives)
        mask = false_negatives(9, 9 + negatives) if masked else None
        want = dense(MAPS[name], a, b, 0.2, bidirectional, "none", mask)
        x, y, keep = made(kind, a, b, mask)
        options = {"temperature": 0.2, "bidirectional": bidirectional, "reduction": "none", "mask": keep}
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
    from anymax.linear.torch_candidates import BlockSize

    monkeypatch.setattr(torch_contrastive, "_SIZE", BlockSize(4, 3))  # several blocks, and a diagonal across them
    monkeypatch.setattr(torch_contrastive, "_HELD", held)
    a, b = (torch.tensor(v).requires_grad_() for v in embeddings(negatives=negatives))
    mask = torch.tensor(false_negatives(9, 9 + negatives)) if negatives else None
    log_t = torch.tensor(-1.0, dtype=torch.float64).requires_grad_()
    free = a, b, log_t
    g = torch.linspace(-1, 2, 9, dtype=torch.float64) if reduction == "none" else None

    def loss(a, b, log_t):
        return A.contrastive_loss(a, b, mapping=MAPS[name], temperature=log_t.exp(), reduction=reduction, mask=mask)

    s = a @ b.T / log_t.exp()
    place = torch.arange(9)
    if negatives:
        s = s.masked_fill(~mask & ~torch.eye(9, 9 + negatives, dtype=torch.bool), -torch.inf)
    if name == "softmax":
        of = lambda s: torch.nn.functional.cross_entropy(s, place, reduction=reduction)  # noqa: E731
    else:
        of = lambda s: A.entmax15_loss(s, place, reduction=reduction)  # noqa: E731
    want = 0.5 * (of(s) + of(s[:, :9].T))
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


def test_negatives_with_large_scores_have_finite_gradients():
    torch = pytest.importorskip("torch")
    a, b = (torch.tensor(v).requires_grad_() for v in embeddings(negatives=3))
    s, place = a @ b.T / 5e-4, torch.arange(9)
    want = torch.nn.functional.cross_entropy(s, place) + torch.nn.functional.cross_entropy(s[:, :9].T, place)
    got = A.contrastive_loss(a, b, temperature=5e-4)
    for one, other in zip(torch.autograd.grad(got, (a, b)), torch.autograd.grad(0.5 * want, (a, b))):
        close(one, other, 1e-9)


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
    close(step(a, b).detach(), want.detach(), 1e-5)
    close(torch.autograd.grad(step(a, b), a)[0], torch.autograd.grad(want, a)[0], 1e-5)


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


def test_what_is_refused():
    a, b = embeddings()
    with pytest.raises(
        ValueError, match=r"b \[pairs, features\], or \[pairs \+ negatives, features\], got \(9, 4\) and \(3, 4\)"
    ):
        A.contrastive_loss(a, b[:3])
    with pytest.raises(TypeError, match="bidirectional must be True or False, got 'no'"):
        A.contrastive_loss(a, b, bidirectional="no")
    with pytest.raises(TypeError, match="mask must be booleans, True = keep, got float64"):
        A.contrastive_loss(a, b, mask=np.ones((9, 9)))
    with pytest.raises(ValueError, match=r"mask of shape \(8, 9\) does not broadcast"):
        A.contrastive_loss(a, b, mask=np.ones((8, 9), dtype=bool))
    with pytest.raises(ValueError, match="temperature must be above 0"):
        A.contrastive_loss(a, b, temperature=0.0)
    with pytest.raises(ValueError, match="one number for all pairs"):
        A.contrastive_loss(a, b, temperature=np.ones(9))
    with pytest.raises(TypeError, match="say temperature="):
        A.contrastive_loss(a, b, tau=0.1)
    with pytest.raises(TypeError, match="torch tensor with group="):
        A.contrastive_loss(a, b, axis_name="pairs")
