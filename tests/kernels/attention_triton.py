"""Attention by the Triton kernels against the reference in fp64: every option, map, dtype and layout, forward and all gradients.

On a GPU it runs for real: `pytest tests/kernels/attention_triton.py`. Without one, test_triton.py runs this file in Triton's
interpreter, in a process of its own: TRITON_INTERPRET=1 is read when triton is imported.
"""

from __future__ import annotations

import math

import pytest
from triton_place import DEVICE, REAL, WARNINGS

torch = pytest.importorskip("torch")

import anymax as am
from anymax import Budget, Entmax, Softmax, Sparsemax
from anymax._attention import torch_flash
from anymax.kernels.triton import attention
from anymax.kernels.triton import attention_plans as plans

pytestmark = WARNINGS


@pytest.fixture(autouse=True)
def _tiles(monkeypatch):
    if not REAL:
        monkeypatch.setattr(plans, "forced_blocks", [plans.BlockPlan(16, 16, 4, 1)])


H = 2
L, S, D, E = (300, 411, 40, 24) if REAL else (19, 30, 5, 3)


def numbers(*shape, seed=0, scale=1.0):
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(DEVICE)


def heads(batch=1, rows=L, keys=S, d=D, e=E, shared=H, seed=0):
    """q, k, v whose scores are of size 2."""
    q = numbers(batch, H, rows, d, seed=seed, scale=2.0)
    return q, numbers(batch, shared, keys, d, seed=seed + 1), numbers(batch, shared, keys, e, seed=seed + 2)


def alphas(*values):
    return torch.tensor(values, device=DEVICE).reshape(-1, 1, 1)


def whole(*values):
    return torch.tensor(values, device=DEVICE)


SLOPES, SINK = whole(0.5, 0.125), whole(0.3, 2.5)


def every_option(rows, keys):
    keep = numbers(1, rows, keys, seed=7) < 0.7
    keep[:, 3] = False  # a query with nothing to attend to
    return {
        "plain": {},
        "causal": {"is_causal": True},
        "causal at the end": {"is_causal": True, "offset": keys - rows},
        "beyond the keys": {"window": (0, 0), "offset": keys - 4},
        "window": {"window": (5, 2), "offset": 3},
        "lengths": {"lengths": whole(keys - 14), "q_lengths": whole(rows - 1)},
        "alibi": {"alibi": SLOPES},
        "softcap": {"softcap": 0.7},
        "sink": {"sink": SINK, "is_causal": True},
        "mask": {"mask": keep},
        "additive": {"mask": numbers(1, 1, 1, keys, seed=4)},
        "bias": {"bias": numbers(H, rows, keys, seed=5)},
        "bias of queries": {"bias": numbers(rows, 1, seed=5), "sink": SINK},
        "all": {
            "bias": numbers(1, rows, keys, seed=5), "mask": keep, "is_causal": True, "sink": SINK, "softcap": 2.0, "alibi": SLOPES,
            "window": (17, None), "offset": 9, "scale": 0.6,
        },
    }  # fmt: skip


OPTIONS = every_option(L, S)
MAPS = {
    "softmax": Softmax(), "sparsemax": Sparsemax(), "entmax-1.25": Entmax(1.25), "entmax-1.3": Entmax(1.3), "entmax-0.7": Entmax(0.7),
    "entmax-3": Entmax(3.0), "budget": Budget(2.5), "budget-all": Budget(S + 0.0),
    "alphas": Entmax(alphas(1.4, 2.6)), "budgets": Budget(alphas(1.4, 6.5)),
}  # fmt: skip


def is_real(a):
    return isinstance(a, torch.Tensor) and a.is_floating_point()


def run(implementation, tensors, mapping, options, dtype):
    """(output, all gradients, by name)."""
    leaves = {n: a.detach().to(dtype).requires_grad_() for n, a in zip("qkv", tensors)}
    own = {n: a.detach().to(dtype).requires_grad_() if is_real(a) else a for n, a in options.items()}
    learned = {n: a.detach().to(dtype).requires_grad_() for n, a in mapping.params().items()}
    out = am.attention(*leaves.values(), mapping.replace(**learned), implementation=implementation, **own)
    free = {**leaves, **{n: a for n, a in own.items() if is_real(a)}, **learned}
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(DEVICE, dtype)
    return out.detach(), dict(zip(free, torch.autograd.grad(out, list(free.values()), g)))


def close(got, want, tol, name=""):
    size = max(1.0, float(want.abs().max()))
    error = float((got.double() - want.double()).abs().max())
    assert got.shape == want.shape, name
    assert error <= tol * size, (name, error, size)  # NaN is not below either


