"""NumPyro: the distribution over classes that a map gives for scores, for `numpyro.sample`.

>>> import anymax.numpyro  # doctest: +SKIP
>>> numpyro.sample("z", anymax.numpyro.Categorical(Sparsemax(), scores))  # doctest: +SKIP
"""

from __future__ import annotations

import math
from typing import Any

from ._core.mapping import Mapping
from ._core.static import Static
from .functional.draws import log_p_of_draw, p_of_draw
from .likelihood.terms import kl_rows, read, refuse_draws_of_none, terms_of
from .mappings import Softmax
from .sampling import samplers

try:
    import jax
    import jax.numpy as jnp
    from numpyro.distributions import CategoricalLogits, CategoricalProbs, Distribution, constraints, kl_divergence
    from numpyro.distributions.util import lazy_property
except ImportError as error:
    raise ImportError("anymax.numpyro needs NumPyro; install it with: pip install 'anymax[numpyro]'") from error

__all__ = ["Categorical"]

_SOFTMAX = Softmax()


def __dir__() -> list[str]:
    return __all__


class _BelowInfinity(constraints.Constraint):
    """Rows of numbers below +inf. (`constraints.independent` would do, but fails for a batch without rows.)"""

    event_dim = 1

    def __call__(self, x: Any) -> Any:
        return (x < math.inf).all(-1)

    def feasible_like(self, prototype: Any) -> Any:
        return jnp.zeros_like(prototype)

    def eq(self, other: object, static: bool = False) -> bool:
        return isinstance(other, _BelowInfinity)

    def tree_flatten(self) -> Any:
        return (), ((), {})


class Categorical(Distribution):
    """The distribution over classes that a map gives for scores, as a NumPyro class: `anymax.nn.Categorical` for JAX.

    `scores` are the scores after mask and transform; `probs` and `logits` are p and log p. `mean` and `variance` are NaN.

    Parameters
    ----------
    mapping
        The map, such as `Sparsemax()`; its parameters that are arrays have derivatives too.
    scores
        An array whose last axis is the classes and whose other axes are the batch; -inf masks a class.
    mask
        Boolean, broadcastable to the scores, True = keep. A row that keeps no class has probabilities of 0, its sample is
        -1, and log_prob of -1 is 0.
    transform
        A transform of the masked scores: one of `anymax.transforms`, or several in `compose(...)`.
    validate_args
        Check the scores and the values, as in NumPyro.
    """

    arg_constraints = {"scores": _BelowInfinity()}  # noqa: RUF012 (as NumPyro has it)
    has_enumerate_support = True
    pytree_data_fields = ("scores", "_params")
    pytree_aux_fields = ("_static",)

    def __init__(
        self,
        mapping: Mapping,
        scores: Any,
        *,
        mask: Any = None,
        transform: Any = None,
        validate_args: bool | None = None,
    ) -> None:
        given = read("Categorical", mapping, jnp.asarray(scores), -1, mask, transform)
        refuse_draws_of_none("Categorical", given.mapping)
        self.scores = given.rows
        self._static, self._params = Static(given.mapping, None), given.mapping.params()
        super().__init__(batch_shape=self.scores.shape[:-1], validate_args=validate_args)

    @property
    def mapping(self) -> Mapping:
        return self._static.mapping(self._params)

    @lazy_property
    def probs(self) -> jax.Array:
        """p, normalised to sum to 1 for every map."""
        return p_of_draw(self.mapping, self.scores, jnp)

    @lazy_property
    def logits(self) -> jax.Array:
        """log p, -inf where p is 0."""
        return log_p_of_draw(self.mapping, self.scores, jnp)

    @constraints.dependent_property(is_discrete=True, event_dim=0)  # type: ignore[arg-type]
    def support(self) -> Any:
        return constraints.integer_interval(0, self.scores.shape[-1] - 1)

    @property
    def mean(self) -> jax.Array:
        return jnp.full(self.batch_shape, jnp.nan, dtype=jnp.result_type(self.scores))

    @property
    def variance(self) -> jax.Array:
        return self.mean

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> jax.Array:
        """Random classes, integers of shape `sample_shape + batch_shape`, from a JAX key."""
        scores = jax.lax.stop_gradient(self.scores)
        drawn: Any = samplers.sample(self.mapping.frozen(), scores, generator=key, num_samples=math.prod(sample_shape))
        return drawn.reshape(sample_shape + self.batch_shape)

    def log_prob(self, value: Any) -> jax.Array:
        """log p of the classes `value`, whose shape broadcasts with the batch; -inf off the support, 0 for -1.

        Without validation a number that is no class gives NaN, as in NumPyro's own distributions.
        """
        if self._validate_args:
            dead = jnp.all(self.scores == -jnp.inf, axis=-1)
            self._validate_sample(jnp.where((jnp.asarray(value) == -1) & dead, 0, value))
        shape = jnp.broadcast_shapes(jnp.shape(value), self.batch_shape)
        extra = len(shape) - len(self.batch_shape)
        index = jnp.broadcast_to(jnp.asarray(value), shape).reshape((math.prod(shape[:extra]), *shape[extra:]))
        rows = jnp.broadcast_to(self.scores, (*shape[extra:], self.scores.shape[-1]))
        return jnp.moveaxis(terms_of(self.mapping, rows, jnp.moveaxis(index, 0, -1), jnp).log_p, -1, 0).reshape(shape)

    def entropy(self) -> jax.Array:
        """`-sum p log p`, with a gradient that is exact where p is 0."""
        none = jnp.zeros((*self.batch_shape, 0), dtype=int)
        h = terms_of(self.mapping, self.scores, none, jnp, entropy=True).entropy
        assert h is not None
        return h[..., 0]

    def enumerate_support(self, expand: bool = True) -> jax.Array:
        values = jnp.arange(self.scores.shape[-1]).reshape((-1,) + (1,) * len(self.batch_shape))
        return jnp.broadcast_to(values, values.shape[:1] + self.batch_shape) if expand else values


def _as_scores(q: Any) -> tuple[Mapping, Any]:
    if isinstance(q, Categorical):
        return q.mapping, q.scores
    if isinstance(q, CategoricalProbs):
        return _SOFTMAX, jnp.where(q.probs == 0, -jnp.inf, jnp.log(jnp.where(q.probs == 0, 1.0, q.probs)))
    return _SOFTMAX, q.logits


def _kl(p: Any, q: Any) -> jax.Array:
    (mapping_p, x), (mapping_q, y) = _as_scores(p), _as_scores(q)
    if x.shape[-1] != y.shape[-1]:
        raise ValueError(f"kl_divergence: {x.shape[-1]} and {y.shape[-1]} classes; both must have the same")
    shape = jnp.broadcast_shapes(x.shape, y.shape)
    return kl_rows(mapping_p, jnp.broadcast_to(x, shape), mapping_q, jnp.broadcast_to(y, shape), jnp)


for _other in (CategoricalLogits, CategoricalProbs):
    kl_divergence.register(Categorical, _other)(_kl)
    kl_divergence.register(_other, Categorical)(_kl)
kl_divergence.register(Categorical, Categorical)(_kl)
