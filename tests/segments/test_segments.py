"""Ragged rows: p against a loop over the segments by the verb on rows, and how a caller names the segments."""

import itertools

import numpy as np
import pytest
from refusals import each, refuses
from segment_cases import (
    COUNT,
    ENTRIES,
    JAX,
    LENGTHS,
    PTR,
    SHUFFLED,
    SORTED,
    by_few,
    by_map,
    by_segment,
    compiled,
    its_own_warnings,
    scores,
)

import anymax
from anymax import (
    Entmax,
    Segments,
    Sparsemax,
    segment_apply,
    segment_entropy,
    segment_log_apply,
    segment_logsumexp,
    segment_loss,
    segment_sample,
    segment_threshold,
)
from anymax.kernels import native

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
jnp = jax.numpy

pytestmark = its_own_warnings


# -- p, and the ways to say which entries belong together ----------------------------------------------------------------------------------


@compiled
@pytest.mark.whole(lambda heads, dtype: dtype == "float32" and heads != (2, 3))
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [((), "float32"), ((8,), "float32"), ((2, 3), "float32"), ((2, 3), "float64"), ((8,), "float16")],
    ids=str,
)
@by_map
def test_p_is_that_of_the_rows_to_the_last_bit(mapping, heads, dtype):
    x = scores(*heads, dtype=dtype)
    want = by_segment(x, SHUFFLED, lambda row: anymax.apply(mapping, row))
    got = segment_apply(mapping, x, index=SHUFFLED, num_segments=COUNT)
    np.testing.assert_array_equal(got, want)
    assert got.dtype == x.dtype
    want = by_segment(x, SORTED, lambda row: anymax.apply(mapping, row))
    for given in ({"index": SORTED}, {"ptr": PTR}, {"lengths": LENGTHS}, {"index": Segments.of(ptr=PTR)}):
        np.testing.assert_array_equal(segment_apply(mapping, x, **given), want)


@compiled
@pytest.mark.parametrize("long", [2049, 5000, 270_000])
@by_few
def test_long_segments(mapping, long):
    lengths = [3, long, 0, 2048, 7]
    ptr = np.concatenate([[0], np.cumsum(lengths)])
    x = np.random.default_rng(0).normal(size=(sum(lengths), 2)).astype(np.float32)
    order = np.random.default_rng(1).permutation(len(x))
    index = np.empty(len(x), int)
    index[order] = np.repeat(np.arange(5), lengths)
    mixed = np.empty_like(x)
    mixed[Segments.of(index).order] = x
    p, q = segment_apply(mapping, x, ptr=ptr), segment_apply(mapping, mixed, index=index)
    np.testing.assert_array_equal(q[Segments.of(index).order], p)
    tau, shuffled = segment_threshold(mapping, x, ptr=ptr).tau, segment_threshold(mapping, mixed, index=index).tau
    np.testing.assert_array_equal(shuffled, tau)
    for s, (a, b) in enumerate(itertools.pairwise(ptr)):
        for h in range(2):
            row = x[a:b, h].copy()
            np.testing.assert_array_equal(p[a:b, h], anymax.apply(mapping, row) if b > a else row)
            assert tau[s, h] == (anymax.threshold(mapping, row).tau if b > a else -np.inf)


@compiled
def test_results_do_not_depend_on_threads():
    lengths = np.random.default_rng(0).pareto(0.8, 4000).astype(int)
    x = np.random.default_rng(1).normal(size=int(lengths.sum())).astype(np.float32)
    index = np.random.default_rng(2).permutation(np.repeat(np.arange(4000), lengths))
    before = native.get_num_threads()
    try:
        made = []
        for count in (1, 2, 5):
            native.set_num_threads(count)
            made.append((segment_apply("entmax15", x, lengths=lengths), segment_apply("sparsemax", x, index=index)))
    finally:
        native.set_num_threads(before)
    for sorted_, shuffled in made[1:]:
        np.testing.assert_array_equal(sorted_, made[0][0])
        np.testing.assert_array_equal(shuffled, made[0][1])


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_the_axis_of_the_entries(axis):
    x = np.moveaxis(scores(2, 3), 0, axis)
    want = np.moveaxis(segment_apply("sparsemax", np.ascontiguousarray(np.moveaxis(x, axis, 0)), ptr=PTR), 0, axis)
    np.testing.assert_array_equal(segment_apply("sparsemax", x, ptr=PTR, axis=axis), want)
    np.testing.assert_array_equal(segment_apply("sparsemax", x, ptr=PTR, dim=axis), want)
    tau, _ = segment_threshold("sparsemax", x, ptr=PTR, axis=axis)
    assert tau.shape[axis] == COUNT