def hold(tensors, mapping, options, tol=5e-6, steep=2e-4, dtype=torch.float32):
    """Near the edge of the support above alpha = 2, gradients are as exact as the scores' own rounding lets them be."""
    got, found = run("triton", [a.to(dtype) for a in tensors], mapping, options, dtype)
    want, expected = run("reference", [a.to(dtype) for a in tensors], mapping, options, torch.float64)
    assert got.dtype == dtype
    close(got, want, tol, "output")
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        close(found[name], gradient, steep if "3" in str(mapping) or "2.6" in str(mapping) else tol, name)
    return got, found


# -- options and maps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option(option):
    got, _ = hold(heads(), Entmax(1.5), OPTIONS[option])
    if "mask" in option:
        assert not got[:, :, 3].any()


@pytest.mark.parametrize("option", ["plain", "causal at the end", "window", "lengths", "sink", "bias"])
def test_softmax_with_an_option(option):
    """Blocks without a masked key take a loop of their own, and the scale is within the exponents where nothing is added to a score."""
    hold(heads(), Softmax(), OPTIONS[option])


@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_softmax_with_an_option_that_reverses_the_order(scale):
    """The highest q k^T is then not the highest score."""
    hold(heads(), Softmax(), {"scale": scale, "is_causal": True})


def test_an_option_hides_queries_that_do_not_exist():
    q, k, v = heads()
    q[:, :, L - 1] = math.nan
    got = am.attention(q, k, v, Softmax(), q_lengths=whole(L - 1), implementation="triton")
    assert not got[:, :, L - 1].any()
    close(got[:, :, : L - 1], am.attention(q[:, :, : L - 1], k, v, implementation="reference").double(), 5e-6)


def test_softmax_saves_what_its_scores_add_up_to_with_an_option_of_large_scores():
    """Scores near 1000 that fp32 holds exactly: the backward finds the p of the forward from the saved numbers."""
    q, k, v = heads()
    q, k = ((8 * a).round() / 8 for a in (q / q.abs().max(), k / k.abs().max()))
    q[..., 0], k[..., 0] = 1.0, 1000.0
    _, found = run("triton", (q, k, v), Softmax(), {"scale": 1.0}, torch.float32)
    _, expected = run("reference", (q, k, v), Softmax(), {"scale": 1.0}, torch.float64)
    close(found["v"], expected["v"], 6e-6)


@pytest.mark.parametrize("name", MAPS)
def test_a_map(name):
    hold(heads(), MAPS[name], OPTIONS["plain" if name in ("budget-all", "entmax-0.7") else "all"])


@pytest.mark.parametrize("name", ["softmax", "sparsemax"])
def test_shared_keys_of_several_batches(name):
    lengths = {"lengths": whole(S, 9), "q_lengths": whole(L - 3, L), "offset": whole(2, 0), "is_causal": True}
    hold(heads(batch=2, shared=1), MAPS[name], {**lengths, "enable_gqa": True})


@pytest.mark.parametrize("name", ["softmax", "sparsemax"])
def test_a_map_with_slopes_and_a_sink_for_each_head_of_each_batch(name):
    """A slope for each head of each batch beside a sink for each head, and the other way round."""
    each, sinks = whole(0.5, 0.125, 0.0, 0.3).reshape(2, H), whole(0.3, 2.5, -1.0, 0.0).reshape(2, H, 1, 1)
    hold(heads(batch=2, shared=1), MAPS[name], {"alibi": each, "sink": SINK, "enable_gqa": True})
    hold(heads(batch=2), MAPS[name], {"alibi": SLOPES, "sink": sinks, "bias": numbers(2, 1, 1, S, seed=3)})


@pytest.mark.parametrize("name", ["softmax", "alphas", "budget"])
def test_no_key_for_any_query(name):
    out, found = hold(heads(rows=3), MAPS[name], {"mask": torch.zeros(1, 1, dtype=torch.bool, device=DEVICE)})
    assert not out.any()
    assert not any(found[n].any() for n in "qkv")


def test_layouts():
    """Keys that are broadcast over heads, queries with the heads inside, no heads at all, an alpha for each query."""
    q, k, v = heads()
    hold((q.transpose(1, 2).contiguous().transpose(1, 2), k[:, :1], v.mT.contiguous().mT), Sparsemax(), {})
    each = torch.linspace(1.2, 1.9, L, device=DEVICE)[:, None]
    hold((q[0, 0], k[0, 0], v[0, 0]), Entmax(each), {})


