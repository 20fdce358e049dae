# Copyright 2026 DeepMind Technologies Limited. All Rights Reserved.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
# ==============================================================================
"""Entmax: the family of softmax and sparsemax, and its loss."""

import functools

import jax
import jax.numpy as jnp
from optax._src import utils

_SMALL = 0.3  # below it, power series are exact to double precision


def _series(x: jax.Array, start: int) -> jax.Array:
  r""":math:`\sum_{k \ge 0} x^k / (k + \text{start})!` for small ``x``."""
  total = jnp.ones_like(x)
  for k in range(start + 12, start, -1):
    total = 1.0 + x / k * total
  for k in range(2, start + 1):
    total = total / k
  return total


def _expm1_ratio(x: jax.Array) -> jax.Array:
  """``expm1(x) / x``, with a derivative at 0."""
  small = jnp.abs(x) < _SMALL
  safe = jnp.where(small, 1.0, x)
  return jnp.where(
      small, _series(jnp.where(small, x, 0.0), 1), jnp.expm1(safe) / safe
  )


def _safe_log(p: jax.Array) -> jax.Array:
  """``log(p)``, and 0 where p is 0: it is multiplied by p or by 0."""
  return jnp.log(jnp.where(p > 0, p, 1.0))


def _link(t: jax.Array, alpha: jax.Array) -> jax.Array:
  r""":math:`[1 + (\alpha - 1) t]_+^{1 / (\alpha - 1)}`; exp(t) at alpha 1."""
  u = (alpha - 1.0) * t
  zero = (u <= -1.0) | jnp.isneginf(t)
  t, u = jnp.where(zero, 0.0, t), jnp.where(zero, 0.0, u)
  flat = u == 0.0
  ratio = jnp.where(flat, 1.0, jnp.log1p(u) / jnp.where(flat, 1.0, u))
  return jnp.where(zero, 0.0, jnp.exp(t * ratio))


@jax.custom_jvp
def _entmax(scores: jax.Array, alpha: jax.Array) -> jax.Array:
  """Entmax along the last axis; ``alpha`` has size 1 there."""
  peak = jnp.max(scores, axis=-1, keepdims=True)
  scores = scores - jnp.where(jnp.isneginf(peak), 0.0, peak)
  # The largest probability is between 1 / n and 1, so that the threshold is
  # between 0 and the t at which the link of -t is 1 / n.
  log_n = jnp.log(jnp.asarray(scores.shape[-1], scores.dtype))
  width = log_n * _expm1_ratio((1.0 - alpha) * log_n)
  width = jnp.broadcast_to(width, peak.shape)

  def halve(_, carry):
    low, width = carry
    width = width / 2
    above = jnp.sum(_link(scores - low - width, alpha), -1, keepdims=True) >= 1
    return jnp.where(above, low + width, low), width

  steps = jnp.finfo(scores.dtype).nmant + 2
  low, _ = jax.lax.fori_loop(0, steps, halve, (jnp.zeros_like(width), width))
  p = _link(scores - low, alpha)
  total = jnp.sum(p, axis=-1, keepdims=True)
  return p / jnp.where(total == 0, 1.0, total)


@_entmax.defjvp
def _entmax_jvp(primals, tangents):
  scores, alpha = primals
  scores_dot, alpha_dot = tangents
  p = _entmax(scores, alpha)
  log_p, support = _safe_log(p), p > 0
  # The derivative of the link in t, as a function of p.
  slope = jnp.where(support, jnp.exp((2.0 - alpha) * log_p), 0.0)
  # Its derivative in alpha at the same t: -(slope - p - p v) / (alpha - 1)^2.
  v = (1.0 - alpha) * log_p
  small = v < _SMALL
  series = p * log_p**2 * _series(jnp.where(small, v, 0.0), 2)
  gap = jnp.where(small, 1.0, alpha - 1.0)
  in_alpha = -jnp.where(small, series, (slope - p - p * v) / gap**2)

  moved = jnp.where(support, slope * scores_dot, 0.0) + in_alpha * alpha_dot
  total = jnp.sum(slope, axis=-1, keepdims=True)
  mean = jnp.sum(moved, -1, keepdims=True) / jnp.where(total > 0, total, 1.0)
  return p, moved - slope * mean


def _prepare(scores, alpha):
  """Scores in at least single precision, and an alpha for each row."""
  utils.check_subdtype(scores, jnp.floating)
  scores = jnp.asarray(scores)
  scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
  alpha = jnp.asarray(alpha, scores.dtype)
  return scores, jnp.broadcast_to(alpha, scores.shape[:-1] + (1,))


