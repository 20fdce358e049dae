"""`anymax.nn.Attention` beside `torch.nn.MultiheadAttention`: the same weights, masks and results; and what only it has."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest

torch = pytest.importorskip("torch")

import anymax as A
from anymax import Entmax, Softmax, Sparsemax, nn

E, H, N, L, S = 12, 3, 2, 5, 7


def pair(**options):
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(E, H, **options)
    ours = nn.Attention(E, H, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs(batch_first, kdim=E, vdim=E, seed=0):
    g = torch.Generator().manual_seed(seed)
    out = [torch.randn(N, n, d, generator=g) for n, d in ((L, E), (S, kdim), (S, vdim))]
    return [a if batch_first else a.transpose(0, 1) for a in out]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"batch_first": True},
        {"kdim": 4, "vdim": 6},
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True, "vdim": 6},
    ],
    ids=lambda o: str(sorted(o)),
)
@pytest.mark.parametrize("weights", [True, False])
def test_softmax_is_torchs_module(options, weights):
    theirs, ours = pair(**options)
    args = inputs(options.get("batch_first", False), options.get("kdim", E), options.get("vdim", E))
    padding = torch.zeros(N, S, dtype=torch.bool)
    padding[1, 4:] = True
    hidden = torch.zeros(L, S, dtype=torch.bool)
    hidden[:, 2] = True
    each = torch.randn(N * H, L, S, generator=torch.Generator().manual_seed(1))
    for pad, mask in itertools.product((None, padding), (None, hidden, each)):
        if pad is not None and mask is each:
            pad = torch.zeros(N, S).masked_fill(padding, -torch.inf)
        call = {"key_padding_mask": pad, "attn_mask": mask, "need_weights": weights}
        want, got = theirs(*args, **call), ours(*args, **call)
        torch.testing.assert_close(got[0], want[0])
        torch.testing.assert_close(got[1], want[1])
    for average in (True, False):
        call = {"average_attn_weights": average}
        torch.testing.assert_close(ours(*args, **call)[1], theirs(*args, **call)[1])


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}], ids=lambda o: str(sorted(o)))
def test_without_a_batch_is_torchs(options):
    theirs, ours = pair(**options)
    x, y = torch.randn(L, E), torch.randn(S, E)
    padding = torch.arange(S) >= 4
    for mask in (None, torch.randn(L, S), torch.randn(H, L, S)):
        for weights, average in itertools.product((True, False), (True, False)):
            call = {"attn_mask": mask, "need_weights": weights, "average_attn_weights": average}
            call["key_padding_mask"] = padding if mask is None else torch.zeros(S).masked_fill(padding, -torch.inf)
            torch.testing.assert_close(ours(x, y, y, **call), theirs(x, y, y, **call))


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}], ids=lambda o: str(sorted(o)))
def test_more_keys_are_seen_by_every_query(options):
    """Causal without a mask is causal with one; the gradients are torch's, and no query is without a key."""
    theirs, ours = pair(**options)
    x = torch.randn(L, N, E)
    hidden = torch.ones(L, L, dtype=torch.bool).triu(1)
    want = theirs(x, x, x, attn_mask=hidden)
    torch.testing.assert_close(ours(x, x, x, is_causal=True), want)
    got = torch.autograd.grad(ours(x, x, x, is_causal=True)[0].square().sum(), list(ours.parameters()))
    wanted = torch.autograd.grad(want[0].square().sum(), list(theirs.parameters()))
    names = [n for n, _ in theirs.named_parameters()]
    for name, g in zip((n for n, _ in ours.named_parameters()), got):
        torch.testing.assert_close(g, wanted[names.index(name)])
    alone = ours(x, x, x, key_padding_mask=torch.ones(N, L, dtype=torch.bool))[1]
    torch.testing.assert_close(alone[..., :L], torch.zeros(N, L, L))
    torch.testing.assert_close(alone[..., L:], torch.ones(N, L, 1))
    kinds = nn.Attention(E, H, Sparsemax(), kv_heads=1, **options)
    assert kinds(x, x, x, is_causal=True)[1].shape == (N, L, L + 1)


