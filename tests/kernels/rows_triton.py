"""The GPU engine against the reference: every kernel, dtype, form and layout.

On a GPU it runs for real: `pytest tests/kernels/rows_triton.py`.
Without one, test_triton.py runs this file in Triton's interpreter, in a process of its own: TRITON_INTERPRET=1 is read when triton
is imported.
"""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import oracles
import pytest
import row_cases
from cases import CASES, each, on
from triton_place import DEVICE, REAL, WARNINGS

torch = pytest.importorskip("torch")

import anymax as am
from anymax import kernels
from anymax._array.ranges import unchecked
from anymax.kernels import reference
from anymax.kernels import triton as engine
from anymax.kernels.link import SPARSE
from anymax.kernels.triton import launch, operands, plans, policy

pytestmark = WARNINGS

STEPS = plans.Plan(1, 2, 512 if REAL else 64, False, 4)  # a long row, on a small scale
PARTS = plans.Plan(1, 2, 256 if REAL else 32, False, 4, 4)  # the same in parts
# lanes that are gathered: some rows have as few, others not
FORMS = {"whole": None, "few": 16, "steps": 0, "parts": 16}
each_form = pytest.mark.parametrize("form", ["whole", "few", "parts"])
SIZES = (1, 5, 251) + ((4096, 40_001, 131_072) if REAL else ())
LONG = 40_001 if REAL else 251
rows, wide = functools.partial(row_cases.rows, batch=(5,), device=DEVICE), row_cases.reference


@pytest.fixture(autouse=True)
def _asked():
    with am.use("triton") if not REAL else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def planned(form):
    if FORMS[form] is None:
        yield
        return
    before, plans.FEW = plans.FEW, FORMS[form]
    forced = PARTS if form == "parts" else STEPS
    plans.forced.update(dict.fromkeys(plans.FAMILIES, forced))
    try:
        yield
    finally:
        plans.forced.clear()
        plans.FEW = before


def served(case):
    return engine.refuse_map("forward", case.mapping) is None


SERVED = tuple(c for c in CASES if served(c))
# perturb max loops over everything anyhow
QUICK = tuple(c for c in SERVED if c.row != "PerturbMax" or c.id == "perturb_max-gumbel")
FEW = tuple(
    c for c in SERVED
    if c.id in ("softmax", "sparsemax", "entmax-1.5", "entmax-1.1", "entmax-3", "entmax-array-1.75", "budget-2.5", "normmax-2",
                "taylor-2", "sparse_softmax-k2", "sparse_softmax-p0.9")
)  # fmt: skip


def of_few_maps(case):
    """In the interpreter, which is slow, one map of each kernel and parameter goes through a form that all of them share."""
    if case not in FEW and not REAL:
        pytest.skip("a map that takes the steps of another")


def mapped(case):
    mapping = on(case.mapping, lambda a: torch.as_tensor(a, device=DEVICE))
    return mapping.replace(nodes=32) if case.row == "PerturbMax" else mapping


def bound(case, want, dtype="float32"):
    """What the reference itself is allowed, and one ulp more."""
    cut = 2.0**-8 if REAL else 2.0**-7  # the interpreter cuts bf16 off
    eps = {"float32": 2.0**-23, "bfloat16": cut, "float16": 2.0**-10}[dtype]
    top = float(want.abs().max()) if want.numel() else 1.0
    if case.tv is not None:
        return 5e-6 + eps * top
    return (1 + case.ulps) * eps * top if dtype == "float32" else eps * top + 4e-7


def poisoned(x):
    return torch.full_like(x, torch.nan)


def forward(case, x, mask=None):
    """Written to memory full of NaN: what is not written shows."""
    out = poisoned(x)
    assert engine.ENGINE.forward(mapped(case), x, mask, out) is out
    return out


def slopes_of(f, *leaves):
    """The gradients of f(*leaves) by this engine, and those by the reference in fp64."""
    copies = [a.detach().double().requires_grad_() for a in leaves]
    got = torch.autograd.grad(f(*leaves), leaves)
    with am.use("reference"):
        return zip(got, torch.autograd.grad(f(*copies), copies), strict=True)


def close(got, want, atol):
    assert float((got.double() - want.double()).abs().max()) <= atol


# -- forward -----------------------------------------------------------------------------------------------------------------


@each(SERVED)
@pytest.mark.parametrize("n", SIZES)
def test_forward_is_the_references(case, n):
    if case.mass > n or (case not in QUICK and n == 251):
        pytest.skip("fewer classes than the budget, or a slow one: 129 serve as well")
    x = rows(n)
    want = wide(lambda t: am.apply(mapped(case), t), x)
    got = forward(case, x)
    close(got, want, bound(case, want))
    if REAL:  # the interpreter has one order
        assert torch.equal(got, forward(case, x))


@each(QUICK)
@pytest.mark.parametrize(("n", "form"), [(LONG, "few"), (LONG, "steps"), (LONG, "parts")])
def test_forward_of_a_row_in_steps(case, n, form):
    if case.mass > n:
        pytest.skip("fewer classes than the budget")
    if form == "steps":
        of_few_maps(case)
    x = rows(n, batch=(2,))
    want = wide(lambda t: am.apply(mapped(case), t), x)
    with planned(form):
        close(forward(case, x), want, bound(case, want))


@each(FEW)
@pytest.mark.parametrize(("dtype", "form"), [("bfloat16", "whole"), ("float16", "few"), ("bfloat16", "parts")])
def test_halves(case, dtype, form):
    x = rows(97, dtype, batch=(3,))
    with planned(form):
        got = forward(case, x)
        want = wide(lambda t: am.apply(mapped(case), t), x)
        close(got, want, bound(case, want, dtype))
        g = rows(97, dtype, batch=(3,), seed=4)
        want = wide(lambda *t: reference.ENGINE.vjp(mapped(case), *t), x, got, g)
        close(engine.ENGINE.vjp(mapped(case), x, got, g), want, 2e-2 * max(1.0, float(want.abs().max())))