@pytest.mark.parametrize("d", [1, 16, 24] + ([64, 80, 128, 200, 256] if REAL else []))
def test_features(d):
    hold(heads(d=d, e=257 - d if REAL else 17), Entmax(1.5), {"is_causal": True})


@pytest.fixture
def bf16(monkeypatch):
    """The interpreter keeps bf16 as integers, and its product of matrices takes them for such."""
    from triton import language as tl
    from triton.runtime import interpreter

    def dot(self, a, b, *rest):
        a, b = (self.create_fp_ext(t, tl.float32) if t.dtype == tl.bfloat16 else t for t in (a, b))
        return inner(self, a, b, *rest)

    inner = interpreter.InterpreterBuilder.create_dot
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, bf16):
    """As near as the rounding of the inputs, of p and of the result."""
    for mapping in (Softmax(), Entmax(1.5)):
        hold(heads(), mapping, OPTIONS["causal"], tol=3e-2 if dtype == torch.bfloat16 else 5e-3, dtype=dtype)


# -- where blocks are left out ---------------------------------------------------------------------------------------------------


def far_apart(rows, keys, seed=3):
    """Queries that look at few keys each, near one another."""
    q, k, v = heads(rows=rows, keys=keys, seed=seed)
    place = torch.linspace(-1, 1, keys, device=DEVICE)
    k[..., 0], k[..., 1] = 60 * place, -30 * place**2
    q[..., 0], q[..., 1] = torch.linspace(-1, 1, rows, device=DEVICE) * D**0.5, D**0.5
    return q, k, v


def kept_blocks(saved, wide):
    """The bits of the table of blocks, [B, H, blocks of queries, blocks of keys]."""
    place = torch.arange(wide, device=DEVICE)
    words = saved.flags.long().mT[..., place // 32]
    return (words >> (place % 32) & 1).bool()


@pytest.mark.parametrize("by_centres", [False, True])
@pytest.mark.parametrize("name", ["sparsemax", "entmax-1.3", "alphas"])
def test_blocks_are_left_out(name, by_centres, monkeypatch):
    """The lists hold the blocks that have a probability, all of them and nearly no other; the gradients are those of all."""
    rows, keys = (1000, 9000) if REAL else (34, 300)
    tensors, seen, centred = far_apart(rows, keys), [], []
    inner, launch = torch_flash.kernels.forward, attention._launch
    monkeypatch.setattr(torch_flash.kernels, "forward", lambda *a: seen.append(inner(*a)) or seen[-1])
    monkeypatch.setattr(attention, "SKIPPED", 0 if by_centres else keys + 1)
    monkeypatch.setattr(attention, "_launch", lambda kernel, *a, **o: centred.append(kernel) or launch(kernel, *a, **o))
    mapping = Entmax(alphas(1.4, 1.6)) if name == "alphas" else MAPS[name]
    hold(tensors, mapping, {}, tol=2e-5)  # scores of size 60
    assert (attention.attention_centres in centred) == by_centres
    (_, saved), = seen  # fmt: skip
    plan = plans.blocks(max(D, E), 4, rows, False, name == "alphas")
    _, p = am.attention(*tensors, mapping, need_weights=True, implementation="reference")
    tall, wide = saved.counts.shape[-1], -(-keys // plan.N)
    table = torch.zeros(1, H, tall * plan.M, wide * plan.N, device=DEVICE)
    table[..., :rows, :keys] = p
    want = table.reshape(1, H, tall, plan.M, wide, plan.N).amax((-1, -3)) > 1e-6
    live = kept_blocks(saved, wide)
    assert want.float().mean() < 0.6
    assert not (want & ~live).any()
    assert (live & ~want).float().mean() < 0.03
    assert torch.equal(live.sum(-1).int(), saved.counts)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in saved.counts.shape)).tolist():
        count = int(saved.counts[tuple(place)])
        mine = saved.lists[tuple(place)][:count].tolist()
        assert sorted(mine) == live[tuple(place)].nonzero().flatten().tolist()