def test_torchs_layers_take_it():
    """In TransformerEncoderLayer and TransformerDecoderLayer, training and not: never torch's fused layer, which knows softmax alone."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(12, 4, 24, 0.0, batch_first=True)
    for mapping in (Softmax(), Sparsemax()):
        own = copy.deepcopy(layer)
        own.self_attn = nn.Attention(12, 4, mapping, batch_first=True)
        own.self_attn.load_state_dict(layer.self_attn.state_dict())
        x = 3 * torch.randn(N, L, 12)
        causal = torch.nn.Transformer.generate_square_subsequent_mask(L)
        stack = torch.nn.TransformerEncoder(own, 2)
        for module, given in ((own, {}), (own, {"src_mask": causal, "is_causal": True}), (stack, {"mask": causal})):
            trained = module.train()(x, **given)
            with torch.no_grad():
                torch.testing.assert_close(module.eval()(x, **given), trained)
        if mapping == Softmax():
            torch.testing.assert_close(own(x), layer.eval()(x))
        else:
            assert (own(x) - layer.eval()(x)).abs().max() > 1e-3
    decoder = torch.nn.TransformerDecoderLayer(12, 4, 24, 0.0, batch_first=True)
    own = copy.deepcopy(decoder)
    for name in ("self_attn", "multihead_attn"):
        made = nn.Attention(12, 4, batch_first=True)
        made.load_state_dict(getattr(decoder, name).state_dict())
        setattr(own, name, made)
    y = torch.randn(N, S, 12)
    call = {"tgt_mask": causal, "tgt_is_causal": True}
    torch.testing.assert_close(own(x, y, **call), decoder(x, y, **call))


@pytest.mark.parametrize("mapping", [Softmax(), Sparsemax()], ids=repr)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torchs_encoder_takes_it_with_padding_and_without_gradients(mapping):
    """There torch's encoder makes its input nested, and its layers prefer their fused form, which has only softmax."""
    torch.manual_seed(0)
    theirs = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(12, 4, 24, 0.0, batch_first=True), 2)
    ours = copy.deepcopy(theirs)
    for layer, other in zip(ours.layers, theirs.layers):
        layer.self_attn = nn.Attention(12, 4, mapping, batch_first=True)
        layer.self_attn.load_state_dict(other.self_attn.state_dict())
        other.self_attn.load_state_dict(layer.self_attn.state_dict())
        assert layer.self_attn._qkv_same_embed_dim
    x = 3 * torch.randn(N, L, 12)
    hidden = torch.arange(L) >= torch.tensor([L, 2])[:, None]
    want = ours.eval()(x, src_key_padding_mask=hidden)
    for module in (ours, pickle.loads(pickle.dumps(ours)), torch.nn.TransformerEncoder(ours.layers[0], 1)):
        module.eval()
        with torch.no_grad():
            got, whole = module(x, src_key_padding_mask=hidden), module(x)
        assert not got[hidden].any()
        torch.testing.assert_close(got[~hidden], module(x, src_key_padding_mask=hidden)[~hidden])
        torch.testing.assert_close(whole, module(x))
    difference = (want - theirs.eval()(x, src_key_padding_mask=hidden))[~hidden].abs().max()
    assert difference < 1e-5 if mapping == Softmax() else difference > 1e-3


def test_torchs_fused_layer_never_takes_its_weights():
    """Without the hook torch's layer would compute softmax; then it is an error."""
    layer = torch.nn.TransformerEncoderLayer(12, 4, 24, 0.0, batch_first=True).eval()
    layer.self_attn = nn.Attention(12, 4, "sparsemax", batch_first=True).eval()
    layer.self_attn._forward_pre_hooks.clear()
    with torch.no_grad(), pytest.raises(RuntimeError, match="torch's fused encoder layer has only softmax"):
        layer(torch.randn(N, L, 12))


