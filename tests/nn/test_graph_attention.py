"""`anymax.nn.GraphAttention` beside a loop over nodes and beside PyTorch Geometric's `GATv2Conv`; `anymax.nn.AttentionPool`."""

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import anymax
from anymax import Entmax, Segments, Softmax, Sparsemax, Taylor, nn
from anymax._core.names import as_mapping

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # of torch.compile
]

N, E, F, C, HEADS, EDGE = 12, 40, 5, 3, 2, 4
MAPS = [Softmax(), Sparsemax(), Entmax(1.5), Entmax(torch.tensor([1.2, 1.8])), Taylor(2), "entmax:alpha=1.3"]
by_map = pytest.mark.parametrize("mapping", MAPS, ids=lambda m: m if isinstance(m, str) else repr(m).replace("\n", ""))
OPTIONS = [
    {}, {"concat": False}, {"bias": False}, {"share_weights": True}, {"residual": True}, {"residual": True, "concat": False},
    {"add_self_loops": False}, {"negative_slope": 0.5}, {"heads": 1}, {"edge_dim": EDGE}, {"edge_dim": 1},
    {"edge_dim": EDGE, "add_self_loops": False},
    *({"edge_dim": EDGE, "fill_value": fill} for fill in ("add", "min", "max", "mul", 0.25, torch.linspace(0, 1, EDGE))),
]  # fmt: skip
by_option = pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()) or "plain"
)


def graph(edge_dim=None, seed=0, dtype=torch.float32):
    """Features, edges (node 7 has none that come in, two edges are given twice, some are self-loops), features of the edges."""
    g = torch.Generator().manual_seed(seed)
    edges = torch.randint(N, (2, E), generator=g)
    edges[:, 0], edges[:, 2] = 3, edges[:, 1]
    edges[1, edges[1] == 7] = 6
    x = torch.randn(N, F, generator=g, dtype=dtype)
    return x, edges, None if edge_dim is None else torch.randn(E, edge_dim, generator=g, dtype=dtype)


def made(options, mapping=None, dtype=torch.float32, **more):
    torch.manual_seed(1)
    given = {"heads": HEADS, **options, **more}
    return nn.GraphAttention(given.pop("in_channels", F), C, mapping=mapping, dtype=dtype, **given).eval()


def by_node(layer, x, edges, edge_attr, mapping):
    """The formula of the paper, a node, a head and an edge at a time, by `anymax.apply`."""
    left, right = x if isinstance(x, tuple) else (x, x)
    heads = layer.heads
    values = layer.lin_l(left).reshape(-1, heads, C)
    own = layer.lin_r(right).reshape(-1, heads, C)
    out = torch.zeros(len(right), heads, C, dtype=left.dtype)
    weights = torch.zeros(edges.shape[1], heads, dtype=left.dtype)
    for node in range(len(right)):
        incoming = [e for e in range(edges.shape[1]) if int(edges[1, e]) == node]
        for head in range(heads):
            scores = []
            for e in incoming:
                total = values[edges[0, e], head] + own[node, head]
                if edge_attr is not None:
                    total = total + (layer.lin_edge.weight @ edge_attr[e]).reshape(heads, C)[head]
                scores.append(torch.where(total > 0, total, layer.negative_slope * total) @ layer.att[0, head])
            if not scores:
                continue
            p = anymax.apply(mapping(head), torch.stack(scores))
            weights[incoming, head] = p
            out[node, head] = sum(p[i] * values[edges[0, e], head] for i, e in enumerate(incoming))
    out = out.flatten(1) if layer.concat else out.mean(1)
    if layer.res is not None:
        out = out + right @ layer.res.weight.T
    return out + layer.bias if layer.bias is not None else out, weights


def with_loops(edges, edge_attr, nodes, fill):
    """Each node's self-loop, with features made of those of its other incoming edges."""
    keep = edges[0] != edges[1]
    edges, edge_attr = edges[:, keep], None if edge_attr is None else edge_attr[keep]
    loops = torch.arange(nodes).expand(2, -1)
    if edge_attr is not None:
        reduce = {"mean": lambda a: a.mean(0), "add": lambda a: a.sum(0), "min": lambda a: a.amin(0), "max": lambda a: a.amax(0),
                  "mul": lambda a: a.prod(0)}  # fmt: skip
        rows = []
        for node in range(nodes):
            own = edge_attr[edges[1] == node]
            if not isinstance(fill, str):
                rows.append(torch.as_tensor(fill, dtype=edge_attr.dtype).expand(edge_attr.shape[1]))
            elif len(own):
                rows.append(reduce[fill](own))
            else:
                rows.append(torch.full((edge_attr.shape[1],), 1.0 if fill == "mul" else 0.0, dtype=edge_attr.dtype))
        edge_attr = torch.cat([edge_attr, torch.stack(rows)])
    return torch.cat([edges, loops], 1), edge_attr


def of_head(mapping):
    """head -> the map with its own number."""
    mapping = as_mapping(mapping, "test")
    alpha = getattr(mapping, "alpha", None)
    return (lambda head: Entmax(alpha[head])) if isinstance(alpha, torch.Tensor) else (lambda head: mapping)