@pytest.mark.parametrize("option", ["causal at the end", "window", "lengths", "mask"])
def test_blocks_are_left_out_by_their_centres_under(option, monkeypatch):
    """A mask takes keys away, and leaves the bounds of the blocks true."""
    rows, keys = (1000, 9000) if REAL else (34, 300)
    monkeypatch.setattr(attention, "SKIPPED", 0)
    hold(far_apart(rows, keys), Entmax(1.5), every_option(rows, keys)[option], tol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("alpha", [2.0, 1.25, 1.5])
def test_blocks_are_left_out_where_a_lane_has_more_high_scores_than_are_kept(alpha, dtype):
    """The fourth score of a lane is not kept: the third says that there is little left, and the sums of the output that it is too much."""
    rows, keys, wide = (100, 3000, 64) if REAL else (20, 300, 16)
    q, k, v = heads(rows=rows, keys=keys)
    q, k = 0 * q, 0 * k
    q[..., 0], k[..., 0] = torch.linspace(1.0, 1.01, rows, device=DEVICE), -20.0
    score = lambda p: p ** (alpha - 1) / (alpha - 1)  # noqa: E731
    k[..., : 12 * wide : wide, 0] = score(0.03)
    k[..., 2:12:2, 0] = score(0.13)
    hold((q, k, v), Entmax(alpha), {"scale": 1.0}, tol=1e-5 if dtype == torch.float32 else 5e-3, dtype=dtype)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_poisoned_key_is_not_left_out(value, monkeypatch):
    """Its block has no centre; each query that sees it is NaN, as without the centres, or has nothing of it."""
    rows, keys = (1000, 9000) if REAL else (34, 300)
    q, k, v = far_apart(rows, keys)
    k[:, :, 3, 1] = float(value)
    outs = []
    for least in (0, keys + 1):
        monkeypatch.setattr(attention, "SKIPPED", least)
        outs.append(am.attention(q, k, v, Entmax(1.5), implementation="triton"))
    assert torch.equal(outs[0].isnan(), outs[1].isnan())
    assert outs[0].isnan().any() == (value != "-inf")
    close(outs[0].nan_to_num(), outs[1].nan_to_num().double(), 1e-6)


@pytest.mark.parametrize("name", ["sparsemax", "entmax-1.3", "budget"])
@pytest.mark.parametrize("listed", [1, 5])
def test_lists_that_run_over_stand_for_all_blocks(name, listed, monkeypatch):
    """Their length is bounded, and the bits of the table are shared: nothing but time is lost."""
    monkeypatch.setattr(attention, "LISTED", listed)
    rows, keys = (1000, 9000) if REAL else (34, 180)
    tensors, seen = far_apart(rows, keys), []
    inner = torch_flash.kernels.forward
    monkeypatch.setattr(torch_flash.kernels, "forward", lambda *a: seen.append(inner(*a)) or seen[-1])
    hold(tensors, MAPS[name], {"is_causal": True, "offset": keys - rows, "bias": numbers(1, keys, seed=5)}, tol=2e-5)
    assert seen[0][1].lists.shape[-1] == listed + 32
    assert seen[0][1].flags.shape[2] == 1
    assert (seen[0][1].counts > listed).any()


@pytest.mark.parametrize("number", [-30000, 30000])
def test_what_hooks_give_back_leads_out_of_no_memory(number):
    """Lists and numbers of blocks that are none: the gradients are wrong, and nothing else is read or written."""
    spoil = lambda a: a if a.is_floating_point() else torch.full_like(a, number)  # noqa: E731
    leaves = [a.requires_grad_() for a in heads(rows=34, keys=50)]
    with torch.autograd.graph.saved_tensors_hooks(lambda a: a, spoil):
        out = am.attention(*leaves, Entmax(1.5), is_causal=True, offset=20, implementation="triton")
        found = torch.autograd.grad(out.sum(), leaves)
    assert [a.shape for a in found] == [a.shape for a in leaves]


def test_memory_grows_with_the_length_not_with_its_square(monkeypatch):
    monkeypatch.setattr(plans, "forced_blocks", [])

    def bytes_of(length):
        q = torch.empty(1, 1, length, 64, dtype=torch.bfloat16, device="meta")
        job = attention.Job("power", 2, 0.5, 0.125, 0.0, True, -1, -1, 0, 0.0, False, False)
        _, parts = attention.sizes(job, q, q, q, True)
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in parts.values())

    assert bytes_of(2**20) <= 8.5 * bytes_of(2**17)
    assert bytes_of(2**20) <= 128 * 2**20


@pytest.mark.parametrize("option", ["causal at the end", "window", "all"])
def test_a_tile_that_is_not_square(option, monkeypatch):
    """As on a GPU: other than square, and of more queries than the kernel of keys and values takes at a time."""
    if not REAL:
        monkeypatch.setattr(plans, "forced_blocks", [plans.BlockPlan(32, 16, 4, 1, 16)])
    rows, keys = (1000, 3000) if REAL else (70, 100)
    hold(heads(rows=rows, keys=keys, shared=1), Entmax(1.5), {**every_option(rows, keys)[option], "enable_gqa": True})


