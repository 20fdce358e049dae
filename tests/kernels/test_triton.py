"""The GPU engine without a GPU: every kernel in Triton's interpreter, and compiled ahead of time for NVIDIA and AMD."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import row_cases

torch = pytest.importorskip("torch")

import anymax as am
from anymax import kernels
from anymax._random.noises import find
from anymax.kernels import triton as engine
from anymax.kernels.engine import SegmentsAlong
from anymax.kernels.link import KINDS, WITH_SLOPE, WITHOUT_LOG, WITHOUT_LOSS
from anymax.kernels.tasks import ScoreBlock
from anymax.kernels.triton import ragged

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.append(ROOT)  # tools are no part of the package
from tools import gpu_launches, gpu_static
from tools.gpu_launches import KERNELS, Recorder, compiled, described

needs_triton = pytest.mark.skipif(isinstance(engine.load(), str), reason="triton is not installed")


def ahead(test):
    """Compiled for another machine than this one."""
    return needs_triton(pytest.mark.filterwarnings("ignore")(test))  # of the compiler


# -- in the interpreter ---------------------------------------------------------------------------------------------------------

# What the short battery takes of each file: one process for all of them.
BRIEF = {
    "rows": (
        "(forward_is and 5- or backward_is and 3-whole) and (softmax or sparsemax or entmax-1.5 or entmax-4/3 or budget-2.5 or normmax-2 "
        "or taylor-4) or index_losses and 2-whole and (-softmax or entmax-1.5) or ties_are and whole and SparseSoftmax "
        "or ties_below and float32-whole and 40 or in_place and Sparsemax and few or many_lanes and 40-parts or ends_among and few "
        "or slope and (references and 129 and (-rows or entmax-1.3 or normmax-2) or steep_rows and steps)"
    ),
    "ragged": "test_gradients and sparsemax and False or launched",
    "layer": (
        "product or terms_of_a_block and all-70 or two_kernels and softcap-mean-float32 or over_its_scores and sparsemax and steps"
    ),
    "replay": (
        "second_call and top-k and dtype0 or each_row_are_kept and Entmax or in_place_and or test_unusual or hooks "
        "or end_of_the_memory or another_device"
    ),
    "router": "of_the_reference and (deepseek-v3 or eight) and float32 or any_axis_strides",
    "sinkhorn": "masks or 30.0-2]",
    "attention": "a_map_with_slopes and sparsemax or keys_in_parts_with_a_map and budgets",
}
PARTS = {  # of the long files, by the names of their tests: one process each
    "rows": {
        "forward": "forward or halves",
        "rows": "flat or layouts or masks",
        "strange": "strange or huge or ties or ends_among or offsets or perturb_max or alpha",
        "backward": "backward and not logarithms",
        "slopes": "slope and not backward",
        "losses": "index_losses",
    },
    "attention": {
        "options": "an_option and not keys_in_parts",
        "maps": "(a_map or features or layouts or shared) and not keys_in_parts",
        "parts": "keys_in_parts",
    },
}


def groups():
    """name -> (files, words): every test of a file is in one group, with what no words name in `others`."""
    yield "brief", (tuple(BRIEF), " or ".join(f"{file}_triton and ({words})" for file, words in BRIEF.items()))
    for file, brief in BRIEF.items():
        words = PARTS.get(file, {})
        named = " or ".join(f"({w})" for w in words.values())
        for name, own in {**words, "others": f"not ({named})" if named else file}.items():
            yield f"{file} {name}", ((file,), f"({own}) and not ({brief})")


GROUPS = dict(groups())


@pytest.mark.long
@pytest.mark.whole(lambda group: group != "brief")
@needs_triton
@pytest.mark.parametrize("group", GROUPS)
def test_interpreted(group):
    """In a process where the interpreter stands in for the compiler."""
    here, (files, words) = Path(__file__).parent, GROUPS[group]
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", words]
    out = subprocess.run(
        [sys.executable, "-m", "pytest", *(str(here / f"{file}_triton.py") for file in files), *options],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert out.returncode == 0, out.stdout[-3000:] + out.stderr[-1000:]
    assert " passed" in out.stdout


@needs_triton
@pytest.mark.parametrize("noise", ["normal", "logistic"])
def test_levels_of_noises_are_those_of_the_reference(noise):
    depths = np.array([1e-15, 1e-9, 2e-5, 0.5, 0.69, 0.7, 1.0, 3.0, 20.7, 600.0])
    want = find(noise).level(depths, np)
    got = np.array([engine.load().level(noise, depth) for depth in depths.tolist()])
    assert np.abs(got - want).max() <= 1e-12 * np.abs(want).max()


# -- ahead of time: what the engine launches, compiled instead -----------------------------------------------------------------

TARGETS = ("sm_80", "sm_90", "gfx942")


MAPS = {
    **row_cases.MAPS, "entmax-rows": am.Entmax(torch.full((4, 1), 1.4)), "normmax-3": am.NormMax(3.0), "taylor": am.Taylor(4),
    "perturb-normal": am.PerturbMax("normal"), "perturb-logistic": am.PerturbMax("logistic"),
}  # fmt: skip


def recorded(monkeypatch, module=None, names=KERNELS["launch"]):
    """The launches of these kernels from here on, in place of which nothing happens."""
    module, calls = module or engine.load(), []
    for name in names:
        monkeypatch.setattr(module, name, Recorder(getattr(module, name), calls))
    return calls


def launches(monkeypatch, mapping, n, dtype):
    """Every launch that this map has, of rows like these."""
    calls = recorded(monkeypatch)
    x = torch.zeros(4, n, dtype=dtype)
    keep, t = torch.ones(n, dtype=torch.bool), torch.zeros(4, dtype=torch.long)
    link = engine.triton_link(mapping)
    _, saved = engine.ENGINE.forward_saving(mapping, x, keep)
    engine.ENGINE.vjp(mapping, x, x, x, saved)
    if link.kind in WITH_SLOPE:
        engine.ENGINE.slope(mapping, KINDS[link.kind].parameter, x, x, x)
    if link.kind not in WITHOUT_LOG:
        engine.ENGINE.log_forward(mapping, x)
        if link.kind != "sigsoftmax":
            engine.ENGINE.log_vjp(mapping, x, x, x)
    if link.kind not in ("perturb_max", *WITHOUT_LOSS):
        state = engine.ENGINE.index_loss(mapping, x, t, save=True).saved
        engine.ENGINE.index_loss_grad(mapping, x, t, torch.ones(4), state)
        if link.params is None:
            engine.ENGINE.threshold(mapping, x)
    return calls


# in the short battery most kernels are compiled once, of a map and for a target that are quick
SOON = {"softmax": "sm_80", "taylor": "gfx942"}


@pytest.mark.whole(lambda name, target: SOON.get(name) != target)
@pytest.mark.weekly(
    lambda name, target: SOON.get(name) != target and (list(MAPS).index(name) + TARGETS.index(target)) % 3 != 0
)
@ahead
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", MAPS)
def test_compiles_ahead_of_time(name, target, monkeypatch, compiler):
    monkeypatch.setattr(engine.load(), "_wave", gpu_launches.TARGETS[target][2])
    # one target the rows that fit on chip, another the long ones, the third rows of few classes
    n, dtype = {"sm_80": (1000, torch.float16), "sm_90": (131_072, torch.bfloat16), "gfx942": (8192, torch.float32)}[
        target
    ]
    compile_all(launches(monkeypatch, MAPS[name], n, dtype), target)


@pytest.mark.whole
@pytest.mark.weekly(lambda name: name != "sparsemax")
@ahead
@pytest.mark.parametrize("name", ["softmax", "sparsemax", "entmax-1.7", "budget", "top-k"])
def test_rows_in_parts_compile_ahead_of_time(name, monkeypatch, compiler):
    calls = launches(monkeypatch, MAPS[name], 1_000_000, torch.float32)
    assert any("parts" in one.name for one in calls)
    compile_all(calls, "sm_90")  # 16,384 lanes in the registers of one program


@pytest.mark.whole
@ahead
@pytest.mark.parametrize(
    ("name", "n", "rows"), [("softmax", 50_257, 8), ("softmax", 50_257, 3), ("entmax-1.5", 1001, 8)]
)
def test_rows_that_begin_anywhere_are_read_in_packs(name, n, rows, monkeypatch, compiler):
    calls, x = recorded(monkeypatch), torch.zeros(rows, n, dtype=torch.bfloat16)
    engine.ENGINE.forward(MAPS[name], x)
    engine.ENGINE.vjp(am.Softmax(), x, x, x)
    for one in calls:
        assert (1 if rows == 8 else 2) == one.options["TILE"].SHIFT
        found = gpu_static.figures(compiled("sm_90", one))
        assert found["wide_loads"] > 0
        # else the last row, or what is known of parts, is read number by number
        if rows == 8 and not one.options.get("PARTS", getattr(one.options.get("FEW"), "PARTS", 0)):
            assert found["wide_loads"] == found["loads"]


@pytest.mark.whole
@ahead
def test_ragged_rows_compile_ahead_of_time(monkeypatch, compiler):
    from anymax.kernels.triton import segments

    monkeypatch.setattr(segments, "_SPARE", 0)
    calls, mapping = recorded(monkeypatch), am.Softmax()
    engine = ragged.TritonSegments(SegmentsAlong(am.Segments.of(lengths=[9, 0, 40_000]), 0))
    x, t = torch.zeros(40_009, 2, dtype=torch.bfloat16), torch.zeros(2, 3, dtype=torch.int64)
    engine.forward(mapping, x)
    engine.vjp(mapping, x, x, x)
    engine.log_vjp(mapping, x, engine.log_forward(mapping, x), x)
    saved = engine.index_loss(mapping, x, t, save=True).saved
    engine.index_loss_grad(mapping, x, t, torch.ones(t.shape), saved)
    engine.forward(am.Entmax(torch.full((2, 3), 1.4)), x)
    assert all(one.options["TILE"].RAGGED for one in calls)
    assert {one.options["TILE"].WHOLE for one in calls} == {True, False}
    compile_all(calls, "sm_90")


@pytest.mark.whole
@ahead
def test_sparse_products_compile_ahead_of_time(monkeypatch, compiler):
    from anymax.kernels.triton import layer

    calls = recorded(monkeypatch, layer, KERNELS["layer"])
    starts, index = torch.zeros(201, dtype=torch.int64), torch.zeros(200, dtype=torch.int64)
    for dtype in (torch.float16, torch.float32):
        rows = torch.zeros(200, 96, dtype=dtype)
        layer.add_products(rows.clone(), starts, index, torch.zeros(200), rows)
        layer.scale(rows, torch.zeros((), dtype=torch.float32))
    compile_all(calls, "sm_80")


@pytest.mark.whole
@ahead
@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_blocks_of_scores_compile_ahead_of_time(target, monkeypatch, compiler):
    from anymax.kernels.triton import layer

    monkeypatch.setattr(engine.load(), "_wave", gpu_launches.TARGETS[target][2])
    calls = recorded(monkeypatch, layer, KERNELS["layer"])
    n, more = 5000, torch.zeros(3, 1)
    for dtype in (torch.float32, torch.float16):
        numbers, index = torch.zeros(3, n, dtype=dtype), torch.zeros(3, dtype=torch.int64)
        every = torch.zeros(n, dtype=dtype), torch.ones(3, n, dtype=torch.bool), more
        for of, cap, weights in (((None, None, None), 0.0, None), (every, 30.0, torch.zeros(n))):
            block = ScoreBlock(numbers, *of, index, 0, cap)
            layer.terms(block, weights, entropy=cap > 0, best=cap > 0)
            layer.slopes(block, numbers.view(torch.float16)[:, :n], torch.zeros(3, 5), weights, mixed=cap > 0)
    s, t = torch.zeros(4, 40_000), torch.zeros(4, dtype=torch.int64)
    launched = recorded(monkeypatch)
    for mapping in (am.Sparsemax(), am.SparseSoftmax(k=50)):
        saved = engine.ENGINE.index_loss(mapping, s, t, save=True).saved
        engine.ENGINE.score_loss_grad(mapping, s, t, torch.ones(4), saved, s.view(torch.float16)[:, :40_000])
    grads = [one for one in launched if one.options["MODE"] == "grad"]
    assert all(one.options["FEW"].LATE for one in grads)
    compile_all([*calls, *grads], target)


STEPS = {  # of an output layer, and the kernels that touch a block of its scores, but for the two products of its gradient
    "loss": (lambda x, w, t: am.linear_loss(x, w, t), "layer_terms layer_slopes"),
    "options": (
        lambda x, w, t: am.linear_loss(x, w, t, label_smoothing=0.1, z_loss=1e-4, transform=am.transforms.softcap(30.0)),
        "layer_terms layer_slopes",
    ),
    "each row": (lambda x, w, t: am.linear_loss(x, w, t, reduction="none").sum(), "layer_terms layer_slopes"),
    "log p and entropy": (
        lambda x, w, t: sum(am.linear_log_prob_entropy(x, w, t, temperature=0.7)).sum(), "layer_terms layer_slopes"
    ),
    "sparsemax": (lambda x, w, t: am.linear_loss(x, w, t, am.Sparsemax()), "separable_rows separable_rows"),
    "top-k": (lambda x, w, t: am.linear_loss(x, w, t, am.SparseSoftmax(k=50)), "truncated_rows truncated_rows"),
}  # fmt: skip
VIEWS = {
    "view",
    "slice",
    "as_strided",
    "t",
    "transpose",
    "detach",
    "empty",
    "resolve_conj",
    "to",
    "select",
    "alias",
    "split",
    "narrow",
}


@needs_triton
@pytest.mark.parametrize("name", STEPS)
def test_a_block_of_scores_is_touched_by_two_kernels_alone(name, monkeypatch):
    """Between the product that makes it and the two that take its gradient."""
    from anymax.kernels.triton import layer as kernels_of_layers
    from anymax.linear import layer, torch_blocks

    rows, features, classes = 64, 48, 3000
    if not hasattr(engine.load().dense_rows, "fn"):
        pytest.skip("the interpreter has replaced the compiler")
    monkeypatch.setattr(torch_blocks, "on_gpu", lambda x: True)
    monkeypatch.setattr(layer, "on_cpu", lambda x: False)
    monkeypatch.setattr(engine, "_interpreted", lambda: True)
    monkeypatch.setattr(
        torch_blocks,
        "product",
        lambda x, w, out=None: x.new_empty(len(x), len(w), dtype=torch.float32) if out is None else out,
    )
    calls = recorded(monkeypatch, kernels_of_layers, KERNELS["layer"])
    for kernel in KERNELS["launch"]:
        monkeypatch.setattr(engine.load(), kernel, Recorder(getattr(engine.load(), kernel), calls))
    call, kernels_ = STEPS[name]
    x, w = (torch.zeros(n, features, dtype=torch.bfloat16, requires_grad=True) for n in (rows, classes))
    t = torch.arange(rows)
    with am.use("triton"):
        torch.autograd.grad(call(x, w, t), (x, w))
        calls.clear()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
            torch.autograd.grad(call(x, w, t), (x, w))
    large = [
        event.name[6:]
        for event in profile.events()
        if event.name.startswith("aten::")
        and any(shape in ([rows, classes], [classes, rows], [rows, 2 * classes]) for shape in event.input_shapes)
    ]
    assert set(large) <= VIEWS | {"mm", "matmul"}
    of_scores = [
        one.name
        for one in calls
        if any(isinstance(a, torch.Tensor) and a.shape[-1:] == (classes,) and len(a) == rows for a in one.args)
    ]
    assert " ".join(of_scores) == kernels_


@pytest.mark.whole
@ahead
@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_routers_compile_ahead_of_time(target, monkeypatch, compiler):
    from anymax.kernels.triton import router

    calls, bias = recorded(monkeypatch, router, KERNELS["router"]), torch.zeros(256)
    router.choose(torch.zeros(64, 256), 8, (8, 4, 2), "sigmoid", bias, True, True, 2.5)
    router.choose(torch.zeros(64, 256, dtype=torch.bfloat16), 8, (1, 1, 1), "softmax", None, True, True)
    compile_all(calls, target)
    for one in calls:
        if target == "sm_80" and not oldest():
            found = gpu_static.figures(compiled(target, one))
            assert (found["stack"], found["spills"]) == (0, 0)


@pytest.mark.whole
@ahead
def test_small_matrices_compile_ahead_of_time(monkeypatch, compiler):
    from anymax.kernels.triton import sinkhorn_kernels

    calls = recorded(monkeypatch, sinkhorn_kernels, KERNELS["sinkhorn"])
    x = torch.zeros(1000, 4, 4)
    for g in (None, x):
        sinkhorn_kernels.run(x, g, 20, 1.0)
    for target in ("sm_80", "gfx942"):
        compile_all(calls, target)


def oldest():
    """Whether this is the oldest Triton, which no bar of size is for: the record of tools/gpu_static.py has its figures."""
    import triton

    return gpu_static.oldest(triton.__version__)


def compile_all(calls, target, most=2_000_000, shared=64):
    assert len(calls) >= 2
    for one in calls:
        made = compiled(target, one)
        binary = made.asm["hsaco" if target == "gfx942" else "cubin"]
        assert len(binary) > 1000
        if oldest():
            continue
        # a tile in the layout of another is computed many times over: such a kernel is ten times as long. The bar is wide, since the
        # length has the names of files in it, and differs by a sixth between versions of Triton
        assert len(made.asm.get("ptx", "")) < most, one.options
        assert made.metadata.shared <= shared * 1024


@needs_triton
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("n", [70, 40_000])
def test_warm_up_makes_every_call(name, n, monkeypatch):
    def kinds(calls):
        """What the compiler would be told: constants, types, and by what numbers can be divided."""
        return {(one.name, repr(described(one))) for one in calls}

    if not hasattr(engine.load().dense_rows, "fn"):
        pytest.skip("the interpreter has replaced the compiler")
    mapping = am.Entmax(torch.full((4, 1), 1.4)) if name == "entmax-rows" else MAPS[name]
    calls = recorded(monkeypatch)
    engine.warm_up(mapping, (4, n), torch.float32, "cpu")
    warm = kinds(calls)
    assert kinds(launches(monkeypatch, mapping, n, torch.float32)) <= warm
    calls = recorded(monkeypatch)
    x, link = torch.zeros(4, n), engine.triton_link(mapping)
    engine.ENGINE.forward(mapping, x)
    if link.kind not in ("perturb_max", *WITHOUT_LOSS):
        t = torch.zeros(4, dtype=torch.long)
        loss, state, count, _ = engine.ENGINE.index_loss(mapping, x, t, save=True, ignored=-100, reduction="mean")
        engine.ENGINE.index_loss_grad(mapping, x, t, loss / count, state, ignored=-100)
    assert kinds(calls) <= warm


@needs_triton
def test_parameters_given_as_numbers_are_copied_once():
    from anymax.kernels.triton import operands

    x, alpha = torch.zeros(3, 5), np.array([[1.2], [1.5], [3.0]])
    first = operands.per_row(alpha, x, 1.0)
    held = dict(operands._numbers)
    again = operands.per_row(alpha.copy(), x, 1.0)
    assert dict(operands._numbers) == held
    assert any(again.data_ptr() == t.data_ptr() for t in held.values())
    assert first.tolist() == pytest.approx([0.2, 0.5, 2.0])
    assert operands.per_row(np.float64(1.5), x).tolist() == [1.5] * 3


@needs_triton
@pytest.mark.parametrize("capturing", [False, True])
def test_a_copied_parameter_is_kept_for_the_stream_that_reads_it(capturing, monkeypatch):
    """A cached copy belongs to the stream of the first call; a graph's copy is never freed, and needs no stream."""
    from anymax.kernels.triton import operands

    used = []
    monkeypatch.setattr(operands, "_numbers", {})
    monkeypatch.setattr(operands, "_captured", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: used.append((self.data_ptr(), stream)))
    x = types.SimpleNamespace(device=torch.device("cpu"), is_cuda=True, shape=(3, 5))
    for _ in range(2):
        operands.per_row([[1.2], [1.5], [3.0]], x)
    (kept,) = operands._numbers.values()
    assert used == ([] if capturing else [(kept.data_ptr(), "the stream of cpu")] * 2)
    assert list(operands._captured.values()) == ([kept] if capturing else [])


