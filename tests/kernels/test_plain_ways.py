"""What compiled kernels do for most calls, and plain operations do for the others: a check of its own for each."""

import numpy as np
import pytest

import anymax as am
from anymax._random.draws import first_above
from anymax.margins import ArcFace

X = np.array([[0.4, -0.2, 0.9, 0.1], [0.3, 0.5, -0.6, 0.2], [-0.1, 0.8, 0.2, 0.0]])


def test_another_index_to_ignore_beside_a_margin():
    options = {"margin": ArcFace(0.3), "scale": 8.0, "axis": -1}
    got = am.margin_loss(am.Softmax(), X, np.array([2, -7, 1]), ignore_index=-7, **options)
    want = am.margin_loss(am.Softmax(), X[[0, 2]], np.array([2, 1]), **options)
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_label_smoothing_keeps_the_mass_of_a_budget():
    y = np.array([[1.0, 0.0, 1.0, 0.0]] * 3)
    got = am.fenchel_young(am.Budget(2), X, y, label_smoothing=0.2, axis=-1)
    want = am.fenchel_young(am.Budget(2), X, 0.8 * y + 0.2 * 2 / 4, axis=-1)
    np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize("mapping", [am.Softmax(), am.Sparsemax(), am.Entmax(1.5)], ids=str)
def test_no_share_of_a_masked_class_is_asked_for(mapping):
    x, y = np.append(X[0], -np.inf), np.array([0.5, 0.0, 0.25, 0.25, 0.0])
    with am.use("reference"):
        got = am.fenchel_young(mapping, x, y)
        want = am.fenchel_young(mapping, X[0], y[:-1])
    np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("engine", ["reference", None])
def test_dtypes_of_thresholds_and_logarithms(dtype, engine):
    x = X.astype(dtype)
    with am.use(engine or "native"):
        assert am.threshold(am.Sparsemax(), x).tau.dtype == dtype
    assert am.log_apply(am.Sparsemax(), x).dtype == dtype


def test_where_sums_of_probabilities_pass_a_level():
    upto = np.array([[0.1, 0.3, 0.3, 1.0]])
    levels = np.array([[0.0, 0.05, 0.1, 0.2, 0.3, 0.99]])
    np.testing.assert_array_equal(first_above(upto, levels, np), [[0, 0, 1, 1, 3, 3]])


@pytest.mark.parametrize("order", [2, 10, 20])
def test_the_slope_of_a_long_polynomial(order):
    mapping, x, step = am.Taylor(order), 20.0 * X[0], 1e-4
    with am.use("reference"):
        got = am.jacobian(mapping, x)
        want = np.stack(
            [(am.apply(mapping, x + step * e) - am.apply(mapping, x - step * e)) / (2 * step) for e in np.eye(4)],
            axis=-1,
        )
    np.testing.assert_allclose(got, want, atol=1e-7)
