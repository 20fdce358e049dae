"""What the maps answer to parameters, targets and calls that they do not take."""

import math

import numpy as np
import pytest
import torch
from refusals import each, refuses
from scipy import special, stats

import anymax as am
from anymax import Bounded, Budget, Elementwise, Fusedmax, PerturbMax, Sink, Softpick
from anymax._random.noises import Noise
from anymax.thresholds import mellowmax

X = np.random.default_rng(0).standard_normal((5, 4))
T = torch.tensor([[1.0, 2.0, -1.0]])
EYE, ONES = np.eye(3)[:2], np.array([1.0, 0.5, 0.5])
CAUCHY = Noise(cdf=stats.cauchy.cdf, pdf=stats.cauchy.pdf)
ABOVE = "gives no class more than its upper bound, and the target of one is"
QUANTILES = {
    "constant": lambda q: 0.0 * q,
    "number": lambda q: 1.0,
    "NaN": lambda q: math.nan * q,
    "falling": lambda q: -q,
}


def layer(mapping, target=(1, 2, 0), **options):
    """A loss of an output layer with seven classes."""
    return am.linear_loss(torch.ones(3, 5), torch.ones(7, 5), torch.tensor(target), mapping, **options)


WRONG = {
    "bounded: upper": (lambda: Bounded(-0.1), ValueError, "upper must be at least 0"),
    "bounded: some upper": (lambda: Bounded(np.array([0.1, -1.0])), ValueError, "every entry must be at least 0"),
    "bounded: word": (lambda: Bounded("much"), TypeError, "expected a number or an array"),
    "bounded: alpha": (lambda: Bounded(0.5, 3.0), ValueError, "alpha must be from 1 to 2"),
    "bounded: some alpha": (lambda: Bounded(0.5, np.array([0.5])), ValueError, "every entry must be from 1 to 2"),
    "bounded: rows": (lambda: am.apply(Bounded(0.5, np.array([1.5, 1.6])), np.zeros((3, 2))), ValueError, "alpha of shape"),
    "bounded: index": (lambda: am.fenchel_young(Bounded(0.5), X, np.zeros(5, int)), ValueError, f"bounded {ABOVE} 1"),
    "bounded: target": (lambda: am.fenchel_young(Bounded(ONES), X[:2, :3], EYE), ValueError, f"bounded {ABOVE} 1"),
    "budget: target": (lambda: am.fenchel_young(Budget(2), X[:2, :3], 2 * EYE), ValueError, f"budget {ABOVE} 2"),
    "elementwise: no link": (lambda: Elementwise("taylor"), ValueError, "taylor has no link"),
    "elementwise: no map": (lambda: Elementwise("silu"), ValueError, "there is no map 'silu'"),
    "elementwise: word": (lambda: Elementwise(tau="x"), TypeError, "expected a number or an array"),
    "elementwise: draw": (lambda: am.sample(Elementwise(), X), ValueError, "gives each class a number of its own"),
    "elementwise: draw of a segment": (
        lambda: am.segment_sample(Elementwise(), X.ravel(), lengths=[20]), ValueError, "gives each class a number of its own",
    ),
    "elementwise: sink": (lambda: Sink(Elementwise()), ValueError, "sum to the same number in every row"),
    "elementwise: target": (lambda: am.fenchel_young(Elementwise(), X, -np.abs(X)), ValueError, "non-negative numbers"),
    "fusedmax: strength": (lambda: Fusedmax(-1.0), ValueError, "strength must be at least 0"),
    "mellowmax: word": (lambda: mellowmax([1.0], "max"), TypeError, "expected a number or an array, got 'max'"),
    "mellowmax: NaN": (lambda: mellowmax([1.0], math.nan), ValueError, "omega must be a number, not NaN"),
    "mellowmax: name": (
        lambda: mellowmax([1.0], temperature=2.0), TypeError, r"mellowmax has no option 'temperature' \(say omega=, its reciprocal\)",
    ),
    "perturb max: noise": (
        lambda: PerturbMax("cauchy"), ValueError, r"'cauchy' is unknown; use one of gumbel, normal, .*, or a Noise",
    ),
    "perturb max: number as noise": (lambda: PerturbMax(3), TypeError, "expected a name or a Noise"),
    **{
        f"perturb max: {nodes} nodes": (lambda nodes=nodes: PerturbMax(nodes=nodes), ValueError, r"nodes=.*integer from 8")
        for nodes in (0, 7, 32.0, True)
    },
    "perturb max: scale": (lambda: PerturbMax(scale=-1.0), ValueError, "scale must be above 0 and finite"),
    "perturb max: word": (lambda: PerturbMax(scale="1"), TypeError, "expected a number or an array"),
    "perturb max: omega": (lambda: PerturbMax().omega(X, np), TypeError, r"no closed form.*loss"),
    "perturb max: seed": (lambda: PerturbMax().monte_carlo(X, 10, "seed"), TypeError, "Generator"),
    "noise: cdf alone": (lambda: Noise(cdf=special.ndtr), TypeError, "give both cdf"),
    "noise: numbers": (lambda: Noise(cdf=3, pdf=4), TypeError, r"Noise\(cdf=3\): expected a function of an array"),
    "noise: support": (lambda: Noise(quantile=special.ndtri, support=(1.0, 0.0)), ValueError, "lower < upper"),
    **{
        f"noise: quantile, {name}": (
            lambda q=q: am.apply(PerturbMax(Noise(quantile=q)), X), ValueError, "quantile must be finite and increase",
        )
        for name, q in QUANTILES.items()
    },
    "noise: mean": (
        lambda: PerturbMax(Noise(cdf=stats.cauchy.cdf, pdf=stats.cauchy.pdf, mean=math.inf)).loss(X, None, X, np),
        TypeError, r"mean is inf.*nll",
    ),
    "noise: no mean": (lambda: am.fenchel_young(PerturbMax(CAUCHY), X[0], 0), TypeError, "its noise has no mean"),
    "noise: too few nodes": (
        lambda: am.apply(PerturbMax(CAUCHY, nodes=8), [0.0, -30.0]), ValueError,
        r"the nodes miss the noise: .* sum to .* raise nodes",
    ),
    "noise: pdf of another": (
        lambda: am.apply(PerturbMax(Noise(cdf=stats.norm.cdf, pdf=stats.norm(scale=2.0).pdf)), X), ValueError, "Are cdf and pdf",
    ),
    "sink: nested": (lambda: Sink(Sink()), ValueError, "nest no sinks"),
    "sink: no map": (lambda: Sink("softmaxx"), ValueError, "there is no map 'softmaxx'"),
    "sink: word": (lambda: Sink(score="high"), TypeError, r"Sink\(score=...\): expected a number or an array"),
    "sink: index": (
        lambda: am.fenchel_young(Sink(), X, np.arange(5)), IndexError,
        "from 0 to 3, -1 for none of them, or ignore_index=-100, got values from 0 to 4",
    ),
    "sink: score a class": (lambda: am.apply(Sink(score=np.zeros((5, 4))), X), ValueError, "varies along the classes"),
    "sink: no loss": (lambda: am.fenchel_young(Sink("taylor"), X, np.zeros(5, int)), TypeError, "anymax.nll"),
    "sink: target": (
        lambda: am.fenchel_young(Sink(), X, np.full((5, 4), 0.5)), ValueError,
        "non-negative numbers that sum to 0 to 1; the sums go from 2 to 2",
    ),
    "sink: no bound": (
        lambda: Sink("sparsemax", bound=0.3), TypeError,
        r"only a map with upper bounds, such as Bounded\(0.5\), takes a bound of the sink",
    ),
    "sink: bound in attention": (
        lambda: am.attention(T, T, T, Sink(Bounded(0.5), bound=0.2)), TypeError, "in attention the sink has the bound of the keys",
    ),
    "sink: two in attention": (
        lambda: am.attention(T, T, T, Sink(), sink=torch.ones(1)), ValueError, "has a sink, and sink= gives another",
    ),
    "sink: shape in attention": (
        lambda: am.attention(T, T, T, sink=torch.zeros(3, 6)), ValueError, r"for each query, shape \(1, 1\)",
    ),
    "sink: transform in an output layer": (
        lambda: layer(Sink(), transform=am.temperature(2.0)), ValueError, "transform can't be given with a sink",
    ),
    "sink: scores in an output layer": (lambda: layer(Sink("softmax", torch.zeros(3, 1))), ValueError, "one score for all rows"),
    "sink: index in an output layer": (lambda: layer(Sink(), (7, 0, 0)), IndexError, "from 0 to 6"),
    **{
        f"softpick: epsilon {value}": (
            lambda value=value: Softpick(value), ValueError, "Softpick: epsilon must be a finite number of at least 0",
        )
        for value in (-1.0, math.inf, "x")
    },
    "softpick: no loss": (
        lambda: am.fenchel_young(Softpick(), X, np.zeros(5, int)), TypeError, r"no Fenchel-Young loss.*anymax\.nll",
    ),
}  # fmt: skip


@each(WRONG)
def test_what_is_refused(call, error, words):
    refuses(call, error, words)


@pytest.mark.parametrize("target", [np.array([0, 0]), np.array([[0.5, 0.5, 0.0]] * 2)], ids=["index", "soft"])
def test_targets_below_the_bounds_are_taken(target):
    bound = ONES if target.ndim == 1 else 0.5
    assert am.fenchel_young(Bounded(bound), np.random.default_rng(5).normal(size=(2, 3)), target) > 0
