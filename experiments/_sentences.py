"""Short sentences with an intent, a small BERT that reads them, and how it is fine-tuned or trained from scratch."""

from __future__ import annotations

import copy
import csv
import dataclasses
import gzip
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anymax import Mapping, Softmax, apply, attention, fenchel_young

from ._until import Averaged, Patient, Stop, Watch

HEAD_RATE = 10.0  # the new layer learns so many times faster than the encoder


@dataclasses.dataclass(frozen=True)
class Sentences:
    """For each sentence its tokens' numbers and its class."""

    tokens: list[np.ndarray]
    classes: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, rows: np.ndarray) -> Sentences:
        return Sentences([self.tokens[i] for i in rows], self.classes[rows])

    def some(self, n: int, rng: np.random.Generator) -> Sentences:
        return self.take(rng.permutation(len(self))[:n])


@dataclasses.dataclass(frozen=True)
class Task:
    """Sentences to train on and sentences to test on, of the same classes."""

    train: Sentences
    test: Sentences

    @property
    def classes(self) -> int:
        return int(self.train.classes.max()) + 1


Tokenizer = Callable[[Sequence[str]], list[np.ndarray]]


def tokenizer(folder: Path, length: int) -> Tokenizer:
    """That of the pretrained model in `folder`; a sentence is cut to `length` tokens."""
    from tokenizers import Tokenizer as Words  # late: only full runs need it

    words = Words.from_file(str(folder / "tokenizer.json"))
    words.no_padding()
    words.enable_truncation(length)
    return lambda texts: [np.asarray(one.ids) for one in words.encode_batch(list(texts))]


def banking(train: Path, test: Path, tokens: Tokenizer) -> Task:
    parts = []
    for path in (train, test):
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            parts.append([(row["text"], row["category"]) for row in csv.DictReader(file)])
    return _task(*parts, tokens)


def clinc(path: Path, tokens: Tokenizer) -> Task:
    """The 150 intents in scope."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        known = json.load(file)
    return _task(known["train"], known["test"], tokens)


def _task(train: Sequence[Sequence[str]], test: Sequence[Sequence[str]], tokens: Tokenizer) -> Task:
    names = sorted({name for _, name in train})
    both = [
        Sentences(tokens([text for text, _ in part]), np.asarray([names.index(name) for _, name in part]))
        for part in (train, test)
    ]
    return Task(*both)


def invented(classes: int, seed: int, words: int = 120, each: int = 40) -> Task:
    """Sentences of six to ten words: each class has four of its own, each of which it shares with others, among words of no meaning.

    The meaning of a word is the same for every seed below 1000 and above: what one draw teaches helps in another.
    """
    meaning, rng = np.random.default_rng(0), np.random.default_rng(seed)
    groups = meaning.permutation(words)[: words // 2].reshape(-1, 4)  # words of one meaning
    kinds = rng.permutation([(a, b) for a in range(len(groups)) for b in range(a)])[:classes]
    tokens, labels = [], []
    for label in np.tile(np.arange(classes), each):
        said = rng.integers(0, words, size=rng.integers(6, 11))
        said[:4] = [rng.choice(groups[kinds[label][i % 2]]) for i in range(4)]
        tokens.append(rng.permutation(said))
        labels.append(label)
    whole, half = Sentences(tokens, np.asarray(labels)), classes * each // 2
    return Task(whole.take(np.arange(half)), whole.take(np.arange(half, len(whole))))


# -- the encoder ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a BERT, named as in its config.json."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    dropout: float = 0.1

    @classmethod
    def of(cls, folder: Path) -> Shape:
        known = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return cls(**{f.name: known[f.name] for f in dataclasses.fields(cls) if f.name in known})


class Layer(nn.Module):
    """Attention, then two linear layers, each added to what came in and normalised after that, as in BERT."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.hidden_size
        self.heads = shape.num_attention_heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, shape.intermediate_size), nn.Linear(shape.intermediate_size, width)
        self.norm, self.last_norm = nn.LayerNorm(width, eps=1e-12), nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        seen = attention(q, k, v, lengths=lengths).transpose(1, 2).flatten(-2)
        x = self.norm(x + self.dropout(self.out(seen)))
        return self.last_norm(x + self.dropout(self.down(nn.functional.gelu(self.up(x)))))


class Embeddings(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.places = nn.Embedding(shape.max_position_embeddings, shape.hidden_size)
        self.kind = nn.Parameter(torch.zeros(shape.hidden_size))
        self.norm = nn.LayerNorm(shape.hidden_size, eps=1e-12)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.norm(self.words(tokens) + self.places.weight[: tokens.shape[1]] + self.kind))


