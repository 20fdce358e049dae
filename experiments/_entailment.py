"""Does the premise entail the hypothesis? Pairs of sentences, and two networks that read them with any attention.

`Reader` is the network of Martins & Astudillo 2016, section 4.3: one GRU reads the premise, another goes on with the hypothesis, and
its last state looks back at the words of the premise once. `Aligner` is decomposable attention (Parikh et al. 2016): every word
of either sentence looks at the words of the other; no word knows its place.
"""

from __future__ import annotations

import copy
import csv
import gzip
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import anymax
from anymax import Mapping
from anymax.nn import Activation

LABELS = ("entailment", "neutral", "contradiction")
SIZE, DROPOUT, BATCH, RATE = 64, 0.1, 64, 5e-3


class Pair(NamedTuple):
    """A premise and a hypothesis, in words, with the number of their label."""

    label: int
    premise: tuple[str, ...]
    hypothesis: tuple[str, ...]


def pair(label: str, premise: str, hypothesis: str) -> Pair:
    return Pair(LABELS.index(label), words(premise), words(hypothesis))


def words(sentence: str) -> tuple[str, ...]:
    """In lower case; a mark is a word of its own, the full stop at the end is dropped."""
    return tuple(re.findall(r"[\w']+|[^\w\s]", sentence.lower().strip().rstrip(" .")))


def snli(path: Path) -> list[Pair]:
    """label, premise, hypothesis; one pair a line."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [pair(*line.rstrip("\n").split("\t")) for line in file]


def counterfactual(path: Path) -> list[Pair]:
    """premise, hypothesis, label; below a line of titles."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        next(rows)
        return [pair(label, premise, hypothesis) for premise, hypothesis, label in rows]


def breaking(path: Path) -> list[Pair]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    return [pair(row["gold_label"], row["sentence1"], row["sentence2"]) for row in rows]


def by_premise(pairs: Sequence[Pair], held: int) -> tuple[list[Pair], list[Pair]]:
    """(the rest, at least `held` pairs); no premise is in both."""
    order = list(dict.fromkeys(p.premise for p in pairs))
    order = [order[i] for i in np.random.default_rng(0).permutation(len(order))]
    count, chosen = Counter(p.premise for p in pairs), set()
    while order and sum(count[premise] for premise in chosen) < held:
        chosen.add(order.pop())
    return [p for p in pairs if p.premise not in chosen], [p for p in pairs if p.premise in chosen]


def invented(n: int, seed: int) -> list[Pair]:
    """Two animals, each with a colour and a place; the hypothesis gives one of them a colour, or a size of which nothing was said."""
    rng = np.random.default_rng(seed)
    animals, colours = "dog cat horse bird fox".split(), "red blue green white black".split()
    places, sizes = "house river road tree".split(), "big small old".split()
    pairs = []
    for _ in range(n):
        (one, two), (first, second) = (rng.choice(animals, 2, False), rng.choice(colours, 2, False))
        here, there = rng.choice(places, 2)
        label = LABELS[rng.integers(3)]
        said = {"entailment": first, "contradiction": second, "neutral": rng.choice(sizes)}[label]
        parts = [f"a {first} {one} by the {here}", f"a {second} {two} by the {there}"]
        pairs.append(pair(label, " and ".join(parts[i] for i in rng.permutation(2)), f"the {one} is {said}"))
    return pairs