@pytest.mark.parametrize(("dtype", "form"), [("float16", form) for form in FORMS] + [("bfloat16", "whole")])
def test_no_class_of_a_budget_is_rounded_up_to_its_bound(dtype, form):
    x = torch.full((3, 97), -9.0, dtype=getattr(torch, dtype), device=DEVICE)
    half = torch.finfo(x.dtype).eps / 2  # the distance of 1 and the number below
    x[:, 3], x[:, 40], x[:, 90] = 0.5 + half, 1.0, 0.5  # tau is half / 3
    g = rows(97, dtype, batch=(3,), seed=4)
    with planned(form):
        p = engine.ENGINE.forward(am.Budget(2), x)
        assert (1 - p.double()[:, 40]).tolist() == 3 * [half]
        got = engine.ENGINE.vjp(am.Budget(2), x, p, g)
    free = p > 0
    assert torch.equal(got != 0, free)
    mean = torch.where(free, g.double(), 0).sum(-1, keepdim=True) / 3
    close(got, torch.where(free, g - mean, 0), 2 * half * float(g.abs().max()))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("p", [0.3, 0.9])
def test_two_rows_of_several_warps_in_a_program(p, masked):
    """Top-p: an odd number of rows, one of them flat, one poisoned, one with ties."""
    n, mapping = 1500, am.SparseSoftmax(p=p)
    x = torch.as_tensor(np.random.default_rng(2).normal(size=(5, n)), device=DEVICE).float()
    x[1] *= 0.01
    x[2, 7] = torch.nan
    x[3] = x[3].round()
    assert plans.plan("nucleus", 5, n, False, False).R == 2
    mask = x > -0.5 if masked else None
    with am.use("reference"):
        want = am.apply(mapping, x.double(), mask=mask)
    got = am.apply(mapping, x, mask=mask)
    assert bool(got[2].isnan().all()) is not masked  # the mask has its NaN
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-7, equal_nan=True)


@each(FEW)
@pytest.mark.parametrize(("sigma", "form"), [(0.02, "few"), (8.0, "few"), (0.02, "parts"), (8.0, "parts")])
def test_flat_and_peaked_rows(case, sigma, form):
    x = torch.as_tensor(np.random.default_rng(1).normal(size=(2, LONG)) * sigma, device=DEVICE).float()
    want = wide(lambda t: am.apply(mapped(case), t), x)
    with planned(form):
        close(forward(case, x), want, bound(case, want))


