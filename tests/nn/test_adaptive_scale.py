"""`anymax.nn.AdaptiveScale`: beside its formula written out, in `attention` and in `nn.Attention`; and slopes of one's own there."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import anymax as A
from anymax import nn

N, H, L, E, D = 2, 4, 6, 8, 3


def made(only=None, dtype=torch.float64, **options):
    torch.manual_seed(0)
    scale = nn.AdaptiveScale(E, H, only=only, dtype=dtype, **options)
    with torch.no_grad():
        scale.projection.weight.mul_(3.0)
    return scale, torch.randn(N, L, E, dtype=dtype), *torch.randn(3, N, H, L, D, dtype=dtype)


def factor(scale, x, n):
    """[N, H, L, 1] of the paper's formula, head by head; n is the number of keys of each query, [L]."""
    heads = range(H) if scale.only is None else scale.only
    w, b = scale.projection.weight, scale.projection.bias
    out = torch.ones(N, H, L, 1, dtype=x.dtype)
    for place, head in enumerate(heads):
        beta = torch.log1p(torch.exp(x @ w[place] + b[place]))
        gamma = scale.gamma_range * torch.tanh(x @ w[len(heads) + place] + b[len(heads) + place])
        grown = torch.where(n > 1, torch.log(n.clamp(min=2)) ** gamma, 0.0)
        out[:, head, :, 0] = scale.delta + beta * grown
    return out


@pytest.mark.parametrize("only", [None, (2, 3), (3, 0)])
@pytest.mark.parametrize("mapping", ["softmax", "entmax15"])
def test_it_is_a_factor_of_the_queries(mapping, only):
    scale, x, q, k, v = made(only, delta=0.7, gamma_range=1.5)
    n = torch.arange(1, L + 1)
    want = A.attention(q * factor(scale, x, n), k, v, mapping, is_causal=True)
    for implementation in ("reference", "blockwise"):
        got = A.attention(q, k, v, mapping, is_causal=True, transform=scale(x), implementation=implementation)
        torch.testing.assert_close(got, want)
    keep = torch.ones(L, L, dtype=torch.bool)
    keep[:, 4] = keep[2, 1] = keep[5, :3] = False
    got = A.attention(q, k, v, mapping, mask=keep, transform=scale(x))
    torch.testing.assert_close(got, A.attention(q * factor(scale, x, keep.sum(1)), k, v, mapping, mask=keep))


def test_a_query_of_one_key_has_the_scale_delta():
    scale, x, *_ = made(delta=0.25)
    scores = torch.randn(N, H, L, L, dtype=torch.float64).masked_fill(~torch.eye(L, dtype=torch.bool), -torch.inf)
    scores.requires_grad_()
    out = scale(x)(scores)
    torch.testing.assert_close(out, 0.25 * scores)
    out.diagonal(dim1=-2, dim2=-1).sum().backward()
    assert not scale.projection.weight.grad.any()


def test_gradients_by_both_ways_and_by_differences():
    scale, x, q, k, v = made(only=(1, 3))
    x.requires_grad_()
    leaves = [x, scale.projection.weight, scale.projection.bias]
    found = []
    for implementation in ("reference", "blockwise"):
        out = A.attention(q, k, v, "entmax15", is_causal=True, transform=scale(x), implementation=implementation)
        found.append(torch.autograd.grad(out.square().sum(), leaves))
    for one, other in zip(*found):
        assert one.any()
        torch.testing.assert_close(one, other)

    def out_of(x, weight, bias):
        given = {"projection.weight": weight, "projection.bias": bias}
        return A.attention(q, k, v, is_causal=True, transform=torch.func.functional_call(scale, given, (x,)))

    assert torch.autograd.gradcheck(out_of, tuple(leaves), fast_mode=True)


def test_arrays_of_numpy_and_jax_take_the_same_terms():
    jnp = pytest.importorskip("jax.numpy")
    scale, x, q, k, v = made(dtype=torch.float32)
    want = A.attention(q, k, v, "entmax15", is_causal=True, transform=scale(x)).detach().numpy()
    terms = {name: value.detach().numpy() for name, value in scale(x).params if name in ("beta", "gamma")}
    for make in (np.asarray, jnp.asarray):
        t = A.transforms.scalable(**{name: make(value) for name, value in terms.items()}, delta=1.0)
        got = A.attention(*(make(a.numpy()) for a in (q, k, v)), "entmax15", is_causal=True, transform=t)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("layout", ["batch first", "length first", "no batch"])
