"""
Decoding
========

A small language model counts the characters of Python's own language reference. It then writes text by drawing the next character in
three ways: from softmax, which gives every character some probability; from softmax over the nucleus of mass 0.9; and from 1.5-entmax,
whose support follows from the scores. If the model is sure, entmax keeps one or two characters. If it is not, entmax keeps many.
"""

from collections import defaultdict
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import numpy as np

import anymax
from anymax import Entmax, Softmax, plot

text = " ".join(" ".join(topics[name].split()) for name in sorted(topics))[:200_000]
alphabet = sorted(set(text))
place = {character: i for i, character in enumerate(alphabet)}
order = 5
counts = [defaultdict(lambda: np.zeros(len(alphabet))) for _ in range(order + 1)]
for end in range(order, len(text)):
    for length in range(order + 1):
        counts[length][text[end - length : end]][place[text[end]]] += 1


def scores(written):
    """Log-probabilities of the next character: each context backs off to the one that is shorter."""
    p = np.full(len(alphabet), 1 / len(alphabet))
    for length in range(order + 1):
        seen = counts[length].get(written[len(written) - length :])
        if seen is not None:
            kinds = (seen > 0).sum()
            p = (seen + kinds * p) / (seen.sum() + kinds)
    return np.log(p)


def nothing(x):
    return x


ways = {
    "softmax": (Softmax(), nothing),
    "top p = 0.9": (Softmax(), anymax.topp(0.9)),
    "entmax 1.5": (Entmax(1.5), nothing),
}
start = "The value "
written, kept, surprise = {}, {}, {}
for name, (mapping, transform) in ways.items():
    rng = np.random.default_rng(0)
    written[name], kept[name], surprise[name] = start, [], []
    for _ in range(300):
        x = scores(written[name])
        drawn = anymax.sample(mapping, transform(x), generator=rng)
        p = anymax.apply(mapping, transform(x))
        kept[name].append(anymax.support(p).sum())
        surprise[name].append(-anymax.log_prob(Softmax(), x, drawn))
        written[name] += alphabet[int(drawn)]
    print(f"{name}:\n{written[name]}\n")

# %%
# The next character after "The val", where the model is sure, and after "The value ", where it is not. A character
# that can't be drawn has no bar.

figure, axes = plt.subplots(2, 3, figsize=(12, 5.6), layout="constrained", sharey="row")
for row, context in zip(axes, ("The val", start)):
    x = scores(context)
    first = np.argsort(-x)[:16]
    for i, (ax, (name, (mapping, transform))) in enumerate(zip(row, ways.items())):
        p = anymax.apply(mapping, transform(x))
        shown = np.where(p[first] > 0, p[first], np.nan)
        ax.bar(range(16), shown, color=plot.style.COLOURS[i])
        ax.set(
            yscale="log",
            xticks=range(16),
            xticklabels=["␣" if alphabet[j] == " " else alphabet[j] for j in first],
            title=f"{name}: {int((p > 0).sum())} of {len(alphabet)} characters",
        )
    row[0].set_ylabel(f"probability after {context!r}")

# %%
# How many characters could be drawn at each step, and how surprising the drawn ones were to the model, by its own softmax.
# Entmax also lowers the small probabilities that it keeps, so its text is the least surprising.

figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
for i, name in enumerate(ways):
    style = {
        "color": plot.style.COLOURS[i],
        "linestyle": plot.style.DASHES[i],
        "label": name,
    }
    left.plot(np.sort(kept[name])[::-1], linewidth=2, **style)
    right.plot(np.cumsum(surprise[name]), linewidth=2, **style)
left.set(yscale="log", xlabel="steps, sorted", ylabel="characters that could be drawn")
right.set(xlabel="step", ylabel="surprise so far, in nats")
right.legend()