def test_flat_rows():
    """Nearly equal scores: every key has a share, and the threshold lies far below the maximum's own."""
    q, k, v = heads(rows=5, keys=S + 30)
    hold((0.01 * q, k, v), Entmax(1.5), {})
    hold((0.0 * q, k, v), Sparsemax(), {})


def test_far_offsets_of_the_scores():
    q, k, v = heads(rows=5, keys=20)
    bias = numbers(H, 5, 1, seed=8, scale=300.0)
    a = am.attention(q, k, v, Entmax(1.5), implementation="triton")
    b = am.attention(q, k, v, Entmax(1.5), bias=bias, implementation="triton")
    close(b, a.double(), 2e-4)


def test_the_edge_of_a_steep_map():
    """Of two scores that lie 1/2 - h apart, alpha = 3 gives the lower one h, as the difference of squares says."""
    q, k = torch.ones(1, 1, device=DEVICE), torch.tensor([[0.0], [1e-4 - 0.5]], device=DEVICE)
    for mapping in (Entmax(3.0), Entmax(alphas(3.0)[0])):
        p = am.attention(q, k, torch.eye(2, device=DEVICE), mapping, scale=1.0, implementation="triton")
        close(p, torch.tensor([[1 - 1e-4, 1e-4]], device=DEVICE), 1e-6)


# -- where the keys are cut in parts ---------------------------------------------------------------------------------------------

FEW, CACHE = (5, 3001) if REAL else (4, 77)
DECODING = every_option(FEW, CACHE)


@pytest.fixture
def parts(monkeypatch):
    """Three parts of every call without gradients, little of them at a time; the list of the calls that were cut."""
    steps = plans.Split(16, 64, 3, 4, 2) if REAL else plans.Split(16, 16, 3, 4, 1, 4, 32, 2, 2)
    monkeypatch.setattr(plans, "forced_split", [steps])
    seen, inner = [], attention._forward_split
    monkeypatch.setattr(attention, "_forward_split", lambda job, *rest: seen.append(job) or inner(job, *rest))
    if not REAL:  # no memory is taken for zeros
        torch.use_deterministic_algorithms(True)
        yield seen
        torch.use_deterministic_algorithms(False)
    else:
        yield seen
    assert seen


def decode(tensors, mapping, options, tol=5e-6, dtype=torch.float32):
    """Without gradients, against the reference."""
    options = {"enable_gqa": True, **options}
    got = am.attention(*(a.to(dtype) for a in tensors), mapping, implementation="triton", **options)
    own = {n: a.double() if is_real(a) else a for n, a in options.items()}
    exact = mapping.replace(**{n: a.double() for n, a in mapping.params().items()})
    want = am.attention(*(a.to(dtype).double() for a in tensors), exact, implementation="reference", **own)
    assert got.dtype == dtype
    close(got, want, tol)
    return got


@pytest.mark.parametrize("option", DECODING)
def test_keys_in_parts_with_an_option(option, parts):
    got = decode(heads(rows=FEW, keys=CACHE, shared=1), Entmax(1.5), DECODING[option])
    if "mask" in DECODING[option] and option != "additive":
        assert not got[:, :, 3].any()


@pytest.mark.parametrize("name", MAPS)
def test_keys_in_parts_with_a_map(name, parts):
    mapping = Budget(CACHE + 0.0) if name == "budget-all" else MAPS[name]
    option = "plain" if name in ("budget-all", "entmax-0.7") else "all"
    decode(heads(rows=FEW, keys=CACHE, shared=1), mapping, DECODING[option])


@pytest.mark.parametrize("name", ["softmax", "alphas", "budget"])
def test_keys_in_parts_of_several_batches(name, parts):
    """Some have fewer keys than there are parts, and one has none."""
    tensors = heads(batch=3, rows=2, keys=CACHE)
    ranges = {"lengths": whole(CACHE, 9, 0), "q_lengths": whole(1, 2, 2), "offset": whole(70, 0, 0), "is_causal": True}
    got = decode(tensors, MAPS[name], ranges)
    assert got[1].any()
    assert not got[2].any()
    assert not decode(tensors, MAPS[name], {"mask": torch.zeros(1, 1, dtype=torch.bool, device=DEVICE)}).any()
    each = numbers(3, H, seed=8).abs()
    decode(tensors, MAPS[name], {"alibi": each, "sink": each.flip(0)[..., None, None]})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_in_parts_in_half_precision(dtype, parts, bf16):
    for mapping in (Softmax(), Entmax(1.5)):
        decode(heads(rows=1, keys=CACHE), mapping, {}, tol=2e-2 if dtype == torch.bfloat16 else 3e-3, dtype=dtype)


