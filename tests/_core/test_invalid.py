"""`invalid=`: what samplers and the like give where a row has no class."""

import math

import numpy as np
import pytest
from kinds import KINDS, back, every_kind, generator, jax_in_the_whole_battery

import anymax as am
from anymax import sampling

INF, NAN = math.inf, math.nan
X = np.array([[0.0, 2.0, 1.0], [1.0, NAN, 5.0], [-INF, -INF, -INF], [0.0, INF, 1.0], [-INF, 3.0, 2.0]])
BEST = [1, 1, 0, 1, 1]  # as argmax says
LOST = [False, True, True, True, False]
GIVE = {
    "sample": lambda x, g, **o: am.sample("softmax", x, generator=g, **o),
    "sample, entmax": lambda x, g, **o: am.sample("entmax15", x, generator=g, **o),
    "sample, transform": lambda x, g, **o: am.sample("softmax", x, transform=am.topk(2), generator=g, **o),
    "sample, own function": lambda x, g, **o: am.sample("softmax", x, transform=lambda s: 2 * s, generator=g, **o),
    "sample, log p": lambda x, g, **o: am.sample("softmax", x, generator=g, return_log_prob=True, **o).index,
    "gumbel_max": lambda x, g, **o: am.gumbel_max(x, generator=g, **o),
    "perturb_argmax": lambda x, g, **o: sampling.perturb_argmax(x, generator=g, **o),
    "top": lambda x, g, **o: sampling.top("softmax", x, 2, **o).index,
    "topk_log_prob": lambda x, g, **o: sampling.topk_log_prob("softmax", x, 2, **o).index,
    "gumbel_topk": lambda x, g, **o: sampling.gumbel_topk(x, 2, generator=g, **o).index,
}


@jax_in_the_whole_battery
@every_kind
@pytest.mark.parametrize("verb", GIVE)
def test_rows_without_a_class(verb, kind):
    x, give = KINDS[kind](X), GIVE[verb]
    usual = back(give(x, generator(kind)))
    got = back(give(x, generator(kind), invalid="argmax"))
    first = usual if usual.ndim == 1 else usual[:, 0]
    assert (first < 0).tolist() == LOST
    want = np.where(usual < 0, np.array(BEST) if usual.ndim == 1 else np.array(BEST)[:, None], usual)
    np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match="row 1, in C order, has no class to give"):
        give(x, generator(kind), invalid="raise")
    sound = KINDS[kind](X[[0, 4]])
    np.testing.assert_array_equal(
        back(give(sound, generator(kind), invalid="raise")), back(give(sound, generator(kind)))
    )
    with pytest.raises(ValueError, match="invalid must be None, which gives -1, 'argmax' or 'raise', got 'first'"):
        give(x, generator(kind), invalid="first")


@jax_in_the_whole_battery
@every_kind
def test_axes_and_many_samples(kind):
    x = KINDS[kind](X.T.copy())
    for verb in (lambda **o: am.sample("softmax", x, **o), lambda **o: am.gumbel_max(x, **o)):
        got = back(verb(generator=generator(kind), axis=0, num_samples=4, invalid="argmax"))
        assert got.shape == (4, 5)
        assert got[:, LOST].tolist() == [[1, 0, 1]] * 4
        assert (got >= 0).all()
    best = sampling.top("softmax", x, 2, axis=0, invalid="argmax")
    assert back(best.index).shape == (2, 5)
    assert (back(best.index) >= 0).all()
    assert np.isnan(back(best.p)[:, 1]).all()


def test_masks_and_fewer_classes():
    got = am.sample("softmax", [3.0, 5.0, 4.0], mask=[False, False, False], generator=0, invalid="argmax")
    assert got.tolist() == 0
    best = sampling.top("sparsemax", [[3.0, 1.0, 0.0], [0.0, 0.0, 9.0]], 2, invalid="argmax")
    assert best.index.tolist() == [[0, 0], [2, 2]]
    assert best.p.tolist() == [[1.0, 0.0], [1.0, 0.0]]
    with pytest.raises(ValueError, match="row 0, in C order"):
        sampling.top("sparsemax", [[3.0, 1.0, 0.0]], 2, invalid="raise")
    with pytest.raises(ValueError, match="index= gives them"):
        sampling.top("softmax", [[3.0, 1.0, 0.0]], index=[[0, -1]], invalid="argmax")