LAYOUTS = {name: make for name, make in row_cases.LAYOUTS.items() if name not in ("contiguous", "every other row")} | {
    "four axes apart": lambda x: (
        x.reshape(3, 2, 2, 1, -1).repeat_interleave(2, 0).repeat_interleave(2, 1).repeat_interleave(3, 2)[::2, ::2, ::3]
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@each(tuple(c for c in SERVED if c.id in ("softmax", "entmax-1.5", "taylor-2", "sparse_softmax-k2")))
def test_layouts(case, layout):
    plain, g = rows(20, batch=(3, 4)), rows(20, batch=(3, 4), seed=5)
    x, gx = LAYOUTS[layout](plain), LAYOUTS[layout](g)
    before = x.clone()
    want = forward(case, x.contiguous())
    close(engine.ENGINE.forward(mapped(case), x), want, 1e-7)
    assert torch.equal(x, before)
    p = LAYOUTS[layout](want) if layout != "four axes apart" else want
    want = engine.ENGINE.vjp(mapped(case), x.contiguous(), p.contiguous(), gx.contiguous())
    close(engine.ENGINE.vjp(mapped(case), x, p, gx), want, 1e-6)


@pytest.mark.parametrize(  # memory that ends with a pack, and not
    ("dtype", "batch", "form"),
    [("float32", 8, "whole"), ("bfloat16", 3, "whole"), ("bfloat16", 8, "steps"), ("bfloat16", 3, "parts")],
)
@each(tuple(c for c in SERVED if c.id in ("softmax", "entmax-1.5", "sparse_softmax-k2")))
def test_layouts_of_rows_that_begin_anywhere(case, dtype, batch, form, monkeypatch):
    x, g = (rows(101, dtype, batch=(batch,), seed=seed) for seed in (0, 1))
    x[1, 3], x[2] = torch.nan, -torch.inf
    t = torch.arange(batch, device=DEVICE) * 30
    found = []
    with planned(form):
        for least, shift in ((16, 1 if batch == 8 else 2), (1000, 0)):
            monkeypatch.setattr(plans, "SHIFTED", least)
            assert operands.PlainRows(x, out=g).shift == shift
            p, saved = engine.ENGINE.forward_saving(mapped(case), x)
            over = x.clone()
            engine.ENGINE.forward(mapped(case), over, None, over)
            found.append([forward(case, x), p, over, engine.ENGINE.vjp(mapped(case), x, p, g, saved)])
            if case.mapping.facts.has_potential:
                value, state, *_ = engine.ENGINE.index_loss(mapped(case), x, t, save=True)
                grad = engine.ENGINE.index_loss_grad(mapped(case), x, t, torch.ones(batch, device=DEVICE), state)
                found[-1] += [value, grad]
    want = wide(lambda s: am.apply(mapped(case), s), x).nan_to_num()
    for got in (found[0][0], found[0][2]):
        close(got.nan_to_num(), want, bound(case, want, dtype))
    for got, same in zip(*found):
        torch.testing.assert_close(got, same, rtol=1e-5, atol=1e-6, equal_nan=True)


@each(tuple(c for c in SERVED if c.id in ("softmax", "entmax-1.5", "perturb_max-gumbel")))
def test_more_axes_than_a_kernel_takes(case):
    x, g = (rows(7, batch=(2, 3, 2, 3), seed=s).permute(3, 1, 0, 2, 4) for s in (0, 1))
    want = engine.ENGINE.forward(mapped(case), x.contiguous())
    p = engine.ENGINE.forward(mapped(case), x)
    assert torch.equal(p, want)
    out = poisoned(x)
    assert engine.ENGINE.forward(mapped(case), x, None, out) is out
    assert torch.equal(out, want)
    back = engine.ENGINE.vjp(mapped(case), x, p, g)
    close(back, engine.ENGINE.vjp(mapped(case), x.contiguous(), want, g.contiguous()), 1e-6)


@each_form
@each(FEW)
def test_masks_without_a_copy(case, form):
    x = rows(70, batch=(2, 2))
    keep = torch.rand(2, 70, generator=torch.Generator().manual_seed(0)).to(DEVICE) > 0.4
    keep[1] = False
    with planned(form):
        got = am.apply(mapped(case), x, mask=keep)
        want = wide(lambda t: am.apply(mapped(case), t, mask=keep), x)
        close(got, want, bound(case, want))
        assert not bool(got[:, 1].any())
        assert not bool(got[~keep.expand_as(got)].any())
        if case.mass == 1.0 and case.mapping.facts.has_potential:
            t = torch.tensor([[0, -100], [60, 1]], device=DEVICE)
            got = am.fenchel_young(mapped(case), x.movedim(-1, 1), t, reduction="none", mask=keep.T)
            want = wide(
                lambda t_: am.fenchel_young(mapped(case), t_.movedim(-1, 1), t, reduction="none", mask=keep.T), x
            )
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@each_form
@each(FEW)
def test_strange_rows_touch_no_other(case, form):
    x = rows(70, batch=(4,))
    with planned(form):
        want = forward(case, x)
        y = x.clone()
        y[0, 5], y[2, 69], y[3] = torch.nan, torch.inf, -torch.inf
        got = forward(case, y)
        assert bool(got[[0, 2]].isnan().all())
        assert not bool(got[3].any())
        assert torch.equal(got[1], want[1])
        back = engine.ENGINE.vjp(mapped(case), y, got, torch.ones_like(y))
        assert bool(back[[0, 2]].isnan().all())
        assert not bool(back[3].any())


@each(QUICK)
def test_huge_tiny_and_equal_scores(case):
    for row in row_cases.EXTREME:
        if case.mass <= len(row):
            p = forward(case, torch.tensor([row], device=DEVICE))
            assert bool(p.isfinite().all()), row
            assert abs(float(p.double().sum()) - case.mass) < 1e-6, row


triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit
def numbers_of_rows(STATE, BACK, first):
    """What `remember` has stored of four rows from `first` on, by `recall`; STATE begins with these."""
    row = first + tl.arange(0, 4)
    base = STATE - first.to(tl.int64) * 4
    policy.remember(base, row, row >= 0, row < 0, row * 0.0 + 1.0, row * 0.0 + 2.0, row * 0.0 + 3.0, row * 0.0 + 4.0)
    tl.debug_barrier()
    s0, s1, s2, s3, bad = policy.recall(base, row, row >= 0)
    tl.store(BACK + tl.arange(0, 4), s0 + 10.0 * s1 + 100.0 * s2 + 1000.0 * s3 + tl.where(bad, 1e6, 0.0))


@pytest.mark.parametrize("first", [7, 2**29, 2**31 - 4])
def test_a_huge_number_of_rows(first):
    """The place of a row's four numbers is counted in 64 bits."""
    state, back = (torch.zeros(n, dtype=torch.float32, device=DEVICE) for n in (16, 4))
    numbers_of_rows[(1,)](state, back, first)
    assert state.view(4, 4).tolist() == [[1.0, 2.0, 3.0, 4.0]] * 4
    assert back.tolist() == [4321.0] * 4


@each_form
@pytest.mark.parametrize(
    "mapping", [am.SparseSoftmax(k=3), am.SparseSoftmax(k=40), am.SparseSoftmax(p=0.5), am.Budget(40)], ids=repr
)
def test_ties_are_broken_by_position(mapping, form):
    x = torch.zeros(3, 130, device=DEVICE)
    x[0, ::7], x[1, 80:], x[2, 3] = 1.0, 0.5, 9.0
    want = wide(lambda t: am.apply(mapping, t), x)
    with planned(form):
        got = engine.ENGINE.forward(mapping, x)
    close(got, want, 3e-7)
    assert torch.equal(got > 0, want > 0)


@each_form
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mapping", [am.SparseSoftmax(k=2), am.SparseSoftmax(k=40), am.SparseSoftmax(p=0.5)], ids=repr)
def test_ties_below_zero_and_a_mass_that_one_score_has(mapping, dtype, form):
    """Keys of negative halves end in ones; and the search may find the edge without having weighed it."""
    x = torch.full((4, 130), -9.0, device=DEVICE)
    x[0, ::3], x[0, 5] = -1.0, 0.0
    x[1] = -1004.0
    x[1, 17] = -1000.0
    x[2, :90] = -0.5
    x[3] = torch.randn(130, generator=torch.Generator().manual_seed(0)) - 3.0
    x = x.to(getattr(torch, dtype))
    want = wide(lambda t: am.apply(mapping, t), x)
    with planned(form):
        got = engine.ENGINE.forward(mapping, x)
    close(got.double(), want, 3e-7 if dtype == "float32" else 4e-3)
    assert torch.equal(got > 0, want.to(x.dtype) > 0)


@each_form
@pytest.mark.parametrize("mapping", [am.SparseSoftmax(k=60), am.SparseSoftmax(p=0.9)], ids=repr)
def test_a_row_ends_among_few_of_many_scores(mapping, form):
    """Scores all over the row, several of them equal, with holes; whole numbers; two numbers."""
    x = rows(251, batch=(3,)).bfloat16().float()
    x[0, ::5], x[1] = -torch.inf, x[1].round()
    x[2] = (x[2] > 0).float()
    want = wide(lambda t: am.apply(mapping, t), x)
    with planned(form):
        got = engine.ENGINE.forward(mapping, x)
    close(got, want, 3e-7)
    assert torch.equal(got > 0, want > 0)


OVER = (am.Softmax(), am.Sparsemax(), am.Entmax(1.1), am.Budget(2.5), am.SparseSoftmax(p=0.9), am.SparseSoftmax(k=40))
IN_PLACE = [(mapping, form) for form in ("few", "parts") for mapping in OVER]
IN_PLACE += [(am.Sparsemax(), "whole"), (am.Taylor(2), "few"), (am.PerturbMax("logistic", nodes=32), "few")]


@pytest.mark.parametrize(("mapping", "form"), IN_PLACE, ids=str)
def test_in_place(mapping, form):
    """A score is read before its place is written: in a row with few live lanes, and in one where all are."""
    base = rows(300, batch=(2,), sigma=8.0)
    base[1] /= 4096
    x, beside, before = base[:, ::2], base[:, 1::2], base[:, 1::2].clone()
    keep = torch.arange(150, device=DEVICE) % 7 != 3
    want = wide(lambda t: am.apply(mapping, t, mask=keep), x)
    with planned(form):
        assert engine.ENGINE.forward(mapping, x, keep, x) is x
    close(x, want, 3e-6)
    assert torch.equal(beside, before)


@pytest.mark.parametrize("form", ["few", "parts"])
@pytest.mark.parametrize("k", [2, 40])
def test_logarithms_of_many_lanes(k, form):
    """And of few; in memory of their own, and in place."""
    mapping, x = am.SparseSoftmax(k=k), rows(150, batch=(2,))
    want = wide(lambda t: am.log_apply(mapping, t), x)
    for out in (poisoned(x), x):
        with planned(form):
            launch.run("log", engine.triton_link(mapping), x, out=out)
        torch.testing.assert_close(out.double(), want, rtol=2e-6, atol=2e-6)


def test_out_that_overlaps_the_scores_in_part():
    """Of a public call: through memory of its own, as on the CPU."""
    base = rows(151, batch=(2,), sigma=8.0)
    for read, write in ((base[:, 1:], base[:, :-1]), (base[:, :-1], base[:, 1:])):
        want = wide(am.sparsemax, read)
        with planned("few"):
            am.sparsemax(read, out=write)
        close(write, want, 1e-6)


def test_offsets_beyond_32_bits():
    store = torch.empty(2**31 + 64, dtype=torch.float16, device=DEVICE)
    x, plain = store.as_strided((2, 3), (1, 2**30)), rows(3, "float16", batch=(2,))
    x.copy_(plain)
    out = store.as_strided((2, 3), (1, 2**30), 8)
    for mapping in (am.Softmax(), am.Entmax(1.5)):
        assert torch.equal(engine.ENGINE.forward(mapping, x, None, out), engine.ENGINE.forward(mapping, plain))


@each(tuple(c for c in SERVED if c.row == "PerturbMax" and c.id != "perturb_max-gumbel"))
def test_perturb_max_is_as_near_the_truth_as_the_reference(case):
    x, g = rows(129, batch=(3,)), rows(129, batch=(3,), seed=9)
    truth = case.mapping.replace(nodes=96)
    p = forward(case, x)
    want, same = (wide(lambda t, m=m: am.apply(m, t), x) for m in (truth, mapped(case)))
    assert float((p.double() - want).abs().sum(-1).max()) <= 2 * float((same - want).abs().sum(-1).max()) + 1e-6
    want, same = (wide(lambda *t, m=m: reference.ENGINE.vjp(m, *t), x, want, g) for m in (truth, mapped(case)))
    close(engine.ENGINE.vjp(mapped(case), x, p, g), want, 3 * float((same - want).abs().max()) + 1e-6)


def test_perturb_max_in_steps_is_that_of_a_whole_row(monkeypatch):
    mapping, x, g = am.PerturbMax("normal", nodes=8), rows(70, batch=(3,)), rows(70, batch=(3,), seed=9)
    x[1, ::7] = -torch.inf
    x[2, 3] = torch.nan
    whole = engine.ENGINE.forward(mapping, x)
    pulled = engine.ENGINE.vjp(mapping, x, whole, g)
    monkeypatch.setitem(plans.forced, "perturb", plans.Plan(2, 1, 32, False, 4))
    for first, second in (
        (whole, engine.ENGINE.forward(mapping, x)),
        (pulled, engine.ENGINE.vjp(mapping, x, whole, g)),
    ):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6, equal_nan=True)
        assert first[2].isnan().all()
        assert not first[1, ::7].any()


@pytest.mark.parametrize("form", ["whole", "steps"])
def test_a_scale_for_each_row_of_perturb_max(form, monkeypatch):
    if form == "steps":
        monkeypatch.setitem(plans.forced, "perturb", plans.Plan(2, 1, 32, False, 4))
    x, g = rows(70, batch=(5,)), rows(70, batch=(5,), seed=9)
    scale = torch.tensor([[0.3], [1.7], [40.0], [-1.0], [1e-45]], device=DEVICE)
    with unchecked():  # as on a device, where the values are not read
        mapping = am.PerturbMax("normal", nodes=8, scale=scale)
    p = engine.ENGINE.forward(mapping, x)
    pulled = engine.ENGINE.vjp(mapping, x, p, g)
    assert bool(p[3].isnan().all())
    assert bool(pulled[3].isnan().all())
    for i in (0, 1, 2):
        one = mapping.replace(scale=float(scale[i]))
        close(p[i : i + 1], engine.ENGINE.forward(one, x[i : i + 1]), 1e-6)
        same = engine.ENGINE.vjp(one, x[i : i + 1], p[i : i + 1], g[i : i + 1])
        close(pulled[i : i + 1], same, 1e-6 * float(same.abs().max()))
    close(p[4], torch.nn.functional.one_hot(x[4].argmax(), 70), 1e-6)


@pytest.mark.parametrize("form", ["whole", "steps"])
def test_an_infinite_gradient_where_perturb_max_has_no_probability(form, monkeypatch):
    if form == "steps":
        monkeypatch.setitem(plans.forced, "perturb", plans.Plan(1, 1, 4, False, 4))
    mapping, x = (
        am.PerturbMax("normal", nodes=8),
        torch.tensor([[1.0, 0.5, -60.0, -0.5, -40.0, -torch.inf]], device=DEVICE),
    )
    g = torch.tensor([[0.3, -0.2, torch.inf, 0.7, torch.nan, torch.inf]], device=DEVICE)
    p = engine.ENGINE.forward(mapping, x)
    assert (p[0, [2, 4, 5]] == 0).all()
    got = engine.ENGINE.vjp(mapping, x, p, g)
    close(got, engine.ENGINE.vjp(mapping, x, p, torch.where(p > 0, g, 0.0)), 1e-7)
    assert not got[0, [2, 4, 5]].any()


# -- backward ----------------------------------------------------------------------------------------------------------------


@each(QUICK)
@pytest.mark.parametrize(("n", "form"), [(3, "whole"), (129, "whole"), (LONG, "steps"), (LONG, "parts")])
def test_backward_is_the_references(case, n, form):
    if form == "steps":
        of_few_maps(case)
    x, g = rows(n, sigma=1.0, batch=(3,)), rows(n, seed=9, batch=(3,))
    p = wide(lambda t: am.apply(mapped(case), t), x).float()
    with planned(form):
        got = engine.ENGINE.vjp(mapped(case), x, p, g)
    want = wide(lambda *t: reference.ENGINE.vjp(mapped(case), *t), x, p, g)
    close(got, want, 3e-6 * max(1.0, float(want.abs().max())))


@pytest.mark.parametrize(("n", "form"), [(3, "whole"), (129, "whole"), (LONG, "steps"), (LONG, "few")])
@pytest.mark.parametrize("alpha", [3.0, 16.0, 80.0, 1000.0])
def test_backward_of_a_norm_of_any_alpha(alpha, n, form):
    """p^alpha of many classes alike is below all numbers, and p^(2 - alpha) above them."""
    mapping = am.NormMax(alpha)
    for scale in (1e-3, 1.0):
        x, g = rows(n, batch=(3,)) * scale, rows(n, seed=9, batch=(3,))
        with planned(form):
            p, saved = engine.ENGINE.forward_saving(mapping, x)
            got = engine.ENGINE.vjp(mapping, x, p, g, saved)
        for i in range(3):
            want = torch.tensor(oracles.normmax_derivatives(p[i].tolist(), g[i].tolist(), alpha)[0], device=DEVICE)
            close(got[i], want, (1e-6 + 4e-7 * alpha) * float(want.abs().max()))


@each([c for c in FEW if c.mapping.kernel in SPARSE or c.row == "SparseSoftmax"])
@pytest.mark.parametrize("sigma", [0.02, 8.0])
@pytest.mark.parametrize("form", ["few", "parts"])
def test_backward_from_the_lanes_that_the_forward_found(case, sigma, form):
    n = LONG if REAL else 150  # a part is not a power of two
    x, g = rows(n, sigma=sigma, batch=(3,)), rows(n, seed=9, batch=(3,))
    x[1, ::7] = -torch.inf
    x[2, 3] = torch.nan
    with planned(form):
        p, saved = engine.ENGINE.forward_saving(mapped(case), x)
        got, want = engine.ENGINE.vjp(mapped(case), x, p, g, saved), engine.ENGINE.vjp(mapped(case), x, p, g)
    assert case.id == "entmax-array-1.75" or saved is not None
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, equal_nan=True)
    if sigma == 8.0 and saved is not None and not REAL:
        assert int(saved.memory[3 * saved.few.FEW :].min()) <= saved.few.FEW  # a row that had few