@by_option
def test_it_is_a_loop_over_nodes(options):
    layer, mapping = made(options, Sparsemax(), torch.float64), Sparsemax()
    x, edges, edge_attr = graph(layer.edge_dim, dtype=torch.float64)
    given = edge_attr[:, 0] if layer.edge_dim == 1 else edge_attr
    out, (used, weights) = layer(x, edges, given, return_attention_weights=True)
    if layer.add_self_loops:
        edges, edge_attr = with_loops(edges, edge_attr, N, layer.fill_value)
    want, p = by_node(layer, x, edges, edge_attr, lambda head: mapping)
    assert torch.equal(used, edges)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(weights, p)


@by_map
def test_every_map_by_name_and_with_a_number_for_each_head(mapping):
    layer = made({}, mapping)
    x, edges, _ = graph()
    out, (used, weights) = layer(x, edges, return_attention_weights=True)
    want, p = by_node(layer, x, used, None, of_head(mapping))
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(weights, p)
    torch.testing.assert_close(torch.zeros(N, HEADS).index_add(0, used[1], weights), torch.ones(N, HEADS))


def test_a_sparse_map_leaves_edges_out_entirely():
    layer = made({}, "sparsemax")
    with torch.no_grad():
        layer.att.mul_(20)
    x, edges, _ = graph()
    _, (used, weights) = layer(x, edges, return_attention_weights=True)
    zero = (weights == 0).all(1)
    assert zero.sum() > 10
    kept = used[:, ~zero & (used[0] != used[1])]
    torch.testing.assert_close(layer(x, kept), layer(x, edges))


@pytest.mark.parametrize("edge_dim", [None, EDGE])
def test_bipartite(edge_dim):
    layer = made({"edge_dim": edge_dim, "residual": True}, Sparsemax(), in_channels=(F, 7), add_self_loops=False)
    x = (torch.randn(N, F), torch.randn(4, 7))
    edges = torch.stack([torch.arange(N), torch.arange(N) % 3])  # the last target has none
    edge_attr = None if edge_dim is None else torch.randn(N, edge_dim)
    out, (_, weights) = layer(x, edges, edge_attr, return_attention_weights=True)
    want, p = by_node(layer, x, edges, edge_attr, lambda head: Sparsemax())
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(weights, p)
    torch.testing.assert_close(out[3], layer.bias + layer.res(x[1])[3])


@pytest.mark.parametrize("options", [{"share_weights": True}, {"edge_dim": EDGE}], ids=str)
def test_a_bipartite_graph_of_more_targets_than_sources(options):
    """Sources and targets of as many features; the first targets, of which there is a source, have self-loops."""
    layer = made(options, Sparsemax(), in_channels=(F, F))
    x = (torch.randn(4, F), torch.randn(N, F))
    edges = torch.stack([torch.arange(N) % 3, torch.arange(N)])
    edge_attr = torch.randn(N, EDGE) if "edge_dim" in options else None
    want, _ = by_node(layer, x, *with_loops(edges, edge_attr, 4, "mean"), lambda head: Sparsemax())
    torch.testing.assert_close(layer(x, edges, edge_attr), want)


# -- PyTorch Geometric ----------------------------------------------------------------------------------------------------------------


@by_option
def test_its_weights_load_and_softmax_is_gatv2conv(options):
    pyg = pytest.importorskip("torch_geometric.nn")
    torch.manual_seed(2)
    theirs = pyg.GATv2Conv(F, C, **{"heads": HEADS, **options}).eval()
    ours = made(options)
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    ours.load_state_dict(theirs.state_dict())
    x, edges, edge_attr = graph(options.get("edge_dim"))
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    want, (their_edges, their_weights) = theirs(leaves[0], edges, edge_attr, return_attention_weights=True)
    got, (used, weights) = ours(leaves[1], edges, edge_attr, return_attention_weights=True)
    assert torch.equal(used, their_edges)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(weights, their_weights)
    g = torch.randn_like(want)
    (want * g).sum().backward()
    (got * g).sum().backward()
    torch.testing.assert_close(leaves[1].grad, leaves[0].grad)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=lambda m, name=name: f"{name}: {m}")


def test_bipartite_is_gatv2conv():
    pyg = pytest.importorskip("torch_geometric.nn")
    theirs = pyg.GATv2Conv((F, 7), C, HEADS, edge_dim=EDGE)
    ours = made({"edge_dim": EDGE}, in_channels=(F, 7))
    ours.load_state_dict(theirs.state_dict())
    x = (torch.randn(N, F), torch.randn(4, 7))
    edges, edge_attr = torch.stack([torch.arange(N), torch.arange(N) % 3]), torch.randn(N, EDGE)
    torch.testing.assert_close(ours(x, edges, edge_attr), theirs(x, edges, edge_attr))


