"""Length generalisation: associative recall, trained on at most 64 tokens and tested on up to 4,096, with four maps."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import numpy as np

from . import _jobs
from ._common import Experiment, Settings, main, quick_on_one_thread
from ._report import Claim, Findings
from ._statistics import Interval, difference, over_seeds

PAPER = "Vasylenko et al. 2026"
FAR = "at 16 times the length of training"
EXPERIMENT = Experiment(
    name="length",
    title="Longer than in training: adaptive-scaled entmax, entmax and scalable softmax in attention",
    about="A transformer of two layers looks up the values of keys, in contexts up to 64 times as long as those of training.",
    claims={
        "softmax": Claim(f"With NAPE, adaptive-scaled entmax is more accurate than softmax {FAR}", PAPER),
        "scalable": Claim(f"With NAPE, adaptive-scaled entmax is more accurate than scalable softmax {FAR}", PAPER),
        "entmax": Claim(f"With NAPE, adaptive-scaled entmax is more accurate than entmax without a scale {FAR}", PAPER),
        "keeps": Claim("With NAPE, adaptive-scaled entmax keeps 90 % of its accuracy at 8 times the length of training", "asked here"),
        "sparse": Claim(f"With NAPE, entmax without a scale is more accurate than softmax {FAR}", PAPER),
        "ssmax": Claim(f"With NAPE, scalable softmax is more accurate than softmax {FAR}", "Nakanishi 2025"),
        "position": Claim("With each map, NAPE is more accurate than RoPE at 4 times the length of training, by 10 points", PAPER),
    },
    seeds=5,
    lengths="Each network was trained for one length only, of 900 steps; "
            "it is not shown that the held-out loss had stopped by then, and a verdict may turn with the length.",
    needs=("matplotlib", "scipy", "torch"),
    options={"--jobs": _jobs.OPTION},
    free=("--jobs",),
)  # fmt: skip
SOFTMAX, SCALABLE, ENTMAX, ADAPTIVE = MAPS = ("softmax", "scalable softmax", "1.5-entmax", "adaptive-scaled 1.5-entmax")
CODES = ("NAPE", "RoPE")
KEYS, VALUES, SHARE = 1024, 64, 0.8  # SHARE: of the context, taken by keys, their values and a space after each
SPACE, ASK, FIRST_KEY, FIRST_VALUE = 0, 1, 2, 2 + KEYS  # tokens
LONGEST, SHORTEST, QUERIES = 64, 32, 8  # tokens and queries of a sequence of training
LENGTHS = tuple(LONGEST * 2**i for i in range(7))
FOURFOLD, EIGHTFOLD, SIXTEENFOLD = 4 * LONGEST, 8 * LONGEST, 16 * LONGEST
WIDTH, HEADS = 64, 4
LEARNED = 95.0  # percent right at the length of training


def recall(rng: np.random.Generator, rows: int, length: int, queries: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [rows, length] and the values asked for [rows, queries].

    First a context of `key value space`, with each key once and more spaces in between, then `ask key value` for each query.
    """
    context = length - 3 * queries
    pairs = min(int(SHARE * context) // 3, KEYS)
    items = context - 2 * pairs  # pairs with their space, and further spaces
    size = np.where(rng.random((rows, items)).argsort(1) < pairs, 3, 1)
    at = (np.cumsum(size, 1) - size)[size == 3].reshape(rows, pairs)
    keys = FIRST_KEY + rng.random((rows, KEYS)).argsort(1)[:, :pairs]
    values = rng.integers(VALUES, size=(rows, pairs))
    tokens, row = np.full((rows, length), SPACE), np.arange(rows)[:, None]
    tokens[row, at], tokens[row, at + 1] = keys, FIRST_VALUE + values
    asked = rng.integers(pairs, size=(rows, queries))
    end = tokens[:, context:].reshape(rows, queries, 3)
    end[..., 0], end[..., 1], end[..., 2] = ASK, keys[row, asked], FIRST_VALUE + values[row, asked]
    tokens[:, context:] = end.reshape(rows, -1)
    return tokens, values[row, asked]


def network(name: str, code: str) -> Any:
    """Two layers of attention with a map and a position code; `network(tokens, queries)` gives the scores of the values asked for."""
    import torch  # late: listing the experiments needs no torch

    from anymax import attention, nn, transforms

    mapping = "entmax15" if name in (ENTMAX, ADAPTIVE) else "softmax"
    nape = code == "NAPE"
    # NAPE: half of the heads have ALiBi, with slopes of 1, 1/2, ...; the others have no positions, and they alone are scaled
    local = HEADS // 2 if nape else 0
    slopes = torch.tensor([1.0 / (h + 1) if h < local else 0.0 for h in range(HEADS)])
    features = WIDTH // HEADS
    frequencies = 10_000.0 ** (-torch.arange(0, features, 2) / features)

    def rotated(a: torch.Tensor, first: int) -> torch.Tensor:
        angles = torch.arange(first, first + a.shape[-2])[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        u, v = a.chunk(2, -1)
        return torch.cat([u * cos - v * sin, u * sin + v * cos], -1)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
            self.query = torch.nn.Linear(WIDTH, WIDTH, bias=False)
            self.key_value = torch.nn.Linear(WIDTH, 2 * WIDTH, bias=False)
            self.out = torch.nn.Linear(WIDTH, WIDTH, bias=False)
            self.wide, self.narrow = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)
            self.adaptive = nn.AdaptiveScale(WIDTH, HEADS, only=range(local, HEADS)) if name == ADAPTIVE else None
            # softmax, at the end of training's lengths
            start = torch.full((HEADS - local, 1, 1), 1.0 / math.log(LONGEST))
            self.beta = torch.nn.Parameter(start) if name == SCALABLE else None

        def transform(self, h: torch.Tensor) -> Any:
            if self.adaptive is not None:
                return self.adaptive(h)
            if self.beta is None:
                return None
            none = self.beta.new_zeros(local, 1, 1)
            return transforms.scalable(
                torch.cat([none, self.beta]), delta=torch.cat([1.0 + none, torch.zeros_like(self.beta)])
            )

        def forward(self, x: torch.Tensor, last: int) -> torch.Tensor:
            """The last positions alone, from all."""
            first, h = x.shape[1] - last, self.before(x)
            q, k, v = (
                a.unflatten(-1, (-1, features)).transpose(1, 2)
                for a in (self.query(h[:, first:]), *self.key_value(h).chunk(2, -1))
            )
            if not nape:
                q, k = rotated(q, first), rotated(k, 0)
            heads = attention(
                q, k, v, mapping, is_causal=True, offset=first, alibi=slopes if nape else None,
                transform=self.transform(h[:, first:]),
            )  # fmt: skip
            x = x[:, first:] + self.out(heads.transpose(1, 2).flatten(-2))
            return x + self.narrow(torch.relu(self.wide(self.between(x))))

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(FIRST_VALUE + VALUES, WIDTH)
            self.layers = torch.nn.ModuleList([Layer(), Layer()])
            self.norm, self.values = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, VALUES)

        def forward(self, tokens: torch.Tensor, queries: int) -> torch.Tensor:
            x = self.layers[0](self.embedding(tokens), tokens.shape[1])
            x = self.layers[1](x, 3 * queries)
            return self.values(self.norm(x[:, 1::3]))  # at the keys asked for

    return Network()