def test_the_lanes_serve_autograd():
    x, g = rows(LONG, sigma=8.0, batch=(3,)).requires_grad_(), rows(LONG, seed=9, batch=(3,))
    with planned("parts"):
        got = torch.autograd.grad(am.sparsemax(x), x, g)[0]
    p = am.sparsemax(x.detach())
    close(got, wide(lambda *t: reference.ENGINE.vjp(am.Sparsemax(), *t), x.detach(), p, g), 1e-5)


def test_one_alpha_a_row_on_both_sides_of_two():
    alpha = torch.tensor([[1.0], [1.3], [1.5], [2.0], [2.5], [4.0], [0.7], [-1.0]], device=DEVICE)
    x, g = rows(200, batch=(8,)), rows(200, batch=(8,), seed=2)
    with unchecked():  # as on a device, where the values are not read
        mapping, exact = am.Entmax(alpha), am.Entmax(alpha.double())
    got = engine.ENGINE.forward(mapping, x)
    close(got[:7], wide(lambda t: am.apply(exact, t), x)[:7], 1e-6)
    assert bool(got[7].isnan().all())
    close(
        engine.ENGINE.vjp(mapping, x, got, g)[:7], wide(lambda *t: reference.ENGINE.vjp(exact, *t), x, got, g)[:7], 1e-5
    )


