"""Every verb and transform, differentiated in each of the ways that torch has, without a tensor that requires a gradient where it can be:
forward mode, batches of gradients, forward over backward. The oracle is the Jacobian that autograd's backward gives row by row.

And what a backward pass reads is what the forward pass read: a change in between is an error."""

from __future__ import annotations

import types

import pytest

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad
from torch.autograd.functional import jacobian

import anymax as A
from anymax import transforms

# torch's own, inside forward mode
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated:DeprecationWarning")


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, W, Q, K, E = draw(3, 6), draw(7, 6, seed=1), draw(2, 5, 4, seed=2), draw(2, 5, 4, seed=3), draw(8, seed=4)
T, IDS = torch.tensor([0, 4, 2]), torch.tensor([[0, 1, 2]] * 3)
Y, FACTORS = draw(3, 6, seed=5).softmax(-1), draw(7).exp()
ALPHA = torch.tensor(1.4, dtype=torch.float64)
TRANSFORMS = {
    "epsilon_cutoff": A.transforms.epsilon_cutoff(0.1),
    "eta": A.transforms.eta(0.1),
    "minp": A.minp(0.3),
    "dry": A.transforms.dry([0, 2, 4, 0, 2], 0.5),
    "dynamic_temperature": A.transforms.dynamic_temperature(0.5, 2.0, 1.3),
    "mink": A.transforms.mink(1.0),
    "pless": A.transforms.pless(),
    "toph": A.transforms.toph(0.6),
    "topk": A.topk(2),
    "topnsigma": A.transforms.topnsigma(0.7),
    "topp": A.topp(0.6),
    "typical": A.transforms.typical(0.5),
    "xtc": A.transforms.xtc(0.1, 1.0, generator=1),
    "cosine": A.cosine(W),
    "logit_bias": A.transforms.logit_bias({1: 2.0}),
    "mask": A.mask(X > -1),
    "noise": transforms.noise("gumbel", generator=1),
    "normalize": A.normalize("l2"),
    "prior": A.prior(scale=Y),
    "repetition_penalty": A.transforms.repetition_penalty(IDS, 2.0),
    "sequence_bias": A.transforms.sequence_bias([0, 2, 1], {(1, 3): -1.5, (2,): -float("inf")}),
    "softcap": A.transforms.softcap(1.5),
    "scalable": A.transforms.scalable(1.0, 0.1),
    "temperature": A.temperature(0.7),
}
VERBS = {
    "accuracy_loss": lambda x: A.accuracy_loss("softmax", x, T),
    "apply": lambda x: A.apply("square", x, 0, mask=X > -1),
    "attention": lambda q: A.attention(q, K, q, "entmax15", transform=A.topk(3)),
    "attention, softmax": lambda q: A.attention(q, K, q),
    "attention, bias": lambda b: A.attention(Q, K, K, "sparsemax", bias=b[:1]),
    "attention_varlen": lambda q: A.attention_varlen(
        q.reshape(5, 2, 4), K.reshape(5, 2, 4), K.reshape(5, 2, 4), [0, 2, 5], mapping="sparsemax"
    ),
    "budget": lambda x: A.budget(x, 2),
    "cross_entropy": lambda x: A.cross_entropy(x, T, FACTORS[:6]),
    "entmax": lambda x: A.entmax(x, 1.3),
    "entmax, alpha": lambda a: A.entmax(X, a),
    "entmax15": A.entmax15,
    "entmax15_loss": lambda x: A.entmax15_loss(x, Y),
    "entmax_loss": lambda x: A.entmax_loss(x, T, alpha=1.3),
    "entmax_loss, alpha": lambda a: A.entmax_loss(X, T, alpha=a),
    "entropy": lambda p: A.entropy(p.softmax(-1)),
    "fenchel_young": lambda x: A.fenchel_young("sparsemax", x, Y, label_smoothing=0.1),
    "fenchel_young, target": lambda y: A.fenchel_young("entmax15", X, y.softmax(-1)),
    "gumbel_softmax": lambda x: A.gumbel_softmax(x, generator=1),
    "jacobian": lambda x: A.jacobian("softmax", x),
    "jacobian_norm": lambda x: A.inspection.jacobian_norm("entmax15", x),
    "kl": lambda x: A.likelihood.kl("softmax", x, "softmax", Y),
    "linear_attention": lambda q: A.linear_attention(q, K, q, is_causal=True),
    "linear_kl": lambda x: A.linear_kl(x, W, Y, W, beta=0.3),
    "linear_kl, mean": lambda x: A.linear_kl(x, W, Y, W, direction="reverse", reduction="mean"),
    "linear_kl, sparse": lambda x: A.linear_kl(x, W, Y, W, "entmax15", beta=0.6),
    "linear_kl, reference": lambda w: A.linear_kl(X, W, Y, w),
    "linear_log_prob": lambda x: A.linear_log_prob(x, W, T, transform=A.topk(5)),
    "linear_log_prob, weight": lambda w: A.linear_log_prob(X, w, T, "taylor"),
    "linear_log_prob_entropy": lambda x: A.linear_log_prob_entropy(x, W, T, temperature=0.7)[1],
    "linear_log_prob_entropy, weight": lambda w: A.linear_log_prob_entropy(X, w, T, "entmax15")[1],
    "linear_loss": lambda x: A.linear_loss(x, W, T, weight=FACTORS),
    "linear_loss, z_loss": lambda x: A.linear_loss(x, W, T, z_loss=0.5),
    "linear_loss, z_loss of a sparse map": lambda x: A.linear_loss(x, W, T, "entmax15", z_loss=0.5),
    "linear_loss, suppress": lambda x: A.linear_loss(x, W, T, "sparsemax", suppress=0.5),
    "linear_loss, weight": lambda w: A.linear_loss(X, w, T, "sparsemax"),
    "linear_topk_kl": lambda x: A.linear_topk_kl(x, W, IDS, Y[:, :3].log(), tail="one class", direction="reverse"),
    "linear_loss, alpha": lambda a: A.linear_loss(X, W, T, A.Entmax(a)),
    "linear_threshold": lambda x: A.linear.linear_threshold(x, W, "entmax15").tau,
    "linear_threshold, weight": lambda w: A.linear.linear_threshold(X, w).tau,
    "log_apply": lambda x: A.log_apply("sigsoftmax", x),
    "log_prob": lambda x: A.log_prob("softmax", x, IDS[:, 0], transform=A.minp(0.01)),
    "log_prob_entropy": lambda x: torch.stack(A.log_prob_entropy("softmax", x, T)),
    "log_softmax": A.log_softmax,
    "logsumexp": A.logsumexp,
    "logsumexp, temperature": lambda t: A.logsumexp(X, temperature=t),
    "margin_loss": lambda x: A.margin_loss("softmax", x.tanh(), T, margin=0.1, scale=2.0),
    "margin_loss, several centers": lambda x: A.margin_loss(
        "entmax15", torch.cat([x, -x], -1).tanh(), T, margin=0.1, scale=2.0, sub_centers=2
    ),
    "mix": lambda x: A.mix(A.softmax(x), Y, 0.2),
    "multilabel_softmax_loss": lambda x: A.multilabel_softmax_loss(x, Y > 0.15),
    "nll": lambda x: A.nll("softmax", x, Y),
    "normmax": A.normmax,
    "normmax_loss": lambda x: A.normmax_loss(x, T),
    "perturb_max": A.perturb_max,
    "perturb_max_loss": lambda x: A.perturb_max_loss(x, T),
    "segment_apply": lambda e: A.segment_apply("sparsemax", e, lengths=[3, 0, 5]),
    "segment_apply, budget": lambda e: A.segment_apply("budget:k=2", e, lengths=[1, 7]),
    "segment_entropy": lambda e: A.segment_entropy(A.segment_apply("softmax", e, ptr=[0, 3, 8]), ptr=[0, 3, 8]),
    "segment_log_apply": lambda e: A.segment_log_apply("softmax", e, index=[0, 1, 2, 0, 1, 2, 0, 1]),
    "segment_logsumexp": lambda e: A.segment_logsumexp(e, lengths=[3, 5]),
    "segment_loss": lambda e: A.segment_loss("entmax15", e, [1, 4], lengths=[3, 5]),
    "segment_threshold": lambda e: A.segment_threshold("entmax15", e, lengths=[3, 5]).tau,
    "sigsoftmax": A.sigsoftmax,
    "smoothed_nll": lambda x: A.smoothed_nll("sparsemax", x, T, epsilon=0.1),
    "soft_permutation": lambda x: A.soft_permutation(x, "entmax15", 0.7),
    "soft_rank": lambda x: A.soft_rank(x, "kl", 0.4),
    "soft_sort": lambda x: A.soft_sort(x, "kl", 0.4),
    "softmax": A.softmax,
    "sparse_softmax": lambda x: A.sparse_softmax(x, k=2),
    "sparse_softmax_loss": lambda x: A.sparse_softmax_loss(x, T, p=0.7),
    "sparsemax": A.sparsemax,
    "sparsemax_loss": lambda x: A.sparsemax_loss(x, T),
    "stop_gradient_loss": lambda x: A.stop_gradient_loss("softmax", x, T),
    "taylor_softmax": A.taylor_softmax,
    "taylor_softmax_loss": lambda x: A.taylor_softmax_loss(x, T),
    "threshold": lambda x: A.threshold("entmax15", x).tau,
    "threshold, alpha": lambda a: A.threshold(A.Entmax(a), X).tau,
    "topk_kl": lambda x: A.topk_kl(x, IDS, Y[:, :3].log(), tail="one class"),
    **TRANSFORMS,
    "contrastive_loss": lambda x: A.contrastive_loss(x, Y, temperature=0.5),
    "contrastive_loss, sparse": lambda x: A.contrastive_loss(x, Y, mapping="sparsemax"),
    "compose, several": A.compose(A.temperature(0.5), A.topk(5), A.minp(0.3)),
}  # fmt: skip
CONSTANT = {
    "choose", "check_mapping", "compose", "explain", "explain_attention", "facts", "from_config", "gumbel_max", "gumbel_topk",
    "logit_gap", "perturb_argmax", "sample", "segment_sample", "segment_support", "show_config", "speculative_accept", "support",
    "topk_log_prob", "use", "warm_up",
}  # no array that has a derivative  # fmt: skip
ARGUMENTS = {
    "attention": Q, "attention, softmax": Q, "attention, bias": draw(2, 5, 5), "attention_varlen": Q, "linear_attention": Q,
    "linear_kl, reference": W, "linear_log_prob, weight": W, "linear_log_prob_entropy, weight": W, "linear_loss, weight": W,
    "linear_threshold, weight": W,
}  # fmt: skip
every_verb = pytest.mark.parametrize("verb", VERBS)