def test_arrays_that_lie_apart():
    wide = scores(6)
    for x in (wide[:, ::2], wide[::-1], np.asfortranarray(wide), wide[:, 2]):
        np.testing.assert_array_equal(
            segment_apply("softmax", x, ptr=PTR), segment_apply("softmax", np.ascontiguousarray(x), ptr=PTR)
        )


@pytest.mark.parametrize("engine", [pytest.param("native", marks=compiled), "reference"])
def test_nan_and_infinity_stay_in_their_segment(engine):
    x = scores(2)
    x[PTR[2], 0], x[PTR[4], 1], x[PTR[0] : PTR[1], 0] = np.nan, np.inf, -np.inf
    with anymax.use(engine):
        p = segment_apply("sparsemax", x, ptr=PTR)
    lost = np.isnan(p)
    assert lost[PTR[2] : PTR[3], 0].all()
    assert lost[PTR[4] : PTR[5], 1].all()
    assert lost.sum() == LENGTHS[2] + LENGTHS[4]
    assert (p[PTR[0] : PTR[1], 0] == 0).all()


def test_no_entries_and_no_segments():
    for given in ({"ptr": [0]}, {"lengths": []}, {"lengths": [0, 0]}, {"index": [], "num_segments": 3}):
        assert segment_apply("softmax", np.zeros((0, 2), np.float32), **given).shape == (0, 2)
    assert segment_logsumexp(np.zeros((0, 2)), lengths=[0, 0]).tolist() == [[-np.inf] * 2] * 2
    assert segment_entropy(np.zeros(0), lengths=[0]).tolist() == [0.0]
    assert segment_sample("softmax", np.zeros(0), lengths=[0], generator=0).tolist() == [-1]
    assert segment_loss("softmax", np.zeros(0), [-100], lengths=[0]) == 0.0


NO_ENTRIES = {
    "apply": lambda m, x: segment_apply(m, x, lengths=[0, 0]),
    "apply, no segments": lambda m, x: segment_apply(m, x, lengths=[]),
    "log_apply": lambda m, x: segment_log_apply(m, x, lengths=[0, 0]),
    "loss": lambda m, x: segment_loss(m, x, torch.tensor([-100, -100]), lengths=[0, 0]),
    "loss of distributions": lambda m, x: segment_loss(m, x, torch.zeros(0), lengths=[0, 0]),
}


@pytest.mark.parametrize("verb", NO_ENTRIES)
def test_no_entries_are_a_part_of_the_graph(verb):
    for mapping in (Sparsemax(), Entmax(torch.tensor(1.5, requires_grad=True))):
        x = torch.zeros(0, requires_grad=True)
        NO_ENTRIES[verb](mapping, x).sum().backward()
        assert x.grad is not None
        for parameter in mapping.params().values():
            NO_ENTRIES[verb](mapping, torch.zeros(0)).sum().backward()
            assert parameter.grad == 0


def test_no_entries_have_a_graph_in_what_has_one_number_a_segment():
    for verb in (segment_entropy, segment_logsumexp):
        for lengths in ([0, 0], []):
            x = torch.zeros(0, requires_grad=True)
            verb(x, lengths=lengths).sum().backward()
            assert x.grad is not None
    t = torch.tensor(2.0, requires_grad=True)
    segment_logsumexp(torch.zeros(0), temperature=t, lengths=[0]).nan_to_num(neginf=0.0).sum().backward()
    assert t.grad == 0