def test_the_gradient_in_alpha():
    x, alpha = rows(40, batch=(3,)).requires_grad_(), torch.full((3, 1), 1.4, device=DEVICE, requires_grad=True)
    for a, b in slopes_of(lambda x, alpha: (am.entmax(x, alpha) ** 2).sum(), x, alpha):
        close(a, b, 1e-5)


# -- the derivative by a parameter ----------------------------------------------------------------------------------------------

ALPHAS = (0.7, 1.0, 1.0001, 1.3, 1.5, 2.0, 2.5, 4.0)
LEARNED = {
    **{f"entmax-{alpha:g}": am.Entmax(alpha) for alpha in ALPHAS if alpha != 1.0},
    **{f"normmax-{alpha:g}": am.NormMax(alpha) for alpha in (1.3, 2.0, 4.0, 30.0)},
    "budget": am.Budget(2.5),
    "entmax-rows": am.Entmax(torch.tensor(ALPHAS)[:, None]),
    "entmax-one": am.Entmax(torch.tensor(1.0)),
    "normmax-rows": am.NormMax(torch.tensor([1.1, 1.5, 2.0, 2.5, 3.0, 4.0, 8.0, 30.0])[:, None]),
    "budget-rows": am.Budget(torch.tensor([1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5])[:, None]),
}


def learned(name):
    return on(LEARNED[name], lambda a: torch.as_tensor(a, device=DEVICE))


def parameter(mapping):
    return "k" if isinstance(mapping, am.Budget) else "alpha"


def slopes(mapping, p, g):
    """By the engine, and by the reference in fp64; p and g serve as scores, too, which nobody reads."""
    name = parameter(mapping)
    assert kernels.choose("slope", mapping, p) is engine.ENGINE
    got = engine.ENGINE.slope(mapping, name, p, p, g)
    assert got.dtype is torch.float32
    return got, wide(lambda p, g: reference.ENGINE.slope(mapping, name, p, p, g), p, g)


