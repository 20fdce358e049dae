"""What the functions answer to options and names of other libraries, misplaced arguments and likely mistakes: one sentence each."""

import numpy as np
import pytest
from refusals import each, one_sentence, said
from test_first_guesses import X, Y

import anymax as am
from anymax import Entmax, Ranks, Ratio, Softmax, Sparsemax, SparseSoftmax, soft_permutation, soft_rank, soft_sort

KEEP = X > 0
NO_MAP = {  # what is no name of a map -> what is said of it
    "sparsmax": "there is no map 'sparsmax' (did you mean 'sparsemax'?); the maps are softmax, sparsemax, entmax",
    "nothing": "there is no map 'nothing'; the maps are softmax",
    "entmax1.3": "there is no map 'entmax1.3' (write 'entmax:alpha=1.3')",
    "entmax_1.3": "there is no map 'entmax_1.3' (write 'entmax:alpha=1.3')",
    "entmax(1.5)": "there is no map 'entmax(1.5)' (write 'entmax:alpha=1.5')",
    "Entmax(alpha=1.5)": "there is no map 'Entmax(alpha=1.5)' (write 'entmax:alpha=1.5')",
    "SparseSoftmax(p=0.9)": "(write 'sparse_softmax:p=0.9')",
    "sparsemax2": "there is no map 'sparsemax2' (did you mean 'sparsemax'?)",
    "top-k": "(write 'sparse_softmax:k=50')",
    "nucleus": "there is no map 'nucleus' (write 'sparse_softmax:p=0.9')",
    "argmax": "(write anymax.softmax(anymax.temperature(0)(x)))",
    "entmax:alhpa=2": "entmax has no parameter 'alhpa'; it takes alpha",
    "entmax:2": "'entmax:2': write entmax:alpha=2",
    "entmax:2,3": "write NAME:parameter=value, as in entmax:alpha=1.2",
    "sink:sparsemax": "write sink:mapping=sparsemax",
    "sink:0.5": "write sink:score=0.5",
    "sparsemax:2": "write NAME:parameter=value",
    "entmax15:alpha=2": "entmax15 is entmax:alpha=1.5 and takes no parameters",
    "sparse_softmax": "sparse_softmax needs a parameter, as in sparse_softmax:k=2",
    "ratio": "ratio needs a function; choose one of square, sigmoid, relu, stablemax, or give anymax.Ratio(u, du)",
    "entmax:alpha=1.3,alpha=1.4": "alpha is given twice; give it once",
    "sink:mapping=softmax,mapping=sparsemax": "mapping is given twice; give it once",
}
WRONG = (
    said(ValueError, *((lambda name=name: am.apply(name, X), words) for name, words in NO_MAP.items()))
    | said(
        TypeError,
        # of attention
        (lambda: am.attention(X, X, X, attn_mask=KEEP, mask=KEEP), "attn_mask= is another name of mask, which is given too"),
        (lambda: am.attention(X, X, X, key=X), "key= is another name of k, which is given too"),
        (lambda: am.attention(X, X, X, causal=True), "attention has no option 'causal' (say is_causal=)"),
        (lambda: am.attention(X, X, X, softmax_scale=1.0), "(say scale=)"),
        (lambda: am.attention(X, X, X, dropout=0.1), "no option 'dropout' (say dropout_p=)"),
        (lambda: am.attention(X, X, X, p=0.1), "no option 'p' (say dropout_p=)"),
        (lambda: am.attention(X, X, X, attn_bias=X), "(say bias=)"),
        (lambda: am.attention(X, X, X, window_size=(3, 0)), "(say window=(left, right)"),
        (lambda: am.attention(X, X, X, key_padding_mask=Y), "(say lengths=, or mask= of the shape"),
        (lambda: am.attention(X, X, X, temperature=2), "(say scale=1 / (T * sqrt(features))"),
        (lambda: am.attention(X, X, X, alpha=1.3), "(it belongs to the map, as in mapping=anymax.Entmax(alpha=1.3))"),
        (lambda: am.attention(X, X, X, need_weight=True), "(did you mean need_weights=?)"),
        (lambda: am.explain_attention(X, X, X, causal=True), "explain_attention has no option 'causal' (say is_causal=)"),
        (lambda: am.linear_attention(X, X, X, causal=True), "linear_attention has no option 'causal' (say is_causal=)"),
        (lambda: am.attention(X, X, X, transform=Sparsemax()), "transform must be a function…a map is given as mapping="),
        # of maps, and of verbs for all of them
        (lambda: am.attention(X, X, X, top_k=3), "attention has no option 'top_k' (say transform=anymax.topk(50))"),
        (lambda: am.sampling.gumbel_softmax(X, T=2), "gumbel_softmax has no option 'T' (say temperature=)"),
        (lambda: am.softmax(input=X), "softmax has no option 'input' (the scores come first, without a name)"),
        (lambda: am.entmax(logits=X), "entmax has no option 'logits' (the scores come first, without a name)"),
        (lambda: am.softmax(), "the scores are missing"),
        (lambda: am.Sparsemax()(input=X), "sparsemax has no option 'input' (the scores come first, without a name)"),
        (lambda: am.Sparsemax()(), "the scores are missing (None): give an array"),
        (lambda: am.entmax(alpha=1.5), "the scores are missing (None)"),
        (lambda: am.budget(k=2), "the scores are missing (None): give an array or a list"),
        (lambda: am.budget(X), "budget: k is missing; write budget(x, k)"),
        (lambda: am.budget(logits=X, k=2), "budget has no option 'logits' (the scores come first, without a name)"),
        (lambda: am.softmax(X + 1j), "got complex128; take their real part first"),
        (lambda: am.softmax(np.array(["a"])), "got U1; give numbers, not words"),
        (lambda: am.entmax(X, alpha=[1.2, 1.5]), "for one in each row give an array such as np.array([[1.2], [1.5]])"),
        (lambda: am.softmax(X, labels=Y), "softmax has no option 'labels'; its options are axis"),
        (lambda: am.softmax(X, T=2), "softmax has no option 'T' (divide the scores by it)"),
        (lambda: am.softmax(X, attn_mask=KEEP), "softmax has no option 'attn_mask' (say mask=, True = keep)"),
        (lambda: am.softmax(X, where=KEEP), "softmax has no option 'where' (say mask="),
        (lambda: am.softmax(X, temperatur=2), "softmax has no option 'temperatur'"),
        (lambda: am.softmax(X, temperature=3), "softmax has no option 'temperature' (divide the scores by it"),
        (lambda: am.softmax(X, top_k=3), "put the scores through anymax.topk(50) first"),
        (lambda: am.softmax(X, Y), "to group scores by an index, write anymax.segment_apply(mapping, x, index=...)"),
        (lambda: am.softmax(X, dtype=np.int64), "floating-point dtype"),
        (lambda: am.log_softmax(X, tau=2.0), "log_softmax has no option 'tau' (divide the scores by it); its options are axis"),
        (lambda: am.sparsemax(X, msk=KEEP), "(did you mean mask=?)"),
        (lambda: am.sparsemax(X, k=3), "sparsemax has no option 'k' (leave it out"),
        (lambda: am.sparsemax(X, alpha=2), "(only entmax, bounded and normmax have it, as in anymax.Entmax(alpha=1.3))"),
        (lambda: am.entmax(X, 1.5, n_iter=50), "entmax has no option 'n_iter' (leave it out, since the answer is exact)"),
        (lambda: am.sparse_softmax(X, top_p=0.9), "sparse_softmax has no option 'top_p' (say p=)"),
        (lambda: am.sparse_softmax(X, top_k=3), "sparse_softmax has no option 'top_k' (say k="),
        (lambda: am.normmax(X, 2.0, nonsense=1), "normmax has no option 'nonsense'; its options are axis, dim, mask, out, dtype"),
        (lambda: Sparsemax()(X, where=KEEP), "sparsemax has no option 'where' (say mask=, True = keep)"),
        (lambda: am.apply(Softmax(), X, temperature=2), "apply has no option 'temperature' (divide the scores by it)"),
        (lambda: am.apply(Softmax(), X, attn_mask=KEEP), "apply has no option 'attn_mask' (say mask=, True = keep)"),
        (lambda: am.log_apply(Softmax(), X, temperature=2), "log_apply has no option 'temperature' (divide the scores by it)"),
        (lambda: am.logsumexp(X, tau=2), "logsumexp has no option 'tau' (say temperature=)"),
        (lambda: am.logsumexp(input=X), "logsumexp has no option 'input' (the scores come first, without a name)"),
        (lambda: am.threshold(Sparsemax(), X, where=KEEP), "threshold has no option 'where' (say mask=, True = keep)"),
        (lambda: am.jacobian(Sparsemax(), X, wrt=0), "jacobian has no option 'wrt'; its options are"),
        (lambda: am.entropy(X, where=KEEP), "entropy has no option 'where'"),
        (lambda: am.support("sparsemax", X), "got 2; for scores write anymax.support(anymax.apply(mapping, x))"),
        # of losses
        (lambda: am.cross_entropy(X, Y, size_average=True), "no option 'size_average' (say reduction='mean' or reduction='sum')"),
        (lambda: am.cross_entropy(X, Y, reduce=False), "(say reduction='none' for one loss a sample)"),
        (lambda: am.sparsemax_loss(y_true=Y, y_pred=X), "sparsemax_loss has no option 'y_true' (say target=)"),
        (lambda: am.sparsemax_loss(y_pred=X, target=Y), "no option 'y_pred' (the scores come first, without a name)"),
        (lambda: am.cross_entropy(X, Y, from_logits=True), "no option 'from_logits' (leave it out, since the scores are logits)"),
        (lambda: am.linear_loss(X, X, Y, lse_square_scale=1e-4), "no option 'lse_square_scale' (say z_loss=)"),
        (lambda: am.cross_entropy(X, Y, smoothing=0.1), "(say label_smoothing=)"),
        (lambda: am.cross_entropy(X, Y, weights=[1, 1, 1]), "(say weight=, one factor for each class)"),
        (lambda: am.cross_entropy(X, Y, labels=Y), "labels= is another name of target, which is given too"),
        (lambda: am.cross_entropy(X, Y, None, 2), "cross_entropy takes 3 without a name (scores, target, weight), got 4"),
        (lambda: am.sparsemax_loss(X, Y, temperature=2), "sparsemax_loss has no option 'temperature' (divide the scores by it)"),
        (lambda: am.sparsemax_loss(X, Y, k=3), "sparsemax_loss has no option 'k' (leave it out, since any number of"),
        (lambda: am.fenchel_young("entmax", X, Y, alpha=1.3), "(it belongs to the map, as in anymax.Entmax(alpha=1.3))"),
        (lambda: am.entmax_loss(X, Y, alfa=1.3), "entmax_loss has no option 'alfa' (did you mean alpha=?); its options are weight, alpha"),
        (lambda: am.multilabel_softmax_loss(X, KEEP, pos_weight=2), "no option 'pos_weight' (say weight=, one factor for each class)"),
        (lambda: am.margin_loss(Sparsemax(), X / 9, Y, margin=Sparsemax()), "margin: expected a number"),
        (lambda: am.segment_loss("softmax", X, Y, weight=[1], ptr=[0]), "(weigh the losses that reduction='none' gives)"),
        (lambda: am.segment_apply("softmax", X, [0, 1]), "takes 2 without a name (mapping, x), got 3; name the others: index=, ptr="),
        (lambda: am.linear_loss("sparsemax", X, X, Y), "got 'sparsemax'; the mapping comes after the target"),
        (lambda: am.linear_loss(Sparsemax(), X, X, Y), "got Sparsemax(); the mapping comes after the target"),
        # of samplers and transforms
        (lambda: am.sample("softmax", X, seed=0), "(say generator=, which takes an integer too)"),
        (lambda: am.sample("softmax", X, generator=0, size=3), "no option 'size' (say num_samples=)"),
        (lambda: am.sample("softmax", X, n=3), "no option 'n' (say num_samples="),
        (lambda: am.sample("softmax", X, top_p=0.5), "write transform=anymax.topp(0.9)"),
        (lambda: am.sample("softmax", X, temperature=0.7), "write transform=anymax.temperature(0.7)"),
        (lambda: am.sample("softmax", X, min_p=0.1), "write transform=anymax.minp(0.1)"),
        (lambda: am.sample("softmax", X, num_samples=2, replacement=False), "anymax.sampling.gumbel_topk draws"),
        (lambda: am.sample(am.topp(0.9), X), "got topp(p=0.9), a transform, which goes before a map: say transform="),
        (lambda: am.transforms.repetition_penalty(1.2), "got float64; they come first, as in repetition_penalty(tokens, 1.2)"),
        (lambda: am.transforms.from_config(top_p=0.9), "no option 'top_p' (write from_config({\"top_p\": ...}))"),
        (lambda: am.transforms.from_config(do_sample=True), "(write from_config({\"do_sample\": ...}))"),
        (lambda: am.sample("softmax", X, transform=am.sparsemax), "got the function sparsemax; give its map, by name: 'sparsemax'"),
        (lambda: am.sample("softmax", X, transform=am.topp), "got the function topp, which makes a transform; call it: topp(...)"),
        (lambda: am.compose(am.topk), "got the function topk, which makes a transform; call it: topk(...)"),
        (lambda: am.attention(X, X, X, transform=am.softmax), "got the function softmax; give its map, by name: 'softmax'"),
        (lambda: am.gumbel_softmax(X, generator=0, eps=1e-9), "(leave it out)"),
        (lambda: am.compose(Sparsemax()), "compose: expected functions scores -> scores…a map comes after the transforms"),
        (lambda: am.compose([am.temperature(0.7), am.topk(2)]), "give them one by one, as in compose(*transforms)"),
        (lambda: am.temperature(X, 0.7), "got 2; it makes a function of scores, as in temperature(...)(x)"),
        (lambda: am.mask(X, KEEP), "got 2; it makes a function of scores, as in mask(...)(x)"),
        (lambda: am.topk(X, 2), "got float64[2, 3]; topk makes a function of scores, as in topk(...)(x)"),
        # of the classes of maps
        (lambda: Sparsemax(X), "Sparsemax takes no arguments, got 1; to apply it to scores x, write Sparsemax()(x)"),
        (lambda: Entmax(1.5, X), "Entmax takes 1 without a name (alpha), got 2; to apply it to scores x, write Entmax(alpha=...)(x)"),
        (lambda: am.Sinkhorn(reg=0.1), "Sinkhorn has no option 'reg' (say temperature=)"),
        (lambda: am.Sinkhorn(n_iter=3), "Sinkhorn has no option 'n_iter' (say iterations=)"),
        (lambda: Sparsemax(dim=-1), "no option 'dim' (it goes to the call, as in anymax.apply(mapping, x, dim=1)); it takes none"),
        (lambda: Softmax(temperature=2), "(divide the scores by it, as in mapping(anymax.temperature(2.0)(x)))"),
        (lambda: Entmax(learn=True), "anymax.nn.Activation and anymax.nn.Loss take it, as in learn='alpha'"),
        (lambda: Entmax(alfa=1.5), "Entmax has no option 'alfa' (did you mean alpha=?); its options are alpha"),
        (lambda: SparseSoftmax(top_k=3), "(say k=); its options are k, p"),
        (lambda: SparseSoftmax(top_p=0.9), "SparseSoftmax has no option 'top_p' (say p=)"),
        (lambda: am.Budget(budget=2), "no option 'budget' (say k=)"),
        (lambda: Ratio(Sparsemax()), "Ratio(u=Sparsemax()): expected a function of an array of scores"),
        (lambda: Ratio(np.exp, Sparsemax()), "Ratio(du=Sparsemax()): expected a function of an array of scores"),
        # of soft ranks
        (lambda: soft_sort([1.0], descending="yes"), "descending must be True or False, got 'yes'"),
        (lambda: soft_rank([1.0], descending=1), "descending must be True or False, got 1"),
        (lambda: soft_permutation([1.0], descending=None), "descending must be True or False, got None"),
        (lambda: soft_rank([1.0], direction="DESCENDING"), "say descending=True"),
    )
    | said(
        ValueError,
        (lambda: am.topp(0.9, X), "min_keep must be …, got float64[2, 3]; topp makes a function of scores, as in topp(...)(x)"),
        (lambda: am.minp(0.1, [1.0, 2.0]), "got [1.0, 2.0]; minp makes a function of scores, as in minp(...)(x)"),
        (lambda: am.topp(X, 0.9), "topp makes a function of scores, as in topp(...)(x)"),
        (lambda: am.normalize(X), "got ndarray of shape (2, 3); it makes a function of scores, as in normalize('l2')(x)"),
        (lambda: am.cross_entropy(X, Y[:, None]), "of shape (2, 3); drop the last axis"),
        (
            lambda: am.cross_entropy(np.zeros((2, 4, 5)), np.zeros((2, 4), int)),
            "expected class indices of shape (2, 5)…; if the classes are last, say axis=-1",
        ),
        (lambda: Ranks(0.0), "Ranks(strength=0.0)"),
        (lambda: Ranks(1.0, "l1"), "Ranks: regularization must be 'l2' …or 'kl' …got 'l1'"),
        (lambda: soft_rank([1.0], "l2", -1.0), "soft_rank…regularization_strength"),
        (lambda: soft_sort([1.0], "l2", 0.0), "soft_sort…regularization_strength"),
        (lambda: soft_permutation([1.0], temperature=0.0), "soft_permutation…temperature"),
    )
    | said(  # an axis in the place of a parameter
        (TypeError, ValueError),
        (lambda: am.entmax(X, -1), "alpha must be above 0 and finite…; did you mean axis=-1?"),
        (lambda: am.entmax(X, 0), "alpha must be above 0 and finite…; did you mean axis=0?"),
        (lambda: am.taylor_softmax(X, 1), "the order must be even…; did you mean axis=1?"),
        (lambda: am.taylor_softmax(X, -1), "the order must be even…; did you mean axis=-1?"),
        (lambda: am.normmax(X, 1), "above 1 and finite…; did you mean axis=1?"),
        (lambda: am.normmax(X, -1), "above 1 and finite…; did you mean axis=-1?"),
        (lambda: am.perturb_max(X, -1), "noise: expected a name or a Noise…; did you mean axis=-1?"),
        (lambda: am.sparse_softmax(X, 2), "give k=<number of classes to keep> or p=<mass>; did you mean k=2?"),
        (lambda: am.entropy(am.softmax(X), 1), "kind must be one of …; did you mean axis=1?"),
    )
)  # fmt: skip


@each(WRONG)
def test_a_mistake_is_answered(call, error, words):
    one_sentence(call, error, words)


@pytest.mark.parametrize("name", ["entmax", "sparsemax"])
def test_learn_true_says_which_parameter_could_be_learned(name):
    pytest.importorskip("torch")
    words = "write learn='alpha'" if name == "entmax" else "it has no number that could be learned"
    with pytest.raises(ValueError, match=words):
        am.nn.Activation(name, learn=True)


def test_a_map_of_ones_own_takes_any_number_of_values():
    class Scaled(Sparsemax):
        def __init__(self, *values):
            object.__setattr__(self, "values", values)

    assert Scaled(2, 3).values == (2, 3)