def entmax(
    scores: jax.typing.ArrayLike,
    alpha: jax.typing.ArrayLike = 1.5,
    axis: int = -1,
) -> jax.Array:
  r"""Entmax, the probabilities of Tsallis entropies.

  .. math::

    \underset{p \in \triangle}{\text{argmax}} ~ \langle p, x \rangle +
    H_\alpha(p), \quad H_\alpha(p) = \frac{1}{\alpha (\alpha - 1)}
    \sum_j (p_j - p_j^\alpha)

  where :math:`x` are the scores and :math:`\triangle` is the probability
  simplex. It is :func:`jax.nn.softmax` for :math:`\alpha = 1` and the
  projection onto the simplex, :func:`optax.projections.projection_simplex`,
  for :math:`\alpha = 2`. Above 1 some probabilities are exactly 0.

  Args:
    scores: scores, of any shape. A score of ``-inf`` has probability 0, and
      all of them have in a row without any other score.
    alpha: a number from 1, or an array that broadcasts to the scores with
      size 1 along ``axis``. It can be differentiated, so it can be learned.
    axis: the axis of the classes.

  Returns:
    probabilities, of the shape and dtype of the scores.

  Example:

      >>> import jax.numpy as jnp
      >>> import optax
      >>> p = optax.losses.entmax(jnp.array([1.0, 0.0, -1.0]))
      >>> print(p > 0)
      [ True  True False]

  References:
    Peters et al, `Sparse Sequence-to-Sequence Models
    <https://arxiv.org/abs/1905.05702>`_, 2019
  """
  dtype = jnp.asarray(scores).dtype
  scores = jnp.moveaxis(scores, axis, -1)
  if jnp.ndim(alpha):
    alpha = jnp.moveaxis(alpha, axis, -1)
  p = _entmax(*_prepare(scores, alpha))
  return jnp.moveaxis(p, -1, axis).astype(dtype)


def _tsallis_entropy(p: jax.Array, alpha: jax.Array) -> jax.Array:
  log_p = _safe_log(p)
  terms = p * log_p * _expm1_ratio((alpha - 1.0) * log_p)
  return -jnp.sum(terms / alpha, axis=-1)


@jax.custom_jvp
def _entmax_loss(scores, alpha, labels):
  p = _entmax(scores, alpha)
  target = jnp.take_along_axis(scores, labels[..., None], axis=-1)
  # Zero at the target, where both scores may be infinite.
  is_target = jnp.arange(scores.shape[-1]) == labels[..., None]
  gaps = jnp.where((p > 0) & ~is_target, scores - target, 0.0)
  return jnp.sum(p * gaps, axis=-1) + _tsallis_entropy(p, alpha)


@_entmax_loss.defjvp
def _entmax_loss_jvp(primals, tangents):
  scores, alpha, labels = primals
  scores_dot, alpha_dot, _ = tangents
  # The maximum over p does not move to first order with p.
  p = _entmax(scores, alpha)
  is_target = jnp.arange(scores.shape[-1]) == labels[..., None]
  _, entropy_dot = jax.jvp(
      functools.partial(_tsallis_entropy, p), (alpha,), (alpha_dot,)
  )
  loss_dot = jnp.sum((p - is_target) * scores_dot, axis=-1) + entropy_dot
  return _entmax_loss(scores, alpha, labels), loss_dot


def multiclass_entmax_loss(
    scores: jax.typing.ArrayLike,
    labels: jax.typing.ArrayLike,
    alpha: jax.typing.ArrayLike = 1.5,
) -> jax.Array:
  r"""Multiclass entmax loss.

  The Fenchel-Young loss of :func:`optax.losses.entmax`. Its gradient is
  ``entmax(scores, alpha) - one_hot(labels)``, and it is 0 where the score of
  the label is at least :math:`1 / (\alpha - 1)` above all others. It is
  :func:`optax.losses.softmax_cross_entropy_with_integer_labels` for
  :math:`\alpha = 1`, and
  :func:`optax.losses.multiclass_sparsemax_loss` for :math:`\alpha = 2`.

  Args:
    scores: scores produced by the model, of shape ``[..., num_classes]``.
    labels: ground-truth integer labels, of shape ``[...]``.
    alpha: a number from 1, or an array that broadcasts to
      ``[..., 1]``; it can be differentiated.

  Returns:
    loss values, of shape ``[...]``.

  References:
    Peters et al, `Sparse Sequence-to-Sequence Models
    <https://arxiv.org/abs/1905.05702>`_, 2019

    Blondel et al, `Learning with Fenchel-Young Losses
    <https://arxiv.org/abs/1901.02324>`_, 2020
  """
  utils.check_subdtype(labels, jnp.integer)
  dtype = jnp.asarray(scores).dtype
  scores, alpha = _prepare(scores, alpha)
  return _entmax_loss(scores, alpha, jnp.asarray(labels)).astype(dtype)