def test_keys_in_parts_layouts(parts):
    """A cache with the heads inside, one key head for all, an alpha for each query, no heads at all; more queries than one tile."""
    q, k, v = heads(rows=1, keys=CACHE)
    decode((q, k.transpose(1, 2).contiguous().transpose(1, 2), v.mT.contiguous().mT), Sparsemax(), {})
    decode((q, k[:, :1], v[:, :1]), Sparsemax(), {"enable_gqa": False})
    each = torch.linspace(1.2, 1.9, 3, device=DEVICE)[:, None]
    q, k, v = heads(rows=3, keys=CACHE)
    decode((q[0, 0], k[0, 0], v[0, 0]), Entmax(each), {"enable_gqa": False})
    q = numbers(1, 67, 1, D, scale=2.0)
    for mapping in (Softmax(), Sparsemax()):
        decode((q, k[:, :1], v[:, :1]), mapping, {})


@pytest.mark.parametrize("name", ["softmax", "entmax-1.3", "budget"])
def test_keys_in_parts_with_poisoned_rows(name, parts):
    """NaN and +inf touch their own row alone, also where all heads lie in one tile."""
    q, k, v = heads(rows=FEW, keys=CACHE, shared=1)
    call = lambda bias: am.attention(q, k, v, MAPS[name], bias=bias, enable_gqa=True, implementation="triton")  # noqa: E731
    bias = torch.zeros(H, FEW, CACHE, device=DEVICE)
    want = call(bias)
    bias[0, 1, 50], bias[1, 2, 20] = float("nan"), float("inf")
    got = call(bias)
    bad = torch.zeros(H, FEW, dtype=torch.bool, device=DEVICE)
    bad[0, 1] = bad[1, 2] = True
    assert got[0, bad].isnan().all()
    assert torch.equal(got[0, ~bad], want[0, ~bad])


@pytest.mark.parametrize("name", ["sparsemax", "budget"])
def test_keys_in_parts_read_no_values_of_empty_blocks(name, parts):
    """NaN among them is not seen; the keys that have a probability are in one part of three."""
    q, k, v = heads(rows=1, keys=CACHE, shared=1)
    here = slice(48, 64)  # a block where the tiles are of 16 keys
    bias = torch.full((CACHE,), -100.0, device=DEVICE)
    bias[here] = 0.0
    size = parts_tile()
    first = here.start // size * size
    far = torch.ones(CACHE, dtype=torch.bool, device=DEVICE)
    far[first : first + max(size, 16)] = False
    options = {"bias": bias, "enable_gqa": True, "implementation": "triton"}
    want = am.attention(q, k, v, MAPS[name], **options)
    assert want.any()
    v[:, :, far] = float("nan")
    assert torch.equal(am.attention(q, k, v, MAPS[name], **options), want)


def parts_tile():
    return plans.forced_split[-1].N


@pytest.mark.parametrize("name", ["softmax", "entmax-1.3"])
def test_keys_in_parts_drop_the_same(name, parts):
    """The seed says what is dropped, whoever computes it."""
    q, k, _ = heads(rows=2, keys=CACHE, shared=1)
    eye = torch.eye(CACHE, device=DEVICE)[None, None, :, :256]  # as many features as a head may have
    options = {"enable_gqa": True, "dropout_p": 0.4, "generator": 3, "implementation": "triton"}
    got = am.attention(q, k, eye, MAPS[name], **options)
    one = am.attention(q.requires_grad_(), k, eye, MAPS[name], **options).detach()
    assert torch.equal(got == 0, one == 0)
    close(got, one.double(), 1e-5)


def test_keys_in_parts_with_gradients_stay_whole(parts):
    """And give the same output, up to rounding; without gradients the bits are the same each time."""
    tensors, option = heads(rows=FEW, keys=CACHE), DECODING["sink"]
    one, other = (am.attention(*tensors, MAPS["alphas"], implementation="triton", **option) for _ in range(2))
    assert torch.equal(one, other)
    assert len(parts) == 2
    got, _ = hold(tensors, MAPS["alphas"], option)
    assert len(parts) == 2
    close(one, got.double(), 5e-6)