class Vocabulary:
    """Numbers of words: 0 fills up, 1 is a word seen less than twice in training."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        count = Counter(word for p in pairs for word in (*p.premise, *p.hypothesis))
        self.numbers = {word: i for i, word in enumerate((w for w, n in count.items() if n > 1), start=2)}

    def __len__(self) -> int:
        return len(self.numbers) + 2

    def rows(self, sentences: Sequence[tuple[str, ...]]) -> Tensor:
        longest = max(map(len, sentences))
        return torch.tensor([[self.numbers.get(w, 1) for w in s] + [0] * (longest - len(s)) for s in sentences])

    def batches(self, pairs: Sequence[Pair], generator: torch.Generator | None = None) -> Iterator[tuple[Tensor, ...]]:
        """(which pairs, premises, hypotheses, labels) of like lengths; in a random order where there is a generator."""
        index = (
            list(range(len(pairs))) if generator is None else torch.randperm(len(pairs), generator=generator).tolist()
        )
        pool = len(index) if generator is None else 50 * BATCH
        groups = []
        for start in range(0, len(index), pool):
            near = sorted(index[start : start + pool], key=lambda i: (len(pairs[i].premise), len(pairs[i].hypothesis)))
            groups += [near[i : i + BATCH] for i in range(0, len(near), BATCH)]
        if generator is not None:
            groups = [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]
        for group in groups:
            chosen = [pairs[i] for i in group]
            labels = torch.tensor([p.label for p in chosen])
            yield (
                torch.tensor(group),
                self.rows([p.premise for p in chosen]),
                self.rows([p.hypothesis for p in chosen]),
                labels,
            )


class Attention(NamedTuple):
    """What turns scores into weights: a map, `logistic` (each weight alone), or neither: no attention."""

    mapping: Mapping | None = None
    logistic: bool = False
    learn: str | None = None

    @property
    def on(self) -> bool:
        return self.logistic or self.mapping is not None


class Reader(nn.Module):
    """Without attention the last state of the premise takes the place of what attention found in it."""

    def __init__(self, vocabulary: int, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.embedding = nn.Embedding(vocabulary, SIZE, padding_idx=0)
        self.premise, self.hypothesis = (nn.GRU(SIZE, SIZE, batch_first=True) for _ in range(2))
        if attention.on:
            self.keys, self.query = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE, bias=False)
            self.score = nn.Linear(SIZE, 1, bias=False)
        if attention.mapping is not None:
            self.activation = Activation(attention.mapping, learn=attention.learn)
        self.hidden, self.out = nn.Linear(2 * SIZE, SIZE), nn.Linear(SIZE, len(LABELS))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, premise: Tensor, hypothesis: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Scores [B, 3] and the weights [B, 1, words of the premise]."""
        states, last = self._read(self.premise, premise, None)  # [B, L, D], [B, D]
        _, query = self._read(self.hypothesis, hypothesis, last)
        found, weights = last, []
        if self.attention.on:
            scores = self.score(torch.tanh(self.keys(states) + self.query(query)[:, None])).squeeze(-1)  # [B, L]
            keep = premise != 0
            p = torch.sigmoid(scores) * keep if self.attention.logistic else self.activation(scores, keep)
            found, weights = (p[:, None] @ states).squeeze(1), [p[:, None]]
        both = self.dropout(torch.cat([found, query], dim=-1))
        return self.out(self.dropout(torch.tanh(self.hidden(both)))), weights

    def _read(self, gru: nn.GRU, sentence: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
        """All states and the one after the last word."""
        states = gru(self.dropout(self.embedding(sentence)), None if start is None else start[None])[0]
        at = (sentence != 0).sum(dim=1) - 1
        return states, states[torch.arange(len(at)), at]


class Aligner(nn.Module):
    """Without attention each word is compared with the mean of the other sentence."""

    def __init__(self, vocabulary: int, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.embedding = nn.Embedding(vocabulary, SIZE, padding_idx=0)
        if attention.on:
            self.align = self._layers(SIZE)
        if attention.mapping is not None:
            self.activation = Activation(attention.mapping, learn=attention.learn)
        self.compare, self.join = self._layers(2 * SIZE), self._layers(2 * SIZE)
        self.out = nn.Linear(SIZE, len(LABELS))
        self.dropout = nn.Dropout(DROPOUT)

    @staticmethod
    def _layers(inputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(inputs, SIZE), nn.ReLU())

    def forward(self, premise: Tensor, hypothesis: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Scores [B, 3] and the weights, [B, words of the hypothesis, of the premise] and the other way round."""
        a, b = self.dropout(self.embedding(premise)), self.dropout(self.embedding(hypothesis))
        forth, back = self._look(b, a, premise != 0), self._look(a, b, hypothesis != 0)
        sums = [
            (self.compare(torch.cat([x, found], dim=-1)) * (sentence != 0)[..., None]).sum(dim=1)
            for x, sentence, (found, _) in ((b, hypothesis, forth), (a, premise, back))
        ]
        weights = [p for _, p in (forth, back)] if self.attention.on else []
        return self.out(self.dropout(self.join(torch.cat(sums, dim=-1)))), weights

    def _look(self, x: Tensor, other: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        """What each word of x finds in the other sentence."""
        keep = keep[:, None]
        if not self.attention.on:
            p = keep / keep.sum(dim=-1, keepdim=True)
            return (p @ other).expand(-1, x.shape[1], -1), p
        q, k = self.align(x), self.align(other)
        if self.attention.logistic:
            p = torch.sigmoid(q @ k.transpose(1, 2) / SIZE**0.5) * keep
            return p @ other, p
        return anymax.attention(q, k, other, self.activation.mapping, mask=keep, need_weights=True)


def train(
    model: type[Reader] | type[Aligner],
    attention: Attention,
    vocabulary: Vocabulary,
    pairs: Sequence[Pair],
    held: Sequence[Pair],
    *,
    epochs: int,
    seed: int,
    say: Callable[[str], None],
) -> Reader | Aligner:
    """The network of the epoch with the best accuracy on `held`; Adam."""
    torch.manual_seed(seed)
    net, generator = model(len(vocabulary), attention), torch.Generator().manual_seed(seed)
    optimizer, best, kept = torch.optim.Adam(net.parameters(), RATE, fused=True), -1.0, net.state_dict()
    for epoch in range(epochs):
        net.train()
        for _, premise, hypothesis, labels in vocabulary.batches(pairs, generator):
            optimizer.zero_grad()
            anymax.cross_entropy(net(premise, hypothesis)[0], labels).backward()
            optimizer.step()
        reached = measure(net, vocabulary, held).accuracy
        if reached > best:
            best, kept = reached, copy.deepcopy(net.state_dict())
        say(f"epoch {epoch + 1}: {100 * reached:.1f} % of the pairs held out")
    net.load_state_dict(kept)
    return net.eval()


class Measured(NamedTuple):
    right: np.ndarray  # of each pair whether it is
    zeros: float  # share of the weights of real words that are exactly 0; NaN without attention

    @property
    def accuracy(self) -> float:
        return float(self.right.mean())


@torch.no_grad()
def measure(net: Reader | Aligner, vocabulary: Vocabulary, pairs: Sequence[Pair]) -> Measured:
    net.eval()
    right, zeros, count = np.zeros(len(pairs), dtype=bool), 0, 0
    for rows, premise, hypothesis, labels in vocabulary.batches(pairs):
        scores, weights = net(premise, hypothesis)
        right[rows.numpy()] = (scores.argmax(dim=-1) == labels).numpy()
        for p, queries, keys in zip(weights, (hypothesis, premise), (premise, hypothesis)):
            real = (keys != 0)[:, None] & ((queries != 0)[..., None] if p.shape[1] > 1 else torch.tensor(True))
            zeros += int(((p == 0) & real).sum())
            count += int(real.sum())
    return Measured(right, zeros / count if count else float("nan"))


@torch.no_grad()
def weights(net: Reader | Aligner, vocabulary: Vocabulary, one: Pair) -> np.ndarray:
    """[queries, words of the premise] of one pair."""
    return net(vocabulary.rows([one.premise]), vocabulary.rows([one.hypothesis]))[1][0][0].numpy()


def keep(vocabulary: Vocabulary, one: Pair) -> np.ndarray:
    """The mask of these weights, [words of the premise]: true for the words that attention may read."""
    return (vocabulary.rows([one.premise])[0] != 0).numpy()