def test_in_the_module(layout):
    torch.manual_seed(1)
    slopes = [1.0, 0.5, 0.0, 0.0]
    scale = nn.AdaptiveScale(E, H, only=(2, 3))
    module = nn.Attention(E, H, "entmax15", alibi=slopes, transform=scale, batch_first=layout == "batch first")
    assert {"adaptive.projection.weight", "adaptive.projection.bias"} <= {n for n, _ in module.named_parameters()}
    x = torch.randn(N, L, E)
    given = {"batch first": x, "length first": x.transpose(0, 1), "no batch": x[0]}[layout]
    out, weights = module(given, given, given, is_causal=True, average_attn_weights=False)
    q, k, v = torch.nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias).split(E, -1)
    q, k, v = (a.unflatten(-1, (H, -1)).transpose(1, 2) for a in (q, k, v))
    want, p = A.attention(
        q, k, v, "entmax15", is_causal=True, alibi=torch.tensor(slopes), transform=module.adaptive(x), need_weights=True
    )
    want = module.out_proj(want.transpose(1, 2).flatten(-2))
    want = {"batch first": want, "length first": want.transpose(0, 1), "no batch": want[0]}[layout]
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(weights, p[0] if layout == "no batch" else p)
    plain = A.attention(q, k, v, "entmax15", is_causal=True, alibi=torch.tensor(slopes), need_weights=True)[1]
    torch.testing.assert_close(p[:, :2], plain[:, :2])  # the heads with ALiBi are as they were
    assert (p[:, 2:] - plain[:, 2:]).abs().max() > 1e-3
    assert "only=(2, 3)" in repr(module)


def test_slopes_of_ones_own():
    torch.manual_seed(2)
    x = torch.randn(N, L, E)
    usual = nn.Attention(E, H, alibi=True, batch_first=True)
    same = nn.Attention(E, H, alibi=[2.0 ** (-2.0 * (h + 1)) for h in range(H)], batch_first=True)
    same.load_state_dict(usual.state_dict())
    torch.testing.assert_close(same(x, x, x), usual(x, x, x))
    none = nn.Attention(E, H, alibi=torch.zeros(H), batch_first=True)
    none.load_state_dict(usual.state_dict())
    plain = nn.Attention(E, H, batch_first=True)
    plain.load_state_dict(usual.state_dict())
    torch.testing.assert_close(none(x, x, x), plain(x, x, x))
    assert (usual(x, x, x)[0] - plain(x, x, x)[0]).abs().max() > 1e-3
    learned = nn.Attention(E, H, alibi=torch.nn.Parameter(torch.rand(H)), batch_first=True)
    learned(x, x, x)[0].square().sum().backward()
    assert learned.slopes.grad.any()
    assert "slopes" in dict(learned.named_parameters())


def test_slopes_and_heads_survive_casts_and_late_weights():
    """Neither is a buffer: no cast rounds them, and a module made on `meta` has them once its weights are there."""
    make = {"alibi": [1.0, 1 / 3, 0.0, 0.0], "batch_first": True}
    there = nn.Attention(E, H, "entmax15", transform=nn.AdaptiveScale(E, H, only=(2, 3), delta=0.5), **make)
    with torch.device("meta"):
        late = nn.Attention(E, H, "entmax15", transform=nn.AdaptiveScale(E, H, only=(2, 3), delta=0.5), **make)
    late.to_empty(device="cpu").load_state_dict(there.state_dict())
    x = torch.randn(N, L, E)
    want = there(x, x, x, is_causal=True)
    torch.testing.assert_close(late(x, x, x, is_causal=True), want)
    assert copy.deepcopy(there).bfloat16().alibi == (1.0, 1 / 3, 0.0, 0.0)
    wide = copy.deepcopy(there).double()
    torch.testing.assert_close(wide(*[x.double()] * 3, is_causal=True)[0].float(), want[0])


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while it traces
@pytest.mark.parametrize("only", [None, (2, 3)])
def test_in_one_graph(only):
    torch._dynamo.reset()
    scale = nn.AdaptiveScale(E, H, only=only)
    module = nn.Attention(E, H, "entmax15", alibi=[1, 0.5, 0, 0], transform=scale, batch_first=True)
    x = torch.randn(N, L, E)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, x, x, is_causal=True), module(x, x, x, is_causal=True))
