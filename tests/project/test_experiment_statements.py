"""The parts of the experiments on statements: each is held to something that shares no code with it."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

import anymax
from experiments import _networks, attending, statements

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("one_thread")]


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# -- losses -----------------------------------------------------------------------------------------------------------


def test_what_is_watched_is_computed_as_when_written_out():
    rng = np.random.default_rng(0)
    z, y = 2 * rng.normal(size=(40, 5)), rng.integers(5, size=40)
    p, right = softmax(z), z[np.arange(40), y]
    found = statements.watched(anymax.Softmax(), z, y, True)
    assert found == pytest.approx({
        "accuracy": 1 - (z.argmax(1) == y).mean(),
        "value": ((p * z).sum(1) - right).mean(),
        "-log p": (np.log(np.exp(z).sum(1)) - right).mean(),
    })  # fmt: skip
    assert statements.watched(anymax.Sparsemax(), z, y, False).keys() == {"accuracy"}


def test_each_figure_stops_the_training_where_it_is_least(monkeypatch):
    """Four epochs whose scores are known; test rows tell the epochs apart."""
    y = np.array([0, 0, 1, 1, 0, 1, 0, 1, 0, 1])
    x, x_test = np.zeros((10, 1), np.float32), np.ones((5, 1), np.float32)
    y_test = np.zeros(5, int)
    held = np.array(
        [[[1.5, 0.0], [0.0, 0.01]], [[1.2, 0.0], [0.0, 9.0]], [[0.1, 0.0], [0.1, 0.0]], [[30.0, 0.0], [0.0, 0.1]]]
    )

    def epochs(loss, x, y, hidden, number, seed):
        for epoch in range(number):

            def scores(x, epoch=epoch):
                if len(x) == 2:  # held out
                    return held[epoch]
                ahead = np.arange(len(x)) <= epoch  # more rows are right at each epoch
                return np.stack([ahead, ~ahead], 1) * 50.0

            yield scores

    monkeypatch.setattr(_networks, "epochs", epochs)
    early, found = statements.trained((x, y, x_test, y_test), "softmax", 3, (2, 4), 0)
    for by, at in (("accuracy", 2), ("value", 0), ("-log p", 3)):
        assert found[by]["accuracy"] == pytest.approx(20.0 * (at + 1))
    assert [one["accuracy"] for one in found["watched"]] == [0.5, 0.5, 0.0, 0.5]
    assert found["last"]["accuracy"] == pytest.approx(80.0)
    for by, at in (("accuracy", 0), ("value", 0), ("-log p", 0), ("last", 1)):
        assert early[by]["accuracy"] == pytest.approx(20.0 * (at + 1))
    assert early["watched"] == found["watched"][:2]
    (sparse,) = statements.trained((x, y, x_test, y_test), "sparsemax", 3, (4,), 0)
    ahead = np.arange(8) <= 3
    assert sparse["at 0"] == pytest.approx(100 * np.mean(ahead != (y[2:] == 0)))


def test_arms_train_with_the_losses_that_they_name():
    z = np.array([[3.0, 1.0, -0.5], [0.2, 0.1, 0.9]])
    y = np.array([1, 2])

    def simplex(row):  # the projection, by bisection
        low, high = row.min() - 1, row.max()
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if np.maximum(row - middle, 0).sum() > 1 else (low, middle)
        return np.maximum(row - low, 0)

    p = np.stack([simplex(row) for row in z])[np.arange(2), y]
    for epsilon in (1e-6, 1e-2):
        loss = statements.ARMS[statements.likelihood("sparsemax", epsilon)][1]
        assert float(loss(z, y)) == pytest.approx(-np.log((p + epsilon) / (1 + 3 * epsilon)).mean())
    taylor = 1 + z + z**2 / 2
    q = taylor / taylor.sum(1, keepdims=True)
    assert float(statements.ARMS["Taylor softmax"][1](z, y)) == pytest.approx(-np.log(q[np.arange(2), y]).mean())
    scores = torch.tensor(z, requires_grad=True)
    statements.ARMS[statements.stop_gradient("Taylor softmax")][1](scores, torch.tensor(y)).backward()
    np.testing.assert_allclose(scores.grad, (q - np.eye(3)[y]) / 2, atol=1e-12)
    smooth = 0.9 * np.eye(3)[y] + 0.1 / 3
    expected = -(smooth * np.log(softmax(z))).sum(1).mean()
    assert float(statements.ARMS[statements.SMOOTHED][1](z, y)) == pytest.approx(expected)


def test_the_gradient_of_the_loss_as_written_has_no_target():
    """What the notes say of `(p - y) . stop_gradient(x)`."""
    grads = []
    for target in (0, 2):
        x = torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64, requires_grad=True)
        y = torch.nn.functional.one_hot(torch.tensor(target), 3)
        ((torch.softmax(x, 0) - y) @ x.detach()).backward()
        grads.append(x.grad.numpy())
    np.testing.assert_array_equal(*grads)


def test_first_scores_of_variance_one():
    x = np.random.default_rng(0).random((500, 300)).astype(np.float32)
    z = [statements.first_scores(x, 200, 100, True, seed) for seed in range(20)]
    assert np.mean([np.square(one).mean() for one in z]) == pytest.approx(1.0, abs=0.1)
    torch.manual_seed(5)
    inner, outer = torch.nn.Linear(300, 200), torch.nn.Linear(200, 100)
    with torch.no_grad():
        expected = outer(torch.relu(inner(torch.from_numpy(x))))
    np.testing.assert_allclose(statements.first_scores(x, 200, 100, False, 5), expected)


def test_apart_is_a_spread_of_log_n_less_one():
    edge = math.log(4)
    z = np.array([[0, 0, 0, 0, edge + 1e-9], [0, 0, 0, 0, edge - 1e-9], [-1, edge, 0, 0, 0], [5, 5, 5, 5, 5]])
    assert statements.apart(z) == 50.0


# -- attention --------------------------------------------------------------------------------------------------------


def test_exact_recall_asks_for_a_key_of_its_context():
    task = attending.Exact("softmax", 20, 4)
    (keys, values, asked), right = task.batch(np.random.default_rng(0), 30)
    assert keys.shape == values.shape == (30, 20)
    assert asked.shape == right.shape == (30, attending.QUERIES)
    for row in range(30):
        known = dict(zip(keys[row].tolist(), values[row].tolist()))
        assert len(known) == 20
        assert [known[k] for k in asked[row].tolist()] == right[row].tolist()
    assert len(np.unique(keys)) > 300


@pytest.mark.parametrize("mapping", ["softmax", "taylor:order=2"])
def test_exact_recall_reads_as_when_written_out(mapping):
    task = attending.Exact(mapping, 9, 4, scale=3.0)
    torch.manual_seed(0)
    model = task.network()
    given, _ = task.batch(np.random.default_rng(0), 2)
    keys, values, asked = given
    query, key, value = (a.detach().double().numpy() for a in (model.query, model.key, model.value))
    s = 3.0 * np.einsum("bqd,bkd->bqk", query[asked], key[keys]) / 2.0
    u = np.exp(s) if mapping == "softmax" else 1 + s + s**2 / 2
    read = np.einsum("bqk,bkv->bqv", u / u.sum(-1, keepdims=True), value[values])
    expected = read @ model.out.weight.detach().double().numpy().T + model.out.bias.detach().double().numpy()
    with torch.no_grad():
        np.testing.assert_allclose(model(*map(torch.from_numpy, given)), expected, atol=1e-4)


def test_exact_recall_begins_with_the_scale():
    task = attending.Exact("softmax", 64, 16, scale=3.0)
    s = []
    for seed in range(10):
        torch.manual_seed(seed)
        model = task.network()
        s.append(3.0 * (model.query @ model.key.T / 4.0).detach().numpy())
    assert np.std(s) == pytest.approx(3.0, rel=0.02)


@pytest.mark.parametrize("even", [False, True])
def test_noisy_recall_draws_by_the_prior(even, monkeypatch):
    monkeypatch.setattr(attending, "VALUES", 10**9)  # a value tells its key
    (keys, values, log_p, queries), right = attending.Noisy("softmax", even=even).batch(np.random.default_rng(0), 400)
    assert keys.shape == (400, 16, 8)
    np.testing.assert_allclose(np.exp(log_p).sum(1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(keys, axis=2), 8**0.5, rtol=1e-5)
    at = (values[:, None] == right[..., None]).argmax(2)
    chosen = np.take_along_axis(log_p, at, 1)
    p = np.exp(log_p) if not even else np.full_like(log_p, 1 / 16)
    surprise, spread = float((p * log_p).sum(1).mean()), float(chosen.std()) / math.sqrt(chosen.size)
    assert chosen.mean() == pytest.approx(surprise, abs=5 * spread)
    counts = np.bincount(at.ravel(), minlength=16) / at.size  # no place is left out
    np.testing.assert_allclose(counts, p.mean(0), atol=0.02)
    noise = queries - np.take_along_axis(keys, at[..., None], 1)
    assert noise.std() == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("way", ["", "added", "scaled", "mixed"])
def test_a_prior_comes_in_as_when_written_out(way):
    task = attending.Noisy("softmax", way)
    torch.manual_seed(0)
    model = task.network()
    given, _ = task.batch(np.random.default_rng(0), 3)
    keys, values, log_p, queries = given
    wq, wk, value, out = (
        a.detach().double().numpy() for a in (model.query.weight, model.key.weight, model.value, model.out.weight)
    )
    s = np.einsum("bqd,bkd->bqk", queries @ wq.T, keys @ wk.T) / math.sqrt(8)
    prior = np.exp(log_p)[:, None]
    p = softmax({"added": s + log_p[:, None], "scaled": s * np.sqrt(16 * prior)}.get(way, s))
    if way == "mixed":
        w = 1 / (1 + math.e)
        p = (1 - w) * p + w * prior
    expected = np.einsum("bqk,bkv->bqv", p, value[values]) @ out.T + model.out.bias.detach().numpy()
    got = model(*map(torch.from_numpy, given))
    np.testing.assert_allclose(got.detach(), expected, atol=1e-4)
    if way:
        got.square().sum().backward()
        assert abs(float(model.strength.grad)) > 1e-3


def test_bayes_takes_the_most_likely_key():
    task = attending.Noisy("softmax")
    given, right = task.batch(np.random.default_rng(0), 20)
    keys, values, log_p, queries = given
    for prior in (False, True):
        hits = []
        for row in range(20):
            for j in range(attending.QUERIES):
                density = np.exp(-np.square(queries[row, j] - keys[row]).sum(1) / 2)
                density = density * np.exp(log_p[row]) if prior else density
                hits.append(values[row, density.argmax()] == right[row, j])
        assert attending.by_bayes(given, right, prior) == pytest.approx(100 * np.mean(hits))


def test_gradients_are_the_norms_of_jacobians():
    x = np.random.default_rng(0).normal(size=(5, 7))
    scales = np.array([0.5, 3.0])
    expected = [a * anymax.inspection.jacobian_norm(anymax.Softmax(), a * x) for a in scales]
    np.testing.assert_allclose(attending.gradients(x, scales), expected, rtol=1e-12)


def test_on_random_scores_finds_the_best_scales():
    found = attending.on_random_scores(16, 41, 3)
    x = np.random.default_rng([3, 16]).normal(size=(41, 16))

    def gradient(a, rows):
        return a * (1 - (softmax(a * rows) ** 2).sum(-1)).mean()

    grid = np.geomspace(0.5, 256, 300)
    best = [grid[np.argmax([gradient(a, row[None]) for a in grid])] for row in x]
    assert found["best"] == pytest.approx(np.median(best), rel=0.05)
    edge = math.sqrt(2 * math.log(16))
    inside = np.linspace(0.5, 4 * edge, 300)
    most = max(gradient(a, x) for a in inside)
    assert found["most"] == pytest.approx(most, rel=0.01)
    assert found["at 1"] == pytest.approx(gradient(1.0, x) / most, rel=0.01)
    assert found["at 4 edges"] == pytest.approx(gradient(4 * edge, x) / most, rel=0.01)


def test_the_power_is_a_slope():
    assert attending.power({n: 3 * math.log(n) ** 0.7 for n in (16, 64, 4096)}) == pytest.approx(0.7)


def test_exact_recall_is_learned():
    task = attending.Exact("softmax", 8, 16)
    model = attending.trained(task, 2e-2, 250, 0)
    assert attending.accuracy(model, task, 64, 0) > 60
    again = attending.trained(task, 2e-2, 250, 0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))