def test_torchs_code_reads_how_the_weights_are_kept():
    for options in ({}, {"kdim": 5}, {"vdim": 5}, {"kdim": 12, "bias": False}):
        theirs, ours = (kind(12, 4, **options) for kind in (torch.nn.MultiheadAttention, nn.Attention))
        assert ours._qkv_same_embed_dim == theirs._qkv_same_embed_dim
        ours.load_state_dict(theirs.state_dict())
        theirs.load_state_dict(ours.state_dict())
    assert not nn.Attention(12, 4, kv_heads=2)._qkv_same_embed_dim  # torch's code would read as many keys as queries


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_their_sequences(layout):
    torch.manual_seed(0)
    module = nn.Attention(12, 4, "sparsemax", batch_first=True, add_bias_kv=True)
    rows, others = ([torch.randn(n, 12) for n in sizes] for sizes in ((2, 5, 1), (3, 1, 4)))
    x, y = (torch.nested.nested_tensor(each, layout=layout, requires_grad=True) for each in (rows, others))
    for inputs, alone, options in (
        ((x, x, x), zip(rows, rows), {"is_causal": True}), ((x, y, y), zip(rows, others), {"average_attn_weights": False}),
    ):  # fmt: skip
        out, weights = module(*inputs, **options)
        assert out.layout == layout
        torch.testing.assert_close(module(*inputs, need_weights=False, **options)[0].unbind(), out.unbind())
        for each, row, (a, b) in zip(out.unbind(), weights, alone, strict=True):
            want, shown = module(a, b, b, **options)
            torch.testing.assert_close(each, want)
            torch.testing.assert_close(row[..., : len(a), : len(b)], shown[..., : len(b)])
            assert not row[..., len(a) :, :].any()
            assert not row[..., len(b) : -1].any()
        (grad,) = torch.autograd.grad(sum(each.square().sum() for each in out.unbind()), x)
        want = [torch.zeros(0)] * 3
        for n, (a, b) in enumerate(zip(rows, rows if inputs[1] is x else others)):
            leaf = a.clone().requires_grad_()
            value = module(leaf, *[leaf if inputs[1] is x else b] * 2, **options)[0]
            want[n] = torch.autograd.grad(value.square().sum(), leaf)[0]
        torch.testing.assert_close(list(grad.unbind()), want)


def test_autocast():
    theirs, ours = pair()
    x = torch.randn(L, N, E)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = ours(x, x, x), theirs(x, x, x)
    assert got[0].dtype == want[0].dtype
    torch.testing.assert_close(got[0], want[0], atol=2e-2, rtol=2e-2)


def test_self_attention_causal_and_unbatched():
    theirs, ours = pair()
    x = torch.randn(L, N, E, requires_grad=True)
    hidden = torch.ones(L, L, dtype=torch.bool).triu(1)
    want = theirs(x, x, x, attn_mask=hidden, is_causal=True, need_weights=False)[0]
    torch.testing.assert_close(ours(x, x, x, attn_mask=hidden, is_causal=True, need_weights=False)[0], want)
    torch.testing.assert_close(ours(x, x, x, is_causal=True, need_weights=False)[0], want)
    one = ours(x[:, 0], x[:, 0], x[:, 0], is_causal=True)
    torch.testing.assert_close(one[0], want[:, 0])
    assert one[1].shape == (L, L)
    got = torch.autograd.grad(ours(x, x, x)[0].pow(2).sum(), [x, *ours.parameters()])
    wanted = torch.autograd.grad(theirs(x, x, x)[0].pow(2).sum(), [x, *theirs.parameters()])
    torch.testing.assert_close(got, wanted)


