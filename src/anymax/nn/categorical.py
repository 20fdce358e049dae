"""A torch distribution over classes, for any map."""

from __future__ import annotations

import math
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Size, Tensor
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Distribution, constraints
from torch.distributions.kl import register_kl
from torch.distributions.utils import lazy_property

from .._core.classes import refuse_strays
from .._core.mapping import Mapping
from .._core.options import check_keywords
from ..functional.draws import log_p_of_draw, p_of_draw
from ..likelihood.terms import kl_rows, read, refuse_draws_of_none, terms_of
from ..mappings import Softmax
from ..sampling import samplers

_SOFTMAX = Softmax()
_ONE = Size()


class _BelowInfinity(constraints.Constraint):
    """Rows of numbers below +inf. (`constraints.independent` would do, but fails for a batch without rows.)"""

    event_dim = 1

    def check(self, value: Tensor) -> Tensor:
        return (value < math.inf).all(-1)


class Categorical(TorchCategorical):
    """The distribution over classes that a map gives for scores, as a `torch.distributions` class: for example a policy with exact zeros.

    It is a subclass of `torch.distributions.Categorical`, and adds to it: any map; masks, which give a class probability 0 and no
    gradient; an entropy whose gradient is exact where p is 0; and a `log_prob` of -inf off the support whose gradient is finite (see
    `anymax.log_prob`).

    `scores` are the scores after mask and transform; `probs` and `logits` are p and log p, computed at their first use. `mean` and
    `variance` are NaN, as in torch. Samples use torch's global generator, or that of `sample(shape, generator=...)`.

    Parameters
    ----------
    mapping
        The map, such as `Sparsemax()`.
    scores
        A tensor whose last axis is the classes and whose other axes are the batch; -inf masks a class, NaN and +inf are
        errors.
    mask
        Boolean, broadcastable to the scores, True = keep. A row that keeps no class is allowed: its probabilities are all
        0, its sample and its mode are -1, its entropy is 0, and log_prob is 0 for -1 and -inf for every class. (A mask of
        large negative numbers would make such a row uniform over forbidden classes.)
    transform
        A transform of the masked scores: one of `anymax.transforms`, or several in `compose(...)`.
    validate_args
        Check the scores and the values; the default is that of `Distribution.set_default_validate_args`.

    Examples
    --------
    >>> import torch, anymax
    >>> policy = anymax.nn.Categorical(anymax.Sparsemax(), torch.tensor([1.0, 0.5, -2.0]))
    >>> policy.probs
    tensor([0.7500, 0.2500, 0.0000])
    >>> policy.log_prob(torch.tensor([0, 2]))
    tensor([-0.2877,    -inf])
    """

    arg_constraints = {"scores": _BelowInfinity()}  # noqa: RUF012 (as torch has it)
    has_enumerate_support = True
    mapping: Mapping
    scores: Tensor

    @check_keywords({"probs": "give scores=, after the map"}, logits="scores")
    def __init__(
        self,
        mapping: Mapping,
        scores: Tensor,
        *,
        mask: Tensor | None = None,
        transform: Any = None,
        validate_args: bool | None = None,
    ) -> None:
        if not isinstance(scores, Tensor):
            raise TypeError(f"Categorical: scores must be a tensor, got {type(scores).__name__}")
        given = read("Categorical", mapping, scores, -1, mask, transform)
        refuse_draws_of_none("Categorical", given.mapping)
        self.scores, self.mapping = given.rows, given.mapping
        self._set(self.scores.shape[:-1], validate_args)

    def _set(self, batch_shape: Size, validate_args: bool | None) -> None:
        self._param, self._num_events = self.scores, self.scores.shape[-1]
        Distribution.__init__(self, batch_shape, validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Categorical:
        new: Any = self._get_checked_instance(Categorical, _instance)
        shape = Size(batch_shape)
        new.mapping, new.scores = self.mapping, self.scores.expand(*shape, self._num_events)
        for name in ("probs", "logits"):
            if name in self.__dict__:
                new.__dict__[name] = self.__dict__[name].expand(*shape, self._num_events)
        new._set(shape, False)
        new._validate_args = self._validate_args
        return new

    @lazy_property
    def probs(self) -> Tensor:
        """p, normalised to sum to 1 for every map."""
        return p_of_draw(self.mapping, self.scores, xp)

    @lazy_property
    def logits(self) -> Tensor:
        """log p, -inf where p is 0."""
        return log_p_of_draw(self.mapping, self.scores, xp)

    @property
    def mode(self) -> Tensor:
        """The most probable class, the first of equal ones; -1 in a row without classes."""
        p = self.probs.detach()
        return torch.where(p.amax(-1) > 0, p.argmax(-1), -1)

    def sample(self, sample_shape: Any = _ONE, generator: Any = None) -> Tensor:
        """Random classes, integers of shape `sample_shape + batch_shape`.

        Parameters
        ----------
        generator
            A `torch.Generator` on the device of the scores, or an integer seed; torch's global generator by default.
        """
        shape = Size(sample_shape)
        with torch.no_grad():
            drawn = samplers.sample(self.mapping, self.scores, generator=generator, num_samples=shape.numel())
        return drawn.reshape(self._extended_shape(shape))

    def _validate_sample(self, value: Tensor) -> None:
        if isinstance(value, Tensor):
            dead = (self.scores == -math.inf).all(-1)
            value = (
                torch.where((value == -1) & dead, 0, value)
                if value.shape[value.ndim - dead.ndim :] == dead.shape
                else value
            )
        super()._validate_sample(value)

    def log_prob(self, value: Tensor) -> Tensor:
        """log p of the classes `value`, whose shape broadcasts with the batch; -inf off the support, 0 for -1.

        A number that is no class is an error, even without validation; in compiled code and on a GPU it gives NaN.
        """
        if self._validate_args:
            self._validate_sample(value)
        refuse_strays("Categorical.log_prob: value", value, self._num_events, None, xp)
        shape = torch.broadcast_shapes(value.shape, self._batch_shape)
        extra = len(shape) - len(self._batch_shape)
        index = value.long().expand(shape).flatten(0, extra - 1) if extra else value.long().expand(shape)[None]
        rows = self.scores.expand(*shape[extra:], self._num_events)
        return self._terms(rows, index.movedim(0, -1)).log_p.movedim(-1, 0).reshape(shape)

    def entropy(self) -> Tensor:
        """`-sum p log p`, with a gradient that is exact where p is 0."""
        none = torch.zeros((*self._batch_shape, 0), dtype=torch.long, device=self.scores.device)
        h = self._terms(self.scores, none, entropy=True).entropy
        assert h is not None
        return h[..., 0]

    def _terms(self, rows: Tensor, index: Tensor, **options: Any) -> Any:
        return terms_of(self.mapping, rows, index, xp, **options)


def _as_scores(q: TorchCategorical) -> tuple[Mapping, Tensor]:
    """The map and scores of a distribution. Where torch's has a probability of 0, its logit is finite and is replaced by -inf."""
    if isinstance(q, Categorical):
        return q.mapping, q.scores
    return _SOFTMAX, q.logits.masked_fill(q.probs == 0, -math.inf)


def _kl(p: TorchCategorical, q: TorchCategorical) -> Tensor:
    (mapping_p, x), (mapping_q, y) = _as_scores(p), _as_scores(q)
    if x.shape[-1] != y.shape[-1]:
        raise ValueError(f"kl_divergence: {x.shape[-1]} and {y.shape[-1]} classes; both must have the same")
    shape = torch.broadcast_shapes(x.shape, y.shape)
    return kl_rows(mapping_p, x.expand(shape), mapping_q, y.expand(shape), xp)


for _pair in ((Categorical, Categorical), (Categorical, TorchCategorical), (TorchCategorical, Categorical)):
    register_kl(*_pair)(_kl)
