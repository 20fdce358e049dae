"""What is wrong ends every process with the same sentence, also where one of them alone has failed; none waits for ever."""

import importlib.util
import inspect

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import numpy as np
import torch
from processes import together
from refusals import each, refuses
from shard_cases import Cut, Here, N, numbers, rows, same
from test_distributed_heads import FEW, FEW_INDEX, head

import anymax as A
from anymax import distributed as D
from anymax.distributed.call import Arguments, ShardKeywords
from anymax.transforms import softcap, temperature

ZEROS, INDEX = torch.zeros(2, 2), torch.tensor([0, 1])
X, WEIGHT, TOKENS = numbers(52, 3, 4), numbers(51, 2, 4), torch.tensor([0, 3, 1])
IDS, LOG_P = torch.tensor([[0, 3], [1, 2], [2, 0]]), torch.full((3, 2), 0.4).log().double()
KEPT, OFFSETS = torch.tensor([0, 3, 1, 2]), torch.tensor([0, 2, 3, 4])


def loss(g, mapping="softmax", x=X, w=WEIGHT, t=TOKENS, **given):
    return D.linear_loss(x, w, t, mapping, group=g, **given)


def tokens(g, t=TOKENS, **given):
    return D.linear_log_prob_entropy(X, WEIGHT, t, group=g, **given)


def kept(g, ids=KEPT, offsets=OFFSETS, **given):
    return tokens(g, support=(ids, offsets), **given)


def kl(g, ids=IDS, log_p=LOG_P, **given):
    return D.linear_topk_kl(X, WEIGHT, ids, log_p, group=g, **given)


def young(mapping, y, **options):
    """A Fenchel-Young loss whose target no process can take, nor one alone."""

    def call(g):
        here = Here(Cut((20, 17)), g)
        return D.fenchel_young(
            mapping, here.part(rows()[2:4]), here.part(y) if y.is_floating_point() else y, axis=-1, group=g, **options
        )

    return call


class Unfit(A.Entmax):
    """Another map's regulariser."""

    def omega(self, q, xp):
        return 4.0 * super().omega(q, xp)


def negative(n):
    x = torch.cat([torch.tensor([[1.0, 0.9, 0.8], [5.0, 0.0, 0.0]]), torch.zeros(2, n - 3)], -1)
    y = torch.cat([torch.tensor([[0.4, 0.3, 0.3], [1.0, 0.0, 0.0]]), torch.zeros(2, n - 3)], -1)

    def call(g):
        here = Here(Cut((n - 1, 1)), g)
        return D.fenchel_young(Unfit(2.0), here.part(x), here.part(y), group=g)

    return call