def argument(verb):
    name = verb.partition(", ")[2]
    learned = ALPHA if name in ("alpha", "temperature") else E if "segment" in verb else X
    return ARGUMENTS.get(verb, learned)


def cleaned(a):
    """-inf of a masked class minus itself is NaN: it has no derivative."""
    return torch.nan_to_num(a)


def test_the_table_has_every_function():
    public = {n: getattr(A, n) for n in A.__all__} | {n: getattr(transforms, n) for n in transforms.__all__}
    public |= {n: getattr(getattr(A, home), n) for n, home in A._MOVED.items()}
    names = {n for n, value in public.items() if isinstance(value, types.FunctionType)}
    assert names == {verb.partition(", ")[0] for verb in VERBS} - {"compose"} | CONSTANT


@every_verb
def test_forward_mode_needs_no_graph(verb):
    f, x = VERBS[verb], argument(verb)
    want, v = jacobian(f, x), draw(*x.shape, seed=9)
    for graph in (True, False):
        with forward_ad.dual_level(), torch.set_grad_enabled(graph):
            tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(x.clone(), v))).tangent
        assert tangent is not None
        wanted = (want * v).flatten(tangent.ndim).sum(-1) if x.ndim else want * v
        torch.testing.assert_close(cleaned(tangent), wanted, rtol=1e-7, atol=1e-8)


