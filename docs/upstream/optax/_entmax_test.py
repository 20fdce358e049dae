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
"""Tests for entmax and its loss in `optax.losses._entmax.py`."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import jax.test_util as jaxtest
import numpy as np
from optax import projections
from optax.losses import _classification
from optax.losses import _entmax

_ALPHAS = (1.0, 1.0001, 1.3, 1.5, 2.0, 3.5)

# One program for all values of alpha.
_entmax_jit = jax.jit(_entmax.entmax, static_argnames='axis')
_loss_jit = jax.jit(_entmax.multiclass_entmax_loss)
_square_gradient = jax.jit(
    jax.grad(lambda x, alpha: jnp.sum(_entmax.entmax(x, alpha) ** 2))
)
_loss_gradient = jax.jit(
    jax.grad(lambda *args: jnp.sum(_entmax.multiclass_entmax_loss(*args)))
)


class EntmaxTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    rng = np.random.RandomState(0)
    self.scores = rng.normal(0.0, 1.5, (5, 7)).astype(np.float32)
    self.labels = np.array([0, 6, 3, 3, 1])

  def test_softmax(self):
    p = _entmax.entmax(self.scores, alpha=1.0)
    np.testing.assert_allclose(p, jax.nn.softmax(self.scores), rtol=1e-5)
    near = _entmax.entmax(self.scores, alpha=1.0 + 1e-6)
    np.testing.assert_allclose(near, p, rtol=1e-4)

  def test_sparsemax(self):
    p = _entmax.entmax(self.scores, alpha=2.0)
    expected = jax.vmap(projections.projection_simplex)(self.scores)
    np.testing.assert_allclose(p, expected, atol=1e-6)
    np.testing.assert_array_equal(p == 0, expected == 0)

  def test_closed_form(self):
    # For alpha = 1.5 and two classes the threshold solves a quadratic equation,
    # (a - tau)^2 + (b - tau)^2 = 1 with a = x_1 / 2 and b = x_2 / 2.
    a, b = 0.5, 0.1
    tau = (a + b - np.sqrt((a + b) ** 2 - 2 * (a * a + b * b - 1))) / 2
    expected = np.array([(a - tau) ** 2, (b - tau) ** 2])
    p = _entmax.entmax(jnp.array([2 * a, 2 * b]), alpha=1.5)
    np.testing.assert_allclose(p, expected, rtol=1e-5)

  @parameterized.product(alpha=_ALPHAS[2:], scale=(0.01, 1.0, 100.0))
  def test_optimality(self, alpha, scale):
    # x_j less the derivative of -H at p_j is the same number on the support,
    # and x_j is at most that off it.
    x = scale * self.scores
    p = np.asarray(_entmax_jit(x, alpha), np.float64)
    np.testing.assert_allclose(p.sum(-1), 1.0, rtol=1e-5)
    tau = np.where(p > 1e-4, x - p ** (alpha - 1) / (alpha - 1), np.nan)
    low, high = np.nanmin(tau, -1), np.nanmax(tau, -1)
    np.testing.assert_array_less(high - low, 1e-4 * max(scale, 1.0))
    off = np.where(p == 0, x, -np.inf).max(-1)
    np.testing.assert_array_less(off - high, 1e-4 * max(scale, 1.0))

  @parameterized.parameters(*_ALPHAS)
  def test_axis_and_leading_dimensions(self, alpha):
    expected = jnp.stack([_entmax_jit(row, alpha) for row in self.scores])
    p = _entmax_jit(self.scores, alpha)
    np.testing.assert_allclose(p, expected, atol=1e-6)
    moved = _entmax_jit(self.scores.T, alpha, axis=0)
    np.testing.assert_allclose(moved.T, expected, atol=1e-6)
    mapped = jax.vmap(_entmax_jit, (0, None))(self.scores, alpha)
    np.testing.assert_allclose(mapped, expected, atol=1e-6)

  def test_alpha_of_each_row(self):
    alphas = jnp.array([1.0, 1.2, 1.5, 2.0, 4.0])
    expected = jax.vmap(_entmax.entmax)(self.scores, alphas)
    p = _entmax.entmax(self.scores, alphas[:, None])
    np.testing.assert_allclose(p, expected, atol=1e-6)
    p = _entmax.entmax(self.scores.T, alphas[None], axis=0)
    np.testing.assert_allclose(p.T, expected, atol=1e-6)

  @parameterized.parameters(*_ALPHAS)
  def test_masked(self, alpha):
    masked = self.scores.copy()
    masked[:, 2:4] = -np.inf
    masked[0] = -np.inf
    p = _entmax_jit(masked, alpha)
    np.testing.assert_array_equal(p[0], np.zeros(7))
    np.testing.assert_array_equal(p[:, 2:4], np.zeros((5, 2)))
    kept = np.delete(masked, (2, 3), axis=1)[1:]
    expected = _entmax_jit(kept, alpha)
    np.testing.assert_allclose(np.delete(p, (2, 3), 1)[1:], expected, atol=1e-6)
    grad = _square_gradient(masked, alpha)
    self.assertTrue(np.isfinite(grad).all())
    np.testing.assert_array_equal(grad[:, 2:4], np.zeros((5, 2)))

  @parameterized.parameters(*_ALPHAS)
  def test_not_a_number_stays_in_its_row(self, alpha):
    x = self.scores.copy()
    x[1, 0] = np.nan
    p = _entmax_jit(x, alpha)
    self.assertTrue(np.isnan(p[1]).all())
    self.assertTrue(np.isfinite(np.delete(p, 1, axis=0)).all())

  @parameterized.parameters(*_ALPHAS)
  def test_extreme_scores(self, alpha):
    p = _entmax_jit(jnp.array([1e5, 0.0, -1e5]), alpha)
    np.testing.assert_allclose(p, np.array([1.0, 0.0, 0.0]), atol=1e-6)
    p = _entmax_jit(jnp.full(4, 1e5), alpha)
    np.testing.assert_allclose(p, np.full(4, 0.25), rtol=1e-6)
    np.testing.assert_allclose(_entmax_jit(jnp.zeros(1), alpha), np.ones(1))

  @parameterized.parameters(jnp.bfloat16, jnp.float16)
  def test_half_precision(self, dtype):
    p = _entmax.entmax(self.scores.astype(dtype))
    self.assertEqual(p.dtype, dtype)
    exact = _entmax.entmax(self.scores.astype(dtype).astype(np.float32))
    expected = exact.astype(dtype).astype(np.float32)
    np.testing.assert_allclose(p.astype(np.float32), expected)

  @parameterized.parameters(1.0, 1.5, 3.5)
  def test_derivatives(self, alpha):
    with jax.enable_x64(True):
      x = jnp.asarray(self.scores[:2, :4], jnp.float64) / 3
      alpha = jnp.asarray(alpha, jnp.float64)
      jaxtest.check_grads(
          jax.jit(_entmax.entmax), (x, alpha), order=2, rtol=1e-4
      )

  def test_integer_scores_are_refused(self):
    with self.assertRaises(TypeError):
      _entmax.entmax(jnp.arange(3))


class MulticlassEntmaxLossTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    rng = np.random.RandomState(1)
    self.scores = rng.normal(0.0, 1.5, (5, 7)).astype(np.float32)
    self.labels = np.array([0, 6, 3, 3, 1])

  def test_cross_entropy(self):
    losses = _loss_jit(self.scores, self.labels, 1.0)
    expected = _classification.softmax_cross_entropy_with_integer_labels(
        self.scores, self.labels
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-5)

  def test_sparsemax_loss(self):
    losses = _loss_jit(self.scores, self.labels, 2.0)
    expected = _classification.multiclass_sparsemax_loss(
        self.scores, self.labels
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-6)

  @parameterized.parameters(*_ALPHAS)
  def test_gradient(self, alpha):
    grad = _loss_gradient(self.scores, self.labels, alpha)
    expected = _entmax_jit(self.scores, alpha) - jax.nn.one_hot(self.labels, 7)
    np.testing.assert_allclose(grad, expected, atol=1e-5)

  @parameterized.parameters(1.0, 1.5, 3.5)
  def test_derivatives(self, alpha):
    with jax.enable_x64(True):
      x = jnp.asarray(self.scores[:2, :4], jnp.float64) / 3
      alpha = jnp.asarray(alpha, jnp.float64)

      @jax.jit
      def loss(x, alpha):
        return _entmax.multiclass_entmax_loss(x, jnp.array([1, 0]), alpha)

      jaxtest.check_grads(loss, (x, alpha), order=2, rtol=1e-4)

  @parameterized.parameters(1.2, 1.5, 2.0, 3.5)
  def test_margin(self, alpha):
    # The loss is 0 from a lead of 1 / (alpha - 1) on, and not before.
    margin = 1 / (alpha - 1)
    lead = jnp.array([1.001, 2.0, 1e5]) * margin
    scores = jnp.stack([lead, jnp.zeros(3), jnp.zeros(3)], axis=-1)
    labels = jnp.zeros(3, jnp.int32)
    losses = _loss_jit(scores, labels, alpha)
    np.testing.assert_allclose(losses, np.zeros(3), atol=1e-6)
    short = _loss_jit(scores[0] * 0.5, labels[0], alpha)
    self.assertGreater(short, 1e-4)

  @parameterized.parameters(*_ALPHAS)
  def test_masked(self, alpha):
    scores = jnp.array([[1.0, -jnp.inf, 0.5], [-jnp.inf, 0.0, 1.0]])
    labels = jnp.array([0, 0])
    losses = _loss_jit(scores, labels, alpha)
    expected = _loss_jit(jnp.array([1.0, 0.5]), jnp.array(0), alpha)
    np.testing.assert_allclose(losses[0], expected, rtol=1e-5)
    self.assertEqual(losses[1], np.inf)

  def test_labels_that_are_no_integers_are_refused(self):
    with self.assertRaises(TypeError):
      _entmax.multiclass_entmax_loss(self.scores, jnp.ones(5))


if __name__ == '__main__':
  absltest.main()
