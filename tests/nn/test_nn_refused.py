"""The words of `anymax.nn` to bad input: a row a mistake."""

from __future__ import annotations

import math

import numpy as np
import pytest
from refusals import each, refuses

torch = pytest.importorskip("torch")

from anymax import Bounded, Entmax, NormMax, PerturbMax, Softmax, Sparsemax, SparseSoftmax, Taylor, nn

E, H, N, L = 12, 3, 2, 5
X = torch.zeros(L, N, E)
EDGES = torch.arange(80).reshape(2, 40) % 12
NODES = torch.zeros(12, 5)
LENGTHS = [3, 0, 5, 1]


def attend(query=X, key=None, value=None, more=None, **options):
    """The module with these options, called."""
    return nn.Attention(E, H, **(more or {}))(
        query, query if key is None else key, query if value is None else value, **options
    )


def graph(x=NODES, edges=EDGES, *more, in_channels=5, heads=2, **options):
    return nn.GraphAttention(in_channels, 3, heads, **options)(x, edges, *more)


def jagged():
    return torch.nested.nested_tensor([torch.zeros(L, E)], layout=torch.jagged)


ADAPTIVE_SCALE = {
    "no heads": (lambda: nn.AdaptiveScale(8, 0), ValueError, "num_heads must be at least 1, got 0"),
    "a width that is no integer": (lambda: nn.AdaptiveScale(8.0, 2), TypeError, "embed_dim must be an integer, got 8.0"),
    "a head that is not there": (lambda: nn.AdaptiveScale(8, 2, only=(2,)), ValueError, "only must name some of the 2 heads, 0 to 1"),
    "a head twice": (lambda: nn.AdaptiveScale(8, 2, only=(1, 1)), ValueError, "each once"),
    "no head": (lambda: nn.AdaptiveScale(8, 2, only=()), ValueError, "only must name some"),
    "gamma below 0": (lambda: nn.AdaptiveScale(8, 2, gamma_range=-1.0), ValueError, "gamma_range must be finite and at least 0"),
    "delta in words": (lambda: nn.AdaptiveScale(8, 2, delta="1"), TypeError, "delta must be a number, got '1'"),
    "alpha of an activation": (lambda: nn.Activation("entmax", alpha=1.5), TypeError, r'write Activation\("entmax:alpha=1.5"\)'),
    "alpha of a loss": (lambda: nn.Loss(alpha=1.5), TypeError, r'write Loss\("entmax:alpha=1.5"\)'),
    "dropout for a map": (lambda: nn.Attention(8, 2, 0.1), TypeError, "got 0.1; for dropout, say dropout=0.1"),
    "gamma=": (lambda: nn.AdaptiveScale(8, 2, gamma=2.0), TypeError, "say gamma_range="),
    "a narrow state": (
        lambda: nn.AdaptiveScale(8, 2)(torch.ones(3, 4)), ValueError, r"expected hidden states \[..., L, 8\], got the shape \(3, 4\)",
    ),
    "a state of NumPy": (lambda: nn.AdaptiveScale(8, 2)(np.ones((3, 8))), ValueError, "got ndarray"),
    "a scale of other heads": (
        lambda: nn.Attention(8, 4, transform=nn.AdaptiveScale(8, 2)), ValueError, "8 features and 4 heads, got 8 and 2",
    ),
    "slopes of other heads": (lambda: nn.Attention(8, 4, alibi=[1.0, 0.5]), ValueError, "a real slope for each of the 4 heads"),
    "slopes and zero keys": (lambda: nn.Attention(8, 4, alibi=[0.0] * 4, add_zero_attn=True), ValueError, "neither window nor alibi"),
}  # fmt: skip
GRAPH = {
    "an index too large": (lambda: graph(edges=EDGES + 5), IndexError, r"edge_index\[0, \d+\] is \d+, and x has 12 sources, 0 to 11"),
    "an index below 0": (
        lambda: graph(edges=torch.tensor([[0, 1], [1, -1]])), IndexError, r"edge_index\[1, 1\] is -1, and x has 12 targets",
    ),
    "real edges": (lambda: graph(edges=EDGES.float()), TypeError, "integers of 32 or 64 bits"),
    "edges turned": (lambda: graph(edges=EDGES.T), ValueError, r"shape \[2, edges\], got \(40, 2\)"),
    "edges in a list": (lambda: graph(edges=EDGES.tolist()), TypeError, "must be a tensor of integers"),
    "an adjacency matrix": (lambda: graph(edges=torch.eye(N).to_sparse()), TypeError, "it has the source and the target of each edge"),
    "a narrow x": (lambda: graph(NODES[:, :3], EDGES), ValueError, r"\[nodes, 5\], got \(12, 3\)"),
    "three x": (lambda: graph((NODES, NODES, NODES), EDGES), ValueError, "got 3 of them"),
    "x of NumPy": (lambda: graph(NODES.numpy(), EDGES), TypeError, "x must be a tensor"),
    "features of edges without edge_dim": (lambda: graph(NODES, EDGES, torch.ones(40, 2)), ValueError, "give edge_dim="),
    "features of edges": (lambda: graph(NODES, EDGES, torch.ones(40, 3), edge_dim=2), ValueError, r"shape \(40, 2\), got \(40, 3\)"),
    "fill_value": (lambda: graph(edge_dim=2, fill_value="median"), ValueError, "one of add, sum, mean, min, max, mul"),
    "dropout": (lambda: graph(dropout=1.0), ValueError, "below 1"),
    "no heads": (lambda: graph(heads=0), ValueError, "heads must be at least 1"),
    "heads that are no integer": (lambda: graph(heads=2.0), TypeError, "heads must be an integer"),
    "three widths": (lambda: graph(in_channels=(1, 2, 3)), ValueError, "a pair of them"),
    "shared weights of two widths": (lambda: graph(in_channels=(1, 2), share_weights=True), ValueError, "share_weights needs"),
    "concat": (lambda: graph(concat=1), TypeError, "True or False"),
    "num_heads": (lambda: graph(num_heads=2), TypeError, "say heads="),
    "a map": (lambda: graph(mapping="sparsemx"), ValueError, "sparsemax"),
}  # fmt: skip
POOL = {
    "no query": (lambda: nn.AttentionPool()(torch.ones(9, 2), lengths=LENGTHS), TypeError, "without a query"),
    "heads without features": (lambda: nn.AttentionPool(heads=2), ValueError, "needs features="),
    "a narrow x": (
        lambda: nn.AttentionPool("softmax", 2)(torch.ones(9, 3), lengths=LENGTHS), ValueError, r"\[entries, 2\], got \(9, 3\)",
    ),
    "scores of other entries": (
        lambda: nn.AttentionPool()(torch.ones(9, 2), torch.ones(8), lengths=LENGTHS), ValueError, r"\(9,\) or \(9, heads\), got \(8,\)",
    ),
    "no segments": (lambda: nn.AttentionPool("softmax", 2)(torch.ones(9, 2)), TypeError, "AttentionPool: give exactly one of index="),
    "fewer entries": (lambda: nn.AttentionPool("softmax", 2)(torch.ones(8, 2), lengths=LENGTHS), ValueError, "9 entries"),
    "embed_dim": (lambda: nn.AttentionPool(embed_dim=2), TypeError, "say features="),
    "no features": (lambda: nn.AttentionPool("softmax", 0), ValueError, "features must be at least 1"),
}  # fmt: skip
ATTENTION = {
    "a map's parameter": (lambda: nn.Attention(8, 2, alpha=1.5), TypeError, 'mapping="entmax:alpha=1.5"'),
    "heads of keys": (lambda: nn.Attention(8, 2, num_kv_heads=1), TypeError, "say kv_heads="),
    **{
        name: (lambda name=name: nn.Attention(8, 2, **{name: True}), TypeError, "it goes to the call")
        for name in ("need_weights", "is_causal", "causal", "attn_mask", "key_padding_mask")
    },
    "no number of heads": (lambda: nn.Attention(8), TypeError, r"num_heads is missing; write Attention\(embed_dim, num_heads\)"),
    "heads of a width": (lambda: nn.Attention(10, 3), ValueError, "embed_dim must be a multiple of num_heads"),
    "a gate": (lambda: nn.Attention(12, 4, gate="heads"), ValueError, 'gate must be True, False or "head", got \'heads\''),
    "kv_heads": (lambda: nn.Attention(12, 4, kv_heads=3), ValueError, "got 12, 4 and 3"),
    "a class of maps": (lambda: nn.Attention(12, 4, Sparsemax), TypeError, "expected a mapping"),
    "one dimension": (lambda: attend(torch.zeros(E)), ValueError, "two dimensions, or all three"),
    "attn_mask": (
        lambda: attend(attn_mask=torch.zeros(L, 2)), ValueError, r"attn_mask must have the shape \(5, 5\) or \(6, 5, 5\), got \(5, 2\)",
    ),
    "integers as a mask": (
        lambda: attend(key_padding_mask=torch.zeros(N, L, dtype=torch.int)), TypeError, "key_padding_mask must be boolean or real",
    ),
    "sdpa": (
        lambda: nn.Attention(E, H, Sparsemax(), implementation="sdpa")(*[X] * 3, need_weights=False), ValueError,
        "torch has attention with softmax",
    ),
    "nothing to learn": (lambda: nn.Attention(E, H, Softmax(), learn="alpha"), ValueError, "no number of that name"),
    "heads that are no integer": (lambda: nn.Attention(E, 3.0), TypeError, "num_heads must be an integer, got 3.0"),
    "dropout": (lambda: nn.Attention(E, H, dropout=1.5), ValueError, "dropout must be a number of at least 0 and below 1, got 1.5"),
    "a window and more keys": (lambda: nn.Attention(E, H, add_bias_kv=True, window=2), ValueError, "neither window nor alibi"),
    "slopes and zero keys": (lambda: nn.Attention(E, H, add_zero_attn=True, alibi=True), ValueError, "neither window nor alibi"),
    "a wide query": (lambda: attend(torch.zeros(L, N, E + 1)), ValueError, "query must have 12 features, got the shape"),
    "a narrow key": (lambda: attend(more={"kdim": 4}), ValueError, "key must have 4 features"),
    "another dtype": (lambda: attend(X.double()), TypeError, "query must have the dtype of the weights"),
    "nested, batch second": (
        lambda: attend(jagged()), ValueError, "nested tensors have the batch first; make the module with batch_first=True",
    ),
    "nested and a mask": (
        lambda: attend(jagged(), more={"batch_first": True}, attn_mask=torch.zeros(L, L)), ValueError,
        "neither key_padding_mask nor attn_mask",
    ),
    "nested beside dense": (
        lambda: nn.Attention(E, H, batch_first=True)(jagged(), *[torch.zeros(1, L, E)] * 2), TypeError, "must all be nested tensors",
    ),
    "sparse": (lambda: nn.Attention(E, H)(torch.zeros(L, E).to_sparse(), *[torch.zeros(L, E)] * 2), TypeError, "got a sparse one"),
    "no key": (lambda: nn.Attention(E, H)(X, None, None), TypeError, "key must be a tensor, got NoneType"),
    "a mask in a list": (lambda: attend(attn_mask=[[True]]), TypeError, "attn_mask must be a tensor, got list"),
    "is_causal": (lambda: attend(is_causal="yes"), TypeError, "is_causal must be True or False, got 'yes'"),
    "a mask of heads": (
        lambda: attend(attn_mask=torch.zeros(H, L, L)), ValueError,
        r"attn_mask must have the shape \(5, 5\) or \(6, 5, 5\), got \(3, 5, 5\)",
    ),
}  # fmt: skip
MAPPING = {
    f"{kind.__name__}, {mapping}": (lambda kind=kind, mapping=mapping: kind(mapping), TypeError, "expected a mapping")
    for kind in (nn.Activation, nn.Loss) for mapping in (2, Sparsemax)
}  # fmt: skip
STRANGE = torch.tensor([math.nan, 0.0]), torch.tensor([math.inf, 0.0])
CHECKED = nn.Categorical(Softmax(), torch.zeros(3, 2, 5), validate_args=True)
CATEGORICAL = {
    "NaN": (lambda: nn.Categorical(Softmax(), STRANGE[0], validate_args=True), ValueError, "scores"),
    "infinity": (lambda: nn.Categorical(Softmax(), STRANGE[1], validate_args=True), ValueError, "scores"),
    "probs": (lambda: nn.Categorical(probs=X), TypeError, r"Categorical has no option 'probs' \(give scores=, after the map"),
    "a list": (lambda: nn.Categorical(Softmax(), [0.0, 1.0]), TypeError, "scores must be a tensor"),
    "no map": (lambda: nn.Categorical(X, X), TypeError, "expected a mapping"),
    "no class": (lambda: CHECKED.log_prob(torch.tensor(5)), ValueError, "within the support"),
    "values of another shape": (lambda: CHECKED.log_prob(torch.zeros(4, dtype=torch.long)), ValueError, "not broadcastable"),
    "a generator of NumPy": (lambda: CHECKED.sample(generator=np.random.default_rng(0)), TypeError, "generator"),
    "a batch that does not expand": (lambda: CHECKED.expand((4, 2, 2)), RuntimeError, "must match the existing size"),
}  # fmt: skip
LEARNING = {
    "beta of entmax": (lambda: nn.Activation(Entmax(1.5), learn="beta"), ValueError, "no number of that name"),
    "alpha of sparsemax": (lambda: nn.Activation(Sparsemax(), learn="alpha"), ValueError, "no number of that name"),
    "a word": (lambda: nn.Activation(PerturbMax("normal"), learn="noise"), ValueError, "no number of that name"),
    "a start outside": (lambda: nn.Activation(Entmax(2.5), learn="alpha"), ValueError, r"strictly inside bounds=\(1\.0, 2\.0\)"),
    "a start at a bound": (lambda: nn.Activation(Entmax(1.0), learn="alpha"), ValueError, "strictly inside"),
    "bounds turned": (lambda: nn.Activation(Entmax(1.5), learn="alpha", bounds=(2.0, 1.0)), ValueError, "strictly inside"),
    "bounds out of entmax's range": (
        lambda: nn.Loss(Entmax(1.5), learn="alpha", bounds=(-1.0, 2.0)), ValueError,
        r"alpha in its range, above 0 and finite, got \(-1\.0, 2\.0\)",
    ),
    "bounds out of normmax's range": (
        lambda: nn.Loss(NormMax(1.5), learn="alpha", bounds=(0.5, 2.0)), ValueError, "alpha in its range, above 1 and finite",
    ),
    "an infinite bound": (lambda: nn.Activation(Entmax(1.5), learn="alpha", bounds=(1.0, math.inf)), ValueError, "above 0 and finite"),
    "bounds out of Bounded's range": (
        lambda: nn.Activation(Bounded(0.5, 1.5), learn="alpha", bounds=(1.0, 3.0)), ValueError, "in its range, from 1 to 2, got",
    ),
    "k of sparse_softmax": (lambda: nn.Activation(SparseSoftmax(k=2), learn="k", bounds=(1, 3)), ValueError, "have no derivative by k"),
    "p of sparse_softmax": (lambda: nn.Loss(SparseSoftmax(p=0.5), learn="p", bounds=(0, 1)), ValueError, "have no derivative by p"),
    "order": (lambda: nn.Activation(Taylor(2), learn="order", bounds=(1, 3)), ValueError, "have no derivative by order"),
    "nodes": (lambda: nn.Activation(PerturbMax(nodes=32), learn="nodes", bounds=(8, 99)), ValueError, "have no derivative by nodes"),
    "k in attention": (lambda: nn.Attention(4, 2, SparseSoftmax(k=2), learn="k", bounds=(1, 3)), ValueError, "have no derivative by k"),
}  # fmt: skip
ALL = {f"{subject}: {name}": row for subject, table in {
    "adaptive scale": ADAPTIVE_SCALE, "graph": GRAPH, "pool": POOL, "attention": ATTENTION, "mapping": MAPPING, "categorical": CATEGORICAL,
    "learning": LEARNING,
}.items() for name, row in table.items()}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@each(ALL)
def test_refused(call, error, words):
    refuses(call, error, words)
