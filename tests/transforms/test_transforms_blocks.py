"""Transforms and samplers of many rows take some at a time: the results are those of all at once, and little memory is held."""

from __future__ import annotations

import math
import sys
import tracemalloc

import numpy as np
import pytest
from engine_state import in_a_child
from kinds import back
from transform_cases import ALL, INF, scores

import anymax as A
from anymax import kernels, sampling
from anymax._array import blocks
from anymax.transforms import (
    dry,
    dynamic_temperature,
    eta,
    logit_bias,
    mink,
    noise,
    normalize,
    pless,
    prior,
    repetition_penalty,
    scalable,
    sequence_bias,
    softcap,
    temperature,
    toph,
    topp,
    typical,
)

ROWS = 60
TOKENS = np.random.default_rng(1).integers(-1, 5, (ROWS, 7))
PER_ROW = np.linspace(0.2, 0.9, ROWS, dtype=np.float32)[:, None]
BY_ROW = {
    "tokens of each row": repetition_penalty(TOKENS, PER_ROW, 0.2, PER_ROW),
    "phrases of each row": dry(TOKENS, PER_ROW, 1.5, 1),
    "sequences of each row": sequence_bias(TOKENS, {(2, 0): -INF, (4,): -1.5}),
    "temperatures": temperature(PER_ROW),
    "noise of rows": noise("gumbel", PER_ROW, generator=list(range(ROWS))),
    "normal noise": noise("normal", PER_ROW, generator=3),
    "top h of rows": toph(PER_ROW),
    "min k of rows": mink(9 * PER_ROW),
}


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("name", [*ALL, *BY_ROW])
def test_rows_in_blocks_are_those_of_all_at_once(name, kind, monkeypatch):
    t = {**ALL, **BY_ROW}[name]
    if kind == "torch":
        torch = pytest.importorskip("torch")
    shape = (20, 3, 5) if name == "temperature[]" or name == "topk[]" else (ROWS, 5)
    x = scores(5).reshape(shape).copy()
    x.reshape(-1, 5)[7, 2], x.reshape(-1, 5)[8, 3] = np.nan, INF
    given = torch.tensor(x) if kind == "torch" else x
    with A.use("reference"):
        want = back(t(given))
        monkeypatch.setattr(blocks, "BLOCK", 22)
        got = back(t(given))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


DRAWS = {
    "gumbel_max": lambda x, g: A.gumbel_max(x, generator=g),
    "three": lambda x, g: A.gumbel_max(x, generator=g, num_samples=3),
    "normal": lambda x, g: sampling.perturb_argmax(x, "normal", generator=g),
    "gumbel_topk": lambda x, g: sampling.gumbel_topk(x, 2, generator=g).index,
    "gumbel_softmax": lambda x, g: A.gumbel_softmax(x, generator=g),
}


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("source", ["seed", "generator", "list", "global"])
@pytest.mark.parametrize("name", DRAWS)
def test_draws_in_blocks_are_those_of_all_at_once(name, source, kind, monkeypatch):
    torch = pytest.importorskip("torch")
    x = scores(5)
    given = torch.tensor(x) if kind == "torch" else x

    def draw():
        torch.manual_seed(3)
        np.random.seed(3)  # noqa: NPY002
        new = torch.Generator().manual_seed if kind == "torch" else np.random.default_rng
        g = {"seed": 4, "generator": new(4), "list": list(range(ROWS)), "global": None}[source]
        return back(DRAWS[name](given, g)), torch.rand(1).item(), np.random.random()  # noqa: NPY002

    want = draw()
    monkeypatch.setattr(blocks, "BLOCK", 22)
    got = draw()
    np.testing.assert_array_equal(got[0], want[0])
    assert got[1:] == want[1:]  # so many numbers were drawn


def test_a_list_of_generators_has_one_for_each_row(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 22)
    with pytest.raises(ValueError, match="got 3 for 60 rows"):
        A.gumbel_max(scores(5), generator=[0, 1, 2])


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_penalties_of_few_classes_in_a_long_row(kind):
    rng, n = np.random.default_rng(0), 20000
    x = rng.normal(0, 3, (4, n)).astype(np.float32)
    x[0, 5], x[1, 7], x[2, 9] = -INF, np.nan, INF
    tokens = np.concatenate([rng.integers(0, n, (4, 30)), np.full((4, 3), -1)], axis=1)
    tokens[0] = -100
    tokens[1:, :4] = tokens[1:, 4:8] = 7
    count = np.stack([np.bincount(row[row >= 0], minlength=n) for row in tokens])
    want = np.where(count > 0, np.where(x > 0, x / 1.5, x * 1.5) - 0.25 - 0.5 * count, x)
    want[x == -INF] = -INF
    given = x
    if kind == "torch":
        torch = pytest.importorskip("torch")
        given = torch.tensor(x, requires_grad=True)
    out = repetition_penalty(tokens, 1.5, 0.25, 0.5)(given)
    np.testing.assert_allclose(back(out.detach() if kind == "torch" else out), want, rtol=1e-6)
    many = np.tile(np.arange(n), (4, 1))  # all classes
    np.testing.assert_allclose(back(repetition_penalty(many, 1.5)(x)), np.where(x > 0, x / 1.5, x * 1.5), rtol=1e-6)
    none = repetition_penalty(np.full((4, 3), -1), 1.5)(x)
    np.testing.assert_array_equal(none, x)
    if kind == "torch":
        (g,) = torch.autograd.grad(out[3].sum(), given)
        slope = np.where(count[3] > 0, np.where(x[3] > 0, 1 / 1.5, 1.5), 1.0)
        np.testing.assert_allclose(g[3].numpy(), slope, rtol=1e-6)


