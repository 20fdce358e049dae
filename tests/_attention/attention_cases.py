"""Attention as data: maps, options, layouts and who serves them, and one oracle in fp64 that shares no code, with its gradients."""

from __future__ import annotations

import functools
import itertools
import math
import random
from typing import NamedTuple

import pytest
from kinds import KINDS, back

import anymax as A
from anymax import Budget, Entmax, NormMax, PerturbMax, Ratio, Sigsoftmax, Softmax, Sparsemax, SparseSoftmax, Taylor
from anymax import transforms as T

torch = pytest.importorskip("torch")

from anymax._attention import torch_blockwise

HIDDEN = -math.inf
WIDE = torch.float64
TOLERANCE = {"float64": 1e-9, "float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}  # of the largest number


# -- the maps of a row ----------------------------------------------------------------------------------------------------------


def entmax(x, alpha):
    """By bisection, and one step of Newton's for the derivatives in x and alpha."""
    c = torch.as_tensor(alpha, dtype=WIDE) - 1.0
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


def by_apply(make):
    """A map whose formulas the laws hold to an oracle of its own."""

    def p_of(x, alpha):
        with A.use("reference"):
            return A.apply(make(alpha), x)

    return make, p_of


MAPS = {  # name -> (the map, the oracle), both from an alpha, which is that of a head or of a query
    "softmax": (lambda alpha: Softmax(), lambda x, alpha: softmax(x)),
    "sparsemax": (lambda alpha: Sparsemax(), lambda x, alpha: entmax(x, 2.0)),
    "entmax": (Entmax, entmax),
    "sparse_softmax": (lambda alpha: SparseSoftmax(k=2), lambda x, alpha: largest(x, 2)),
    "taylor": (lambda alpha: Taylor(2), lambda x, alpha: taylor(x)),
    "entmax1.25": (lambda alpha: Entmax(1.25), lambda x, alpha: entmax(x, 1.25)),
    "entmax1.5": (lambda alpha: Entmax(1.5), lambda x, alpha: entmax(x, 1.5)),
    "entmax3": (lambda alpha: Entmax(3.0), lambda x, alpha: entmax(x, 3.0)),
    "normmax": by_apply(lambda alpha: NormMax(2.0 if alpha is None else alpha)),
    "budget": by_apply(lambda alpha: Budget(2.0 if alpha is None else alpha)),
    "linear budget": by_apply(lambda alpha: Budget(2.0 if alpha is None else alpha, shape="linear")),
    "sigsoftmax": by_apply(lambda alpha: Sigsoftmax()),
    "topp": by_apply(lambda alpha: SparseSoftmax(p=0.8)),
    "perturb_max": by_apply(lambda alpha: PerturbMax(nodes=64)),
    "ratio": by_apply(lambda alpha: Ratio.square()),
    "traced": by_apply(lambda alpha: Ratio(lambda x: x * x + 1)),
}
RANDOM = ("softmax", "sparsemax", "entmax", "sparse_softmax", "taylor")


# -- the oracle -----------------------------------------------------------------------------------------------------------------


def oracle(p_of, q, k, v, *, alpha=None, mask=None, bias=None, is_causal=False, window=None, offset=0, scale=None, softcap=None,
           alibi=None, sink=None, lengths=None, q_lengths=None, beta=None, mix=None, enable_gqa=False):  # fmt: skip
    """(output, weights) from the definitions: q [B, H, L, D], k and v [B, heads of keys, S, D], or without batch and heads."""
    lead = q.shape[:-2]
    q, k, v = (a[(None,) * (4 - a.ndim)] for a in (q, k, v))
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
    left, right = window if isinstance(window, tuple) else (window, window)
    seen = seen if left is None else seen & (j >= i - left)
    seen = seen if right is None else seen & (j <= i + right)
    seen = seen if lengths is None else seen & (j < lengths[:, None, None, None])
    seen = seen if q_lengths is None else seen & (row < q_lengths[:, None, None, None])
    s = s.masked_fill(~seen, HIDDEN)
    seen = s > HIDDEN
    if beta is not None:
        count = seen.sum(-1, keepdim=True).clamp(min=1).to(WIDE)
        s = torch.where(seen, torch.where(seen, s, 0.0) * beta * count.log(), HIDDEN)
    if sink is not None:
        s = torch.cat([s, sink[:, None, None].expand(*s.shape[:-1], 1)], -1)
    p = p_of(s, alpha)[..., : k.shape[2]]
    if mix is not None:
        p = (1 - mix[1]) * p + mix[1] * torch.where(seen, mix[0], 0.0)
    out = p @ v
    return (out, p) if lead else (out[0, 0], p[0, 0])


def learns(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def answer(name, arrays, options, seed=0):
    """What the oracle says: (output, weights, a cotangent, gradients by name)."""
    leaves = {key: value.clone().requires_grad_() for key, value in {**arrays, **options}.items() if learns(value)}
    out, p = oracle(MAPS[name][1], **{**arrays, **options, **leaves})
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).bfloat16().half().to(WIDE)
    grads = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), g, allow_unused=True)))
    return out.detach(), p.detach(), g, grads


