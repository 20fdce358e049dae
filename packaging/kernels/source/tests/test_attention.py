"""Attention against the whole matrix of weights, whose rows `apply` computes."""

from __future__ import annotations

import math

import pytest
import torch

from .formulas import scores

pytestmark = pytest.mark.kernels_ci
B, H, L, S, D, E = 1, 2, 9, 14, 5, 3


def plain(kernel, q, k, v, map, given, *, mask=None, bias=None, causal=False, softcap=0.0, alibi=None, sink=None):
    k, v = (a.repeat_interleave(q.shape[1] // a.shape[1], 1) for a in (k, v))
    x = q @ k.mT / math.sqrt(q.shape[-1])
    x = softcap * torch.tanh(x / softcap) if softcap else x
    place = torch.arange(x.shape[-1], device=x.device) - torch.arange(x.shape[-2], device=x.device)[:, None]
    if alibi is not None:
        x = x - alibi[:, None, None] * place.abs()
    x = x if bias is None else x + bias
    keep = torch.ones_like(x, dtype=torch.bool)
    keep = keep & mask if mask is not None else keep
    keep = keep & (place <= 0) if causal else keep
    x = x.masked_fill(~keep, -math.inf)
    if sink is not None:
        x = torch.cat([x, sink[:, None, None].expand(*x.shape[:-1], 1)], -1)
    p = kernel.apply(x, map, **given)
    return p[..., : k.shape[-2]] @ v


OPTIONS = {"plain": {}, "causal": {"is_causal": True}, "everything": {}}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    ("map", "given"),
    [("softmax", {}), ("sparsemax", {}), ("entmax", {"alpha": 1.5}), ("budget", {"k": 2.5})],
    ids=["softmax", "sparsemax", "entmax", "budget"],
)
def test_attention_and_its_gradients(kernel, device, map, given, option):
    def leaf(*shape, seed):
        return scores(*shape, seed=seed).float().to(device).requires_grad_()

    leaves = {
        "query": leaf(B, H, L, D, seed=1), "key": leaf(B, 1, S, D, seed=2), "value": leaf(B, 1, S, E, seed=3),
    }  # fmt: skip
    more = dict(OPTIONS[option])
    if option == "everything":
        leaves |= {"bias": leaf(1, H, L, S, seed=4), "sink": leaf(H, seed=5), "alibi": leaf(H, seed=6)}
        more = {"mask": (scores(1, 1, L, S, seed=7) < 1.0).to(device), "softcap": 2.0}
    got = kernel.attention(**leaves, map=map, **given, **more)
    words = {"causal" if key == "is_causal" else key: value for key, value in more.items()}
    q, k, v = (leaves[n] for n in ("query", "key", "value"))
    words |= {n: leaves[n] for n in ("bias", "sink", "alibi") if n in leaves}
    want = plain(kernel, q, k, v, map, given, **words)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)
    g = scores(*got.shape, seed=8).float().to(device)
    found, expected = (torch.autograd.grad(a, list(leaves.values()), g) for a in (got, want))
    for name, a, b in zip(leaves, found, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    with torch.no_grad():
        torch.testing.assert_close(kernel.attention(**leaves, map=map, **given, **more), got, rtol=0, atol=2e-5)


def test_compiled_without_breaks(kernel, device):
    q, k, v = (scores(1, 2, n, 8, seed=n).float().to(device) for n in (5, 6, 6))

    def total(q):
        return kernel.attention(q, k, v, "entmax", alpha=1.5, is_causal=True).square().sum()

    grads = []
    for f in (total, torch.compile(total, backend="aot_eager", fullgraph=True)):
        leaf = q.clone().requires_grad_()
        f(leaf).backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)


def test_what_is_refused(kernel, device):
    q = scores(1, 2, 4, 8).float().to(device)
    with pytest.raises(ValueError, match="map is one of softmax, sparsemax, entmax, budget"):
        kernel.attention(q, q, q, "sigsoftmax")
    with pytest.raises(ValueError, match="where H' divides H"):
        kernel.attention(q, q[:, :, :, :4], q)
    with pytest.raises(TypeError, match="mask has booleans"):
        kernel.attention(q, q, q, mask=q[..., :4])
    with pytest.raises(ValueError, match="bias broadcasts to"):
        kernel.attention(q, q, q, bias=q[..., :3])
