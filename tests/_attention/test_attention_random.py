"""Options of attention by the dozen, drawn at random, beside a dense oracle in fp64 that shares no code: output, weights, gradients."""

from __future__ import annotations

import functools
import math
import random

import pytest
from kinds import KINDS, back

import anymax as A
from anymax import Entmax, Softmax, Sparsemax, SparseSoftmax, Taylor
from anymax import transforms as T

torch = pytest.importorskip("torch")

HIDDEN = -math.inf
WIDE = torch.float64
TOLERANCE = {"float64": 1e-9, "float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}  # of the largest number


# -- the oracle -----------------------------------------------------------------------------------------------------------------


def entmax(x, alpha):
    """By bisection, and one step of Newton's for the derivatives in x and alpha."""
    c = alpha - 1.0
    kept = x > HIDDEN
    y = torch.where(kept, x, -1e30)

    def p(tau, y, c):
        u = (c * (y - tau)).clamp(min=0.0)
        return torch.where(u > 0, torch.where(u > 0, u, 1.0) ** (1.0 / c), 0.0)

    with torch.no_grad():
        high = y.max(-1, keepdim=True).values
        low = high - 1.0 / c
        for _ in range(80):
            middle = 0.5 * (low + high)
            more = p(middle, y, c).sum(-1, keepdim=True) > 1
            low, high = torch.where(more, middle, low), torch.where(more, high, middle)
    with torch.enable_grad():
        free = low.clone().requires_grad_()
        (rate,) = torch.autograd.grad(p(free, y.detach(), c.detach()).sum(), free)
    tau = low - (p(low, y, c).sum(-1, keepdim=True) - 1) / torch.where(rate == 0, 1.0, rate)
    return torch.where(kept, p(tau, y, c), 0.0)


def over_total(u, x):
    u = torch.where(x > HIDDEN, u, 0.0)
    total = u.sum(-1, keepdim=True)
    return u / torch.where(total > 0, total, 1.0)


def softmax(x):
    y = torch.where(x > HIDDEN, x, -1e30)
    return over_total((y - y.max(-1, keepdim=True).values.detach()).exp(), x)


def largest(x, k):
    k = min(k, x.shape[-1])
    return softmax(x.masked_fill(x < x.detach().topk(k, -1).values[..., -1:], HIDDEN))


def taylor(x):
    y = torch.where(x > HIDDEN, x, 0.0)
    return over_total(1 + y + y * y / 2, x)


MAPS = {  # name -> (the map, the oracle), both from an alpha, which is that of a head
    "softmax": (lambda alpha: Softmax(), lambda x, alpha: softmax(x)),
    "sparsemax": (lambda alpha: Sparsemax(), lambda x, alpha: entmax(x, torch.tensor(2.0, dtype=WIDE))),
    "entmax": (Entmax, entmax),
    "sparse_softmax": (lambda alpha: SparseSoftmax(k=2), lambda x, alpha: largest(x, 2)),
    "taylor": (lambda alpha: Taylor(2), lambda x, alpha: taylor(x)),
}


def oracle(p_of, q, k, v, *, alpha=None, mask=None, bias=None, is_causal=False, window=(None, None), offset=0, scale=None, softcap=None,
           alibi=None, sink=None, lengths=None, q_lengths=None, beta=None, mix=None):  # fmt: skip
    """(output, weights) from the definitions, the whole matrix at once; q [B, H, L, D], k and v [B, heads of keys, S, D]."""
    k, v = (a.repeat_interleave(q.shape[1] // a.shape[1], 1) for a in (k, v))
    s = torch.einsum("bhid,bhjd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    s = s if bias is None else s + bias
    row, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    i = row + (offset[:, None, None, None] if isinstance(offset, torch.Tensor) else offset)
    s = s if alibi is None else s - alibi[..., None, None] * (i - j).abs()
    seen = torch.ones_like(s, dtype=torch.bool)
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        s = s + mask
    seen = seen & (j <= i) if is_causal else seen
    left, right = window
    seen = seen if left is None else seen & (j >= i - left)
    seen = seen if right is None else seen & (j <= i + right)
    seen = seen if lengths is None else seen & (j < lengths[:, None, None, None])
    seen = seen if q_lengths is None else seen & (row < q_lengths[:, None, None, None])
    s = s.masked_fill(~seen, HIDDEN)
    seen = s > HIDDEN
    if beta is not None:
        s = torch.where(
            seen, torch.where(seen, s, 0.0) * beta * seen.sum(-1, keepdim=True).clamp(min=1).to(WIDE).log(), HIDDEN
        )
    if sink is not None:
        s = torch.cat([s, sink[:, None, None].expand(*s.shape[:-1], 1)], -1)
    p = p_of(s, alpha)[..., : k.shape[2]]
    if mix is not None:
        p = (1 - mix[1]) * p + mix[1] * torch.where(seen, mix[0], 0.0)
    return p @ v, p


# -- the calls ------------------------------------------------------------------------------------------------------------------------


def drawn(seed):
    """(map, arrays, options) of a random call; the numbers are such that fp32 holds them, those of q, k and v fp16 and bf16 too."""
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=g).to(WIDE)

    def some(share):
        return r.random() < share

    name = r.choice(list(MAPS))
    b, h, rows, keys = r.choice([1, 2]), r.choice([1, 2, 4]), r.choice([1, 3, 17]), r.choice([2, 5, 33])
    shared = r.choice([n for n in (1, 2, 4) if h % n == 0])
    q, k, v = normal(b, h, rows, 4), normal(b, shared, keys, 4), normal(b, shared, keys, 3)
    q, k, v = (a.bfloat16().half().to(WIDE) for a in (q, k, v))
    shape = (b, h, rows, keys)
    part = lambda: [1 if some(0.4) else n for n in shape[r.randint(0, 3) :]]  # noqa: E731
    options: dict = {"alpha": normal(h, 1, 1).sigmoid().float().to(WIDE) + 1.1} if name == "entmax" else {}
    if some(0.3):
        options["mask"] = normal(*part()) < 0.5
    elif some(0.3):
        numbers = normal(*part())
        options["mask"] = numbers.masked_fill(numbers > 0.8, HIDDEN)
    for key, share, make in (
        ("bias", 0.3, lambda: normal(*part())), ("is_causal", 0.4, lambda: True), ("scale", 0.2, lambda: r.choice([0.3, -0.5])),
        ("window", 0.3, lambda: r.choice([(0, 0), (2, None), (None, 1), (3, 4)])), ("softcap", 0.2, lambda: 1.5),
        ("offset", 0.3, lambda: r.choice([keys - rows, 1, torch.randint(-1, keys, (b,), generator=g)])),
        ("alibi", 0.2, lambda: normal(*(r.choice([(h,), (b, h), (b, 1)]))).abs()),
        ("sink", 0.2, lambda: normal(h)), ("beta", 0.2, lambda: normal(h, 1, 1).abs() + 0.1),
        ("lengths", 0.2, lambda: torch.randint(0, keys + 1, (b,), generator=g)),
        ("q_lengths", 0.2, lambda: torch.randint(0, rows + 1, (b,), generator=g)),
        ("mix", 0.15, lambda: (normal(rows, keys).abs(), 0.3)),
    ):  # fmt: skip
        if some(share):
            options[key] = make()
    return name, {"q": q, "k": k, "v": v}, options


def learns(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def call(name, arrays, options, make, **more):
    options = dict(options)
    mapping = MAPS[name][0](make(options.pop("alpha"))) if "alpha" in options else MAPS[name][0](None)
    if "beta" in options:
        options["transform"] = T.scalable(beta=make(options.pop("beta")))
    if "mix" in options:
        options["mix"] = (make(options["mix"][0]), options["mix"][1])
    made = {key: make(value) if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    return A.attention(arrays["q"], arrays["k"], arrays["v"], mapping, enable_gqa=True, **made, **more)


def near(got, want, tolerance, what):
    assert got.shape == want.shape, what
    if want.numel():
        error = float((got.detach().to(WIDE) - want.detach()).abs().max()) / (1 + float(want.detach().abs().max()))
        assert error < tolerance, f"{what}: {error:.2g}"


@functools.cache
def answer(seed):
    """(name, arrays, options) as drawn, and what the oracle says: (output, weights, a cotangent, gradients by name)."""
    name, arrays, options = drawn(seed)
    leaves = {key: value.clone().requires_grad_() for key, value in {**arrays, **options}.items() if learns(value)}
    out, p = oracle(MAPS[name][1], **{**arrays, **options, **leaves})
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).bfloat16().half().to(WIDE)
    grads = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), g, allow_unused=True)))
    return name, arrays, options, out.detach(), p.detach(), g, grads


