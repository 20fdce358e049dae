"""Attention's words to bad input, `attention_varlen` and `linear_attention` included: a row a mistake."""

from __future__ import annotations

import numpy as np
import pytest
from refusals import each, refuses

import anymax as A
from anymax import Budget, Entmax, Sparsemax, Taylor

torch = pytest.importorskip("torch")

B, H, L, S, D = 2, 4, 5, 7, 3
G = np.random.default_rng(0)
Q, K, V = (G.normal(size=(B, H, n, D)) for n in (L, S, S))
BIAS, KEEP = G.normal(size=(H, L, S)), G.uniform(size=(B, 1, L, S)) < 0.7
PRIOR = np.full((L, S), 1 / S)
q, k, v = (torch.tensor(a) for a in (Q, K, V))
keep = torch.ones(L, S, dtype=torch.bool)
meta = {"device": "meta"}


def nested():
    return torch.nested.nested_tensor([torch.zeros(H, L, D)], layout=torch.jagged)


def jax(*shape, number=1.0):
    jnp = pytest.importorskip("jax").numpy
    return jnp.full(shape, number)


ATTENTION = {
    "list": (lambda: A.attention([[1.0]], K, V), TypeError, "q must be an array, got list"),
    "vector": (lambda: A.attention(Q[0, 0, 0], K, V), ValueError, "q needs at least two dimensions"),
    "features": (lambda: A.attention(Q[..., :2], K, V), ValueError, "q has 2 features and k has 3"),
    "length": (lambda: A.attention(Q, K, V[:, :, :5]), ValueError, "k has length 7 and v has 5"),
    "dtype": (lambda: A.attention(Q, K.astype(np.float32), V), TypeError, "must have one dtype"),
    "framework": (lambda: A.attention(q, K, V), TypeError, "of one framework, got arrays of torch, NumPy and NumPy"),
    "mapping": (lambda: A.attention(Q, K, V, 2), TypeError, "expected a mapping such as"),
    "groups": (lambda: A.attention(Q[:, :3], K[:, :2], V[:, :2], enable_gqa=True), ValueError, "must be a multiple"),
    "dropout": (lambda: A.attention(Q, K, V, dropout_p=1.0), ValueError, "at least 0 and below 1, got 1.0"),
    "a mask of JAX": (lambda: A.attention(q, k, v, mask=jax(5, 7) > 0), TypeError, "a JAX array for scores of torch; convert one of them"),
    "a bias of JAX": (lambda: A.attention(q, k, v, bias=jax(5, 7)), TypeError, "got a JAX array for scores of torch"),
    "an alpha of JAX": (lambda: A.attention(q, k, v, Entmax(jax(4, 1, 1, number=1.5))), TypeError, "got a JAX array for scores of torch"),
    "explained, refused": (
        lambda: A.explain_attention(q, k, v, Sparsemax(), implementation="sdpa"), ValueError,
        "can't take this call: torch has attention with softmax",
    ),
    "explained, no map": (lambda: A.explain_attention(Q, K, V, "softmin"), ValueError, "there is no map 'softmin'"),
    "explained, no option": (lambda: A.explain_attention(Q, K, V, casual=True), TypeError, "casual"),
    "implementation": (lambda: A.attention(Q, K, V, implementation="flash"), ValueError, "no implementation 'flash'; there are sdpa,"),
    "refused": (lambda: A.attention(Q, K, V, Sparsemax(), implementation="sdpa"), ValueError, "torch has attention with softmax"),
    "blocks of numpy": (lambda: A.attention(Q, K, V, implementation="blockwise"), ValueError, "it takes torch tensors"),
    "blocks, weights": (
        lambda: A.attention(q, k, v, implementation="blockwise", need_weights=True), ValueError, "the matrix that it never has"),
    "linear": (lambda: A.attention(Q, K, V, implementation="linear"), ValueError, "only Taylor softmax of order 2"),
    "linear mask": (lambda: A.attention(Q, K, V, Taylor(), mask=KEEP, implementation="linear"), ValueError, r"scores q k\^T alone"),
    "mask dtype": (lambda: A.attention(Q, K, V, mask=np.ones((L, S), int)), TypeError, "mask must be boolean .* got int64"),
    "mask shape": (lambda: A.attention(Q, K, V, mask=np.ones((3, L, S), bool)), ValueError, "mask of shape .* does not broadcast"),
    "bias shape": (lambda: A.attention(Q, K, V, bias=np.ones((L, 1, S))), ValueError, "bias of shape"),
    "alpha shape": (lambda: A.attention(Q, K, V, Entmax(np.ones(3) * 1.5)), ValueError, "entmax: alpha of shape"),
    "heads": (lambda: A.attention(Q, K[:, :2], V[:, :2]), ValueError, "say enable_gqa=True"),
    "values": (lambda: A.attention(Q, K, V[:, :3]), ValueError, "v of shape"),
    "window": (lambda: A.attention(Q, K, V, window=(1, -2)), ValueError, "window must be"),
    "window float": (lambda: A.attention(Q, K, V, window=1.5), ValueError, "window must be"),
    "alibi": (lambda: A.attention(Q, K, V, alibi=np.ones(3)), ValueError, r"alibi must have one number for each head, shape \(4,\)"),
    "alibi of batches": (lambda: A.attention(Q, K, V, alibi=np.ones((3, 4))), ValueError, r"each head of each batch, shape \(2, 4\)"),
    "sink": (lambda: A.attention(Q, K, V, sink=np.ones((4, 2))), ValueError, "sink must have one number for each head"),
    "lengths": (lambda: A.attention(Q, K, V, lengths=np.ones(3, int)), ValueError, "lengths must have one number for each batch"),
    "lengths beyond": (lambda: A.attention(Q, K, V, lengths=[S + 1, 3]), ValueError, rf"lengths must be from 0 to {S}, .* 3 to {S + 1}"),
    "lengths below": (lambda: A.attention(q, k, v, q_lengths=[-1, 3]), ValueError, f"q_lengths must be from 0 to {L}"),
    "lengths real": (lambda: A.attention(Q, K, V, lengths=np.ones(2)), TypeError, "lengths must be integers"),
    "offset": (lambda: A.attention(Q, K, V, offset=1.0), TypeError, "offset must be an integer"),
    "softcap": (lambda: A.attention(Q, K, V, softcap=-1.0), ValueError, "softcap must be a finite number above 0"),
    "scale": (lambda: A.attention(Q, K, V, scale="big"), TypeError, "scale must be a number"),
    "transform": (lambda: A.attention(Q, K, V, transform=3), TypeError, "transform must be a function"),
    "mix": (lambda: A.attention(Q, K, V, mix=PRIOR), TypeError, r"mix must be a pair \(prior, weight\), got ndarray$"),
    "mix shape": (lambda: A.attention(Q, K, V, mix=(PRIOR.T, 0.5)), ValueError, "the prior of mix of shape"),
    "integers": (lambda: A.attention(*(a.astype(int) for a in (Q, K, V))), TypeError, "must be real floating-point"),
    "device": (lambda: A.attention(q, k, v.to("meta")), ValueError, "on one device, got cpu, cpu and meta"),
    "mask device": (lambda: A.attention(q, k, v, bias=torch.tensor(BIAS).to("meta")), ValueError, "bias is on meta"),
    "budget": (lambda: A.attention(Q, K, V, Budget(9)), ValueError, "9"),
    "generator": (lambda: A.attention(Q, K, V, dropout_p=0.1, generator="0"), TypeError, "generator: NumPy arrays need"),
    "mask elsewhere": (lambda: A.attention(q, k, v, mask=keep.to("meta")), ValueError, "mask is on meta, the call's .* on cpu"),
    "alpha elsewhere": (lambda: A.attention(q, k, v, Entmax(torch.ones(4, 1, 1, **meta))), ValueError, "alpha is on meta"),
    "prior elsewhere": (lambda: A.attention(q, k, v, mix=(torch.ones(5, 7, **meta), 0.5)), ValueError, "the prior of mix is on meta"),
    "weight": (lambda: A.attention(q, k, v, mix=(torch.ones(5, 7), "half")), ValueError, "weight of mix must be a number from 0 to 1"),
    "weight of 2": (lambda: A.attention(q, k, v, mix=(torch.ones(5, 7), 2)), ValueError, "weight of mix must be a number from 0 to 1"),
    "weights": (lambda: A.attention(q, k, v, mix=(torch.ones(5, 7), torch.ones(3))), ValueError, r"the weight of mix of shape \(3,\)"),
    "dropout word": (lambda: A.attention(q, k, v, dropout_p="0.1"), ValueError, "at least 0 and below 1, got '0.1'"),
    "dropout none": (lambda: A.attention(q, k, v, dropout_p=None), ValueError, "dropout_p must be a number .* got None"),
    "causal word": (lambda: A.attention(q, k, v, is_causal="no"), TypeError, "is_causal must be True or False, got 'no'"),
    "causal array": (lambda: A.attention(q, k, v, is_causal=np.ones(2, bool)), TypeError, "is_causal must be True or False"),
    "gqa number": (lambda: A.attention(q, k, v, enable_gqa=2), TypeError, "enable_gqa must be True or False, got 2"),
    "weights word": (lambda: A.attention(q, k, v, need_weights="no"), TypeError, "need_weights must be True or False"),
    "sink bool": (lambda: A.attention(q, k, v, sink=True), TypeError, "sink must be real, got bool"),
    "transform shape": (lambda: A.attention(q, k, v, transform=lambda s: s[..., :1]), ValueError, r"must give back .* \(2, 4, 5, 7\)"),
    "transform none": (lambda: A.attention(Q, K, V, transform=lambda s: None), ValueError, "but gave NoneType"),
    "transform dtype": (lambda: A.attention(q, k, v, transform=lambda s: s > 0), ValueError, "but gave Tensor of bool"),
    "transform kind": (lambda: A.attention(q, k, v, transform=lambda s: s.numpy()), ValueError, "but gave ndarray"),
    "sparse": (lambda: A.attention(q.to_sparse(), k, v), TypeError, r"q must be a dense tensor, got a sparse one; call its to_dense\(\)"),
    "nested": (lambda: A.attention(*[nested()] * 3), TypeError, "q must be a dense tensor, got a nested one; pad it and say lengths="),
    "float8": (lambda: A.attention(*(a.to(torch.float8_e4m3fn) for a in (q, k, v))), TypeError, "of 16 bits or more, got torch.float8"),
}  # fmt: skip
LINEAR = {
    "order": (lambda: A.linear_attention(Q, Q, Q, Taylor(4)), ValueError, "only order 2 of Taylor softmax is supported, not 4"),
    "softmax": (lambda: A.linear_attention(Q, Q, Q, A.Softmax()), ValueError, "only Taylor softmax of order 2"),
    "list": (lambda: A.linear_attention([1.0], K, V), TypeError, "q must be an array"),
    "features": (lambda: A.linear_attention(Q[..., :2], K, V), ValueError, "q has 2 features and k has 3"),
    "length": (lambda: A.linear_attention(Q, K, V[:, :, :5]), ValueError, "k has length 7 and v has 5"),
    "heads": (lambda: A.linear_attention(Q, K[:, :2], V[:, :2]), ValueError, "say enable_gqa=True"),
    "groups": (lambda: A.linear_attention(Q[:, :3], K[:, :2], V[:, :2], enable_gqa=True), ValueError, "a multiple of those of k and v"),
    "real lengths": (lambda: A.linear_attention(Q, K, V, lengths=np.ones(2)), TypeError, "lengths must be integers"),
    "framework": (lambda: A.linear_attention(q, K, V), TypeError, "linear_attention: q, k and v must be of one framework"),
    "dtype": (lambda: A.linear_attention(q, k.float(), v), TypeError, "linear_attention: q, k and v must have one dtype"),
    "integers": (lambda: A.linear_attention(*(a.long() for a in (q, k, v))), TypeError, "must be real floating-point"),
    "device": (lambda: A.linear_attention(q, k.to("meta"), v), ValueError, "must be on one device, got cpu, meta and cpu"),
    "batches": (lambda: A.linear_attention(q, k[:1].expand(3, 4, 7, 3), v), ValueError, "do not broadcast"),
    "values": (lambda: A.linear_attention(q, k, v[:, :3]), ValueError, "v of shape .* does not broadcast"),
    "scale": (lambda: A.linear_attention(q, k, v, scale="big"), TypeError, "linear_attention: scale must be a number or an array"),
    "lengths": (lambda: A.linear_attention(q, k, v, lengths=[1, 2, 3]), ValueError, "lengths must have one number"),
    "map": (lambda: A.linear_attention(q, k, v, 2), TypeError, r"linear_attention: expected a mapping such as .*, got 2"),
}  # fmt: skip

