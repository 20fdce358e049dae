"""Ragged rows by the CPU engine: lengths of every kernel, heads, orders, gradients; an index of any kind; JAX's programs."""

import itertools
import threading

import numpy as np
import pytest
from engine_state import by_threads
from segment_cases import MAPS, by_map

import anymax
from anymax import Segments, Sparsemax, SparseSoftmax, segment_apply
from anymax.kernels import native
from anymax.kernels.engine import SegmentsAlong
from anymax.kernels.ragged import NativeSegments

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(isinstance(native.load(), str), reason="no engine")


def lengths_of(most, count, seed=0):
    """Some of each kernel: a few classes, a batch of one, two and four groups of cells, and beyond."""
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.integers(0, 40, count), rng.integers(33, 200, count), rng.integers(1, most, count // 4)])


def row_by_row(function, lengths, *arrays):
    """function(rows of each segment and head) of arrays [entries, heads], written to where they were."""
    out, ptr = np.empty_like(arrays[0]), np.concatenate([[0], np.cumsum(lengths)])
    for a, b in itertools.pairwise(ptr):
        for h in range(out.shape[1]):
            if b > a:
                out[a:b, h] = function(*(np.ascontiguousarray(x[a:b, h]) for x in arrays))
    return out


@pytest.mark.whole(lambda mapping, mixed, heads: heads == 8 and (mixed or mapping != MAPS[0]))
@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("mixed", [False, True], ids=["in order", "mixed"])
@by_map
def test_p_and_its_gradient_are_those_of_the_rows_to_the_last_bit(mapping, mixed, heads):
    lengths = lengths_of(2500 if heads == 1 else 300, 40)
    entries, rng = int(lengths.sum()), np.random.default_rng(1)
    x, g = (rng.normal(size=(entries, heads)).astype(np.float32) * 2 for _ in range(2))

    def gradient(x, g):
        t = torch.tensor(x, requires_grad=True)
        return torch.autograd.grad(anymax.apply(mapping, t), t, torch.tensor(g))[0].numpy()

    index = np.repeat(np.arange(len(lengths)), lengths)
    index = Segments.of(rng.permutation(index) if mixed else index, num_segments=len(lengths))
    assert (index.order is not None) == mixed
    order = index.order if mixed else np.arange(entries)
    want_p, want = (np.empty_like(x) for _ in range(2))
    want_p[order] = row_by_row(lambda row: anymax.apply(mapping, row), lengths, x[order])
    want[order] = row_by_row(gradient, lengths, x[order], g[order])
    t = torch.tensor(x if heads > 1 else x[:, 0], requires_grad=True)
    p = segment_apply(mapping, t, index=index)
    np.testing.assert_array_equal(p.detach().reshape(entries, heads), want_p)
    (got,) = torch.autograd.grad(p, t, torch.tensor(g).reshape(t.shape))
    np.testing.assert_array_equal(got.reshape(entries, heads), want)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_gradient_of_entries_apart_along_any_axis(axis):
    lengths = lengths_of(50, 20)
    index = np.random.default_rng(2).permutation(np.repeat(np.arange(len(lengths)), lengths))
    x, g = (torch.randn(len(index), 2, 3, generator=torch.Generator().manual_seed(s)) for s in range(2))

    def gradient(x, g, axis):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(segment_apply("sparsemax", x, index=index, axis=axis), x, g)[0]

    got = gradient(x.movedim(0, axis), g.movedim(0, axis), axis)
    torch.testing.assert_close(got.movedim(axis, 0), gradient(x, g, 0), rtol=0, atol=0)


def test_what_is_kept_for_the_gradient_is_p_by_segment():
    index = Segments.of(np.array([1, 0, 1, 1, 0]))
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    p, kept = NativeSegments(SegmentsAlong(index, 0)).forward_saving(Sparsemax(), x)
    np.testing.assert_array_equal(kept, p[index.order])
    p, kept = NativeSegments(SegmentsAlong(Segments.of(ptr=index.ptr), 0)).forward_saving(Sparsemax(), x)
    assert kept is None


@pytest.mark.parametrize("heads", [1, 4, 8])
@pytest.mark.parametrize("wrong", [-1, 5])
def test_an_order_with_an_entry_out_of_range(heads, wrong):
    x, order = np.zeros((5, heads), np.float32), np.array([0, 1, wrong, 3, 4])
    with pytest.raises(Exception, match="their order name each entry"):
        NativeSegments(SegmentsAlong(Segments(np.array([0, 2, 5]), order, 5), 0)).forward(Sparsemax(), x)


# -- an index ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False], ids=["num_segments", "by the index"])
@pytest.mark.parametrize("size", [1, 7, 1000, 300_000])
def test_bounds_of_an_index_in_order(size, known):
    rng = np.random.default_rng(size)
    for gaps in (1, 3, 40):  # few segments and many, and many without entries
        index = np.sort(rng.integers(0, max(size // 50, 1) * gaps, size))
        count = int(index[-1]) + 4 if known else None
        for make in (np.asarray, torch.tensor):
            got = Segments.of(make(index), num_segments=count)
            assert got.order is None
            np.testing.assert_array_equal(got.ptr, np.searchsorted(index, np.arange(got.num_segments + 1)))
            assert got.num_segments == (count if known else index[-1] + 1)


@pytest.mark.parametrize("size", [2, 9, 300_000])
def test_order_of_an_index_that_is_not(size):
    rng = np.random.default_rng(size)
    for index in (rng.integers(0, 100, size), np.sort(rng.integers(0, 100, size))):
        index[size // 2 :] = index[size // 2 :][::-1]
        index[-1], index[0] = 0, 3
        got = Segments.of(index)
        np.testing.assert_array_equal(got.order, np.argsort(index, kind="stable"))
        np.testing.assert_array_equal(got.lengths, np.bincount(index))


@pytest.mark.parametrize("count", [1, 100, 5000, 300_000])
def test_threads_that_share_a_sort_change_nothing(count):
    index = np.random.default_rng(count).integers(0, count, 300_001)
    index[:2] = count - 1, 0
    for made in by_threads((1, 2, 3), lambda: Segments.of(index, num_segments=count + 1)):
        if made.order is not None:
            np.testing.assert_array_equal(made.order, np.argsort(index, kind="stable"))
        np.testing.assert_array_equal(made.lengths, np.bincount(index, minlength=count + 1))


@pytest.mark.parametrize(
    "lengths", [np.ones(300_000, int), 1 + np.arange(40_000) % 9, [300_000, 1, 0, 270_000, 5000, 2049]]
)
def test_threads_that_share_segments_change_nothing(lengths):
    x = np.random.default_rng(0).normal(size=int(np.sum(lengths))).astype(np.float32)
    for mapping in (Sparsemax(), anymax.Softmax()):
        found = by_threads((1, 2, 3), lambda mapping=mapping: segment_apply(mapping, x, lengths=np.asarray(lengths)))
        assert all(np.array_equal(found[0], other) for other in found[1:])
        ends = np.cumsum(lengths)
        np.testing.assert_array_equal(found[0][ends[-3] : ends[-2]], anymax.apply(mapping, x[ends[-3] : ends[-2]]))


@pytest.mark.parametrize("size", [10, 300_000])
@pytest.mark.parametrize("at", ["first", "middle", "last"])
def test_an_entry_out_of_range_is_named(size, at):
    where = {"first": 0, "middle": size // 2, "last": size - 1}[at]
    for index in (np.arange(size) // 7, np.arange(size)[::-1] // 7):
        for value in (-1, size):
            wrong = index.copy()
            wrong[where] = value
            with pytest.raises(IndexError, match=rf"index\[{where}\] is {value}; allowed is from 0 to {size - 1}"):
                Segments.of(wrong, num_segments=size)
        wrong[where] = -2
        with pytest.raises(IndexError, match=rf"index\[{where}\] is -2"):
            Segments.of(wrong)


def test_an_index_of_negatives_alone():
    with pytest.raises(IndexError, match=r"index\[0\] is -1; allowed is none"):
        Segments.of(np.full(20, -1))
    with pytest.raises(IndexError, match=r"index\[0\] is 5; allowed is none"):
        Segments.of(np.full(20, 5), num_segments=0)


def test_an_index_that_another_thread_writes_to():
    rng, over = np.random.default_rng(0), threading.Event()
    fine, strange = rng.integers(0, 5000, 200_000), rng.integers(0, 2**40, 200_000) * rng.choice([-1, 0, 1], 200_000)
    other, index, refused = rng.permutation(fine), fine.copy(), 0

    def write():
        while not over.is_set():
            for numbers in (other, fine, strange, fine):
                np.copyto(index, numbers)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(60):
            try:
                rows = Segments.of(index, num_segments=5000)
            except (IndexError, RuntimeError):
                refused += 1
                continue
            if rows.order is not None:
                np.testing.assert_array_equal(np.bincount(rows.order, minlength=index.size), 1)
    finally:
        over.set()
        writer.join()
    assert refused


# -- a value of k for each segment -------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [None, "reference"])
@pytest.mark.parametrize("kind", ["numpy", "torch", pytest.param("jax", marks=pytest.mark.whole)])
def test_k_of_each_segment(kind, engine):
    if kind == "jax":
        make = pytest.importorskip("jax").numpy.asarray
    else:
        make = {"numpy": np.asarray, "torch": torch.tensor}[kind]
    lengths, k = [4, 0, 6, 1, 3], np.array([9, 1, 4, 5, 3])
    x = np.random.default_rng(0).normal(size=(14, 2)).astype(np.float32)
    x[6:8] = x[5]  # ties: by their place
    with anymax.use(engine) if engine else np.errstate():
        p = np.asarray(segment_apply(SparseSoftmax(k=make(k)[:, None]), make(x), lengths=lengths))
        log_p = np.asarray(anymax.segment_log_apply(SparseSoftmax(k=make(k)[:, None]), make(x), lengths=lengths))
        target = make(np.array([[0, 0], [-100, -100], [4, 5], [10, 10], [11, 12]]))
        loss = anymax.segment_loss(
            SparseSoftmax(k=make(k)[:, None]), make(x), target, lengths=lengths, reduction="none"
        )
    ptr = np.concatenate([[0], np.cumsum(lengths)])
    for s, (a, b) in enumerate(itertools.pairwise(ptr)):
        for h in range(2):
            row = np.ascontiguousarray(x[a:b, h])
            if b > a:
                want = SparseSoftmax(k=int(k[s]))
                np.testing.assert_allclose(p[a:b, h], anymax.apply(want, row), rtol=2e-6)
                np.testing.assert_allclose(log_p[a:b, h], anymax.log_apply(want, row), rtol=2e-5, atol=1e-6)
                right = [0, None, h, 0, h][s]
                own = anymax.sparse_softmax_loss(row, right, k=int(k[s]))
                np.testing.assert_allclose(np.asarray(loss)[s, h], own, rtol=2e-5, atol=1e-6)