RANDOM = ("gumbel_softmax", "noise", "xtc")  # torch.vmap asks for its own way of drawing


@every_verb
def test_a_batch_of_tangents_and_one_of_gradients(verb):
    f, x = VERBS[verb], argument(verb)
    want = jacobian(f, x)
    torch.testing.assert_close(jacobian(f, x, vectorize=True), want, rtol=1e-7, atol=1e-8)
    if verb not in RANDOM:
        got = jacobian(f, x, vectorize=True, strategy="forward-mode")
        torch.testing.assert_close(cleaned(got), want, rtol=1e-7, atol=1e-8)


@every_verb
def test_forward_mode_over_a_recorded_backward(verb):
    x = argument(verb).clone().requires_grad_()
    out = VERBS[verb](x)
    g, v = torch.ones_like(out), draw(*out.shape, seed=9)
    (want,) = torch.autograd.grad(out, x, v, retain_graph=True)
    with forward_ad.dual_level():
        (found,) = torch.autograd.grad(out, x, forward_ad.make_dual(g, v))
        tangent = forward_ad.unpack_dual(found).tangent
    assert tangent is not None
    torch.testing.assert_close(tangent, want, rtol=1e-7, atol=1e-8)


# -- changes between forward and backward ----------------------------------------------------------------------------------------------