def scale_of(mapping, p, g, want):
    """How large the terms are whose sum a slope is."""
    most = float(g.abs().max()) if g.numel() else 1.0
    return max(1.0, most) * max(1.0, float(want.nan_to_num().abs().max()))


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize(
    ("n", "sigma", "form"), [(5, 1.0, "whole"), (129, 2.0, "whole"), (LONG, 0.02, "steps"), (LONG, 4.0, "steps")]
)
def test_slope_is_the_references(name, n, sigma, form):
    mapping = learned(name)
    x, g = rows(n, sigma=sigma, batch=(8,)), rows(n, seed=9, batch=(8,))
    p = wide(lambda t: am.apply(mapping, t), x).float()
    with planned(form):
        got, want = slopes(mapping, p, g)
    assert got.shape == (8, 1)
    close(got, want, 3e-6 * scale_of(mapping, p, g, want))


@pytest.mark.parametrize("form", ["whole", "steps"])
@pytest.mark.parametrize("name", ["entmax-1.3", "entmax-2.5", "entmax-rows", "normmax-2", "normmax-rows", "budget"])
def test_slope_of_strange_rows_and_ties(name, form):
    """Ties, one class alone, all but equal ones, NaN, nothing but zeros; g is not read where p is 0."""
    mapping = learned(name)
    p = torch.zeros(8, 150, device=DEVICE)
    p[0, 3:7], p[1, 149], p[2] = 0.25, 1.0, 1 / 150
    p[3, ::50], p[4, 7], p[7, :2] = torch.tensor([0.5, 0.3, 0.2], device=DEVICE), torch.nan, 0.5
    p[6, ::2] = torch.linspace(0.1, 1.0, 75, device=DEVICE) / 41.25
    g = rows(150, batch=(8,), seed=3)
    with planned(form):
        got, want = slopes(mapping, p, g)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=3e-5, equal_nan=True)
        assert got[4].isnan().all()
        assert not got[[1, 5]].any()
        unread = torch.where(p == 0.0, torch.inf, g)
        assert torch.equal(engine.ENGINE.slope(mapping, parameter(mapping), p, p, unread)[5:], got[5:])


@pytest.mark.parametrize("form", ["whole", "steps"])
def test_slope_of_steep_rows_is_finite(form):
    """p^(2 - alpha) of the smallest floats is beyond all floats, and sum p^alpha below them."""
    p = torch.full((3, 200), 1e-37, device=DEVICE)
    p[0, 50], p[1, 60:], p[2, :140] = 1.0, 1 / 140, 1 / 140  # in steps, the smallest are seen first or last
    g = rows(200, batch=(3,), seed=4)
    with planned(form):
        for alpha in (3.0, 8.0, torch.tensor([[5.0], [100.0], [3.0]], device=DEVICE)):
            got, want = slopes(am.Entmax(alpha), p, g)
            close(got, want, 3e-6 * scale_of(None, p, g, want))


@pytest.mark.parametrize("form", ["whole", "steps"])
@pytest.mark.parametrize("alpha", [1.01, 3.0, 12.0, 45.0])
def test_slope_of_steep_norms_keeps_its_digits(alpha, form):
    """The derivative of a norm falls as fast as the sensitivity to it grows: up to a large product."""
    n = 150
    p, g = torch.zeros(4, n, device=DEVICE), rows(n, batch=(4,), seed=4)
    p[0, :2], p[1, ::70] = (torch.tensor(t, device=DEVICE) for t in ([0.9, 0.1], [0.9, 0.06, 0.04]))
    p[2, 100:105] = 0.2
    p[3] = 1.0 / n
    p[3, :75] *= 1.5
    p[3, 75:] *= 0.5
    want = [oracles.normmax_derivatives(p[i].tolist(), g[i].tolist(), alpha)[1] for i in range(4)]
    with planned(form):
        got = engine.ENGINE.slope(am.NormMax(alpha), "alpha", p, p, g)
    torch.testing.assert_close(got.double().flatten(), torch.tensor(want, device=DEVICE).double(), rtol=3e-5, atol=1e-5)


def test_slope_of_an_alpha_out_of_its_range_is_nan():
    p, g = torch.full((2, 4), 0.25, device=DEVICE), rows(4, batch=(2,), seed=1)
    for kind, alpha in ((am.Entmax, [[-1.0], [1.5]]), (am.NormMax, [[0.5], [1.5]])):
        with unchecked():  # as on a device, where the values are not read
            mapping = kind(torch.tensor(alpha, device=DEVICE))
        got = engine.ENGINE.slope(mapping, "alpha", p, p, g)
        assert got.isnan().flatten().tolist() == [True, False]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["entmax-1.3", "entmax-2", "entmax-4", "normmax-2", "budget"])
def test_slope_of_halves(name, dtype):
    mapping, x, g = learned(name), rows(97, dtype, batch=(3,)), rows(97, dtype, batch=(3,), seed=4)
    p = engine.ENGINE.forward(mapping, x)
    for form in ("whole", "steps"):
        with planned(form):
            got, want = slopes(mapping, p, g)
            close(got, want, 3e-6 * scale_of(mapping, p, g, want))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["entmax-1.5", "entmax-rows", "normmax-2"])
def test_slope_of_layouts(name, layout):
    mapping, p, g = learned(name), rows(20, batch=(3, 4)).softmax(-1), rows(20, batch=(3, 4), seed=5)
    if name == "entmax-rows":
        mapping = am.Entmax(torch.linspace(1.0, 3.0, 12, device=DEVICE).reshape(3, 4, 1))
        if layout == "four axes apart":
            mapping = am.Entmax(mapping.alpha.reshape(3, 2, 2, 1, 1))
    p, g = LAYOUTS[layout](p), LAYOUTS[layout](g)
    want = engine.ENGINE.slope(mapping, "alpha", p, p.contiguous(), g.contiguous())
    close(engine.ENGINE.slope(mapping, "alpha", p, p, g), want, 1e-6)
    close(want, slopes(mapping, p, g)[1], 1e-5)