def test_keys_in_parts_flat_and_far_rows(parts):
    """Every key has a share; and a common offset changes nothing."""
    q, k, v = heads(rows=1, keys=CACHE)
    decode((0.0 * q, k, v), Sparsemax(), {})
    want = decode((0.01 * q, k, v), Entmax(1.5), {})
    shifted = am.attention(0.01 * q, k, v, Entmax(1.5), bias=numbers(H, 1, 1, scale=300.0), implementation="triton")
    close(shifted, want.double(), 2e-4)


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_keys_in_parts_compiled(parts):
    torch._dynamo.reset()
    tensors = heads(rows=1, keys=CACHE)
    f = lambda *a: am.attention(*a, Entmax(1.5), sink=SINK, implementation="triton")  # noqa: E731
    compiled = torch.compile(f, fullgraph=True, backend="inductor" if REAL else "aot_eager")
    close(compiled(*tensors), f(*tensors).double(), 1e-6)
    assert len(parts) == 2


# -- the rest --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["softmax", "entmax-1.3"])
def test_dropout(name):
    """The same seed drops the same, forward as backward; what is kept is a matter of place, and makes up for what is dropped."""
    q, k, _ = heads(rows=9, keys=30, shared=1)
    eye = torch.eye(30, device=DEVICE)[None, None].clone().requires_grad_()
    q.requires_grad_()
    call = lambda v, seed: am.attention(  # noqa: E731
        q, k, v, MAPS[name], enable_gqa=True, dropout_p=0.4, generator=seed, implementation="triton"
    )
    p = call(eye, 3)
    assert torch.equal(p, call(eye, 3))
    assert not torch.equal(p, call(eye, 4))
    full = am.attention(q, k, eye, MAPS[name], enable_gqa=True, implementation="triton")
    there = full.detach() > 1e-6
    kept = (p.detach() > 0)[there]
    assert 0.5 < float(kept.float().mean()) < 0.7
    close(p.detach()[there][kept], full.detach()[there][kept].double() / 0.6, 1e-5)
    g = numbers(*p.shape, seed=11)
    dq, dv = torch.autograd.grad(p, (q, eye), g)
    close(dv, (p.detach().double().mT @ g.double()).sum(1, keepdim=True), 2e-5)
    exact = q.detach().double().requires_grad_()
    weights = am.attention(
        exact, k.double(), eye.detach().double(), MAPS[name], enable_gqa=True, implementation="reference"
    )
    mask = torch.where(p.detach() > 0, 1 / 0.6, 0.0)
    close(dq, torch.autograd.grad(weights * mask, exact, g.double())[0], 2e-5)


def test_poisoned_rows():
    """NaN and +inf touch their own row alone."""
    for mapping in (Softmax(), Entmax(1.5)):
        q, k, v = heads()
        bias = torch.zeros(L, S, device=DEVICE)
        want = am.attention(q, k, v, mapping, bias=bias, implementation="triton")
        bias[2, 5], bias[4, 20] = float("nan"), float("inf")
        q.requires_grad_()
        got = am.attention(q, k, v, mapping, bias=bias, implementation="triton")
        rest = [i for i in range(L) if i not in (2, 4)]
        assert got[:, :, [2, 4]].isnan().all()
        assert torch.equal(got[:, :, rest], want[:, :, rest])
        (dq,) = torch.autograd.grad(got[:, :, rest].sum(), q)
        assert dq[:, :, rest].isfinite().all()
        assert dq[:, :, [2, 4]].isnan().all()


def test_the_same_bits_each_time():
    one, other = (run("triton", heads(), MAPS["alphas"], OPTIONS["all"], torch.float32) for _ in range(2))
    assert torch.equal(one[0], other[0])
    assert all(torch.equal(one[1][n], other[1][n]) for n in one[1])


def test_without_gradients_the_same_output():
    want, _ = run("triton", heads(), Entmax(1.5), OPTIONS["bias"], torch.float32)
    assert torch.equal(am.attention(*heads(), Entmax(1.5), implementation="triton", **OPTIONS["bias"]), want)