def test_torchs_causal_biases():
    from torch.nn.attention.bias import causal_upper_left

    module, x = nn.Attention(E, H, Sparsemax(), batch_first=True), torch.randn(N, L, E)
    for more in ({}, {"key_padding_mask": torch.arange(L).expand(N, L) > 3}):
        want = module(x, x, x, attn_mask=torch.ones(L, L, dtype=torch.bool).triu(1), **more)
        torch.testing.assert_close(module(x, x, x, attn_mask=causal_upper_left(L, L), **more), want)


def test_the_start_is_torchs():
    torch.manual_seed(3)
    theirs = torch.nn.MultiheadAttention(E, H)
    ours = nn.Attention(E, H)
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in theirs.named_parameters()}
    bound = (6 / (3 * E + E)) ** 0.5
    assert 0.9 * bound < float(ours.in_proj_weight.detach().abs().max()) <= bound
    assert not ours.in_proj_bias.any()


@pytest.mark.parametrize("kdim", [None, 4])
def test_the_weights_that_are_not_there_are_none(kdim):
    """Code that fills in torch's module asks which of its weights are None."""
    ours, theirs = (kind(E, H, kdim=kdim) for kind in (nn.Attention, torch.nn.MultiheadAttention))
    for name in theirs._parameters:
        assert (getattr(ours, name) is None) == (getattr(theirs, name) is None)
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]


@pytest.mark.parametrize("gate", [True, "head"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_gate_of_the_query(gate, bias):
    torch.manual_seed(0)
    plain = nn.Attention(E, H, "entmax15", bias=bias, kv_heads=1, window=(2, 0))
    gated = nn.Attention(E, H, "entmax15", bias=bias, kv_heads=1, window=(2, 0), gate=gate)
    missing = gated.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert missing == ["gate_proj.weight"] + ["gate_proj.bias"] * bias
    query, key, value = inputs(False)
    out, weights = gated(query, key, value)
    for one in (plain, gated):
        one.out_proj.weight.data, one.out_proj.bias = torch.eye(E), None
    got, want = gated(query, key, value)[0], plain(query, key, value)[0]
    factor = gated.gate_proj(query).sigmoid()
    factor = factor if gate is True else factor.repeat_interleave(E // H, -1)
    torch.testing.assert_close(got, want * factor)
    assert out.shape == (L, N, E)
    torch.testing.assert_close(weights, plain(query, key, value)[1])
    got.square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in gated.gate_proj.parameters())


def test_options_are_those_of_attention():
    torch.manual_seed(0)
    beta = torch.nn.Parameter(torch.rand(H, 1, 1))
    alpha = torch.nn.Parameter(torch.tensor([1.1, 1.5, 2.0]).reshape(H, 1, 1))
    module = nn.Attention(
        E, H, Entmax(alpha), kv_heads=1, window=(3, 0), softcap=5.0, alibi=True, sink=True,
        transform=A.compose(A.transforms.scalable(beta=beta)), batch_first=True,
    )  # fmt: skip
    assert {n for n, _ in module.named_parameters()} >= {"map_alpha", "sink", "transform_0_beta"}
    with torch.no_grad():
        module.sink.copy_(torch.tensor([0.0, 1.0, -1.0]))
    x = torch.randn(N, S, E)
    out, weights = module(x, x, x, average_attn_weights=False)
    q, k, v = torch.nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias).split([E, 4, 4], -1)
    q, k, v = (a.unflatten(-1, (-1, 4)).transpose(1, 2) for a in (q, k, v))
    want, p = A.attention(
        q, k, v, Entmax(alpha), enable_gqa=True, window=(3, 0), softcap=5.0, alibi=True, sink=module.sink,
        transform=A.transforms.scalable(beta=beta), need_weights=True,
    )  # fmt: skip
    torch.testing.assert_close(out, module.out_proj(want.transpose(1, 2).flatten(-2)))
    torch.testing.assert_close(weights, p)
    assert weights.shape == (N, H, S, S)