# what is said of packed sequences: what is changed of a call -> the error and its words
CU_Q, CU_K = [0, 3, 3, 10, 11, 30, 34], [0, 5, 7, 7, 20, 41, 48]
PACKED = dict(
    zip("qkv", (np.ones((34, H, D)), np.ones((48, H, D)), np.ones((48, H, D)))), cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K
)
CHANGES = [
    ({"cu_seqlens_q": [0, 3, 2, 34]}, ValueError, r"cu_seqlens_q\[2\] is 2, below cu_seqlens_q\[1\], 3"),
    ({"cu_seqlens_k": [1, 3, 48]}, ValueError, r"cu_seqlens_k\[0\] is 1"),
    ({"cu_seqlens_q": [0, 3]}, ValueError, "3 entries in all, and q has 34"),
    ({"cu_seqlens_k": [0, 3, 48]}, ValueError, "6 sequences and cu_seqlens_k has 2"),
    ({"cu_seqlens_q": [0.0, 34.0]}, TypeError, "cu_seqlens_q must be integers"),
    ({"cu_seqlens_q": []}, ValueError, "cu_seqlens_q is empty"),
    ({"max_seqlen_q": 18}, ValueError, "max_seqlen_q is 18, and sequence 4 has 19"),
    ({"max_seqlen_k": 2.5}, TypeError, "max_seqlen_k must be an integer"),
    ({"q": np.zeros((1, 34, H, D))}, ValueError, r"q must have the shape \[entries, heads, features\]"),
    ({"v": np.zeros((45, H, D))}, ValueError, "k has 48 keys and v has 45"),
    ({"k": np.zeros((48, H, D + 1))}, ValueError, "features"),
    ({"q": [[[1.0]]]}, TypeError, "numpy.asarray"),
    ({"mask": np.ones((34, 48), bool)}, TypeError, "is_causal= or window="),
    ({"bias": 1.0}, TypeError, "no option 'bias'"),
    ({"need_weights": True}, TypeError, "call attention for each sequence"),
    ({"mix": (1.0, 0.5)}, TypeError, "call attention for each sequence"),
    ({"lengths": [1]}, TypeError, "cu_seqlens_k has them"),
    ({"window_size": (-1, 0)}, TypeError, "where FlashAttention has -1"),
    ({"offset": np.zeros(3, int)}, TypeError, r"shape \(6,\)"),
    ({"offset": 0.5}, TypeError, "offset must be an integer"),
    ({"mapping": Entmax(np.full((H, 34, 1), 1.5))}, ValueError, r"\[sequences, 1 or heads, 1, 1\]"),
    ({"sink": np.zeros(3)}, ValueError, "sink"),
    ({"is_causal": 1}, TypeError, "True or False"),
    ({"mapping": "softmaxx"}, ValueError, "softmax"),
    ({"implementation": "flash"}, ValueError, "no implementation"),
    ({"alibi": np.ones((5, H))}, ValueError, r"for each head of each sequence, shape \(6, 4\), got \(5, 4\)"),
    ({"q": torch.ones(34, H, D)}, TypeError, "one framework"),
]  # fmt: skip
VARLEN = {
    "-".join(change) + f" {i}": (lambda change=change: A.attention_varlen(**{**PACKED, **change}), error, words)
    for i, (change, error, words) in enumerate(CHANGES)
}
VARLEN["nested"] = (lambda: A.attention_varlen(*[nested()] * 3, [0, 2]), TypeError, r"values\(\)")


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of nested and sparse tensors
@each(ATTENTION)
def test_attention(call, error, words):
    refuses(call, error, words)


@each(LINEAR)
def test_linear_attention(call, error, words):
    refuses(call, error, words)


@each(VARLEN)
def test_attention_varlen(call, error, words):
    refuses(call, error, words)


def test_heads_of_linear_attention_that_do_not_fit():
    a, b = torch.randn(2, 4, 5, 48), torch.randn(3, 4, 5, 48)
    with pytest.raises((ValueError, RuntimeError)):
        A.linear_attention(a, b, b)
    assert A.linear_attention(a[:0], b[:0], b[:0]).shape == (0, 4, 5, 48)