@needs_triton
@pytest.mark.parametrize(
    ("mapping", "dtype", "n", "masked", "rows", "warps"),
    [
        (am.SparseSoftmax(k=5), torch.bfloat16, 1024, False, 2, 1), (am.SparseSoftmax(k=5), torch.float16, 1024, False, 2, 1),
        (am.SparseSoftmax(k=5), torch.bfloat16, 1024, True, 1, 1), (am.SparseSoftmax(k=5), torch.bfloat16, 1001, False, 1, 1),
        (am.SparseSoftmax(k=5), torch.float32, 1024, False, 1, 1), (am.SparseSoftmax(p=0.9), torch.bfloat16, 1024, False, 1, 1),
        (am.Entmax(1.5), torch.bfloat16, 1024, False, 1, 1), (am.Entmax(1.5), torch.bfloat16, 512, False, 2, 1),
        (am.SparseSoftmax(p=0.9), torch.bfloat16, 8192, False, 2, 8), (am.SparseSoftmax(p=0.9), torch.float32, 3000, False, 2, 4),
        (am.SparseSoftmax(p=0.9), torch.bfloat16, 8192, True, 1, 8), (am.SparseSoftmax(p=0.9), torch.bfloat16, 9000, False, 1, 16),
    ],
)  # fmt: skip
def test_two_rows_are_taken_at_a_time_where_it_pays(mapping, dtype, n, masked, rows, warps, monkeypatch):
    calls, x = recorded(monkeypatch), torch.zeros(8, n, dtype=dtype)
    engine.ENGINE.forward(mapping, x, torch.ones(n, dtype=torch.bool) if masked else None)
    (one,) = calls
    assert (one.options["TILE"].R, one.options["num_warps"], one.grid[0]) == (rows, warps, 8 // rows)


@pytest.mark.whole
@needs_triton
def test_a_call_that_repeats_hands_over_what_triton_does():
    """In a process of its own: the driver stands in for that of a GPU."""
    out = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "driverless.py")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert out.stdout == "the same\n", out.stderr[-2000:]


@pytest.mark.whole
def test_it_costs_nothing_where_it_does_not_serve():
    code = "import sys, anymax, torch; anymax.explain(anymax.Softmax(), torch.zeros(2)); print('triton' in sys.modules)"
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_without_triton(monkeypatch):
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: None)
    engine.load.cache_clear()
    try:
        assert "triton is not installed" in engine.load()
    finally:
        engine.load.cache_clear()
    with contextlib.suppress(RuntimeError), am.use("triton"):
        assert kernels.forced() is engine.ENGINE