class Encoder(nn.Module):
    """BERT without its pooler: tokens [B, L] and their lengths [B] to vectors [B, L, width]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embeddings = Embeddings(shape)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x, lengths)
        return x


# BERT's names and ours, the longer first
_PLACES = {
    "embeddings.word_embeddings.weight": "embeddings.words.weight",
    "embeddings.position_embeddings.weight": "embeddings.places.weight",
    "embeddings.LayerNorm": "embeddings.norm",
    "encoder.layer": "layers",
    "attention.self.": "",
    "attention.output.dense": "out",
    "attention.output.LayerNorm": "norm",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "last_norm",
}


def pretrained(folder: Path) -> Encoder:
    """The encoder that `folder` holds, as config.json and model.safetensors."""
    from safetensors.torch import load_file  # late: only full runs need it

    encoder = Encoder(Shape.of(folder))
    encoder.load_state_dict(renamed(load_file(folder / "model.safetensors")))
    return encoder.eval()


def renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a BertModel under the names of `Encoder`."""
    ours = {}
    for name, value in weights.items():
        if name == "embeddings.token_type_embeddings.weight":
            ours["embeddings.kind"] = value[0]
        elif not name.startswith("pooler.") and name != "embeddings.position_ids":
            for theirs, word in _PLACES.items():
                name = name.replace(theirs, word)
            ours[name] = value
    return ours


# -- training -----------------------------------------------------------------------------------------------------------


def padded(rows: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Tokens or vectors [B, L, ...], zeros after the end, and the lengths [B]."""
    lengths = torch.tensor([len(row) for row in rows])
    out = torch.from_numpy(np.zeros((len(rows), int(lengths.max()), *rows[0].shape[1:]), dtype=rows[0].dtype))
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.from_numpy(row)
    return out, lengths


@torch.no_grad()
def read(encoder: Encoder, sentences: Sentences, layers: int) -> Sentences:
    """The vectors that the encoder's first `layers` layers make of each sentence, in place of its tokens."""
    encoder.eval()
    vectors: list[np.ndarray] = [np.empty(0)] * len(sentences)
    for rows in _by_length(sentences, 128):
        tokens, lengths = padded([sentences.tokens[i] for i in rows])
        x = encoder.embeddings(tokens)
        for layer in encoder.layers[:layers]:
            x = layer(x, lengths)
        for i, one, n in zip(rows, x, lengths):
            vectors[i] = one[:n].numpy().copy()
    return Sentences(vectors, sentences.classes)


class Classifier(nn.Module):
    """Layers over what `embeddings` (or a frozen encoder, where it is None) makes of the tokens; a linear layer over the mean."""

    def __init__(self, embeddings: Embeddings | None, layers: Sequence[nn.Module], width: int, classes: int) -> None:
        super().__init__()
        self.embeddings, self.layers = embeddings, nn.ModuleList(layers)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = x if self.embeddings is None else self.embeddings(x)
        for layer in self.layers:
            x = layer(x, lengths)
        real = torch.arange(x.shape[1]) < lengths[:, None]
        return self.head((x * real[..., None]).sum(1) / lengths[:, None])


def start(
    encoder: Encoder, train: Sentences, test: Sentences, classes: int, layers: int, tuned: bool, seed: int
) -> tuple[Classifier, Sentences, Sentences]:
    """An untrained classifier and the sentences as it reads them.

    tuned: the encoder's upper `layers` layers, over what the frozen ones below give; else a new encoder of `layers` layers. The latter
    has embeddings for the tokens that occur, as no others would ever learn.
    """
    torch.manual_seed(seed)
    width = encoder.shape.hidden_size
    if tuned:
        below = len(encoder.layers) - layers
        upper = [copy.deepcopy(layer) for layer in encoder.layers[below:]]
        return Classifier(None, upper, width, classes), read(encoder, train, below), read(encoder, test, below)
    known, numbers = np.unique(np.concatenate([*train.tokens, *test.tokens]), return_inverse=True)
    cuts = np.cumsum([len(t) for t in (*train.tokens, *test.tokens)])[:-1]
    tokens = np.split(numbers, cuts)
    new = Encoder(dataclasses.replace(encoder.shape, vocab_size=len(known), num_hidden_layers=layers))
    model = Classifier(new.embeddings, list(new.layers), width, classes)
    return model, Sentences(tokens[: len(train)], train.classes), Sentences(tokens[len(train) :], test.classes)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How long and how fast to train."""

    epochs: int
    rate: float
    batch: int = 16


def fit(model: Classifier, mapping: Mapping, train: Sentences, recipe: Recipe, seed: int) -> float:
    """Train with the map's own loss, by AdamW, the rate rising for a tenth of the time and then falling to 0.

    Returns the share of training sentences whose class the map kept (p > 0) in the first epoch.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    steps = recipe.epochs * math.ceil(len(train) / recipe.batch)
    optimizer = torch.optim.AdamW(_groups(model, recipe.rate), weight_decay=0.01)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min((n + 1) / (0.1 * steps), (steps - n) / (0.9 * steps))
    )
    kept = 0
    model.train()
    for epoch in range(recipe.epochs):
        for rows in _shuffled(train, recipe.batch, rng):
            scores = model(*padded([train.tokens[i] for i in rows]))
            target = torch.from_numpy(train.classes[rows])
            if epoch == 0:
                p = apply(mapping, scores.detach())
                kept += int((p.gather(1, target[:, None]) > 0).sum())
            optimizer.zero_grad()
            fenchel_young(mapping, scores, target).backward()
            optimizer.step()
            rate.step()
    model.eval()
    return kept / len(train)