EYE, EVEN, ENDS = (
    torch.eye(N, dtype=torch.float64)[:2],
    torch.full((2, N), 1.0 / N, dtype=torch.float64),
    torch.tensor([36, 0]),
)
UNFIT = r"Unfit\(alpha=2\.0\): its Fenchel-Young loss is -.*check_mapping"
OUTSIDE = torch.tensor([3, -1, 11, 7])
RANGE = "from 0 to 10, or ignore_index=-100, got values from -1 to 11"
SMOOTHED = {"label_smoothing": 0.2}
TARGETS = {  # refused on one process, too
    "ranks of shares": (A.Ranks(), EVEN, "sum to what the probabilities of their row sum to"),
    "ranks of indices": (A.Ranks(), ENDS, "a class index to 1"),
    "above a bound": (A.Bounded(0.2), EYE, "gives no class more than its upper bound"),
    "indices above a bound": (A.Bounded(0.2), ENDS, "gives no class more than its upper bound"),
    # of 0.8 and 0.2 / N
    "smoothed above a bound": (A.Bounded(0.795), EYE, "gives no class more than its upper bound", SMOOTHED),
    "smoothed indices above a bound": (A.Bounded(0.795), ENDS, "gives no class more than its upper bound", SMOOTHED),
    "above 1": (A.Elementwise(), 2.0 * EYE, "no class more than its upper bound"),
    "too small a sum": (A.Budget(2, shape="sigmoid"), EVEN, "the sums go from 1 to 1"),
}
WRONG = {
    "one of two maps": (lambda g: D.apply("sparsemax" if g.rank else "entmax15", ZEROS, group=g), RuntimeError, "ask for different things"),
    "one of two dtypes": (
        lambda g: D.apply("softmax", ZEROS if g.rank else ZEROS.bool(), group=g),
        (TypeError, RuntimeError), "real floating-point|process 0 of the group has failed",
    ),
    "class indices": (lambda g: D.nll("softmax", ZEROS, torch.tensor([0, 99]), group=g), IndexError, "class indices must be from 0 to 3"),
    "class_count": (lambda g: D.apply("softmax", ZEROS, group=g, class_count=7), ValueError, "the shards have 4 classes together"),
    "a gap": (lambda g: D.apply("softmax", ZEROS, group=g, class_start=3 * g.rank), ValueError, "must follow each other"),
    "some say class_start": (
        lambda g: D.apply("softmax", ZEROS, group=g, class_start=None if g.rank else 0), ValueError, "on some processes only",
    ),
    "no classes": (lambda g: D.apply("softmax", ZEROS[:, :0], group=g), ValueError, "no classes on any process"),
    "a budget": (lambda g: D.apply(A.Budget(k=5), ZEROS, group=g), ValueError, "can't be chosen of 4"),
    "no potential": (lambda g: D.fenchel_young("taylor", ZEROS, INDEX, group=g), TypeError, "no Fenchel-Young loss"),
    "sums of a target": (
        lambda g: D.fenchel_young("softmax", ZEROS, torch.full((2, 2), 0.4), axis=-1, group=g),
        ValueError, "that sum to 1 over all processes",
    ),
    "shape of a target": (
        lambda g: D.fenchel_young("softmax", ZEROS, INDEX[None], group=g), ValueError, "for a shard of scores of shape",
    ),
    "no threshold": (lambda g: D.threshold("taylor", ZEROS, group=g), TypeError, "has no threshold"),
    "no threshold of a layer": (lambda g: D.linear_threshold(X, WEIGHT, "taylor", group=g), TypeError, "taylor has no threshold"),
    "a negative start": (lambda g: D.apply("softmax", ZEROS, group=g, class_start=-1), ValueError, "a number from 0 on"),
    "a negative temperature": (lambda g: D.logsumexp(ZEROS, temperature=-1.0, group=g), ValueError, "at least 0"),
    "a map of matrices": (lambda g: D.apply(A.Sinkhorn(), ZEROS, group=g), TypeError, r"Sinkhorn.*matri"),
    "bounds of some": (
        lambda g: D.apply(A.Bounded(torch.full((2 - g.rank,), 0.5)), ZEROS, group=g),
        ValueError, "upper of bounded has one value for each class on some processes, and one for all",
    ),
    "no draw": (lambda g: D.sample(A.Elementwise(), ZEROS, group=g), ValueError, "a number of its own"),
    "a negative loss": (negative(3), ValueError, UNFIT),
    "a negative loss, searched": (negative(5000), ValueError, UNFIT),
    # of a sink
    "one of two sinks": (
        lambda g: D.apply(A.Sink("sparsemax" if g.rank else "softmax"), ZEROS, group=g), RuntimeError, "different things",
    ),
    "one of two scores": (lambda g: D.apply(A.Sink(score=0.1 * g.rank), ZEROS, group=g), RuntimeError, "score=0.1"),
    "sink, too large": (
        lambda g: D.nll(A.Sink(), ZEROS, torch.tensor([0, 4]), group=g),
        IndexError, "from 0 to 3, -1 for none of them, or",
    ),
    "sink, too small": (
        lambda g: D.nll(A.Sink(), ZEROS, torch.tensor([-2, -1]), group=g),
        IndexError, "from 0 to 3, -1 for none of them, or",
    ),
    "sink, a sum": (
        lambda g: D.nll(A.Sink(), ZEROS, torch.full((2, 2), 0.4), axis=-1, group=g), ValueError, "sum to 0 to 1 over all processes",
    ),
    "sink, scores of classes": (lambda g: D.apply(A.Sink(score=torch.zeros(2, 2)), ZEROS, group=g), ValueError, "varies along the classes"),
    "sink, a budget": (lambda g: D.apply(A.Sink("budget:k=6"), ZEROS, group=g), ValueError, "can't be chosen of 5"),
    "sink, no classes": (lambda g: D.apply(A.Sink(), ZEROS[:, :0], group=g), ValueError, "no classes on any process"),
    "sink, class_count": (
        lambda g: D.apply(A.Sink(), ZEROS, group=g, class_start=2 * g.rank, class_count=7), ValueError, "have 4 classes together",
    ),
    "sink, no potential": (lambda g: D.fenchel_young(A.Sink("taylor"), ZEROS, INDEX, group=g), TypeError, "anymax.nll"),
    "sink, suppress": (lambda g: loss(g, A.Sink("sparsemax", 0.5), suppress=0.3), ValueError, "the sink is none of them"),
    # of output layers
    "features": (lambda g: loss(g, w=numbers(1, 2, 6)), ValueError, r"expected features \[..., features\] and this process's part"),
    "layer, target": (lambda g: loss(g, t=TOKENS[:2]), ValueError, r"target of shape \(2,\)"),
    "chunk": (lambda g: loss(g, chunk=0), ValueError, "chunk must be at least 1"),
    "layer, class_count": (lambda g: loss(g, class_count=5), ValueError, "class_count=5, and the shards have 4"),
    "reduction": (lambda g: loss(g, reduction="average"), ValueError, "reduction"),
    "an id": (lambda g: kl(g, IDS + 9), IndexError, "ids: class indices must be from 0 to 3"),
    "an id twice": (lambda g: kl(g, IDS * 0), ValueError, "a row names a class twice"),
    "ids of floats": (lambda g: kl(g, IDS.double()), TypeError, "ids must be integers"),
    "ids of another shape": (lambda g: kl(g, IDS[:, :1]), ValueError, "ids and teacher_log_p must have one shape"),
    "a teacher's sum": (lambda g: kl(g, log_p=LOG_P + 1.0), ValueError, "exponentials sum to at most 1"),
    "tail": (lambda g: kl(g, tail="all"), ValueError, "tail must be 'ignore' or 'one class'"),
    "a target of the second group of rows": (
        lambda g: tokens(g, TOKENS + torch.tensor([0, 1, 0]), chunk=1), IndexError, "target: class indices must be from 0 to 3",
    ),
    "temperatures": (
        lambda g: kl(g, temperature=torch.ones(2)),
        ValueError, r"temperature of shape \(2,\): expected a number, or one value for each row",
    ),
    "kl, class_count": (lambda g: kl(g, class_count=5), ValueError, "class_count=5, and the shards have 4 classes together"),
    "full": (lambda g: tokens(g, full=True), ValueError, "full=True applies to a support"),
    "support, ids": (lambda g: kept(g, KEPT + 1), IndexError, "support: ids must be from 0 to 3, got 1 to 4"),
    "support, twice": (lambda g: kept(g, torch.tensor([0, 0, 1, 2])), ValueError, "support: a row has a class twice"),
    "support, offsets": (lambda g: kept(g, offsets=OFFSETS[1:]), ValueError, "support must be ids, one axis of class indices"),
    "support, falling": (lambda g: kept(g, offsets=torch.tensor([0, 3, 2, 4])), ValueError, "support: offsets must rise from 0 to 4"),
    "support, mask": (lambda g: kept(g, mask=torch.ones(2, dtype=torch.bool)), ValueError, "with a support a mask has no meaning"),
    "support, topk": (
        lambda g: kept(g, transform=A.topk(2)),
        (TypeError, ValueError), "a support has some scores of a row only.*give the classes that it leaves",
    ),
    "support, tau": (lambda g: kept(g, tau=2.0), TypeError, "say temperature="),
    "support, class_start": (
        lambda g: kept(g, class_start=0),
        ValueError, r"the shards must follow each other; they start at \[0, 0\] and have \[2, 2\] classes",
    ),
    "topp": (
        lambda g: loss(g, transform=A.topp(0.9)),
        (TypeError, ValueError), "the scores of a row are on several processes.*topp.*does not: give mask=",
    ),
    "a temperature of 0": (
        lambda g: loss(g, transform=temperature(0)), (TypeError, ValueError), "a temperature above 0 do; temperature.*does not",
    ),
    "scalable": (lambda g: loss(g, transform=A.transforms.scalable()), (TypeError, ValueError), "scalable.* does not"),
    "caps": (lambda g: loss(g, transform=softcap(torch.ones(2))), (TypeError, ValueError), r"softcap\(cap=float32\[2\]\) does not"),
    "a function": (
        lambda g: loss(g, transform=torch.sin),
        (TypeError, ValueError), "nothing says whether .*sin.* changes each score by itself; write it as a subclass",
    ),
    "least": (lambda g: loss(g, least=0.1), TypeError, r"linear_loss has no option 'least' \(leave it out: over several processes"),
    "axis": (
        lambda g: loss(g, axis=1),
        TypeError, r"linear_loss has no option 'axis' \(leave it out: the features of x are its last axis\)",
    ),
    "loss, temperature": (lambda g: loss(g, temperature=2.0), TypeError, "write transform=anymax.temperature"),
    "z_loss": (
        lambda g: loss(g, "taylor", z_loss=0.1),
        (TypeError, ValueError), "z_loss= is the factor of tau squared, and taylor has no threshold",
    ),
    "suppress": (lambda g: loss(g, suppress=0.1), (TypeError, ValueError), "suppress= applies to maps that give classes probability 0"),
    # of a margin head, whose targets all processes have
    "head": (lambda g: head(g)(FEW, OUTSIDE if g.rank else FEW_INDEX), IndexError, RANGE),
    "head, sampled": (lambda g: head(g, sample_rate=0.4)(FEW, OUTSIDE if g.rank else FEW_INDEX), IndexError, RANGE),
} | {
    name: (young(mapping, y, **dict(*given)), ValueError, words) for name, (mapping, y, words, *given) in TARGETS.items()
}  # fmt: skip