# -- the options of the table -----------------------------------------------------------------------------------------------------

B, H, L, S, D, DV = 2, 4, 5, 7, 3, 6
SOURCE = torch.Generator().manual_seed(0)


def normal(*shape, source=SOURCE):
    return torch.randn(shape, generator=source).to(WIDE)


Q, K, V = normal(B, H, L, D), normal(B, H, S, D), normal(B, H, S, DV)
BIAS, KEEP = normal(H, L, S), torch.rand(B, 1, L, S, generator=SOURCE) < 0.7
ADDED = normal(B, H, L, S).masked_fill(torch.rand(B, H, L, S, generator=SOURCE) < 0.4, HIDDEN)
SINK, LENGTHS = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=WIDE), torch.tensor([4, 7])
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.0], dtype=WIDE)
PRIOR = over_total(normal(L, S).abs(), torch.zeros(L, S))
BETA = torch.tensor([0.5, 1.0, 2.0, 0.0], dtype=WIDE).reshape(H, 1, 1)
ALPHA = torch.linspace(1.3, 1.9, H, dtype=WIDE).reshape(H, 1, 1)

OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal at the end": {"is_causal": True, "offset": S - L},
    "offsets": {"is_causal": True, "offset": torch.tensor([2, 0])},
    "window": {"window": 1},
    "window left": {"window": (2, None), "is_causal": True},
    "window right": {"window": (0, 2), "offset": 1},
    "beyond the keys": {"window": (0, 0), "offset": 4},
    "lengths": {"lengths": LENGTHS},
    "both lengths": {"lengths": LENGTHS, "q_lengths": torch.tensor([5, 3]), "is_causal": True},
    "alibi": {"alibi": SLOPES, "is_causal": True},
    "alibi of batches": {"alibi": torch.stack([SLOPES, SLOPES.flip(0) + 0.3]), "offset": 2},
    "softcap": {"softcap": 0.7, "bias": BIAS},
    "sink": {"sink": SINK},
    "sink, causal, mask": {"sink": SINK, "is_causal": True, "mask": KEEP},
    "mask": {"mask": KEEP},
    "mask of numbers": {"mask": ADDED},
    "mask of all queries": {"mask": KEEP[0, 0, :1]},
    "mask and bias": {"mask": KEEP, "bias": BIAS},
    "scale": {"scale": 0.3, "window": 2},
    "scale below 0": {"scale": -0.5, "is_causal": True},
    "scale of 0": {"scale": 0.0, "is_causal": True},
    "scalable": {"beta": BETA, "is_causal": True},
    "mix": {"mix": (PRIOR, 0.3), "is_causal": True},
}
LAYOUTS = {  # name -> (arrays, the option that they need)
    "heads": ({"q": Q, "k": K, "v": V}, {}),
    "shared heads": ({"q": Q, "k": K[:, :2], "v": V[:, :2]}, {"enable_gqa": True}),
    "broadcast": ({"q": Q, "k": K[:1], "v": V[:, :1]}, {}),
    "no heads": ({"q": Q[0, 0], "k": K[0, 0], "v": V[0, 0]}, {}),
}
NUMBERS = {  # name -> (a map, numbers that are learned)
    "an alpha": ("entmax", torch.tensor(1.6, dtype=WIDE)),
    "an alpha for each head": ("entmax", ALPHA),
    "an alpha for each query": ("entmax", torch.linspace(1.1, 2.4, B * H * L, dtype=WIDE).reshape(B, H, L, 1)),
    "an alpha near softmax": ("entmax", torch.linspace(1.005, 1.01, H, dtype=WIDE).reshape(H, 1, 1)),
    "normmax's alpha": ("normmax", torch.linspace(1.5, 4.0, H, dtype=WIDE).reshape(H, 1, 1)),
    "a budget": ("budget", torch.linspace(1.2, 3.5, H, dtype=WIDE).reshape(H, 1, 1)),
    "a linear budget": ("linear budget", torch.linspace(1.2, 3.5, H, dtype=WIDE).reshape(H, 1, 1)),
}
SDPA_HAS_NOT = (
    "offsets",
    "both lengths",
    "alibi",
    "alibi of batches",
    "softcap",
    "sink",
    "sink, causal, mask",
    "scalable",
)


