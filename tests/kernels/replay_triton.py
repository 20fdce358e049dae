"""Calls that repeat: the second one launches what the first one did, on other tensors. test_triton.py runs this file in the interpreter."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import inspect
import math

import pytest
import row_cases
from triton_place import DEVICE, REAL, WARNINGS

torch = pytest.importorskip("torch")

import anymax as am
from anymax.autodiff import torch as leaf
from anymax.autodiff import torch_rows
from anymax.kernels import triton as engine
from anymax.kernels.engine import SegmentsAlong
from anymax.kernels.triton import launch, operands, plans, ragged, replay

pytestmark = WARNINGS

MAPS = row_cases.MAPS | {"perturb-max": am.PerturbMax("normal")}
each_map = pytest.mark.parametrize("name", MAPS)


def runner(function, kernel, grid):
    """The interpreter takes tensors, not addresses; in their place it gets tensors over the same memory."""

    def run(*values):
        run.count += 1
        names = function.arg_names
        options = dict(zip(names, values))
        for at, like in run.likes.items():
            size = max(
                like.untyped_storage().nbytes() - like.storage_offset() * like.element_size(), like.element_size()
            )
            memory = (ctypes.c_char * size).from_address(values[at])
            options[names[at]] = torch.frombuffer(memory, dtype=like.dtype, count=size // like.element_size())
        function[grid](**options)

    run.count, run.likes = 0, {}
    RUNS.append(run)
    return run


RUNS: list = []


class Recording(replay._Recording):
    """Checks the order of the arguments, and tells the runner the dtypes behind the addresses."""

    def add(self, function, kernel, grid, args, options):
        before = len(RUNS)
        super().add(function, kernel, grid, args, options)
        if self.launches is None:
            return
        given = {name: value for name, value in options.items() if name in function.arg_names}
        bound = list(inspect.signature(function.fn).bind(*args, **given).arguments.values())
        _, values, addresses, _ = self.launches[-1]
        places = {at for at, _, _ in addresses}
        assert places == {at for at, value in enumerate(bound) if isinstance(value, torch.Tensor)}
        assert all(a is b or a == b for at, (a, b) in enumerate(zip(values, bound, strict=True)) if at not in places)
        if not REAL:
            assert len(RUNS) == before + 1
            RUNS[-1].likes = {at: bound[at] for at in places}


def taken_as_on_gpu(monkeypatch, answer):
    for module in (leaf, torch_rows):
        monkeypatch.setattr(module, "on_gpu", lambda t: answer)


@pytest.fixture(autouse=True)
def _kept(monkeypatch):
    monkeypatch.setattr(replay, "_known", {})
    monkeypatch.setattr(replay, "_Recording", Recording)
    if not REAL:
        monkeypatch.setattr(replay, "runner", runner)
        taken_as_on_gpu(monkeypatch, True)
    RUNS.clear()
    with am.use("triton") if not REAL else contextlib.nullcontext():
        yield


def scores(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def kept():
    return [one for one in replay._known.values() if one is not None]


@contextlib.contextmanager
def anew(monkeypatch):
    """Nothing is kept meanwhile."""
    with monkeypatch.context() as patch:
        patch.setattr(replay, "repeated", lambda key, given, call: call())
        yield


@each_map
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_second_call_is_the_launches_of_the_first(name, dtype, monkeypatch):
    mapping = MAPS[name]
    for seed in range(2):
        x, g = scores(4, 40, seed=seed, dtype=dtype), scores(4, 40, seed=seed + 10, dtype=dtype)
        p, back = engine.ENGINE.forward(mapping, x), engine.ENGINE.vjp(mapping, x, engine.ENGINE.forward(mapping, x), g)
        with anew(monkeypatch):
            want = engine.ENGINE.forward(mapping, x)
            slope = engine.ENGINE.vjp(mapping, x, want, g)
        assert torch.equal(p, want)
        assert torch.equal(back, slope)
    assert len(kept()) == len(replay._known) == 2
    assert REAL or sum(run.count for run in RUNS) >= 4


@pytest.mark.parametrize("mapping", [am.Entmax, am.Budget])
def test_calls_with_a_parameter_of_each_row_are_kept(mapping, monkeypatch):
    for seed in range(2):
        x, g = scores(4, 40, seed=seed), scores(4, 40, seed=seed + 10)
        own = mapping(1.2 + scores(4, 1, seed=seed + 20).abs())
        p, back = engine.ENGINE.forward(own, x), engine.ENGINE.vjp(own, x, g.abs(), g)
        with anew(monkeypatch):
            assert torch.equal(p, engine.ENGINE.forward(own, x))
            assert torch.equal(back, engine.ENGINE.vjp(own, x, g.abs(), g))
    assert len(kept()) == len(replay._known) == 2


def test_calls_on_segments_are_kept(monkeypatch):
    segments = ragged.TritonSegments(SegmentsAlong(am.Segments.of(lengths=torch.tensor([3, 1, 5])), 0))
    for seed in range(2):
        x, g = scores(9, 2, seed=seed), scores(9, 2, seed=seed + 10)
        p, back = segments.forward(am.Sparsemax(), x), segments.vjp(am.Sparsemax(), x, g.abs(), g)
        with anew(monkeypatch):
            assert torch.equal(p, segments.forward(am.Sparsemax(), x))
            assert torch.equal(back, segments.vjp(am.Sparsemax(), x, g.abs(), g))
    assert len(kept()) == len(replay._known) == 2


def test_layouts_are_kept_apart(monkeypatch):
    """Strides, shapes, dtypes, alignment, and memory that ends in the middle of a pack."""
    mapping, whole = am.Sparsemax(), scores(9, 600)
    given = [
        whole[:4, :40], whole[:4, 1:41], whole[1:5, :40], whole[::2, :40], whole[:4, :40].contiguous(), whole[3:7, 8:48],
        whole[:5, :40], whole[:4, :40].bfloat16(), whole[:, :599], whole[:8, 1:600], whole[:, :597].contiguous(), whole.T[:40, :4].T,
    ]  # fmt: skip
    for again in range(2):
        for i, x in enumerate(given):
            y = x if not again else x.clone(memory_format=torch.preserve_format).mul_(0.5) if x.is_contiguous() else x
            got = engine.ENGINE.forward(mapping, y)
            with anew(monkeypatch):
                assert torch.equal(got, engine.ENGINE.forward(mapping, y)), i
    assert len(replay._known) == len({replay.layout(x) for x in given})


def test_the_end_of_the_memory_is_part_of_a_layout():
    """Rows of 600 classes, 601 apart: the last row is not read in packs of 16 bytes if its memory ends within the last pack."""
    tight, roomy = torch.zeros(4 * 601 - 1, device=DEVICE), torch.zeros(5 * 601, device=DEVICE)
    rows = [memory.as_strided((4, 600), (601, 1)) for memory in (tight, roomy)]
    assert [operands.lay_out(None, x).shift for x in rows] == [2, 1]
    assert replay.layout(rows[0]) != replay.layout(rows[1])
    larger = torch.zeros(9 * 601, device=DEVICE)
    for offset in (0, 4 * 601):  # neither the place in the memory nor its size counts beside that
        assert replay.layout(rows[1]) == replay.layout(larger.as_strided((4, 600), (601, 1), offset))


@pytest.mark.parametrize("operand", ["mask", "out", "index", "g"])
def test_an_operand_on_another_device(operand):
    """Its address means nothing to a kernel: an error before the first launch, also where a call like it is kept."""
    x, given = scores(3, 40), {name: scores(3, 40) for name in ("out", "g")}
    given |= {
        "mask": torch.ones(3, 40, dtype=torch.bool, device=DEVICE),
        "index": torch.zeros(3, dtype=torch.int64, device=DEVICE),
    }
    value, link = torch.empty(2, 3, device=DEVICE), engine.triton_link(am.Sparsemax())
    run, back = launch.run, launch.backward

    def call(mask, out, index, g):
        run("p", link, x, mask=mask, out=out)
        run("loss", link, x, index=index, value=value)
        back(link, False, None, x, g, out)

    call(**given)
    assert len(kept()) == 3
    elsewhere = torch.device("cpu" if REAL else "meta")
    assert replay.layout(given[operand]) != replay.layout(given[operand].to(elsewhere))
    with pytest.raises(ValueError, match=f"can't read a tensor on {elsewhere}"):
        call(**given | {operand: given[operand].to(elsewhere)})
    assert len(kept()) == len(replay._known) == 3


def test_in_place_and_apart_are_two_calls(monkeypatch):
    x = scores(4, 300)
    with anew(monkeypatch):
        want = engine.ENGINE.forward(am.Entmax(1.5), x)
    for _ in range(2):
        same, out = x.clone(), torch.empty_like(x)
        assert torch.equal(engine.ENGINE.forward(am.Entmax(1.5), same, None, same), want)
        assert torch.equal(engine.ENGINE.forward(am.Entmax(1.5), x, None, out), want)
    assert len(kept()) == 2


@pytest.mark.parametrize("form", ["whole", "steps", "parts"])
@pytest.mark.parametrize("name", ["softmax", "sparsemax", "top-k"])
def test_rows_with_memory_of_their_own_and_what_a_gradient_reads(name, form, monkeypatch):
    """Lists of lanes, the tops of parts, the state of a loss: a call that repeats takes them anew."""
    mapping, n = MAPS[name], 390
    if form != "whole":
        short = {"whole": 64, "steps": ((math.inf, 2, 2),)}
        families = {key: dataclasses.replace(one, **short) for key, one in plans.FAMILIES.items()}
        monkeypatch.setattr(plans, "FAMILIES", families)
    if form == "parts":
        for limit, value in (
            ("VERY_LONG", 256),
            ("LONG_BACKWARD", 256),
            ("CROWD", 8),
            ("PART", (2, 32, 4)),
            ("ROUND", 8),
        ):
            monkeypatch.setattr(plans, limit, value)
    t = torch.tensor([3, n - 1, -100], device=DEVICE)
    memory = []
    for seed in range(2):
        x, g = scores(3, n, seed=seed), scores(3, n, seed=seed + 10)

        def call(x=x, g=g):
            p, saved = engine.ENGINE.forward_saving(mapping, x)
            made = engine.ENGINE.index_loss(mapping, x, t, save=True, ignored=-100, reduction="mean")
            slope = engine.ENGINE.index_loss_grad(mapping, x, t, made.value, made.saved, ignored=-100)
            lists = saved.memory if isinstance(saved, launch.Lanes) else None
            return (
                p,
                engine.ENGINE.vjp(mapping, x, p, g, saved),
                made.value,
                slope,
                engine.ENGINE.threshold(mapping, x),
                lists,
            )

        got = call()
        with anew(monkeypatch):
            want = call()
        assert all(torch.equal(a, b) for a, b in zip(got[:-1], want[:-1]))
        memory.append(got[-1])
    assert memory[0] is None or memory[0].data_ptr() != memory[1].data_ptr()
    assert len(kept()) == len(replay._known) == 5


def test_what_copies_its_operands_is_not_kept(monkeypatch):
    """More row axes than a kernel takes; a plan that a test sets."""
    x = scores(2, 2, 2, 2, 2, 20).permute(4, 2, 0, 3, 1, 5)[..., :7]
    for _ in range(2):
        got = engine.ENGINE.forward(am.Sparsemax(), x)
        with anew(monkeypatch):
            assert torch.equal(got, engine.ENGINE.forward(am.Sparsemax(), x))
    assert not kept()
    monkeypatch.setitem(plans.forced, "dense", plans.Plan(1, 1, 32, True, 1))
    engine.ENGINE.forward(am.Softmax(), scores(3, 20))
    assert not kept()


def test_the_oldest_calls_make_room(monkeypatch):
    monkeypatch.setattr(replay, "MOST", 3)
    for rows in range(1, 6):
        engine.ENGINE.forward(am.Softmax(), scores(rows, 20))
    assert len(replay._known) == 2


# -- the short way of autograd ----------------------------------------------------------------------------------------------------


def taken(mapping, x, axis=None, mask=None, out=None):
    return torch_rows.quick_on_gpu(mapping, x, axis, mask, out)


@each_map
def test_the_short_way_gives_what_the_long_one_does(name, monkeypatch):
    mapping = MAPS[name]
    for seed in range(2):
        x, g = scores(4, 40, seed=seed), scores(4, 40, seed=seed + 10)
        x[1, 3] = torch.nan
        x[2] = -torch.inf
        free, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
        p = taken(mapping, free)
        assert p is not None
        assert torch.equal(taken(mapping, x).nan_to_num(7.0), p.detach().nan_to_num(7.0))
        with monkeypatch.context() as patch, anew(monkeypatch):
            taken_as_on_gpu(patch, False)
            want = am.apply(mapping, plain)
            slope = torch.autograd.grad(want, plain, g)[0]
        assert torch.equal(p.detach().nan_to_num(7.0), want.detach().nan_to_num(7.0))
        assert torch.equal(torch.autograd.grad(p, free, g)[0].nan_to_num(7.0), slope.nan_to_num(7.0))
        out = torch.empty_like(x)
        assert taken(mapping, x, out=out) is out
        assert torch.equal(out.nan_to_num(7.0), want.detach().nan_to_num(7.0))


@pytest.mark.parametrize("name", ["softmax", "sparsemax", "entmax-1.5", "top-k"])
def test_losses_by_the_short_way(name, monkeypatch):
    mapping = MAPS[name]
    t = torch.tensor([0, 39, -100, 5], device=DEVICE)
    for reduction in ("mean", "sum", "none"):
        for seed in range(2):
            x = scores(4, 40, seed=seed)
            free, plain = x.clone().requires_grad_(), x.clone().requires_grad_()

            def loss(x, reduction=reduction):
                value = leaf.BRIDGE.index_loss(mapping, x, t, -1, -100, reduction)
                return value, torch.autograd.grad(value.sum(), x)[0]

            got = loss(free)
            with monkeypatch.context() as patch, anew(monkeypatch):
                taken_as_on_gpu(patch, False)
                want = loss(plain)
            assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # of torch's forward mode
def test_unusual_calls_take_the_long_way():
    x, mapping = scores(4, 40), am.Sparsemax()
    free = x.clone().requires_grad_()
    assert taken(mapping, x, mask=x > 0) is None
    assert taken(mapping, x, axis=0) is None
    assert taken(mapping, x, axis=1) is not None
    assert taken(mapping, x[:0]) is None
    assert taken(mapping, x.double()) is None
    assert taken(am.Entmax(torch.tensor(1.3, device=DEVICE)), x) is None
    assert taken(mapping, x[:, :20], out=x[:, 20:]) is None
    assert taken(mapping, x, out=torch.empty_like(x).requires_grad_()) is None
    assert taken(mapping, free, out=torch.empty_like(x)) is None
    assert taken(mapping, torch.view_as_complex(x.view(4, 20, 2)).conj().imag) is None  # negated lazily
    assert taken(mapping, x[0, 0]) is None
    with pytest.raises(ValueError, match="at most the number of classes"):
        taken(am.Budget(41), x)
    with am.use("reference"):
        assert taken(mapping, x) is None
    seen = []
    torch.func.vmap(lambda row: seen.append(taken(mapping, row)) or row)(x)
    with torch.autograd.forward_ad.dual_level():
        seen.append(taken(mapping, torch.autograd.forward_ad.make_dual(x, x)))
    assert seen == [None, None]


def test_gradients_of_gradients_batches_and_hooks_take_the_long_way():
    x, g = scores(2, 9, dtype=torch.float32), scores(2, 9, seed=1)
    free = x.clone().requires_grad_()
    p = taken(am.Softmax(), free)
    (slope,) = torch.autograd.grad(p, free, g, create_graph=True)
    second = torch.autograd.grad(slope.square().sum(), free)[0]
    plain = x.double().requires_grad_()
    (want,) = torch.autograd.grad(plain.softmax(-1), plain, g.double(), create_graph=True)
    torch.testing.assert_close(
        second.double(), torch.autograd.grad(want.square().sum(), plain)[0], rtol=1e-4, atol=1e-5
    )
    many = torch.stack([g, 2 * g])
    (batch,) = torch.autograd.grad(taken(am.Softmax(), free), free, many, is_grads_batched=True)
    torch.testing.assert_close(batch[1], 2 * batch[0])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t):
        q = taken(am.Softmax(), free)
    torch.testing.assert_close(torch.autograd.grad(q, free, g)[0], slope.detach(), rtol=1e-5, atol=1e-6)