KEEP, SHARES = torch.ones(3, 7, dtype=torch.bool), draw(3, 7, seed=6).softmax(-1)
READ = {  # a verb of scores and of a tensor that a backward pass reads, and this tensor
    "apply": (lambda x, a: A.entmax(x, a), ALPHA),
    "log_apply": (lambda x, p: A.log_apply(A.SparseSoftmax(p=p), x), ALPHA / 2),
    "loss": (lambda x, a: A.entmax_loss(x, T, alpha=a), ALPHA),
    "loss of distributions": (lambda x, a: A.entmax_loss(x, Y, alpha=a), ALPHA),
    "segment_apply": (lambda x, a: A.segment_apply(A.Entmax(a), x, lengths=[1, 2]), ALPHA),
    "segment_log_apply": (lambda x, p: A.segment_log_apply(A.SparseSoftmax(p=p), x[:, 0], lengths=[1, 2]), ALPHA / 2),
    "segment_loss": (lambda x, a: A.segment_loss(A.Entmax(a), x[:, 0], torch.tensor([0, 2]), lengths=[1, 2]), ALPHA),
    "linear_loss, softmax's mask": (lambda x, m: A.linear_loss(x, W, T, mask=m), KEEP),
    "linear_loss, softmax's mask with a least": (lambda x, m: A.linear_loss(x, W, T, mask=m, least=0.3), KEEP),
    "linear_loss, mask": (lambda x, m: A.linear_loss(x, W, T, "taylor", mask=m), KEEP),
    "linear_loss, weight": (lambda x, w: A.linear_loss(x, W, T, "normmax", weight=w), FACTORS),
    "linear_loss, target": (lambda x, y: A.linear_loss(x, W, y, "sparsemax"), SHARES),
    "linear_loss, alpha": (lambda x, a: A.linear_loss(x, W, T, A.NormMax(a)), ALPHA),
    "linear_loss, transform": (lambda x, t: A.linear_loss(x, W, T, transform=A.temperature(t)), ALPHA),
}


@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("verb", READ)
def test_a_change_between_forward_and_backward_is_an_error(verb, again):
    f, given = READ[verb]
    x, a = X.clone().requires_grad_(), given.clone()
    out = f(x, a)
    g = draw(*out.shape, seed=9)
    if again or verb != "loss of distributions":  # whose first gradient, p - y, has no alpha
        a.logical_not_() if a.dtype is torch.bool else a.mul_(1.3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out, x, g, create_graph=again)


def test_lengths_that_change_between_forward_and_backward_are_those_of_the_forward_pass():
    lengths = torch.tensor([3, 4])
    grads = []
    for change in (0, 1):
        for again in (False, True):
            q = Q[:, None].clone().requires_grad_()
            out = A.linear_attention(q, K[:, None], K[:, None], lengths=lengths)
            lengths += change
            grads += torch.autograd.grad(out.square().sum(), q, create_graph=again)
            lengths -= change
    for g in grads[1:]:
        torch.testing.assert_close(g, grads[0])


def test_a_learned_transform_of_an_output_layer_has_its_gradient():
    for mapping in ("softmax", "sparsemax", "taylor"):
        for transform in (A.temperature, lambda t: lambda s: s / t):
            t, x = ALPHA.clone().requires_grad_(), X.clone().requires_grad_()
            A.linear_log_prob(x, W, T, mapping, transform=transform(t)).sum().backward()
            u = ALPHA.clone().requires_grad_()
            A.log_prob(mapping, X @ W.T / u, T).sum().backward()
            torch.testing.assert_close(t.grad, u.grad)
