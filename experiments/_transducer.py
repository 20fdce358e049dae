"""Strings that become strings: data, a small encoder-decoder with attention, and beam search that knows when it is exact."""

from __future__ import annotations

import copy
import dataclasses
import gzip
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anymax import Mapping, apply, attention, fenchel_young, log_apply

from ._until import Averaged, Patient, Stop, Watch

PAD, START, END = 0, 1, 2
SPECIAL = ("", "<s>", "</s>")
IGNORED = -100
FIRST = END  # of the symbols that can be written: scores have END at 0, then the others


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Strings of source symbols and the strings of target symbols that they become."""

    sources: list[tuple[str, ...]]
    targets: list[tuple[str, ...]]

    def __len__(self) -> int:
        return len(self.sources)

    def take(self, rows: Sequence[int]) -> Pairs:
        return Pairs([self.sources[i] for i in rows], [self.targets[i] for i in rows])


@dataclasses.dataclass(frozen=True)
class Language:
    train: Pairs
    dev: Pairs
    test: Pairs


def pronunciations(path: Path) -> Pairs:
    """Lines `word TAB phonemes with spaces`."""
    rows = _rows(path)
    return Pairs([tuple(word) for word, _ in rows], [tuple(phonemes.split()) for _, phonemes in rows])


def inflections(path: Path) -> Pairs:
    """Lines `lemma TAB form TAB features with ;`: the source is the features, each one symbol, and the lemma's letters."""
    rows = _rows(path)
    return Pairs([(*features.split(";"), *lemma) for lemma, _, features in rows], [tuple(form) for _, form, _ in rows])


