"""`nn.Categorical` beside torch's own distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
from distribution_cases import INF, MAPS, every_map, scores
from kinds import back, generator

import anymax as A
from anymax import Entmax, Softmax, Sparsemax, SparseSoftmax


def categorical(name="softmax", shape=(3, 2, 5), seed=0, **options):
    torch = pytest.importorskip("torch")
    x = torch.tensor(np.random.default_rng(seed).normal(0.3, 0.7, shape))
    return torch, x, A.nn.Categorical(MAPS[name], x, **options)


@every_map
def test_categorical_is_consistent(name):
    """What torch's own tests ask of a distribution: shapes, logits, probs, log_prob of the support, entropy, perplexity, mode."""
    torch, _, d = categorical(name)
    assert isinstance(d, torch.distributions.Categorical)
    assert d.batch_shape == (3, 2)
    assert d.event_shape == ()
    assert d.param_shape == (3, 2, 5)
    torch.testing.assert_close(d.probs.sum(-1), torch.ones(3, 2, dtype=torch.double))
    torch.testing.assert_close(d.logits.exp(), d.probs)
    values = d.enumerate_support()
    assert values.shape == (5, 3, 2)
    assert d.enumerate_support(expand=False).shape == (5, 1, 1)
    torch.testing.assert_close(d.log_prob(values).movedim(0, -1), d.logits)
    torch.testing.assert_close(d.log_prob(d.enumerate_support(expand=False)).movedim(0, -1), d.logits)
    torch.testing.assert_close(d.entropy(), torch.special.entr(d.probs).sum(-1))
    torch.testing.assert_close(d.perplexity(), d.entropy().exp())
    assert torch.equal(d.mode, d.probs.argmax(-1))
    assert d.mean.isnan().all()
    assert d.variance.shape == (3, 2)
    assert d.support.check(values).all()
    for shape in ((), (4,), (2, 3)):
        drawn = d.sample(shape)
        assert drawn.shape == (*shape, 3, 2)
        assert drawn.dtype == torch.int64
        assert d.log_prob(drawn).shape == (*shape, 3, 2)
        assert (d.log_prob(drawn) > -INF).all()
    assert "Categorical(scores: torch.Size([3, 2, 5]))" in repr(d)


@pytest.mark.parametrize("name", ["softmax", "sparsemax", "taylor"])
def test_categorical_draws_with_its_probabilities(name):
    torch, _, d = categorical(name, (2, 5))
    torch.manual_seed(0)
    drawn = d.sample((20_000,))
    for row in range(2):
        counts, p = np.bincount(drawn[:, row], minlength=5), back(d.probs[row])
        assert counts[p == 0].sum() == 0
        assert scipy.stats.chisquare(counts[p > 0], 20_000 * p[p > 0]).pvalue > 1e-4
    torch.manual_seed(0)
    assert torch.equal(d.sample((20_000,)), drawn)
    a, b = (d.sample((50,), generator=generator("torch", 3)) for _ in range(2))
    assert torch.equal(a, b)


def test_categorical_expands_without_copies():
    torch, x, d = categorical("sparsemax", (3, 1, 5))
    plain = d.expand((4, 3, 2))
    assert plain.batch_shape == (4, 3, 2)
    assert plain.scores.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    torch.testing.assert_close(plain.probs, d.probs.expand(4, 3, 2, 5))
    made = d.expand((4, 3, 2))  # now that the probabilities are there
    torch.testing.assert_close(made.entropy(), d.entropy().expand(4, 3, 2))
    values = made.sample()
    torch.testing.assert_close(made.log_prob(values), d.log_prob(values))
    one_a_row = A.nn.Categorical(Entmax(torch.tensor([[1.2], [1.5], [2.0]])), x[:, 0])
    torch.testing.assert_close(one_a_row.expand((2, 3)).probs[1], one_a_row.probs)
    mixed = torch.distributions.MixtureSameFamily(
        A.nn.Categorical(Sparsemax(), x[:, 0]), torch.distributions.Normal(torch.zeros(3, 5), torch.ones(3, 5))
    )
    assert mixed.sample().shape == (3,)
    assert mixed.log_prob(torch.zeros(3)).isfinite().all()


