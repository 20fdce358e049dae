"""The cases of ragged rows: segments of unequal length, beside the packages that have a softmax for them, and dense rows of ours."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

import anymax

from .cases import OURS, Bar, Case, Workload, calls, differs

DENSE = "dense rows of ours, as many entries"
PYG, SCATTER, NESTED, JRAPH = "torch_geometric", "torch.scatter_reduce", "torch nested", "jraph under jit"
NOTES = ("bounds", "index", "shuffled index")
BESIDE_JRAPH = "bounds, beside JAX"
NEEDS = ("torch", "torch_geometric")
LENGTHS = ("Poisson", "power law", "ones")


class Ragged(NamedTuple):
    x: Any  # [entries] or [entries, heads]
    index: Any
    ptr: Any
    dense: Any  # rows of the mean length, as many entries


@functools.lru_cache(maxsize=1)
def data(shape: tuple[int, ...], lengths: str, shuffled: bool) -> Ragged:
    """`shape` is (entries, segments, heads), the entries about as many."""
    import torch

    rng = np.random.default_rng(0)
    entries, count, heads = shape
    if lengths == "power law":
        each = np.minimum(1 + rng.pareto(0.9, count), 100_000).astype(int)  # from 1 to 100,000
    else:
        each = np.ones(count, int) if lengths == "ones" else rng.poisson(entries / count, count)
    index = np.repeat(np.arange(count), each)
    if shuffled:
        index = rng.permutation(index)
    generator = torch.Generator().manual_seed(0)
    size = (len(index), heads) if heads > 1 else (len(index),)
    mean = max(1, len(index) // count)
    dense = torch.randn((len(index) * heads // mean, mean), generator=generator)
    ptr = torch.from_numpy(np.concatenate([[0], np.cumsum(each)]))
    return Ragged(torch.randn(size, generator=generator), torch.from_numpy(index), ptr, dense)


def scatter_softmax(x: Any, index: Any, count: int) -> Any:
    """Softmax of segments as torch composes it."""
    import torch

    wide = index.view(-1, *[1] * (x.ndim - 1)).expand_as(x)
    high = x.new_full((count, *x.shape[1:]), -torch.inf).scatter_reduce(0, wide, x.detach(), "amax")
    e = (x - high.index_select(0, index)).exp()
    z = x.new_zeros((count, *x.shape[1:])).scatter_add(0, wide, e)
    return e / z.index_select(0, index)


def peers(case: Case, d: Ragged, x: Any) -> dict[str, Callable[[], Any]]:
    """Softmax of the same segments by others; those of another map have the same to do, and less."""
    import torch

    count, out = d.ptr.numel() - 1, dict[str, Callable[[], Any]]()
    if case.note == BESIDE_JRAPH:
        return {JRAPH: on_jax(d)}
    from torch_geometric.utils import softmax

    sorted_ = case.note.startswith("bounds")
    out[PYG] = (lambda: softmax(x, ptr=d.ptr)) if sorted_ else lambda: softmax(x, d.index, num_nodes=count)
    out[SCATTER] = lambda: scatter_softmax(x, d.index, count)
    if NESTED in [bar.peer for bar in case.bars]:  # it pads to the longest: 24 GB where lengths follow a power law
        nested = torch.nested.nested_tensor_from_jagged(x if x.ndim > 1 else x[:, None], d.ptr)
        out[NESTED] = lambda: torch.softmax(nested, 1)
    return out


def ours_on_jax(mapping: Any, d: Ragged) -> Callable[[], Any]:
    """A call outside of jit, which runs a program that was compiled for its mapping and shape."""
    import jax

    x, rows = jax.numpy.asarray(d.x.detach().numpy()), anymax.Segments.of(ptr=d.ptr)
    return lambda: anymax.segment_apply(mapping, x, index=rows).block_until_ready()


def on_jax(d: Ragged) -> Callable[[], Any]:
    import jax
    import jraph

    x, index = jax.numpy.asarray(d.x.detach().numpy()), jax.numpy.asarray(d.index.numpy())
    count = d.ptr.numel() - 1
    softmax = jax.jit(lambda x, index: jraph.segment_softmax(x, index, count))
    return lambda: softmax(x, index).block_until_ready()


def run(case: Case) -> Workload:
    import torch

    both = case.note.endswith("both ways")
    d = data(case.shape, case.distribution, case.note.startswith("shuffled"))
    _, mapping = calls(case.map, 3)
    x, dense = (a.clone().requires_grad_() if both else a for a in (d.x, d.dense))
    g, dense_g = (torch.randn(a.shape, generator=torch.Generator().manual_seed(1)) for a in (x, dense))
    given: dict[str, Any] = {"ptr": d.ptr} if case.note.startswith("bounds") else {"index": d.index}
    if case.note.startswith("shuffled"):
        given = {"index": anymax.Segments.of(d.index)}

    def both_ways(function: Callable[[], Any], x: Any, g: Any) -> Callable[[], Any]:
        return (lambda: torch.autograd.grad(function(), x, g)[0]) if both else function

    contenders: dict[str, Callable[[], Any]] = {
        OURS: both_ways(lambda: anymax.segment_apply(mapping, x, **given), x, g),
        DENSE: both_ways(lambda: anymax.apply(mapping, dense), dense, dense_g),
        **{name: both_ways(f, x, g) for name, f in peers(case, d, x).items() if not both or name in (PYG, SCATTER)},
    }

    if case.note == BESIDE_JRAPH:
        contenders[OURS] = ours_on_jax(mapping, d)

    def check() -> str | None:
        """Against the reference; and softmax against torch's composition."""
        got = contenders[OURS]()
        with anymax.use("reference"):
            want = contenders[OURS]()
        if case.map == "softmax" and SCATTER in contenders and not both:
            return differs(got, want, case.dtype) or differs(got, contenders[SCATTER](), case.dtype)
        return differs(got, want, case.dtype)

    return Workload(contenders, check, "native", 2 * x.numel() * x.element_size())


def ragged_cases() -> Iterator[Case]:
    for shape in ((636_000, 10_000, 1), (1_000_000, 100_000, 8)):
        for name in ("softmax", "sparsemax", "entmax15"):
            for note in NOTES:
                for way in ("", ", both ways"):
                    limit = 0.3 if note.startswith("shuffled") else 0.15
                    dense = Bar(DENSE, at_most=None if note.startswith("shuffled") else 2.0)
                    others = (Bar(SCATTER), *([Bar(NESTED)] if note + way == "bounds" else []))
                    bars = (Bar(PYG, at_most=limit), dense, *others)
                    yield Case("ragged", name, shape, run, bars, LENGTHS[0], note=note + way, needs=NEEDS)
        needs = ("torch", "jax", "jraph")
        yield Case("ragged", "softmax", shape, run, (Bar(JRAPH),), LENGTHS[0], note=BESIDE_JRAPH, needs=needs)
    for name in ("softmax", "sparsemax", "entmax15"):
        for way in ("", ", both ways"):
            bars = (Bar(PYG, at_most=0.15), Bar(DENSE, at_most=2.0))
            yield Case("ragged", name, (1_300_000, 60_000, 1), run, bars, LENGTHS[1], note="bounds" + way, needs=NEEDS)
    yield Case(
        "ragged",
        "sparsemax",
        (1_000_000, 1_000_000, 1),
        run,
        (Bar(DENSE, at_most=2.0),),
        LENGTHS[2],
        note="bounds",
        needs=NEEDS,
    )