def asked_in(length: int) -> int:
    """The queries of a test sequence: one in eight tokens, at most 32."""
    return min(length // 8, 32)


def cell(name: str, code: str, seed: int, plan: dict[str, Any]) -> dict[str, Any]:
    """Train one network and test it at every length: percent right, and the seconds of a processor."""
    import torch  # late: listing the experiments needs no torch

    begun = time.process_time()
    torch.manual_seed(seed)
    model = network(name, code)
    rng = np.random.default_rng([seed, 1])  # the same sequences for all maps
    optimiser = torch.optim.AdamW(model.parameters(), plan["learning rate"], betas=(0.9, 0.98), weight_decay=0.0)
    steps, warm = plan["steps"], plan["steps"] // 10 + 1
    for step in range(steps):
        share = min(1.0, (step + 1) / warm) * 0.5 * (1.0 + np.cos(np.pi * step / steps))
        optimiser.param_groups[0]["lr"] = plan["learning rate"] * share
        grown = SHORTEST + (LONGEST - SHORTEST) * min(1.0, 2 * step / steps)
        length = int(rng.integers(SHORTEST, int(grown) + 1))
        tokens, values = map(torch.from_numpy, recall(rng, plan["batch"], length, QUERIES))
        optimiser.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(tokens, QUERIES).flatten(0, 1), values.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    rng = np.random.default_rng([seed, 2])
    right = {}
    with torch.no_grad():
        for length in plan["lengths"]:
            each = []
            for _ in range(plan["test sets"]):  # of a size that fits the memory
                tokens, values = map(torch.from_numpy, recall(rng, rows_of(length, plan), length, asked_in(length)))
                each.append((model(tokens, asked_in(length)).argmax(-1) == values).double().mean())
            right[length] = 100.0 * float(torch.stack(each).mean())
    return {"right": right, "loss": loss.item(), "seconds": time.process_time() - begun}


def rows_of(length: int, plan: dict[str, Any]) -> int:
    return max(plan["least test sequences"], plan["test tokens"] // length)


@quick_on_one_thread
def run(settings: Settings, found: Findings) -> None:
    quick = settings.quick
    plan: dict[str, Any] = {
        "steps": 4 if quick else 900,
        "batch": 8 if quick else 64,
        "learning rate": 4e-3,
        "lengths": LENGTHS[:5] if quick else LENGTHS,
        "test tokens": 128 if quick else 8192,
        "least test sequences": 1 if quick else 4,
        "test sets": 2 if quick else 16,
    }
    found.data = (
        f"Sequences of {KEYS:,} keys and {VALUES} values, drawn anew for each seed: a context of pairs, then queries with their answers. "
        "No data is read."
    )
    found.settings = {
        **plan,
        "length in training": f"from {SHORTEST} tokens to an end that grows to {LONGEST} in half of the steps; {QUERIES} queries",
        "queries in tests": "one in eight tokens, at most 32",
        "test tokens, least test sequences": "of one of the test sets, over which the accuracy is the mean",
        "network": f"two layers of width {WIDTH} with {HEADS} heads, layer norm before each part, {2 * WIDTH} hidden units",
        "optimiser": "AdamW without decay; the rate rises over a tenth of the steps and falls as a cosine",
    }  # fmt: skip
    work = [(name, code, seed) for seed in settings.seeds for code in CODES for name in MAPS]
    results: dict[tuple[str, str], list[dict[int, float]]] = {(name, code): [] for name in MAPS for code in CODES}
    seconds = 0.0
    with _jobs.run_on(settings.options.jobs) as each:
        done = each(cell, [(*one, plan) for one in work])
        for name, code, _ in settings.track(work, "network", lambda w: f"{w[0]}, {w[1]}, seed {w[2]}"):
            one = next(done)
            settings.say(f"the last loss in training is {one['loss']:.3f}, after {one['seconds']:.0f} s")
            results[name, code].append(one["right"])
            seconds += one["seconds"]

    def values(name: str, code: str, length: int) -> list[float]:
        return [right[length] for right in results[name, code]]

    for code in CODES:
        rows: list[dict[str, Any]] = [
            {"tokens": length} | {name: over_seeds(values(name, code, length)) for name in MAPS}
            for length in plan["lengths"]
        ]
        found.table(
            f"Accuracy with {code}", rows, "Percent of the queries answered with the right value, mean over seeds."
        )
    rows = [
        {
            "map": name, "positions": code,
            f"seeds with {LEARNED:g} % at {LONGEST} tokens": sum(v >= LEARNED for v in values(name, code, LONGEST)),
            **{f"each seed at {length:,} tokens": ", ".join(f"{v:.1f}" for v in values(name, code, length))
               for length in (LONGEST, SIXTEENFOLD)},
        }
        for code in CODES for name in MAPS
    ]  # fmt: skip
    found.table("Who learned the task", rows, "All seeds count in all figures, whether they learned it or not.")

    def apart(ours: str, theirs: str) -> Interval:
        return difference(values(ours, "NAPE", SIXTEENFOLD), values(theirs, "NAPE", SIXTEENFOLD))

    for key, ours, theirs in (
        ("softmax", ADAPTIVE, SOFTMAX), ("scalable", ADAPTIVE, SCALABLE), ("entmax", ADAPTIVE, ENTMAX),
        ("sparse", ENTMAX, SOFTMAX), ("ssmax", SCALABLE, SOFTMAX),
    ):  # fmt: skip
        found.test(key, f"accuracy at {SIXTEENFOLD:,} tokens, {ours} - {theirs}", apart(ours, theirs), at_least=0.0)
    kept = difference(values(ADAPTIVE, "NAPE", EIGHTFOLD), [0.9 * v for v in values(ADAPTIVE, "NAPE", LONGEST)])
    found.test(
        "keeps", f"accuracy of {ADAPTIVE}, at {EIGHTFOLD} tokens - 0.9 times that at {LONGEST}", kept, at_least=0.0
    )
    for name in MAPS:
        gap = difference(values(name, "NAPE", FOURFOLD), values(name, "RoPE", FOURFOLD))
        found.test("position", f"accuracy of {name} at {FOURFOLD} tokens, NAPE - RoPE", gap, at_least=10.0)
    found.picture(lambda figure: draw(figure, results, plan["lengths"]), (9.5, 4.0),
                  caption=f"Accuracy against the length of the sequence; dotted: the longest in training, {LONGEST} tokens")  # fmt: skip
    task = (
        "The task is a small form of the paper's multi-query associative recall. In the paper, keys and values "
        "have two tokens, the answers follow all queries, networks have four layers of width 512 and see 50 "
        "million sequences, and only whole sequences count as right. Here, keys and values have one token, "
        "each answer follows its query, networks see 58 thousand sequences, and each answer counts."
    )
    rate = (
        "All maps have the same learning rate. We fixed it before the run, after trials with some of the maps "
        "on other sequences. So it need not be the best rate for a map."
    )
    scales = (
        "NAPE: half of the heads have ALiBi, with slopes of 1 and 1/2. The other half have no positions, and "
        "only they are scaled, as in the paper. Scalable softmax learns one factor for each head and layer; "
        "adaptive-scaled entmax is `anymax.nn.AdaptiveScale`. We take the logarithm of the number of keys that "
        "a query sees; the paper's code adds one to this number."
    )
    time_ = f"A guess is right in {100 / VALUES:.1f} % of all answers. All of it took {seconds / 60:.1f} minutes of one processor."
    found.notes += [task, rate, scales, time_]


def draw(figure: Any, results: dict[Any, Any], lengths: tuple[int, ...]) -> None:
    from anymax.plot.style import COLOURS, DASHES, MARKERS  # late: an optional extra

    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    for ax, code in zip(panels, CODES):
        for k, name in enumerate(MAPS):
            spans = [over_seeds([right[length] for right in results[name, code]]) for length in lengths]
            style = {"color": COLOURS[k], "linestyle": DASHES[k], "marker": MARKERS[k], "markersize": 4}
            ax.plot(lengths, [s.mean for s in spans], label=name, **style)
            if spans[0].n > 1:
                low, high = ([min(max(v, 0.0), 100.0) for v in side] for side in zip(*((s.low, s.high) for s in spans)))
                ax.fill_between(lengths, low, high, color=COLOURS[k], alpha=0.15, linewidth=0)
        ax.axvline(LONGEST, color="#5A5A5A", linestyle=":", linewidth=1.0)
        ax.set_xscale("log", base=2)
        ax.set_xticks(lengths, [f"{length:,}" for length in lengths])
        ax.set(title=code, xlabel="tokens", ylim=(-2, 102))
        ax.grid(color="#E5E5E5", linewidth=0.6)
    panels[0].set(ylabel="accuracy in percent")
    panels[1].legend(frameon=False, fontsize="small")


if __name__ == "__main__":
    sys.exit(main(EXPERIMENT, run))