def test_it_starts_as_gatv2conv_does():
    """Glorot's uniform numbers for the matrices and `att`, zeros for the bias: the same bounds."""
    layer = nn.GraphAttention(100, 50, 4, edge_dim=30, residual=True)
    for weight, a, b in ((layer.lin_l.weight, 100, 200), (layer.lin_r.weight, 100, 200), (layer.lin_edge.weight, 30, 200),
                         (layer.res.weight, 100, 200), (layer.att, 4, 50)):  # fmt: skip
        bound = (6 / (a + b)) ** 0.5
        assert 0.9 * bound < weight.abs().max() <= bound
    assert (layer.bias == 0).all()


# -- derivatives, training, copies -------------------------------------------------------------------------------------------------------


def test_gradients():
    layer = made({"edge_dim": 2}, Sparsemax(), torch.float64, heads=1)
    x = torch.randn(4, F, dtype=torch.float64, requires_grad=True)
    edges = torch.tensor([[0, 1, 2, 3, 1], [1, 2, 1, 0, 3]])
    edge_attr = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, e: layer(x, edges, e), (x, edge_attr))


def test_dropout_of_the_weights_of_a_graph():
    layer = made({}, Entmax(1.5), dropout=0.5).train()
    x, edges, _ = graph()
    torch.manual_seed(0)
    _, (_, weights) = layer(x, edges, return_attention_weights=True)
    torch.testing.assert_close(
        torch.zeros(N, HEADS).index_add(0, layer._with_loops(edges, None, N)[0][1], weights), torch.ones(N, HEADS)
    )


@pytest.mark.whole
def test_compile():
    layer = made({}, "sparsemax", add_self_loops=False)
    x, edges, _ = graph()
    torch.testing.assert_close(torch.compile(layer)(x, edges), layer(x, edges))


def test_no_edges_and_no_nodes():
    layer = made({}, "sparsemax")
    none = torch.zeros(2, 0, dtype=torch.int64)
    x = torch.randn(N, F)
    torch.testing.assert_close(layer(x, none), layer.lin_l(x) + layer.bias)
    layer = made({}, "sparsemax", add_self_loops=False)
    torch.testing.assert_close(layer(x, none), layer.bias.expand(N, -1))
    assert layer(x[:0], none).shape == (0, HEADS * C)


# -- AttentionPool ---------------------------------------------------------------------------------------------------------------------

LENGTHS = [3, 0, 5, 1]
PTR = np.concatenate([[0], np.cumsum(LENGTHS)])
INDEX = np.repeat(np.arange(4), LENGTHS)


def pooled(mapping, x, scores):
    """A segment and a head at a time."""
    scores = scores if scores.ndim == 2 else scores[:, None]
    out = torch.zeros(4, scores.shape[1], x.shape[1], dtype=x.dtype)
    for s, (a, b) in enumerate(itertools.pairwise(PTR)):
        for head in range(scores.shape[1]) if b > a else ():
            out[s, head] = anymax.apply(mapping, scores[a:b, head]) @ x[a:b]
    return out


@pytest.mark.parametrize("mapping", [Softmax(), Sparsemax(), Entmax(1.3)], ids=repr)
@pytest.mark.parametrize("heads", [None, 1, 3])
def test_pool_is_a_loop_over_segments(mapping, heads):
    torch.manual_seed(0)
    x = torch.randn(9, 6)
    pool = nn.AttentionPool(mapping, 6, heads)
    want = pooled(mapping, x, x @ pool.query.T if heads else x @ pool.query)
    want = want if heads else want[:, 0]
    for given in ({"index": INDEX}, {"ptr": PTR}, {"lengths": LENGTHS}, {"index": Segments.of(lengths=LENGTHS)}):
        given = {**given, "num_segments": 4}
        torch.testing.assert_close(pool(x, **given), want)
    order = torch.randperm(9)
    out, weights = pool(x[order], index=torch.as_tensor(INDEX)[order], num_segments=4, return_attention_weights=True)
    torch.testing.assert_close(out, want)
    assert weights.shape == ((9,) if heads is None else (9, heads))
    scores = torch.randn(9) if heads is None else torch.randn(9, heads)
    got = nn.AttentionPool(mapping)(x, scores, lengths=LENGTHS)
    want = pooled(mapping, x, scores)
    torch.testing.assert_close(got, want if heads else want[:, 0])
    torch.testing.assert_close(pool(x, scores, lengths=LENGTHS), got)


def test_pool_of_a_nested_tensor():
    parts = [torch.randn(n, 6) for n in (3, 1, 5)]
    pool = nn.AttentionPool("sparsemax", 6)
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    torch.testing.assert_close(pool(nested), pool(torch.cat(parts), lengths=[3, 1, 5]))


def test_pool_gradients_and_weights():
    pool = nn.AttentionPool(Entmax(1.5), 4, 2, learn="alpha", dtype=torch.float64)
    x = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)

    def call(x, query):
        return torch.func.functional_call(pool, {"query": query}, (x,), {"lengths": LENGTHS})

    assert torch.autograd.gradcheck(call, (x, pool.query))
    half = nn.AttentionPool("sparsemax", 4, dtype=torch.bfloat16)
    few = x.detach().bfloat16()
    for scores in (None, x.detach()[:, 0]):
        assert half(few, scores, lengths=LENGTHS).dtype == torch.bfloat16