@pytest.mark.parametrize("verb", [segment_apply, segment_log_apply, segment_loss, segment_logsumexp])
def test_entries_without_heads(verb):
    given = {segment_loss: ("softmax", torch.zeros(2, 0, dtype=torch.int64)), segment_logsumexp: ()}.get(
        verb, ("softmax",)
    )
    x = torch.zeros(4, 0, requires_grad=True)
    out = verb(*given[:1], x, *given[1:], lengths=[1, 3])
    out.sum().backward()
    assert x.grad.shape == (4, 0)


# -- what the packages ask of their own softmax --------------------------------------------------------------------------------------------

INF = np.inf
PACKAGES = {  # name: (scores, what names the segments, the scores of each)
    "torch_geometric, index": ([1.0] * 4, {"index": [0, 0, 1, 2]}, {0: [1.0, 1.0], 1: [1.0], 2: [1.0]}),
    "torch_geometric, ptr": ([1.0] * 4, {"ptr": [0, 2, 3, 4]}, {0: [1.0, 1.0], 1: [1.0], 2: [1.0]}),
    "torch_geometric, num_segments": ([1.0] * 4, {"index": [0, 0, 1, 2], "num_segments": 5}, {0: [1.0, 1.0], 1: [1.0], 2: [1.0]}),
    "torch_scatter": (
        [0.2, 0, 0.2, -2.1, 3.2, 7, -1, -INF], {"index": [0, 1, 0, 1, 1, 2, 4, 4]},
        {0: [0.2, 0.2], 1: [0, -2.1, 3.2], 2: [7], 4: [-1, -INF]},
    ),
    "jraph": ([0.0, 1, 2, 3, 4, 5], {"index": [0, 0, 1, 1, 1, 3], "num_segments": 4}, {0: [0.0, 1], 1: [2.0, 3, 4], 3: [5.0]}),
    "dgl": ([1.0] * 5, {"index": [1, 2, 1, 0, 2], "num_segments": 3}, {0: [1.0], 1: [1.0, 1.0], 2: [1.0, 1.0]}),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["numpy", "torch", JAX])
@pytest.mark.parametrize("package", PACKAGES)
def test_the_cases_of_other_packages(package, kind):
    make = {"numpy": np.asarray, "torch": torch.tensor, "jax": jnp.asarray}[kind]
    x, given, parts = PACKAGES[package]
    index = np.repeat(np.arange(3), np.diff(given["ptr"])) if "ptr" in given else np.array(given["index"])
    given = {k: make(v) if k != "num_segments" else v for k, v in given.items()}
    p, log_p = (verb("softmax", make(np.array(x)), **given) for verb in (segment_apply, segment_log_apply))
    for s, part in parts.items():
        np.testing.assert_allclose(np.asarray(p)[index == s], anymax.softmax(part), rtol=1e-6)
        np.testing.assert_allclose(np.asarray(log_p)[index == s], anymax.log_softmax(part), rtol=1e-6, atol=1e-6)


# -- segments, and bad input -------------------------------------------------------------------------------------------------------------


def test_what_segments_are():
    rows = Segments.of(SHUFFLED, num_segments=COUNT)
    np.testing.assert_array_equal(rows.ptr, PTR)
    np.testing.assert_array_equal(rows.lengths, LENGTHS)
    np.testing.assert_array_equal(rows.order, np.argsort(SHUFFLED, kind="stable"))
    np.testing.assert_array_equal(rows.order[rows.inverse], np.arange(ENTRIES))
    np.testing.assert_array_equal(rows.index, SHUFFLED)
    assert Segments.of(rows) is rows
    assert Segments.of(SORTED).order is None
    assert repr(rows) == f"Segments(num_segments={COUNT}, num_entries={ENTRIES})"
    given = PTR.copy()
    rows = Segments.of(ptr=given)
    given[1] = 9
    np.testing.assert_array_equal(rows.ptr, PTR)


