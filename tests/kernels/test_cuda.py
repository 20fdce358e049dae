"""On a real GPU: graphs, streams, torch.compile, autocast, no waiting, long rows. The values are the business of rows_triton.py."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)
pytest.importorskip("triton")

import anymax as am
from anymax import kernels

pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # it is what these tests ask with

MAPS = {
    "softmax": am.Softmax(), "sparsemax": am.Sparsemax(), "entmax-1.5": am.Entmax(1.5), "entmax-1.25": am.Entmax(1.25),
    "entmax-1.7": am.Entmax(1.7),
    "entmax-3": am.Entmax(3.0), "budget": am.Budget(3), "normmax": am.NormMax(2.0), "top-k": am.SparseSoftmax(k=50),
    "top-p": am.SparseSoftmax(p=0.9),
    "taylor": am.Taylor(2), "sigsoftmax": am.Sigsoftmax(), "perturb_max": am.PerturbMax("normal"),
}  # fmt: skip
each_map = pytest.mark.parametrize("name", MAPS)


def scores(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def step(mapping, x, t):
    """Forward, backward, and the loss where there is one."""
    free = x.detach().requires_grad_()
    p = am.apply(mapping, free)
    (dx,) = torch.autograd.grad((p * p).sum(), free)
    plain = isinstance(mapping, am.PerturbMax)  # its loss is plain operations, which copy its nodes to the device
    if plain or not mapping.facts.has_potential or getattr(mapping, "mass", 1.0) != 1.0:
        return p.detach(), dx
    value = am.fenchel_young(mapping, free, t, reduction="none")
    return p.detach(), dx, value.detach(), torch.autograd.grad(value.sum(), free)[0]


@each_map
def test_nothing_waits_for_the_device(name):
    mapping, x, t = MAPS[name], scores(64, 1000), torch.arange(64, device="cuda")
    t[3] = -100
    assert kernels.choose("forward", mapping, x).name == "triton"
    want = step(mapping, x, t)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = step(mapping, x, t)
        am.apply(mapping, x, mask=x > -1)
        am.logsumexp(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(got, want))  # and the same bits each time


@each_map
def test_graphs(name):
    mapping, x, t = MAPS[name], scores(32, 3000), torch.arange(32, device="cuda")
    step(mapping, x, t)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(mapping, x, t)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(mapping, x, t)
    x.copy_(scores(32, 3000, seed=1))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(got, step(mapping, x.clone(), t)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_map
def test_a_first_call_may_be_captured_after_warm_up(name, dtype, monkeypatch):
    """Of a shape that nothing else here has: each kernel is there before, so that none is compiled inside the graph."""
    from triton import knobs

    mapping, shape = MAPS[name], (48, 1184) if dtype == torch.float32 else (80, 1184)
    am.kernels.warm_up(mapping, [shape], [dtype])
    x, t = scores(*shape, dtype=dtype), torch.arange(shape[0], device="cuda")
    made: list[object] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **said: made.append(said))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(mapping, x, t)
    assert not made, "a kernel was compiled inside the graph"
    x.copy_(scores(*shape, dtype=dtype, seed=1))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(got, step(mapping, x.clone(), t)))


def test_streams():
    x, side = scores(256, 8192), torch.cuda.Stream()
    want = am.entmax15(x)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = torch.empty_like(x)
        torch.cuda._sleep(10_000_000)
        y.copy_(x)
        got = am.entmax15(y)  # not before the copy of this stream
    side.synchronize()
    assert torch.equal(got, want)


@each_map
def test_compile(name):
    mapping, x = MAPS[name], scores(16, 500)
    free, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    f = torch.compile(lambda a: (am.apply(mapping, a) ** 2).sum(-1), fullgraph=True)
    got, want = f(free), (am.apply(mapping, plain) ** 2).sum(-1)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    got.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(free.grad, plain.grad, rtol=1e-3, atol=1e-5)


def test_autocast():
    x, t = scores(8, 100, dtype=torch.bfloat16), torch.arange(8, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert am.sparsemax(x).dtype == torch.bfloat16
        assert am.sparsemax_loss(x, t).dtype == torch.float32


@pytest.mark.parametrize("n", [100_000, 1_000_003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_rows(n, dtype):
    x = scores(3, n, dtype=dtype)
    for f in (
        am.softmax,
        am.sparsemax,
        am.entmax15,
        lambda t: am.sparse_softmax(t, k=100),
        lambda t: am.entmax(t, 1.3),
    ):
        with am.use("reference"):
            want = f(x.double())
        error = float((f(x).double() - want).abs().sum(-1).max())
        assert error < (1e-6 if dtype == torch.float32 else 4e-3)


def test_more_elements_than_32_bits_count():
    x = scores(20_000, 120_000, dtype=torch.bfloat16)
    p = am.sparsemax(x)
    torch.testing.assert_close(p[-1], am.sparsemax(x[-1].clone()), rtol=0, atol=0)


def test_what_it_refuses_is_served_by_plain_operations():
    x = scores(4, 50).double()
    assert "not torch.float64" in str(am.explain(am.Sparsemax(), x, verbose=True))
    assert float((am.sparsemax(x).sum(-1) - 1).abs().max()) < 1e-12


# -- ragged rows and output layers: the values are the business of ragged_triton.py and layer_triton.py -------------------------------

RAGGED = {
    "softmax": am.Softmax(),
    "sparsemax": am.Sparsemax(),
    "entmax-1.5": am.Entmax(1.5),
    "top-k": am.SparseSoftmax(k=3),
}


def segmented(mapping, x, g, rows):
    free = x.detach().requires_grad_()
    p = am.segment_apply(mapping, free, index=rows)
    return p.detach(), torch.autograd.grad(p, free, g)[0]


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("shuffled", [False, True])
def test_segments_wait_for_nothing_and_repeat_their_bits_also_in_a_graph(name, shuffled):
    lengths = torch.cat([torch.arange(2000) % 50, torch.tensor([30_000, 0, 5000])])
    index = torch.arange(len(lengths)).repeat_interleave(lengths)
    index = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(0))] if shuffled else index
    rows = am.Segments.of(index, num_segments=len(lengths))
    x, g = scores(rows.num_entries, 4), scores(rows.num_entries, 4, seed=1)
    want = segmented(RAGGED[name], x, g, rows)
    with am.use("reference"):
        truth = am.segment_apply(RAGGED[name], x.double(), index=rows)
    assert float((want[0].double() - truth).abs().max()) < 1e-5
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = segmented(RAGGED[name], x, g, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        segmented(RAGGED[name], x, g, rows)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = segmented(RAGGED[name], x, g, rows)
    x.copy_(scores(rows.num_entries, 4, seed=2))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(got, segmented(RAGGED[name], x.clone(), g, rows)))


def test_segments_under_compile():
    lengths = torch.tensor([5, 0, 900, 3], device="cuda")
    f = torch.compile(lambda x: (am.segment_apply("entmax15", x, lengths=lengths) ** 2).sum(), fullgraph=True)
    x = scores(908, 2).requires_grad_()
    (got,) = torch.autograd.grad(f(x), x)
    (want,) = torch.autograd.grad((am.segment_apply("entmax15", x, lengths=lengths) ** 2).sum(), x)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["softmax", "sparsemax", "entmax-1.5", "entmax-1.7"])
def test_output_layers_without_their_scores(name, dtype):
    """In half precision, and for softmax in fp32, with rows of scores in the memory of the weight; if there are more rows than features, as
    here, the weight's gradient is summed in fp32. Sparse maps in fp32 and softmax in fp16 compute blocks of at most 2**25 scores."""
    mapping, rows, features, classes = MAPS[name], 4096, 1024, 60_011
    x, weight = scores(rows, features, dtype=dtype), scores(classes, features, dtype=dtype, seed=1) / 16
    t = torch.randint(classes, (rows,), device="cuda")
    x = x + weight[t] * torch.linspace(0, 8, rows, device="cuda")[:, None].to(dtype)  # from flat rows to sure ones
    leaves = [a.detach().requires_grad_() for a in (x, weight)]
    torch.autograd.grad(am.linear_loss(*leaves, t, mapping), leaves)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    value = am.linear_loss(*leaves, t, mapping)
    got = torch.autograd.grad(value, leaves)
    spent = torch.cuda.max_memory_allocated() - before - sum(a.nbytes for a in got)
    ahead = dtype is torch.bfloat16 or (dtype is torch.float32) == (name == "softmax")
    summed = dtype is not torch.float32
    most = ((2.25 if summed else 1.25) * weight.nbytes if ahead else 0.0) + 3 * 4 * 2**25
    assert spent < most
    s = (x @ weight.T).double().requires_grad_()
    loss = am.nll if name == "softmax" else am.fenchel_young
    with am.use("reference"):
        want = loss(mapping, s, t)
        (slope,) = torch.autograd.grad(want, s)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    assert abs(float(value.detach()) - float(want.detach())) <= tolerance * abs(float(want.detach()))
    for a, b in zip(got, (slope @ weight.double(), slope.T @ x.double())):
        assert float((a.double() - b).abs().max()) <= tolerance * float(b.abs().max())
    again = torch.autograd.grad(am.linear_loss(*leaves, t, mapping), leaves)
    assert all(torch.equal(a, b) for a, b in zip(got, again))