@pytest.mark.parametrize(("batch", "form"), [(8, "whole"), (3, "whole"), (8, "steps"), (3, "steps")])
@pytest.mark.parametrize("name", ["entmax-2.5", "normmax-4", "budget"])
def test_slope_of_rows_that_begin_anywhere(name, batch, form, monkeypatch):
    mapping, dtype = learned(name), "bfloat16"
    p = rows(101, dtype, batch=(batch,)).float().softmax(-1).to(torch.bfloat16)
    g = rows(101, dtype, batch=(batch,), seed=1)
    monkeypatch.setattr(plans, "SHIFTED", 16)
    assert operands.PlainRows(p, g=g).shift == (1 if batch == 8 else 2)
    with planned(form):
        got, want = slopes(mapping, p, g)
    close(got, want, 3e-6 * scale_of(mapping, p, g, want))


def test_slope_beyond_32_bits():
    store = torch.empty(2**31 + 64, dtype=torch.float16, device=DEVICE)
    p, g = (store.as_strided((2, 3), (1, 2**30), at) for at in (0, 8))
    p.copy_(torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.75, 0.25]]))
    g.copy_(rows(3, "float16", batch=(2,), seed=1))
    want = engine.ENGINE.slope(am.Entmax(1.3), "alpha", p, p.contiguous(), g.contiguous())
    assert torch.equal(engine.ENGINE.slope(am.Entmax(1.3), "alpha", p, p, g), want)


def test_slope_without_rows_or_classes():
    for shape in ((0, 5), (3, 0), (2, 0, 4)):
        p = torch.zeros(shape, device=DEVICE)
        got = engine.ENGINE.slope(am.Entmax(1.5), "alpha", p, p, p)
        assert got.shape == (*shape[:-1], 1)
        assert not got.any()


@pytest.mark.parametrize("kind", [am.Entmax, am.NormMax, am.Budget])
def test_the_slope_serves_autograd(kind, monkeypatch):
    """One parameter for all rows and one for each, whose gradients are sums over rows."""
    if kind is am.NormMax and not REAL:
        pytest.skip("its p for an alpha that is a tensor is not from this engine, which the interpreter is asked for")
    calls, before = [], launch.slope
    monkeypatch.setattr(launch, "slope", lambda *given: calls.append(before(*given)))
    x = rows(40, batch=(3, 4)).requires_grad_()
    for shape in ((), (4, 1), (3, 4, 1)):
        value = torch.full(shape, 2.5, device=DEVICE, requires_grad=True)
        for a, b in slopes_of(lambda x, value: (am.apply(kind(value), x) ** 2).sum(), x, value):
            close(a, b, 2e-5)
    assert len(calls) == 3


# -- losses and logarithms ------------------------------------------------------------------------------------------------------

LOSSES = tuple(c for c in QUICK if c.mapping.facts.has_potential and c.mass == 1.0)


@each(LOSSES)
@pytest.mark.parametrize(("n", "form"), [(2, "whole"), (129, "whole"), (LONG, "few")])
def test_index_losses(case, n, form):
    if form == "few":
        of_few_maps(case)
    x = rows(n, batch=(6,)).requires_grad_()
    t = torch.arange(6, device=DEVICE) % n
    t[4] = -100
    assert kernels.choose("index_loss", mapped(case), x) is engine.ENGINE
    with planned(form):
        got = am.fenchel_young(mapped(case), x, t, reduction="none")
        (got * torch.arange(1.0, 7.0, device=DEVICE)).sum().backward()
        mean = am.fenchel_young(mapped(case), x.detach(), t)
    y = x.detach().double().requires_grad_()
    with am.use("reference"):
        want = am.fenchel_young(mapped(case), y, t, reduction="none")
        (want * torch.arange(1.0, 7.0, device=DEVICE)).sum().backward()
    got, want = got.detach(), want.detach()
    close(got, want, 2e-6 * max(1.0, float(want.max())))
    close(x.grad, y.grad, 5e-6)
    close(mean, want.sum().detach() / 5, 2e-6 * max(1.0, float(want.max())))
    assert float(got[4]) == 0.0
    assert not bool(x.grad[4].any())


LISTED = ("sparsemax", "entmax-1.5", "normmax-2", "sparse_softmax-k2", "sparse_softmax-p0.9")


@each([c for c in LOSSES if c.id in LISTED])
@pytest.mark.parametrize("form", ["few", "parts"])
def test_the_gradient_of_a_loss_from_the_lanes_that_it_found(case, form):
    n = LONG if REAL else 150  # a part is not a power of two
    x, t = rows(n, sigma=8.0, batch=(5,)), torch.tensor([1, n - 1, -100, 7, 4], device=DEVICE)
    t[0] = x[0].argmax()  # in a lane of the list; the next one is in none
    x[3] = 0.01 * x[3]  # many lanes
    x[4, 3] = torch.nan
    scale = torch.arange(1.0, 6.0, device=DEVICE)
    with planned(form):
        saved = engine.ENGINE.index_loss(mapped(case), x, t, save=True, ignored=-100).saved
        grad = lambda state: engine.ENGINE.index_loss_grad(mapped(case), x, t, scale, state, ignored=-100)  # noqa: E731
        got, want = grad(saved), grad(saved.state)
        counts = saved.memory[saved.first + 5 * saved.few.FEW :]
        if not REAL:
            assert (counts[:3] <= saved.few.FEW).any()
        spoilt = saved.memory.clone()
        spoilt[saved.first :] = -(2**30)  # what a hook may give back leads out of no memory
        assert grad(saved._replace(memory=spoilt)).shape == x.shape
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert not got[2].any()
    assert got[4].isnan().all()


def test_the_lanes_of_a_loss_serve_autograd():
    x, t = rows(LONG, sigma=8.0, batch=(3,)).requires_grad_(), torch.tensor([0, 5, 9], device=DEVICE)
    with planned("few"):
        loss = am.sparsemax_loss(x, t)
        first = torch.autograd.grad(loss, x, retain_graph=True)[0]
        again = torch.autograd.grad(loss, x)[0]
        with torch.autograd.graph.saved_tensors_hooks(
            lambda a: a.to(torch.float64) if a.is_floating_point() else a, lambda a: a
        ):
            hooked = torch.autograd.grad(am.sparsemax_loss(x, t), x)[0]
    want = (am.sparsemax(x.detach()) - torch.nn.functional.one_hot(t, LONG)) / 3
    close(first, want, 1e-6)
    assert torch.equal(first, again)
    close(hooked, first, 1e-6)


