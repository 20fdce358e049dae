"""Handwritten characters of several alphabets, and a small network that gives each drawing a unit vector."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from anymax import Mapping
from anymax.margins import Margin
from anymax.nn import Loss, MarginHead

SIDE, DIMENSION, BATCH = 28, 64, 100


@dataclasses.dataclass(frozen=True)
class Drawings:
    """Images [n, 1, 28, 28] with the number of each one's character and the name of its alphabet."""

    images: Tensor
    characters: np.ndarray
    alphabets: np.ndarray

    def of(self, alphabets: tuple[str, ...]) -> Drawings:
        """Those of the alphabets, their characters numbered from 0."""
        chosen = np.isin(self.alphabets, alphabets)
        characters = np.unique(self.characters[chosen], return_inverse=True)[1]
        return Drawings(self.images[torch.from_numpy(chosen)], characters, self.alphabets[chosen])

    def turned(self) -> Drawings:
        """Each also by 90, 180 and 270 degrees, as drawings of three further characters: the usual way to have more classes."""
        images = torch.cat([torch.rot90(self.images, turns, (2, 3)) for turns in range(4)])
        characters = np.concatenate([self.characters + turns * self.classes for turns in range(4)])
        return Drawings(images, characters, np.tile(self.alphabets, 4))

    @property
    def classes(self) -> int:
        return int(self.characters.max()) + 1


def omniglot(path: Path) -> Drawings:
    """The drawings, ink averaged from 105 x 105 to 28 x 28 and standardised."""
    with np.load(path) as file:
        n, height, width = file["shape"]
        ink = np.unpackbits(file["bits"], axis=1)[:, : height * width].reshape(n, 1, height, width)
        characters, alphabets = np.unique(file["char"], return_inverse=True)[1], file["alphabet"]
    small = nn.functional.interpolate(torch.from_numpy(ink.astype(np.float32)), size=(SIDE, SIDE), mode="area")
    return Drawings(_standardised(small), characters, alphabets)


def invented(alphabets: tuple[str, ...], characters: int = 6, drawers: int = 8) -> Drawings:
    """Characters of four strokes at random; each drawer moves the strokes' ends a little."""
    rng = np.random.default_rng(0)
    ends = rng.uniform(4, SIDE - 5, size=(len(alphabets) * characters, 1, 5, 2))
    ends = (ends + rng.normal(0, 1.2, size=(len(ends), drawers, 5, 2))).reshape(-1, 5, 2)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    points = np.stack([rows, columns], axis=-1).reshape(1, -1, 1, 2)
    start, stroke = ends[:, None, :-1], ends[:, None, 1:] - ends[:, None, :-1]
    along = np.clip(((points - start) * stroke).sum(-1) / np.maximum((stroke**2).sum(-1), 1e-9), 0, 1)
    distance = np.linalg.norm(points - start - along[..., None] * stroke, axis=-1).min(axis=-1)
    ink = torch.from_numpy(np.clip(1.5 - distance, 0, 1).reshape(-1, 1, SIDE, SIDE).astype(np.float32))
    numbers = np.arange(len(alphabets) * characters)
    names = np.repeat(np.asarray(alphabets), characters * drawers)
    return Drawings(_standardised(ink), np.repeat(numbers, drawers), names)


def _standardised(images: Tensor) -> Tensor:
    return (images - images.mean()) / images.std()


def network() -> nn.Sequential:
    """Three convolutions in steps of two, each with batch normalisation, then a linear layer: 89,000 weights."""
    layers: list[nn.Module] = []
    for a, b in ((1, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 4 * 4, DIMENSION))


class LinearHead(nn.Module):
    """The usual last layer, with the map's loss on its scores."""

    def __init__(self, classes: int, mapping: Mapping) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(DIMENSION, classes), Loss(mapping)

    def forward(self, embeddings: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.layer(embeddings), target)


def train(
    drawings: Drawings, mapping: Mapping, scale: float | None, margin: Margin, *, epochs: int, seed: int
) -> nn.Sequential:
    """The network, trained by Adam with one cycle of the learning rate; without a scale the loss has a linear layer."""
    torch.manual_seed(seed)
    net, classes = network(), drawings.classes
    head = LinearHead(classes, mapping) if scale is None else MarginHead(DIMENSION, classes, mapping, margin, scale)
    steps = epochs * -(-len(drawings.images) // BATCH)
    optimizer = torch.optim.Adam([*net.parameters(), *head.parameters()])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=steps)
    targets = torch.from_numpy(drawings.characters)
    for _ in range(epochs):
        for rows in torch.randperm(len(targets)).split(BATCH):
            optimizer.zero_grad()
            head(net(_moved(drawings.images[rows])), targets[rows]).backward()
            optimizer.step()
            schedule.step()
    return net.eval()


def _moved(images: Tensor) -> Tensor:
    """Each image turned, sheared, scaled and shifted a little."""
    n = len(images)
    change = torch.eye(2, 3).repeat(n, 1, 1)
    change[:, :, :2] += torch.empty(n, 2, 2).uniform_(-0.15, 0.15)
    change[:, :, 2] = torch.empty(n, 2).uniform_(-0.1, 0.1)
    grid = nn.functional.affine_grid(change, list(images.shape), align_corners=False)
    return nn.functional.grid_sample(images, grid, padding_mode="border", align_corners=False)


@torch.no_grad()
def embed(net: nn.Module, drawings: Drawings) -> np.ndarray:
    """Unit vectors [n, 64]."""
    return torch.cat([nn.functional.normalize(net(part)) for part in drawings.images.split(500)]).numpy()