@pytest.mark.parametrize("implementation", [None, "blockwise", "reference"])
@pytest.mark.parametrize("seed", range(50))
def test_torch(seed, implementation, monkeypatch):
    from anymax._attention import torch_blockwise

    r = random.Random(seed)
    for constant, value in zip(("_BLOCK", "_ROWS", "_KEYS"), r.choice([(8, 1, 1), (70, 2, 3), (1 << 20, 32, 256)])):
        monkeypatch.setattr(torch_blockwise, constant, value)
    name, arrays, options, want, weights, g, grads = answer(seed)
    dtype = r.choice(["float64", "float64", "float32", "bfloat16", "float16"])
    low = getattr(torch, dtype)
    inner = WIDE if low is WIDE else torch.float32
    tolerance = TOLERANCE[dtype]
    leaves = {
        key: value.detach().to(low if key in arrays else inner).requires_grad_(r.random() < 0.8)
        for key, value in {**arrays, **options}.items() if learns(value)
    }  # fmt: skip
    given = {key: leaves.get(key, value) for key, value in {**arrays, **options}.items()}
    out = call(
        name, {n: given.pop(n) for n in "qkv"}, given, lambda a: a.to(inner) if learns(a) and not a.requires_grad else a,
        implementation=implementation,
    )  # fmt: skip
    assert out.dtype == low
    near(out, want, tolerance, "out")
    if implementation == "reference":
        again = call(
            name, {n: leaves[n] for n in "qkv"}, given, lambda a: a, implementation=implementation, need_weights=True
        )
        near(again[1], weights, tolerance, "weights")
    wanted = {key: leaf for key, leaf in leaves.items() if leaf.requires_grad}
    if out.requires_grad:
        for key, d in zip(wanted, torch.autograd.grad(out, list(wanted.values()), g.to(low), allow_unused=True)):
            if d is None or grads[key] is None:
                assert all(a is None or not a.any() for a in (d, grads[key])), key
            else:
                near(d, grads[key], 4 * tolerance, key)