class Server(NamedTuple):
    kind: str = "torch"
    implementation: str | None = None
    blocks: tuple = ()  # scores, rows and keys of a block
    tolerance: float = TOLERANCE["float64"]


BLOCKS = {"tiny blocks": (8, 1, 1), "small blocks": (70, 2, 3), "one block": (1 << 20, 32, 256)}
SERVERS = {
    **{kind: Server(kind, tolerance=TOLERANCE["float32" if kind == "jax" else "float64"]) for kind in KINDS},
    "sdpa": Server(implementation="sdpa"),
    **{name: Server(implementation="blockwise", blocks=blocks) for name, blocks in BLOCKS.items()},
    "reference": Server(implementation="reference"),
}


def table():
    """(map, layout, option, numbers) of each case, by name."""
    cases = [
        *(("entmax1.5", "heads", option, None) for option in OPTIONS), *(("softmax", "heads", option, None) for option in OPTIONS),
        *((name, "heads", option, None) for name in MAPS if name not in ("entmax", "softmax") for option in ("causal", "mask and bias")),
        *(("sparsemax", "shared heads", option, None) for option in OPTIONS),
        *(("entmax1.5", "broadcast", option, None) for option in ("plain", "mask")), ("entmax1.5", "no heads", "plain", None),
        *((NUMBERS[n][0], "heads", "window left", n) for n in NUMBERS),
        *(("entmax", "heads", o, "an alpha for each head") for o in ("plain", "causal at the end", "mask and bias", "sink", "softcap")),
        ("entmax", "shared heads", "plain", "an alpha for each head"),
    ]  # fmt: skip
    return {", ".join(word for word in case if word and word != "heads"): case for case in cases}


CASES = table()


def is_empty(case, server):
    """Cells without a test: torch's own attention has softmax alone; strict arrays and JAX have NumPy's formulas, held for one map."""
    name, layout, option, numbers = CASES[case]
    if server == "sdpa":
        return name != "softmax" or option in SDPA_HAS_NOT
    return server in ("jax", "strict") and ((name, layout) != ("entmax1.5", "heads") or numbers is not None)


def filled():
    return [(case, server) for case, server in itertools.product(CASES, SERVERS) if not is_empty(case, server)]


@functools.cache
def of_table(case):
    """(map, arrays, options, what the oracle says)."""
    name, layout, option, numbers = CASES[case]
    arrays, more = LAYOUTS[layout]
    options = {**OPTIONS[option], **more, **({} if numbers is None else {"alpha": NUMBERS[numbers][1]})}
    return name, arrays, options, answer(name, arrays, options)


# -- options at random --------------------------------------------------------------------------------------------------------------