def test_second_derivatives_go_by_blocks():
    q, k, v = heads(rows=5, keys=18)

    def second(implementation, dtype):
        leaves = [a.to(dtype).requires_grad_() for a in (q, k, v)]
        alpha = alphas(1.4, 1.7).to(dtype).requires_grad_()
        sink, slopes = SINK.to(dtype).requires_grad_(), SLOPES[None].to(dtype).requires_grad_()
        given = {"sink": sink, "alibi": slopes, "is_causal": True, "offset": 9}
        out = am.attention(*leaves, Entmax(alpha), implementation=implementation, **given)
        first = torch.autograd.grad(out.square().sum(), [*leaves, alpha, sink, slopes], create_graph=True)
        return torch.autograd.grad(sum(a.square().sum() for a in first), [*leaves, alpha, sink, slopes])

    for a, b in zip(second("triton", torch.float32), second("reference", torch.float64)):
        close(a, b, 2e-4)
    out = am.attention(q.requires_grad_(), k, v, Sparsemax(), dropout_p=0.5, generator=0, implementation="triton")
    with pytest.raises(RuntimeError, match="no second derivative through the dropout"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def test_a_batch_of_gradients_goes_by_blocks():
    leaves = [a.requires_grad_() for a in heads(rows=5, keys=18)]
    out = am.attention(*leaves, Entmax(1.5), sink=SINK, implementation="triton")
    g = numbers(3, *out.shape, seed=8)
    each = [torch.autograd.grad(out, leaves, one, retain_graph=True) for one in g]
    found = torch.autograd.grad(out, leaves, g, is_grads_batched=True)
    torch.testing.assert_close(found, tuple(torch.stack(rows) for rows in zip(*each)), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_compile(dynamic):
    torch._dynamo.reset()
    alpha, sink = alphas(1.4, 1.6).requires_grad_(), SINK.clone().requires_grad_()

    def f(q, k, v):
        options = {"is_causal": True, "offset": 4, "implementation": "triton"}
        return am.attention(q, k, v, Entmax(alpha), sink=sink, **options) + am.attention(
            q, k, v, **options, softcap=3.0
        )

    compiled = torch.compile(f, fullgraph=True, dynamic=dynamic, backend="inductor" if REAL else "aot_eager")
    leaves = [a.requires_grad_() for a in heads(rows=7, keys=12)]
    results = []
    for call in (compiled, f):
        out = call(*leaves)
        results.append((out, *torch.autograd.grad(out.square().sum(), [*leaves, alpha, sink])))
    for a, b in zip(*results):
        close(a, b, 1e-5)
    with torch.no_grad():
        close(compiled(*leaves), results[1][0], 1e-6)


@pytest.mark.parametrize("before", [False, True])
def test_a_trace_holds_for_other_numbers(before):
    from torch.fx.experimental.proxy_tensor import make_fx

    f = lambda q, k, v: am.attention(q, k, v, Entmax(1.5), is_causal=True, implementation="triton")  # noqa: E731
    q, k, v = heads(rows=5, keys=9)
    graph = make_fx(f, pre_dispatch=before)(q, k, v)
    assert "anymax.attention" in graph.code
    close(graph(-q, k, 2 * v), f(-q, k, 2 * v), 1e-6)


def test_refusals():
    q, k, v = heads(rows=2, keys=3)
    for words, mapping, options in (
        ("no kernel for taylor", am.Taylor(2), {}),
        ("no transforms", Sparsemax(), {"transform": am.temperature(2.0)}),
        ("multiply q by an array", Sparsemax(), {"scale": torch.ones(H, 1, 1, device=DEVICE)}),
        ("the matrix that it never has", Sparsemax(), {"need_weights": True}),
    ):
        with pytest.raises(ValueError, match=words):
            am.attention(q, k, v, mapping, implementation="triton", **options)
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        am.attention(q.double(), k.double(), v.double(), Sparsemax(), implementation="triton")
    wide = numbers(1, 1, 2, 300)
    with pytest.raises(ValueError, match="1 to 256 features, not 300"):
        am.attention(wide, wide, wide, Sparsemax(), implementation="triton")
    with pytest.raises(ValueError, match="under a transform"):
        torch.func.vmap(lambda a: am.attention(a, k[0], v[0], Sparsemax(), implementation="triton"))(q)


def test_it_is_chosen_on_a_gpu_alone():
    q, k, v = heads(rows=2, keys=3)
    said = str(am.explain_attention(q, k, v, Sparsemax()))
    assert ("attention  triton" in said) if REAL else ("it is faster only on a GPU" in said)
    cache = numbers(1, H, 3000, D)
    said = str(am.explain_attention(q, cache, cache, Sparsemax(), is_causal=True, offset=2998))
    assert ("attention  triton" in said) if REAL else ("it is faster only on a GPU" in said)


def test_empty():
    for shape in ((0, H, L), (1, H, 0)):
        q = torch.zeros(*shape, D, device=DEVICE, requires_grad=True)
        k, v = (numbers(shape[0], H, S, n).requires_grad_() for n in (D, E))
        bias = torch.zeros(H, shape[-1], S, device=DEVICE, requires_grad=True)
        out = am.attention(q, k, v, Sparsemax(), bias=bias, implementation="triton")
        assert out.shape == (*shape, E)
        out.sum().backward()
        assert not any(a.grad.any() for a in (q, k, v, bias))