@pytest.mark.thin(4)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "torch"])
@pytest.mark.parametrize("seed", range(100, 112))
def test_other_arrays(seed, kind):
    if kind == "jax" and seed > 103:
        pytest.skip("each shape is compiled")
    name, arrays, options, want, weights, g, grads = answer(seed)
    make = lambda a: KINDS[kind](a.numpy())  # noqa: E731
    out, p = call(name, {n: make(a) for n, a in arrays.items()}, options, make, need_weights=True)
    tolerance = TOLERANCE["float32" if kind == "jax" else "float64"]
    near(torch.tensor(back(out)), want, tolerance, "out")
    near(torch.tensor(back(p)), weights, tolerance, "weights")
    if kind == "jax":
        import jax

        given = {key: make(value) for key, value in {**arrays, **options}.items() if learns(value)}
        rest = {key: value for key, value in options.items() if key not in given}

        def f(given):
            own = {n: given[n] for n in "qkv"}
            return call(
                name,
                own,
                {**rest, **{n: a for n, a in given.items() if n not in "qkv"}},
                lambda a: a if is_jax(a) else make(a),
            )

        is_jax = lambda a: isinstance(a, jax.Array)  # noqa: E731
        (found,) = jax.vjp(f, given)[1](make(g))
        for key, d in found.items():
            wanted = torch.zeros(d.shape, dtype=WIDE) if grads[key] is None else grads[key]
            near(torch.tensor(back(d)), wanted, 4 * tolerance, key)