def settled(
    model: Classifier, mapping: Mapping, train: Sentences, held: Sentences, rate: float, recipe: Patient, seed: int
) -> tuple[list[tuple[Stop[Any], Classifier]], list[float]]:
    """For each patience a model with the mean weights of its best epoch; and the share of held-out sentences wrong after each epoch.

    By AdamW and the map's own loss, the matrix products in bfloat16.
    """
    torch.manual_seed(seed)
    rng, watch = np.random.default_rng(seed), Watch[Any](recipe.patiences)
    optimizer = torch.optim.AdamW(_groups(model, rate), weight_decay=0.01, fused=True)
    rises = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / recipe.rising))
    mean = Averaged(model, recipe.decay)
    while not watch.over(recipe.most):
        model.train()
        for rows in _shuffled(train, recipe.batch, rng):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                scores = model(*padded([train.tokens[i] for i in rows]))
            optimizer.zero_grad()
            fenchel_young(mapping, scores.float(), torch.from_numpy(train.classes[rows])).backward()
            optimizer.step()
            rises.step()
            mean.step()
        if watch.better(1.0 - float(right(mean.model, held).mean())):
            watch.keep(mean.weights())
    ended = []
    for stop in watch.stops:
        best = copy.deepcopy(mean.model)
        best.load_state_dict(stop.kept)
        ended.append((stop, best))
    return ended, watch.errors


def _groups(model: Classifier, rate: float) -> list[dict[str, Any]]:
    body = [p for name, p in model.named_parameters() if not name.startswith("head.")]
    return [{"params": body, "lr": rate}, {"params": model.head.parameters(), "lr": HEAD_RATE * rate}]


@torch.no_grad()
def scores_of(model: Classifier, sentences: Sentences) -> np.ndarray:
    """[sentences, classes], in single precision."""
    model.eval()
    out = np.empty((len(sentences), model.head.out_features), np.float32)
    for rows in _by_length(sentences, 128):
        out[rows] = model(*padded([sentences.tokens[i] for i in rows])).numpy()
    return out


def right(model: Classifier, sentences: Sentences) -> np.ndarray:
    """Of each sentence whether the largest score is that of its class."""
    return scores_of(model, sentences).argmax(-1) == sentences.classes


def _by_length(sentences: Sentences, batch: int) -> Iterator[np.ndarray]:
    order = np.argsort([len(t) for t in sentences.tokens], kind="stable")
    return (order[i : i + batch] for i in range(0, len(order), batch))


def _shuffled(sentences: Sentences, batch: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Batches in a random order; in each stretch of eight batches sentences of like length are together, to pad less."""
    order = rng.permutation(len(sentences))
    batches: list[np.ndarray] = []
    for i in range(0, len(order), 8 * batch):
        stretch = order[i : i + 8 * batch]
        stretch = stretch[np.argsort([len(sentences.tokens[j]) for j in stretch], kind="stable")]
        batches += [stretch[j : j + batch] for j in range(0, len(stretch), batch)]
    return (batches[i] for i in rng.permutation(len(batches)))


def trained_on(task: Task, shape: Shape, recipe: Recipe, seed: int) -> Encoder:
    """An encoder trained with softmax on one task, to start from in another."""
    torch.manual_seed(seed)
    encoder = Encoder(shape)
    model = Classifier(encoder.embeddings, list(encoder.layers), shape.hidden_size, task.classes)
    fit(model, Softmax(), task.train, recipe, seed)
    return encoder
