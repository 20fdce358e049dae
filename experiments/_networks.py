"""Small networks for images: the two data sets, the maps with their losses, and a training that can be looked at after each epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import anymax
from anymax import Entmax, Mapping, PerturbMax, Sigsoftmax, Softmax, Sparsemax, Taylor

from . import _images
from ._common import Settings
from ._report import Findings

Loss = Callable[[Any, Any], Any]
Data = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # x, y, x_test, y_test
Sets = dict[str, tuple[Callable[[int], Data], int]]  # a seed draws the data; hidden units
MODELS: dict[str, tuple[Mapping, Loss]] = {
    "softmax": (Softmax(), anymax.cross_entropy),
    "Taylor softmax": (Taylor(2), anymax.taylor_softmax_loss),
    "sigsoftmax": (Sigsoftmax(), lambda x, y: anymax.nll(Sigsoftmax(), x, y)),
    "perturb-max": (PerturbMax(), anymax.perturb_max_loss),
    "perturb-max, accuracy": (PerturbMax(), lambda x, y: anymax.accuracy_loss(PerturbMax(), x, y)),
    "1.5-entmax": (Entmax(1.5), anymax.entmax15_loss),
    "sparsemax": (Sparsemax(), anymax.sparsemax_loss),
}
BATCH, RATE = 100, 1e-3
FASHION = "Fashion-MNIST (Xiao, Rasul and Vollgraf 2017)"
DIGITS = "The digits of scikit-learn (UCI)"


def digits(seed: int) -> Data:
    """The 1,797 digits of scikit-learn (from UCI), 1,000 drawn at random to train."""
    from sklearn.datasets import load_digits  # late: an optional extra

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(y))
    train, test = order[:1000], order[1000:]
    return (x[train] / 16).astype(np.float32), y[train], (x[test] / 16).astype(np.float32), y[test]


def fashion(who: str, folder: Path, rows: int, seed: int) -> Data:
    """Fashion-MNIST; of its training rows at most `rows`, drawn at random."""
    x, y, x_test, y_test = _images.fashion(who, folder)
    chosen = np.random.default_rng(seed).permutation(len(y))[:rows]
    return x[chosen], y[chosen], x_test, y_test


def sets(who: str, settings: Settings, found: Findings, rows: int = 5000) -> Sets:
    """The digits, and unless the run is quick Fashion-MNIST with `rows` to train: how a seed draws it, and the hidden units of its network.

    What they are goes into `found.data`.
    """
    both: Sets = {"digits": (digits, 32 if settings.quick else 64)}
    found.data = f"{DIGITS}: of 1,797 rows 1,000 drawn to train, the others to test."
    if not settings.quick:
        both["Fashion-MNIST"] = (lambda seed: fashion(who, settings.options.fashion_mnist, rows, seed), 128)
        found.data += f" {FASHION}: {rows:,} rows drawn to train, 10,000 to test."
    return both


def network(sets: Sets) -> str:
    """What is trained on each of `sets`, in words."""
    return "one hidden layer, ReLU; " + ", ".join(f"{name}: {hidden} units" for name, (_, hidden) in sets.items())


def epochs(
    loss: Loss, x: np.ndarray, y: np.ndarray, hidden: int, number: int, seed: int
) -> Iterator[Callable[[np.ndarray], np.ndarray]]:
    """Trains a network with one hidden layer by Adam, from the same first weights and by the same batches for every loss.

    After each epoch it gives x -> scores, of the network as it is then.
    """
    import torch  # late: listing the experiments needs no torch

    shuffle = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(x.shape[1], hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, int(y.max()) + 1)
        )
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    rows, target = torch.from_numpy(x), torch.from_numpy(y)

    def scores(x: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(model(torch.from_numpy(x)).double().numpy())

    for _ in range(number):
        for batch in torch.randperm(len(rows), generator=shuffle).split(BATCH):
            optimizer.zero_grad()
            loss(model(rows[batch]), target[batch]).backward()
            optimizer.step()
        yield scores


SETTINGS = {
    "optimizer": f"Adam, learning rate {RATE:g}, batches of {BATCH}, no weight decay",
    "perturb-max": "normal noise of scale 1",
}