def test_a_draw_of_no_class_is_no_lost_row():
    """A sink, or a map that leaves some of the sum, draws none of the classes: -1, whatever `invalid` says."""
    x = np.array([[0.0, 2.0, 1.0], [NAN, 2.0, 1.0]])
    got = am.sample(am.Sink("softmax", 2.0), x, generator=0, num_samples=50, invalid="argmax")
    assert set(got[:, 0].tolist()) == {-1, 0, 1, 2}
    assert (got[:, 1] == 0).all()
    assert -1 in am.sample(am.Sink("softmax", 2.0), x[:1], generator=0, num_samples=50, invalid="raise")


def test_speculative():
    draft = np.full((3, 2, 4), 0.25)
    target = np.full((3, 3, 4), 0.25)
    target[1, 2], target[2, 0] = NAN, 0.0
    tokens = np.array([[0, 1], [2, 3], [1, 1]])
    usual = sampling.speculative_accept(draft, target, tokens, generator=[0, 1, 2])
    assert usual.count.tolist() == [2, 2, 0]
    assert usual.token[1:].tolist() == [-1, -1]
    got = sampling.speculative_accept(draft, target, tokens, generator=[0, 1, 2], invalid="argmax")
    assert got.token.tolist() == [usual.token[0], 0, 0]
    with pytest.raises(ValueError, match="speculative_accept: row 1"):
        sampling.speculative_accept(draft, target, tokens, generator=0, invalid="raise")
    # nothing follows a draft that is accepted whole, and this is no lost row
    got = sampling.speculative_accept(draft[:1], target[:1, :2], tokens[:1], generator=0, invalid="raise")
    assert got.token.tolist() == [-1]
    lost = sampling.recovered_tokens(draft, target[:, :2], tokens, generator=0)
    assert lost[2].tolist()[0] == -1
    assert sampling.recovered_tokens(draft, target[:, :2], tokens, generator=0, invalid="argmax")[2, 0] == 0
    with pytest.raises(ValueError, match="recovered_tokens: row 4"):
        sampling.recovered_tokens(draft, target[:, :2], tokens, generator=0, invalid="raise")


@pytest.mark.whole
def test_under_jit():
    jax = pytest.importorskip("jax")
    x, key = jax.numpy.asarray(X), jax.random.key(0)
    got = jax.jit(lambda x: am.sample("softmax", x, generator=key, invalid="argmax"))(x)
    np.testing.assert_array_equal(got, am.sample("softmax", x, generator=key, invalid="argmax"))
    with pytest.raises(
        TypeError, match=r"sample: invalid='raise' reads the classes, which is not possible where they are traced"
    ):
        jax.jit(lambda x: am.sample("softmax", x, generator=key, invalid="raise"))(x)


@pytest.mark.whole
def test_under_torch_compile_and_vmap():
    torch = pytest.importorskip("torch")
    x = torch.tensor(X)
    compiled = torch.compile(
        lambda x: am.sample("softmax", x, generator=0, invalid="argmax"), backend="aot_eager", fullgraph=False
    )
    assert torch.equal(compiled(x), am.sample("softmax", x, generator=0, invalid="argmax"))
    best = torch.func.vmap(lambda row: sampling.top("softmax", row, 2, invalid="argmax").index)(x)
    assert torch.equal(best, sampling.top("softmax", x, 2, invalid="argmax").index)
    with pytest.raises(TypeError, match="top: invalid='raise' reads the classes"):
        torch.func.vmap(lambda row: sampling.top("softmax", row, 2, invalid="raise").index)(x)