def test_categorical_log_prob_broadcasts_as_torchs():
    torch, x, d = categorical("softmax", (3, 1, 5))
    ref = torch.distributions.Categorical(logits=x)
    for shape in ((), (1,), (2,), (3, 2), (3, 1), (7, 3, 2), (4, 1, 1, 1)):
        value = torch.randint(5, shape, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(d.log_prob(value), ref.log_prob(value))


class MaskedByLargeNumbers:
    """sb3-contrib's MaskableCategorical: logits of -1e8 where masked, and an entropy that leaves these out."""

    def __init__(self, logits, masks):
        torch = pytest.importorskip("torch")
        self.masks = masks
        self.base = torch.distributions.Categorical(
            logits=torch.where(masks, logits, torch.tensor(-1e8, dtype=logits.dtype))
        )

    def entropy(self):
        p_log_p = self.base.logits * self.base.probs
        return -p_log_p.where(self.masks, p_log_p.new_zeros(())).sum(-1)


def test_masks_as_sb3_contrib_has_them():
    torch = pytest.importorskip("torch")
    x = torch.tensor(scores(6, 5))
    keep = torch.tensor(np.random.default_rng(0).uniform(size=(6, 5)) < 0.6)
    keep[:, 2], keep[1] = True, True
    ours, theirs = A.nn.Categorical(Softmax(), x, mask=keep), MaskedByLargeNumbers(x, keep)
    torch.testing.assert_close(ours.probs, theirs.base.probs)
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    drawn = ours.sample((500,))
    assert keep.gather(-1, drawn.movedim(0, -1)).all()
    torch.testing.assert_close(ours.log_prob(drawn), theirs.base.log_prob(drawn))
    assert (ours.log_prob((~keep).long().argmax(-1))[~keep.all(-1)] == -INF).all()
    gradients = []
    for make in (lambda x: A.nn.Categorical(Softmax(), x, mask=keep), lambda x: MaskedByLargeNumbers(x, keep)):
        leaf = x.clone().requires_grad_()
        made = make(leaf)
        log_prob = made.log_prob if hasattr(made, "log_prob") else made.base.log_prob
        gradients.append(torch.autograd.grad(log_prob(drawn[0]).sum() + made.entropy().sum(), leaf)[0])
    torch.testing.assert_close(*gradients)
    assert (gradients[0][~keep] == 0).all()


def test_a_row_that_keeps_no_class():
    torch = pytest.importorskip("torch")
    x = torch.zeros(2, 3, requires_grad=True)
    d = A.nn.Categorical(Softmax(), x, mask=torch.tensor([[False] * 3, [True] * 3]), validate_args=True)
    assert d.sample((4,))[:, 0].tolist() == [-1] * 4
    assert d.mode.tolist() == [-1, 0]
    assert d.probs[0].tolist() == [0.0] * 3
    assert d.entropy()[0] == 0
    value = d.log_prob(torch.tensor([-1, 1]))
    assert value.tolist() == [0.0, pytest.approx(-math.log(3))]
    assert d.log_prob(torch.tensor([1, 1]))[0] == -INF
    (value.sum() + d.entropy().sum()).backward()
    assert (x.grad[0] == 0).all()
    with pytest.raises(ValueError, match="within the support"):
        d.log_prob(torch.tensor([0, -1]))


@pytest.mark.parametrize("name", ["softmax", "sparsemax"])
def test_a_number_that_is_no_class_is_never_a_probability(name):
    """Without validation too: an error as torch's own, NaN where no value can be asked for; -1 is no class, and says so."""
    torch, x, _ = categorical(name)
    d = A.nn.Categorical(MAPS[name], x, validate_args=False)
    for stray in (5, -2):
        value = torch.zeros(3, 2, dtype=torch.long)
        value[1, 0] = stray
        with pytest.raises(IndexError, match=f"value: class indices must be from 0 to 4, or -1 for none, .*{stray}"):
            d.log_prob(value)
        unseen = torch.func.vmap(lambda v: d.log_prob(v))(value[None])[0]
        assert unseen.isnan().nonzero().tolist() == [[1, 0]]
    assert d.log_prob(torch.tensor(-1)).tolist() == [[0.0] * 2] * 3


@pytest.mark.parametrize("lead", [(0,), (2, 0)])
def test_a_batch_without_rows(lead):
    torch = pytest.importorskip("torch")
    d = A.nn.Categorical(Sparsemax(), torch.zeros(*lead, 5), validate_args=True)
    assert d.sample((3,)).shape == d.log_prob(d.sample((3,))).shape == (3, *lead)
    assert d.entropy().shape == d.mode.shape == torch.distributions.kl_divergence(d, d).shape == lead


def test_categorical_takes_transforms():
    torch, x, _ = categorical()
    d = A.nn.Categorical(Softmax(), x, transform=A.compose(A.temperature(0.5), A.topk(2)))
    assert ((d.probs > 0).sum(-1) == 2).all()
    torch.testing.assert_close(d.logits.amax(-1), A.log_apply(SparseSoftmax(k=2), x / 0.5).amax(-1))
    torch.testing.assert_close(A.nn.Categorical(Softmax(), logits=x).logits, A.nn.Categorical(Softmax(), x).logits)
    strange = torch.full_like(x, math.nan)
    assert A.nn.Categorical(Softmax(), strange, validate_args=False).probs.isnan().all()


def test_divergences_of_torch():
    torch, x, _ = categorical(shape=(6, 5))
    y = torch.tensor(scores(6, 5, 3))
    kl = torch.distributions.kl_divergence
    soft = torch.distributions.Categorical
    ours = [A.nn.Categorical(m, s) for m in (Softmax(), Sparsemax()) for s in (x, y)]
    torch.testing.assert_close(kl(ours[0], ours[1]), kl(soft(logits=x), soft(logits=y)))
    torch.testing.assert_close(kl(ours[2], soft(logits=y)), kl(soft(probs=ours[2].probs), soft(logits=y)))
    back_again = kl(soft(logits=x), ours[3])
    torch.testing.assert_close(back_again, kl(soft(logits=x), soft(probs=ours[3].probs)))
    assert (back_again == INF).any()
    sparse = soft(probs=ours[3].probs)
    torch.testing.assert_close(kl(ours[2], ours[3]), kl(ours[2], sparse))
    torch.testing.assert_close(kl(ours[3], ours[3]), torch.zeros(6, dtype=torch.double), atol=1e-12, rtol=0)
    wide = kl(A.nn.Categorical(Softmax(), x[:, None]), A.nn.Categorical(Softmax(), y))
    assert wide.shape == (6, 6)
    with pytest.raises(ValueError, match="5 and 4 classes"):
        kl(ours[0], A.nn.Categorical(Softmax(), y[:, :4]))


@pytest.mark.whole(lambda mapping: mapping != Sparsemax())
@pytest.mark.parametrize("mapping", [Softmax(), Sparsemax(), Entmax(1.5)], ids=repr)
def test_a_policy_learns(mapping):
    """REINFORCE with an entropy bonus on masked actions: it finds the best that is allowed, and no number is NaN."""
    torch = pytest.importorskip("torch")
    scores_, reward = torch.zeros(1, 4, requires_grad=True), torch.tensor([0.0, 0.5, 1.0, 2.0])
    keep, source = torch.tensor([True, True, True, False]), generator("torch", 0)
    step = torch.optim.Adam([scores_], lr=0.05)
    for _ in range(200):
        policy = A.nn.Categorical(mapping, scores_, mask=keep)
        action = policy.sample((16,), generator=source)
        gain = reward[action] - reward[action].mean()
        loss = -(gain * policy.log_prob(action)).mean() - 0.01 * policy.entropy().mean()
        step.zero_grad()
        loss.backward()
        step.step()
    assert policy.mode.item() == 2
    assert policy.probs[0, 2] > 0.9
    assert scores_.grad.isfinite().all()