# -- memory, in inputs, with the result ------------------------------------------------------------------------------------------------

VERBS = {
    "toph": lambda x: toph()(x), "toph of a flat row": lambda x: toph()(0 * x), "mink": lambda x: mink()(x), "pless": lambda x: pless()(x),
    "eta": lambda x: eta(0.001)(x), "typical": lambda x: typical()(x), "topp": lambda x: topp(0.9)(x),
    "dynamic_temperature": lambda x: dynamic_temperature(0.5, 1.5)(x), "softcap": lambda x: softcap(9.0)(x),
    "repetition_penalty": lambda x: repetition_penalty([1, 2, 2], 1.2, 0.1, 0.1)(x), "dry": lambda x: dry([1, 2, 1, 2, 1])(x),
    "sequence_bias": lambda x: sequence_bias([1, 2], {(2, 3): 1.0})(x), "logit_bias": lambda x: logit_bias({3: 1.0})(x),
    "prior": lambda x: prior(scale=2.0)(x), "scalable": lambda x: scalable()(x), "temperature 0": lambda x: temperature(0)(x),
    "normalize": lambda x: normalize()(x), "standardize": lambda x: normalize("standard")(x), "noise": lambda x: noise(generator=0)(x),
    "gumbel_max": lambda x: A.gumbel_max(x, generator=0), "gumbel_topk": lambda x: sampling.gumbel_topk(x, 5, generator=0),
    "gumbel_softmax": lambda x: A.gumbel_softmax(x, generator=0),
    "perturb_argmax": lambda x: sampling.perturb_argmax(x, "normal", generator=0),
    "sample of entmax": lambda x: A.sample("entmax15", x, generator=0, return_support=True),
    "sample of a nucleus": lambda x: A.sample("softmax", x, generator=0, transform=topp(0.9), return_support=True),
}  # fmt: skip


@pytest.mark.parametrize("name", VERBS)
def test_memory_is_at_most_three_inputs(name):
    x = np.random.default_rng(0).normal(0, 3, (32, 30000)).astype(np.float32)
    if name.startswith(("sample", "gumbel_topk")) and kernels.compiled("forward", A.Softmax(), x) is None:
        pytest.skip("p in plain operations holds more")
    VERBS[name](x[:2])
    tracemalloc.start()
    try:
        VERBS[name](x)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most <= 3 * x.nbytes, most / x.nbytes


IN_TORCH = """
import gc, torch
import test_transforms_blocks as cases
torch.manual_seed(0)
torch.set_num_threads(1)
x = 3 * torch.randn(32, 60000)

def kilobytes(word):
    return int(next(line for line in open("/proc/self/status") if line.startswith(word)).split()[1]) * 1024

for name, verb in cases.VERBS.items():
    verb(x)
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")
    before = kilobytes("VmRSS")
    result = verb(x)
    print(name, (kilobytes("VmHWM") - before) / x.nbytes, sep=":")
    del result
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.whole
def test_memory_is_at_most_three_inputs_with_torch():
    pytest.importorskip("torch")
    paths = [__file__.rpartition("/")[0], *sys.path]
    code = f"import sys\nsys.path[:] = {paths!r}\n" + IN_TORCH
    shown = in_a_child(code, ANYMAX_KEPT_MB="0", MALLOC_MMAP_THRESHOLD_="131072")
    factors = {name: float(value) for name, value in (line.split(":") for line in shown.splitlines())}
    assert factors.keys() == VERBS.keys()
    assert max(factors.values()) <= 3, factors
    assert not math.isnan(sum(factors.values()))


def test_a_nucleus_of_one_class_by_the_array_code():
    """NumPy calls a column that is read backwards contiguous; torch takes no such strides."""
    torch = pytest.importorskip("torch")
    x = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0))
    x[:, 0] = 100.0
    with A.use("reference"):
        assert (A.topp(0.7)(x) > -INF).sum() == 2