@functools.cache
def at_random(seed):
    """(map, arrays, options, what the oracle says); fp32 holds the numbers, and those of q, k and v fp16 and bf16 hold too."""
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    draw = functools.partial(normal, source=g)

    def some(share):
        return r.random() < share

    name = r.choice(RANDOM)
    b, h, rows, keys = r.choice([1, 2]), r.choice([1, 2, 4]), r.choice([1, 3, 17]), r.choice([2, 5, 33])
    shared = r.choice([n for n in (1, 2, 4) if h % n == 0])
    q, k, v = draw(b, h, rows, 4), draw(b, shared, keys, 4), draw(b, shared, keys, 3)
    q, k, v = (a.bfloat16().half().to(WIDE) for a in (q, k, v))
    shape = (b, h, rows, keys)
    part = lambda: [1 if some(0.4) else n for n in shape[r.randint(0, 3) :]]  # noqa: E731
    options: dict = {"alpha": draw(h, 1, 1).sigmoid().float().to(WIDE) + 1.1} if name == "entmax" else {}
    if some(0.3):
        options["mask"] = draw(*part()) < 0.5
    elif some(0.3):
        numbers = draw(*part())
        options["mask"] = numbers.masked_fill(numbers > 0.8, HIDDEN)
    for key, share, make in (
        ("bias", 0.3, lambda: draw(*part())), ("is_causal", 0.4, lambda: True), ("scale", 0.2, lambda: r.choice([0.3, -0.5])),
        ("window", 0.3, lambda: r.choice([(0, 0), (2, None), (None, 1), (3, 4)])), ("softcap", 0.2, lambda: 1.5),
        ("offset", 0.3, lambda: r.choice([keys - rows, 1, torch.randint(-1, keys, (b,), generator=g)])),
        ("alibi", 0.2, lambda: draw(*(r.choice([(h,), (b, h), (b, 1)]))).abs()),
        ("sink", 0.2, lambda: draw(h)), ("beta", 0.2, lambda: draw(h, 1, 1).abs() + 0.1),
        ("lengths", 0.2, lambda: torch.randint(0, keys + 1, (b,), generator=g)),
        ("q_lengths", 0.2, lambda: torch.randint(0, rows + 1, (b,), generator=g)),
        ("mix", 0.15, lambda: (draw(rows, keys).abs(), 0.3)),
    ):  # fmt: skip
        if some(share):
            options[key] = make()
    options["enable_gqa"] = True
    arrays = {"q": q, "k": k, "v": v}
    return name, arrays, options, answer(name, arrays, options, seed)


# -- the runner -----------------------------------------------------------------------------------------------------------------------


def call(name, options, make, **more):
    """anymax.attention with the options of a table, among them the arrays."""
    options = {key: make(value) if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    mapping = MAPS[name][0](options.pop("alpha", None))
    if "beta" in options:
        options["transform"] = T.scalable(beta=options.pop("beta"))
    if "mix" in options:
        options["mix"] = (make(options["mix"][0]), options["mix"][1])
    return A.attention(options.pop("q"), options.pop("k"), options.pop("v"), mapping, **options, **more)


def in_blocks(monkeypatch, sizes):
    for constant, value in zip(("BLOCK", "_ROWS", "_KEYS"), sizes):
        monkeypatch.setattr(torch_blockwise, constant, value)


def by_torch(name, arrays, options, g, implementation=None, dtype=WIDE, still=()):
    """(output, gradients by name)."""
    inner = WIDE if dtype is WIDE else torch.float32
    given = {**arrays, **options}
    leaves = {
        key: value.detach().to(dtype if key in arrays else inner).requires_grad_(key not in still)
        for key, value in given.items() if learns(value)
    }  # fmt: skip
    own = lambda a: a.to(inner) if learns(a) and not any(a is leaf for leaf in leaves.values()) else a  # noqa: E731
    out = call(name, {**given, **leaves}, own, implementation=implementation)
    assert out.dtype == dtype
    wanted = [key for key, leaf in leaves.items() if leaf.requires_grad]
    if not out.requires_grad:
        return out, {}
    found = torch.autograd.grad(out, [leaves[key] for key in wanted], g.to(dtype), allow_unused=True)
    return out, dict(zip(wanted, found))


def by_jax(name, arrays, options, g):
    """(output, gradients by name)."""
    import jax

    make = lambda a: a if isinstance(a, jax.Array) else KINDS["jax"](a.numpy())  # noqa: E731
    learned = {key: make(value) for key, value in {**arrays, **options}.items() if learns(value)}
    out, pull = jax.vjp(lambda learned: call(name, {**options, **learned}, make), learned)
    return out, pull(make(g))[0]


def near(got, want, tolerance, what):
    """Within the tolerance of the largest number; None is a gradient of zeros."""
    if want is None or got is None:
        assert all(a is None or not back(a).any() for a in (got, want)), what
        return
    got = torch.as_tensor(back(got).copy() if not isinstance(got, torch.Tensor) else got).detach().to(WIDE)
    assert got.shape == want.shape, what
    if want.numel():
        error = float((got - want.detach()).abs().max()) / (1 + float(want.detach().abs().max()))
        assert error < tolerance, f"{what}: {error:.2g}"


def held(result, said, tolerance):
    """A result of the runner beside what the oracle says."""
    out, grads = result
    near(out, said[0], tolerance, "output")
    for key, grad in grads.items():
        near(grad, said[3][key], 4 * tolerance, f"gradient of {key}")