def _rows(path: Path) -> list[list[str]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [line.rstrip("\n").split("\t") for line in file if line.strip()]


def invented(seed: int, n: int) -> Pairs:
    """Words of an invented spelling: `x` doubles the letter before it, `h` softens it, a last `e` is silent, and one vowel in twelve
    is long, which no spelling shows.
    """
    rng = np.random.default_rng(seed)
    consonants, vowels = "bdgk", "aeo"
    sources, targets = [], []
    for _ in range(n):
        word = ""
        for _ in range(rng.integers(1, 4)):
            word += rng.choice(list(consonants)) + rng.choice(["", "", "h", "x"]) + rng.choice(list(vowels))
        said: list[str] = []
        for letter, after in zip(word, [*word[1:], ""]):
            if letter == "x":
                said.append(said[-1])
            elif letter == "h":
                said[-1] += "ʰ"
            elif letter in vowels:
                if letter == "e" and not after and len(said) > 1:
                    continue
                said.append(letter + "ː" if rng.random() < 1 / 12 else letter)
            else:
                said.append(letter)
        sources.append(tuple(word))
        targets.append(tuple(said))
    return Pairs(sources, targets)


class Alphabet:
    """Symbols and their numbers; a symbol that was not in training is read as nothing."""

    def __init__(self, strings: Sequence[Sequence[str]]) -> None:
        self.symbols = [*SPECIAL, *sorted({symbol for string in strings for symbol in string})]
        self.numbers = {symbol: i for i, symbol in enumerate(self.symbols)}

    def __len__(self) -> int:
        return len(self.symbols)

    def encode(self, string: Sequence[str]) -> list[int]:
        return [self.numbers[symbol] for symbol in string if symbol in self.numbers]

    def decode(self, numbers: Sequence[int]) -> tuple[str, ...]:
        return tuple(self.symbols[i] for i in numbers)


def padded(strings: Sequence[Sequence[int]], value: int = PAD) -> tuple[Tensor, Tensor]:
    """Numbers [B, L] and lengths [B]."""
    lengths = torch.tensor([len(string) for string in strings])
    out = torch.full((len(strings), int(lengths.max())), value, dtype=torch.long)
    for i, string in enumerate(strings):
        out[i, : len(string)] = torch.tensor(string, dtype=torch.long)
    return out, lengths


@dataclasses.dataclass(frozen=True)
class Size:
    embedding: int
    hidden: int
    dropout: float


class Transducer(nn.Module):
    """A GRU that reads both ways, a GRU that writes, and one head of attention between them (Luong, Pham and Manning 2015).

    The writing GRU reads the symbols written so far and starts from a summary of the source; what attention finds enters above it.
    """

    def __init__(self, source: int, target: int, size: Size, attending: Mapping, writing: Mapping) -> None:
        super().__init__()
        self.attending, self.writing = attending, writing
        self.read_symbols = nn.Embedding(source, size.embedding, padding_idx=PAD)
        self.written_symbols = nn.Embedding(target, size.embedding, padding_idx=PAD)
        self.reader = nn.GRU(size.embedding, size.hidden // 2, batch_first=True, bidirectional=True)
        self.writer = nn.GRU(size.embedding, size.hidden, batch_first=True)
        self.start = nn.Linear(size.hidden, size.hidden)
        self.key = nn.Linear(size.hidden, size.hidden, bias=False)
        self.join = nn.Linear(2 * size.hidden, size.hidden)
        self.out = nn.Linear(size.hidden, target - FIRST)
        self.dropout = nn.Dropout(size.dropout)

    def read(self, source: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors [B, S, H] of the source and the writer's first state [1, B, H]."""
        packed = nn.utils.rnn.pack_padded_sequence(
            self.dropout(self.read_symbols(source)), lengths, batch_first=True, enforce_sorted=False
        )
        seen, last = self.reader(packed)
        vectors = nn.utils.rnn.pad_packed_sequence(seen, batch_first=True)[0]
        return self.dropout(vectors), torch.tanh(self.start(last.transpose(0, 1).flatten(1)))[None]

    def write(self, symbols: Tensor, state: Tensor, vectors: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores [B, T, V] of the symbols after each of `symbols` [B, T], the state after them, the attention [B, T, S]."""
        hidden, state = self.writer(self.dropout(self.written_symbols(symbols)), state)
        q, k, v = hidden[:, None], self.key(vectors)[:, None], vectors[:, None]  # one head
        found, weights = attention(q, k, v, self.attending, lengths=lengths, need_weights=True)
        joined = torch.tanh(self.join(torch.cat([hidden, found[:, 0]], dim=-1)))
        return self.out(self.dropout(joined)), state, weights[:, 0]


@dataclasses.dataclass(frozen=True)
class Recipe:
    epochs: int
    rate: float = 2e-3
    batch: int = 32


@dataclasses.dataclass
class Trained:
    """A transducer with its alphabets."""

    model: Transducer
    source: Alphabet
    target: Alphabet


def train(language: Language, attending: Mapping, writing: Mapping, size: Size, recipe: Recipe, seed: int) -> Trained:
    """By Adam with the output map's own loss, one cycle of the rate; the weights of the epoch with the most words right in dev."""
    out, data = _untrained(language, attending, writing, size, seed)
    optimizer = torch.optim.Adam(out.model.parameters())
    steps = recipe.epochs * math.ceil(len(data) / recipe.batch)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=recipe.rate, total_steps=steps)
    rng = np.random.default_rng(seed)
    best, kept = -1.0, {}
    for epoch in range(recipe.epochs):
        for _ in _steps(out.model, data, recipe.batch, optimizer, rng):
            rate.step()
        if 2 * (epoch + 1) >= recipe.epochs:  # the rate is high before
            right = word_accuracy([one.best for one in search(out, language.dev, beam=1)], language.dev)
            if right >= best:
                best, kept = right, {k: v.clone() for k, v in out.model.state_dict().items()}
    out.model.load_state_dict(kept)
    out.model.eval()
    return out


def settled(
    language: Language, attending: Mapping, writing: Mapping, size: Size, rate: float, recipe: Patient, seed: int
) -> tuple[list[tuple[Stop[Any], Trained]], list[float]]:
    """For each patience a transducer with the mean weights of its best epoch; and the share of dev words wrong after each epoch."""
    out, data = _untrained(language, attending, writing, size, seed)
    optimizer = torch.optim.Adam(out.model.parameters(), lr=rate)
    rises = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / recipe.rising))
    mean = Averaged(out.model, recipe.decay)
    judged = dataclasses.replace(out, model=mean.model)
    rng, watch = np.random.default_rng(seed), Watch[Any](recipe.patiences)
    while not watch.over(recipe.most):
        for _ in _steps(out.model, data, recipe.batch, optimizer, rng):
            rises.step()
            mean.step()
        if watch.better(1.0 - word_accuracy([one.best for one in search(judged, language.dev, beam=1)], language.dev)):
            watch.keep(mean.weights())
    ended = []
    for stop in watch.stops:
        model = copy.deepcopy(mean.model)
        model.load_state_dict(stop.kept)
        ended.append((stop, dataclasses.replace(out, model=model.eval())))
    return ended, watch.errors


Encoded = list[tuple[list[int], list[int]]]


def _untrained(
    language: Language, attending: Mapping, writing: Mapping, size: Size, seed: int
) -> tuple[Trained, Encoded]:
    """A transducer with the first weights of a seed, and its training pairs in numbers."""
    torch.manual_seed(seed)
    source, target = Alphabet(language.train.sources), Alphabet(language.train.targets)
    out = Trained(Transducer(len(source), len(target), size, attending, writing), source, target)
    return out, [(source.encode(a), target.encode(b)) for a, b in zip(language.train.sources, language.train.targets)]


def _steps(model: Transducer, data: Encoded, batch: int, optimizer: Any, rng: np.random.Generator) -> Iterator[None]:
    """One epoch; what asks goes on after each step."""
    model.train()
    for rows in _shuffled([len(a) for a, _ in data], batch, rng):
        read, lengths = padded([data[i][0] for i in rows])
        given, _ = padded([[START, *data[i][1]] for i in rows])
        wanted, _ = padded([[t - FIRST for t in (*data[i][1], END)] for i in rows], IGNORED)
        vectors, state = model.read(read, lengths)
        scores, _, _ = model.write(given, state, vectors, lengths)
        optimizer.zero_grad()
        fenchel_young(model.writing, scores, wanted, ignore_index=IGNORED, axis=-1).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        yield


def _shuffled(lengths: Sequence[int], batch: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Batches in a random order, each of sources of like length."""
    order = rng.permutation(len(lengths))
    order = order[np.argsort(np.asarray(lengths)[order] + rng.uniform(0, 2, size=len(order)), kind="stable")]
    batches = [order[i : i + batch] for i in range(0, len(order), batch)]
    return [batches[i] for i in rng.permutation(len(batches))]


# -- what a trained one does ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Zeros:
    """Along the true targets: shares of exact zeros among the probabilities of output and attention, and the mean number above 0."""

    output: float
    symbols: float
    attention: float
    places: float


@torch.no_grad()
def zeros(trained: Trained, pairs: Pairs) -> Zeros:
    trained.model.eval()
    counts = np.zeros(4)
    steps = 0
    for part in _parts(len(pairs), 128):
        read, lengths = padded([trained.source.encode(pairs.sources[i]) for i in part])
        given, sizes = padded([[START, *trained.target.encode(pairs.targets[i])] for i in part])
        vectors, state = trained.model.read(read, lengths)
        scores, _, weights = trained.model.write(given, state, vectors, lengths)
        real = torch.arange(given.shape[1]) < sizes[:, None]
        p = apply(trained.model.writing, scores)[real]
        places = (torch.arange(read.shape[1]) < lengths[:, None])[:, None].expand_as(weights)[real]
        w = weights[real]
        counts += [
            float((p == 0).sum()) / p.shape[1],
            float((p > 0).sum()),
            float(((w == 0) & places).sum(-1).div(places.sum(-1)).sum()),
            float((w > 0).sum()),
        ]
        steps += len(p)
    return Zeros(*(counts / steps))


@torch.no_grad()
def weights_of(trained: Trained, source: Sequence[str]) -> tuple[tuple[str, ...], np.ndarray]:
    """What the transducer writes for a source, with </s>, and its attention [written, source]."""
    trained.model.eval()
    written = trained.target.encode(search(trained, Pairs([tuple(source)], [()]), beam=5)[0].best)
    read, lengths = padded([trained.source.encode(source)])
    given, _ = padded([[START, *written]])
    vectors, state = trained.model.read(read, lengths)
    _, _, weights = trained.model.write(given, state, vectors, lengths)
    return trained.target.decode([*written, END]), weights[0].numpy()


@dataclasses.dataclass(frozen=True)
class Found:
    """What beam search found for one source.

    exhausted: nothing of probability above 0 was ever dropped or cut off, so `finished` lists every string that the model can write and its
    probabilities sum to 1. proven: no string outside can beat `best`, as a string is at most as probable as its beginning and no dropped
    beginning was more probable than `best`. mass: the sum of the finished strings' probabilities.
    """

    best: tuple[str, ...]
    log_p: float
    finished: int
    mass: float
    exhausted: bool
    proven: bool


@torch.no_grad()
def search(trained: Trained, pairs: Pairs, beam: int, longest: int = 40) -> list[Found]:
    """The most probable strings, `beam` beginnings at a time, at most `longest` symbols. Targets are not looked at."""
    trained.model.eval()
    order = sorted(range(len(pairs)), key=lambda i: len(pairs.sources[i]))
    out: list[Found | None] = [None] * len(pairs)
    for part in _parts(len(pairs), 64):
        rows = [order[i] for i in part]
        for i, one in zip(rows, _search(trained, [pairs.sources[i] for i in rows], beam, longest)):
            out[i] = one
    return [one for one in out if one is not None]


def _search(trained: Trained, sources: list[tuple[str, ...]], beam: int, longest: int) -> list[Found]:
    model, n, symbols = trained.model, len(sources), len(trained.target) - FIRST
    read, lengths = padded([trained.source.encode(s) for s in sources])
    vectors, state = model.read(read, lengths)
    vectors, lengths = vectors.repeat_interleave(beam, 0), lengths.repeat_interleave(beam, 0)  # [n beam, S, H]
    state = state.repeat_interleave(beam, 1)
    last = torch.full((n, beam), START)
    log_p = torch.full((n, beam), -math.inf, dtype=torch.float64)
    log_p[:, 0] = 0.0
    written = torch.empty((n, beam, 0), dtype=torch.long)
    dropped = torch.full((n,), -math.inf, dtype=torch.float64)  # the most probable beginning that was dropped
    finished: list[list[tuple[float, list[int]]]] = [[] for _ in sources]
    for _ in range(longest + 1):
        scores, state, _ = model.write(last.reshape(-1, 1), state, vectors, lengths)
        step = log_apply(model.writing, scores[:, 0]).double().reshape(n, beam, symbols)
        grown = log_p[..., None] + step
        grown = torch.where(torch.isnan(grown), -math.inf, grown)
        for row, place in (grown[..., END - FIRST] > -math.inf).nonzero().tolist():
            finished[row].append((float(grown[row, place, END - FIRST]), written[row, place].tolist()))
        grown[..., END - FIRST] = -math.inf
        wide = min(beam + 1, beam * symbols)
        best, where = grown.reshape(n, -1).topk(wide, dim=1)
        if wide > beam:
            dropped = torch.maximum(dropped, best[:, beam])
        log_p, where = best[:, :beam], where[:, :beam]
        parents = where // symbols
        last = where % symbols + FIRST
        flat = (parents + beam * torch.arange(n)[:, None]).reshape(-1)
        state = state[:, flat]
        written = torch.cat([written.reshape(n * beam, -1)[flat].reshape(n, beam, -1), last[..., None]], dim=-1)
        if not bool((log_p > -math.inf).any()):
            break
        known = torch.tensor([max((p for p, _ in one), default=-math.inf) for one in finished], dtype=torch.float64)
        if bool((known >= log_p[:, 0]).all()) and bool((dropped > -math.inf).all()):
            break  # the best are known, and no list can become complete
    return [
        _found(trained.target, one, float(lost), float(open_.max()))
        for one, lost, open_ in zip(finished, dropped, log_p)
    ]


def _found(target: Alphabet, finished: list[tuple[float, list[int]]], dropped: float, still: float) -> Found:
    """dropped, still: the most probable beginning that was dropped, and that was not finished."""
    if not finished:
        return Found((), -math.inf, 0, 0.0, False, False)
    log_p, best = max(finished)
    outside = max(dropped, still)
    return Found(
        target.decode(best),
        log_p,
        len(finished),
        math.fsum(math.exp(p) for p, _ in finished),
        outside == -math.inf,
        log_p >= outside,
    )


def _parts(n: int, size: int) -> list[range]:
    return [range(i, min(i + size, n)) for i in range(0, n, size)]


def word_accuracy(written: Sequence[Sequence[str]], pairs: Pairs) -> float:
    return sum(tuple(a) == b for a, b in zip(written, pairs.targets)) / len(pairs)


def symbol_errors(written: Sequence[Sequence[str]], pairs: Pairs) -> float:
    """Insertions, deletions and replacements for each true symbol: the phoneme error rate."""
    return sum(distance(a, b) for a, b in zip(written, pairs.targets)) / sum(len(b) for b in pairs.targets)


def distance(a: Sequence[str], b: Sequence[str]) -> int:
    """Levenshtein's."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def measure(trained: Trained, test: Pairs, beam: int) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Figures of what a transducer writes, and of each test word 100 where it is right, and where it is listed, else 0."""
    beams, greedy = search(trained, test, beam), search(trained, test, 1)
    best = [one.best for one in beams]
    none = dataclasses.asdict(zeros(trained, test))
    share = 100.0 / len(test)
    each = {
        "words right %": 100.0 * np.array([tuple(one) == true for one, true in zip(best, test.targets, strict=True)]),
        "listed %": 100.0 * np.array([one.exhausted for one in beams]),
    }
    figures = {
        "words right %": 100 * word_accuracy(best, test),
        "symbol errors %": 100 * symbol_errors(best, test),
        "words right, greedy %": 100 * word_accuracy([one.best for one in greedy], test),
        "output zeros %": 100 * none["output"],
        "symbols": none["symbols"],
        "attention zeros %": 100 * none["attention"],
        "places": none["places"],
        "listed %": float(np.mean(each["listed %"])),
        "proven %": share * sum(one.proven for one in beams),
        "mass": float(np.mean([one.mass for one in beams])),
    }
    return figures, each
