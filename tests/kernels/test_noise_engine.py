"""The engine's random numbers are those of torch, and its Gumbel noise is that of the formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
from engine_state import instructions

import anymax
from anymax import sampling
from anymax._random.generators import uniform
from anymax._random.noises import draw
from anymax.kernels import native, noise

if isinstance(native.load(), str):
    pytest.skip(f"no compiled library: {native.load()}", allow_module_level=True)


@pytest.fixture(params=native.load().isas())
def isa(request):
    with instructions(request.param):
        yield request.param


@pytest.mark.usefixtures("isa")
def test_the_numbers_and_the_state_are_torchs():
    torch = pytest.importorskip("torch")
    ours, theirs = (torch.Generator().manual_seed(3) for _ in range(2))
    for size in (1, 5, 617, 1, 624, 623, 2000, 5000):
        assert torch.equal(noise._drawn((size,), ours), torch.rand(size, generator=theirs))
        assert torch.equal(ours.get_state(), theirs.get_state())
        assert torch.equal(torch.randn(3, generator=ours), torch.randn(3, generator=theirs))


def test_the_global_generator_and_a_seed_go_on_as_with_torch_alone(monkeypatch):
    torch = pytest.importorskip("torch")
    like = torch.zeros(1)
    engines = []
    for shape in ((3, 2000), (2, 3)):
        torch.manual_seed(5)
        engines.append((uniform(shape, like, None), torch.rand(4), uniform(shape, like, 7)))
    monkeypatch.setattr(noise, "_MANY", math.inf)
    for shape, before in zip(((3, 2000), (2, 3)), engines):
        torch.manual_seed(5)
        for a, b in zip(before, (uniform(shape, like, None), torch.rand(4), uniform(shape, like, 7))):
            assert torch.equal(a, b)


def test_other_generators_are_left_to_torch(monkeypatch):
    """Another thread may draw from them meanwhile, and torch's lock of a generator can't be held from outside."""
    torch = pytest.importorskip("torch")
    asked = []
    monkeypatch.setattr(noise.native, "engine_for", lambda like: asked.append(like) or native.load())
    x = torch.zeros(3, 5000)
    assert noise._draws_as_torch()
    for generator, drawn in ((None, 0), (torch.Generator(), 0), (7, 1), ([1, 2, 3], 3)):
        asked.clear()
        uniform((3, 5000), x, generator)
        assert len(asked) == drawn
    asked.clear()
    draw("gumbel", (3, 5000), x, 7)
    assert len(asked) > 1


def test_a_torch_whose_generator_is_another_draws_itself(monkeypatch):
    torch = pytest.importorskip("torch")
    assert noise._draws_as_torch()
    noise._draws_as_torch.cache_clear()
    rand = torch.rand
    monkeypatch.setattr(torch, "rand", lambda *a, **k: rand(*a, **k) * 0.5)
    try:
        assert not noise._draws_as_torch()
        assert noise.torch_uniform((10000,), torch.Generator()) is None
    finally:
        noise._draws_as_torch.cache_clear()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("size", [1, 15, 16, 17, 1024, 1025, 5000])
def test_gumbel_noise_is_that_of_the_formula(size):
    pairs = np.random.default_rng(0).random((size, 2), dtype=np.float32)
    pairs[0] = 0.0
    pairs[-1] = 1.0 - 2.0**-24
    u = np.clip((pairs[:, 0] + np.float32(2.0**-24) * pairs[:, 1]).astype(float), 2.0**-48, 1.0 - 2.0**-24)
    got = noise.gumbel(pairs)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, -np.log(-np.log1p(-u)), rtol=3e-7, atol=3e-7)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_draws_of_the_engine_and_of_plain_operations(kind):
    """The same numbers of the generator: noises differ by roundings, and draws where two sums are that near."""
    x = np.random.default_rng(1).normal(0, 3, (40, 700)).astype(np.float32)
    x = x if kind == "numpy" else pytest.importorskip("torch").tensor(x)
    drawn = [
        anymax.gumbel_max(x, generator=2),
        sampling.gumbel_topk(x, 5, generator=2).index,
        draw("gumbel", (9,), x, 4),
    ]
    with anymax.use("reference"):
        plain = [
            anymax.gumbel_max(x, generator=2),
            sampling.gumbel_topk(x, 5, generator=2).index,
            draw("gumbel", (9,), x, 4),
        ]
    for a, b in zip(drawn[:2], plain[:2]):
        assert np.mean(np.asarray(a) != np.asarray(b)) < 0.01
    np.testing.assert_allclose(drawn[2], plain[2], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_row_with_its_own_generator_does_not_depend_on_the_others(kind):
    x = np.random.default_rng(1).normal(0, 1, (6, 5000)).astype(np.float32)
    x = x if kind == "numpy" else pytest.importorskip("torch").tensor(x)
    together = anymax.gumbel_max(x, generator=[1, 2, 3, 4, 5, 6])
    assert [int(anymax.gumbel_max(x[i], generator=i + 1)) for i in range(6)] == [int(k) for k in together]


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
def test_nothing_is_drawn_while_torch_traces():
    """A number that the engine drew would be a constant of the trace."""
    torch = pytest.importorskip("torch")
    traced = torch.jit.trace(lambda x: draw("gumbel", (5000,), x, None), torch.zeros(2), check_trace=False)
    assert not torch.equal(traced(torch.zeros(2)), traced(torch.zeros(2)))