def test_losses_of_sure_rows_keep_their_digits():
    x = torch.tensor([[20.0, 0.0, -1.0], [0.4, 0.0, -3.0], [5.0, 0.0, 0.0]], device=DEVICE)
    first = torch.zeros(3, dtype=torch.long, device=DEVICE)
    for mapping in (am.Softmax(), am.Entmax(1.5), am.Entmax(1.1), am.Sparsemax(), am.NormMax(2.0)):
        loss = lambda t, m=mapping: am.fenchel_young(m, t, first, reduction="none")  # noqa: E731
        got, want = loss(x), wide(loss, x)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=5e-8)


def test_a_masked_target_a_stray_one_and_a_poisoned_row():
    x = rows(9, batch=(4,))
    x[0, 2], x[1, 3] = -torch.inf, torch.nan
    t = torch.tensor([2, 0, 9, 1], device=DEVICE)
    for mapping in (am.Softmax(), am.Entmax(1.5), am.SparseSoftmax(k=2)):
        value, state, *_ = engine.ENGINE.index_loss(mapping, x, t, save=True)
        assert float(value[0]) == torch.inf
        assert bool(value[1:3].isnan().all())
        grad = engine.ENGINE.index_loss_grad(mapping, x, t, torch.ones(4, device=DEVICE), state)
        assert bool(grad[1:3].isnan().all())
        assert bool(grad[[0, 3]].isfinite().all())


@pytest.mark.parametrize(
    "case", [c for c in SERVED if c.row in ("Softmax", "Sigsoftmax", "SparseSoftmax")], ids=lambda c: c.id
)
@each_form
def test_logarithms_and_their_backward(case, form):
    x, g = rows(150, batch=(3,)), rows(150, batch=(3,), seed=3)
    x[0, 0] = -torch.inf

    def total(t):
        log_p = am.log_apply(case.mapping, t)
        return torch.where(log_p.isfinite(), log_p * g, 0.0).sum()

    with planned(form):
        got = am.log_apply(case.mapping, x)
        torch.testing.assert_close(got.double(), wide(lambda t: am.log_apply(case.mapping, t), x), rtol=2e-6, atol=2e-6)
        for a, b in slopes_of(total, x.requires_grad_()):
            close(a, b.nan_to_num(), 1e-4)


@each(tuple(c for c in QUICK if c.mapping.has_threshold and c.id not in ("entmax-array-1.75", "entmax-array-3.5")))
@each_form
def test_thresholds(case, form):
    x = rows(130, batch=(3,))
    x[1] = -torch.inf
    with planned(form):
        got = engine.ENGINE.threshold(mapped(case), x)
    with am.use("reference"):
        want = am.threshold(mapped(case), x.double(), keepdims=True).tau
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-5)


@each_form
def test_logsumexp(form):
    x = rows(130, "bfloat16", batch=(4,))
    x[1], x[2, 7], x[3, 9] = -torch.inf, torch.inf, torch.nan
    with planned(form):
        torch.testing.assert_close(am.logsumexp(x), torch.logsumexp(x, -1), equal_nan=True)


# -- through the front door -------------------------------------------------------------------------------------------------------


def test_the_public_functions():
    x = rows(33, batch=(4, 3))
    for f in (am.softmax, am.sparsemax, am.entmax15, lambda t: am.sparse_softmax(t, k=3), lambda t: am.budget(t, 2)):
        want = wide(f, x)
        close(f(x), want, 5e-7)
        for a, b in slopes_of(lambda t, f=f: (f(t) ** 2).sum(), x.clone().requires_grad_()):
            close(a, b, 2e-6)
    out = poisoned(x)
    assert am.sparsemax(x, out=out) is out
    close(out, wide(am.sparsemax, x), 5e-7)
    close(am.softmax(x, axis=1), wide(lambda t: am.softmax(t, axis=1), x), 5e-7)
    assert am.sparsemax(x[:0]).shape == (0, 3, 33)


def test_double_backward_and_transforms_take_plain_operations():
    def first(x):
        return torch.autograd.grad((am.entmax15(x) ** 3).sum(), x, create_graph=True)[0].sum()

    for a, b in slopes_of(first, rows(7, batch=(2,)).requires_grad_()):
        close(a, b, 1e-4)


def test_it_is_chosen():
    for op in ("forward", "vjp", "index_loss"):
        assert am.choose(op, am.Entmax(1.5), rows(5)).name == "triton"


@pytest.mark.skipif(REAL, reason="a captured graph is pretended")
def test_numbers_that_a_captured_graph_reads_stay(monkeypatch):
    x = torch.zeros(2, 3)
    monkeypatch.setattr(operands, "_numbers", {})
    monkeypatch.setattr(operands, "_captured", {})
    operands.per_row([[1.0], [2.0]], x)
    (first,) = operands._numbers.values()
    with monkeypatch.context() as capturing:
        capturing.setattr(operands, "_capturing", lambda x: True)
        operands.per_row([[1.0], [2.0]], x)
    for i in range(100):
        operands.per_row([[float(i)], [-1.0]], x)
    assert [one is first for one in operands._captured.values()] == [True]
    operands.per_row([[1.0], [2.0]], x)
    assert any(one is first for one in operands._numbers.values())
    assert len(operands._numbers) <= 64


@pytest.mark.parametrize("kernel", plans.LANED)
def test_a_row_in_parts_is_solved_from_few_lanes(kernel):
    """One program holds the lanes of all parts: 16,384 at most."""
    for rows, n, size in ((32, 1_000_000, 2), (128, 200_000, 4)):
        plan = plans.plan(kernel, rows, n, True, False, cut=True, size=size)
        assert plan.parts > 1
        assert plan.parts * plan.L <= 16_384
    assert set(plans.LANED) <= set(plans.FAMILIES)
    assert "halves" in plans.LANED