@each(WRONG)
def test_all_processes_end_with_a_sentence(call, error, words):
    assert together(2, lambda group: refuses(lambda: call(group), error, words)) == [None, None]


CENTRES_OF_ONE = head(sample_rate=0.4)
ALONE = {
    name: (lambda m=m, y=y, o=o: A.fenchel_young(m, rows()[2:4], y, axis=-1, **dict(*o)), ValueError, words)
    for name, (m, y, words, *o) in TARGETS.items()
} | {
    "head, sampled": (lambda: head(sample_rate=0.4)(FEW, OUTSIDE), IndexError, RANGE),
    "head, floats": (lambda: CENTRES_OF_ONE(FEW, FEW_INDEX.float()), TypeError, r"a tensor of integers, got torch\.float32"),
    "head, shape": (lambda: CENTRES_OF_ONE(FEW, FEW_INDEX[:3]), ValueError, r"need a target of shape \(4,\), got \(3,\)"),
    "head, rate": (
        lambda: A.nn.MarginHead(6, 11, sample_rate=0.0), ValueError, "sample_rate must be a number above 0 and at most 1",
    ),
    "a keyword": (
        lambda: D.log_apply("softmax", torch.zeros(3), groups=None),
        TypeError, r"log_apply has no option 'groups' \(did you mean group=\?\)",
    ),
    "NumPy": (lambda: D.apply("softmax", np.zeros(3)), TypeError, "torch tensor with group= or a JAX array with axis_name="),
}  # fmt: skip


@each(ALONE)
def test_one_process_ends_with_a_sentence(call, error, words):
    refuses(call, error, words)


@pytest.mark.skipif(torch.distributed.is_initialized(), reason="there is a group")
def test_a_group_is_needed():
    refuses(lambda: D.apply("softmax", torch.zeros(3)), RuntimeError, "init_process_group")


def test_an_axis_name_beside_a_group_goes():
    for p in together(2, lambda g: D.apply("softmax", ZEROS, group=g, axis_name="c")):
        same(p, torch.full((2, 2), 0.25))


def test_the_keywords_of_every_verb():
    """Their defaults are those in effect."""
    keywords, given = ShardKeywords.__annotations__, inspect.signature(D.apply).parameters.values()
    shown = {p.name: p.default for p in given if p.name in keywords}
    assert list(shown) == list(keywords)
    assert shown.items() <= Arguments("apply", None, None, None, None, None)._asdict().items()