def test_an_index_is_sorted_without_an_engine_too(monkeypatch):
    monkeypatch.setattr(native, "load", lambda: "none")
    for index in (SHUFFLED, SORTED):
        rows = Segments.of(index, num_segments=COUNT)
        np.testing.assert_array_equal(rows.ptr, PTR)
        np.testing.assert_array_equal(
            np.arange(ENTRIES) if rows.order is None else rows.order, np.argsort(index, kind="stable")
        )
    with pytest.raises(IndexError, match=r"index\[1\] is 7"):
        Segments.of([0, 7], num_segments=7)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({}, TypeError, "exactly one of index="),
        ({"index": [0], "ptr": [0, 1]}, TypeError, "got index= and ptr="),
        ({"index": [0, 3, 1], "num_segments": 3}, IndexError, r"index\[1\] is 3; .* 0 to 2 \(num_segments=3 is too small\)"),
        ({"index": [0, 0, -2]}, IndexError, r"index\[2\] is -2"),
        ({"index": [0.0, 1.0, 1.0]}, TypeError, "index must be integers, got float64"),
        ({"index": [[0, 0, 1]]}, ValueError, "one axis"),
        ({"index": [0, 0]}, ValueError, "2 entries in all, and x of shape .* has 3"),
        ({"ptr": [0, 2, 1, 3]}, ValueError, r"ptr\[2\] is 1, below ptr\[1\], 2"),
        ({"ptr": [1, 3]}, ValueError, r"ptr\[0\] is 1"),
        ({"ptr": []}, ValueError, "ptr is empty"),
        ({"ptr": [0, 2]}, ValueError, "2 entries in all"),
        ({"lengths": [4, -1]}, ValueError, r"lengths\[1\] is -1"),
        ({"lengths": [1, 1]}, ValueError, "2 entries in all, and x of shape"),
        ({"lengths": [1, 2], "num_segments": 1}, ValueError, "num_segments=1, and lengths has 2"),
        ({"index": [0, 0, 1], "num_segments": -1}, TypeError, "from 0 on"),
        ({"index": [0, 0, 1], "num_segments": 2.0}, TypeError, "from 0 on"),
        ({"index": [0, 2**40, 1]}, ValueError, r"index\[1\] is 1099511627776, and at most"),
        ({"index": [0, 0, 1], "num_segments": 2**62}, ValueError, r"at most 2147483647 segments are supported; number them"),
        ({"lengths": [2**62, 2**62, 3]}, ValueError, r"the lengths sum to 9.223e\+18, beyond 64 bits"),
        ({"index": [0, 0, 1], "axis": 2}, ValueError, "axis 2 is out of range"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("make", [np.asarray, torch.tensor], ids=["numpy", "torch"])
def test_bad_segments(given, error, said, make):
    x = make([1.0, 2.0, 3.0])
    with pytest.raises(error, match=said):
        segment_apply("softmax", x, **given)


X = [1.0, 2.0, 3.0]
WRONG = {
    "an entry of another segment": (
        lambda: segment_loss("softmax", X, [1, 0], lengths=[2, 1]), IndexError,
        r"target\[1\] is 0, for segment 1: it is an entry of another segment",
    ),
    "no entry": (
        lambda: segment_loss("softmax", X, [3, 2], lengths=[2, 1]), IndexError, r"target\[0\] is 3, for segment 0: the entries are 0 to 2",
    ),
    "too few": (lambda: segment_loss("softmax", X, [0], lengths=[2, 1]), ValueError, "expected an entry for each segment"),
    "no loss": (lambda: segment_loss("taylor", X, [0, 2], lengths=[2, 1]), TypeError, "no Fenchel-Young loss"),
    "alpha": (lambda: segment_apply(Entmax(np.full(3, 1.5)), X, lengths=[2, 1]), ValueError, "does not broadcast"),
    "mask": (lambda: segment_apply("softmax", X, lengths=[2, 1], mask=[True] * 3), TypeError, "-inf"),
    "samples": (lambda: segment_sample("softmax", X, lengths=[2, 1], num_samples=1.5), TypeError, "num_samples"),
    "kind": (lambda: segment_entropy(torch.zeros(0), "rank", lengths=[0]), ValueError, "kind must be"),
}  # fmt: skip


@each(WRONG)
def test_bad_targets_and_options(call, error, words):
    refuses(call, error, words)