# -- attention: the values are the business of attention_triton.py ------------------------------------------------------------------

ATTENTION = {"softmax": am.Softmax(), "sparsemax": am.Sparsemax(), "entmax-1.5": am.Entmax(1.5), "budget": am.Budget(3)}


def attended(mapping, q, k, v, **options):
    """Forward and backward."""
    leaves = [a.detach().requires_grad_() for a in (q, k, v)]
    out = am.attention(*leaves, mapping, implementation="triton", **options)
    return out.detach(), *torch.autograd.grad(out.square().sum(), leaves)


def tokens(length, d=64, dtype=torch.bfloat16, seed=0):
    q, k, v = (scores(2, 4, length, d, dtype=dtype, seed=seed + n) for n in range(3))
    return 2 * q, k, v


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_waits_for_nothing_and_repeats_its_bits(name):
    mapping, given = ATTENTION[name], tokens(1000)
    want = attended(mapping, *given, is_causal=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = attended(mapping, *given, is_causal=True)
        am.attention(*given, mapping, dropout_p=0.1, implementation="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize("d", [16, 40, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_of_any_width(d, dtype):
    given = tokens(777, d, dtype)
    got = attended(am.Entmax(1.5), *given, is_causal=True)
    with torch.enable_grad():
        leaves = [a.double().requires_grad_() for a in given]
        out = am.attention(*leaves, am.Entmax(1.5), is_causal=True, implementation="reference")
        want = out.detach(), *torch.autograd.grad(out.square().sum(), leaves)
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}[dtype]
    for a, b in zip(got, want):
        assert float((a.double() - b).abs().max()) <= tolerance * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("length", [4096, 16384])
def test_long_attention_against_the_last_queries(length):
    given = tokens(length)
    for mapping in (am.Sparsemax(), am.Entmax(1.5), am.Entmax(1.3)):
        out = am.attention(*given, mapping, is_causal=True)
        last = [given[0][:, :, -64:].double(), *(a.double() for a in given[1:])]
        want = am.attention(*last, mapping, is_causal=True, offset=length - 64, implementation="reference")
        torch.testing.assert_close(out[:, :, -64:].double(), want, rtol=2.0**-7, atol=1e-2)


def test_attention_in_a_graph():
    q, k, v = tokens(500)
    attended(am.Entmax(1.5), q, k, v)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        attended(am.Entmax(1.5), q, k, v)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attended(am.Entmax(1.5), q, k, v)
    q.copy_(tokens(500, seed=5)[0])
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(got, attended(am.Entmax(1.5), q.clone(), k, v)))


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("length", [4000, 131072])
def test_attention_of_one_query_waits_for_nothing_also_in_a_graph(name, length):
    """Its keys are cut in parts, in bf16 and fp32; the bits are the same each time."""
    mapping = ATTENTION[name]
    for dtype in (torch.bfloat16, torch.float32):
        q = scores(1, 32, 1, 128, dtype=dtype)
        k, v = (scores(1, 8, length, 128, dtype=dtype, seed=n) for n in (1, 2))
        call = lambda q=q, k=k, v=v: am.attention(q, k, v, mapping, enable_gqa=True, implementation="triton")  # noqa: E731
        want = am.attention(q.double(), k.double(), v.double(), mapping, enable_gqa=True, implementation="reference")
        once = call()
        tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
        assert float((once.double() - want).abs().max()) <= tolerance * max(1.0, float(want.abs().max()))
        torch.cuda.set_sync_debug_mode("error")
        try:
            again = [call() for _ in range(2)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(torch.equal(a, once) for a in again)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = call()
        q.copy_(-q)
        graph.replay()
        assert torch.equal(got, call())
    said = str(am.explain_attention(q, k, v, am.Sparsemax(), enable_gqa=True))
    assert "attention   triton" in said


def test_attention_compiles():
    f = torch.compile(
        lambda q, k, v: am.attention(q, k, v, am.Entmax(1.5), is_causal=True, softcap=20.0), fullgraph=True
    )
    given = [a.requires_grad_() for a in tokens(300, dtype=torch.float32)]
    want = am.attention(*given, am.Entmax(1.5), is_causal=True, softcap=20.0)
    got = f(*given)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    for a, b in zip(*(torch.autograd.grad(out.square().sum(), given) for out in (got, want))):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_attention_needs_no_matrix():
    given = tokens(32768)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attended(am.Entmax(1.5), *given, is_causal=True)
    matrix = 2 * 4 * 32768**2 * 2
    assert torch.cuda.max_memory_allocated() - before < matrix / 16
