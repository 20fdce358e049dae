"""The page that a notebook shows for a map: its name, parameters, formula and properties, and its curve for two classes."""

from __future__ import annotations

import html
import itertools
import re
from typing import Any

import numpy as np

from .._array import is_array, on_host
from .._core.mapping import Mapping
from .._core.names import function_name
from .two_classes import curve, rivals
from .words import distinguishing

_LINES = 5  # at most this many numbers of a parameter that is an array have a curve
_LETTERS = {"alpha": "α"}
_GRID = np.linspace(-4.0, 4.0, 81)
_LEFT, _RIGHT, _TOP, _BOTTOM = 14, 226, 8, 84  # pixels of the picture, where t is -4 and 4, and p is 1 and 0
_WORDS = 'fill="currentColor" stroke="none" font-size="10" text-anchor="middle"'


def page(mapping: Mapping) -> str:
    """The HTML of a map; its colours are those of the surrounding page, dark or light."""
    words = [f"<b>{html.escape(type(mapping).__name__)}</b>", *_parameters(mapping)]
    parts = [f"<div>{' &ensp;'.join(words)}</div>"]
    if mapping.formula:
        parts.append(f'<div style="font-family:serif;font-size:1.2em">{typeset(mapping.formula)}</div>')
    parts += [f'<div style="opacity:.8">{html.escape(sentence)}</div>' for sentence in promises(mapping)]
    text = f'<div style="flex:1 1 14em;max-width:36em">{"".join(parts)}</div>'
    return f'<div style="display:flex;flex-wrap:wrap;gap:.5em 2em;align-items:center;line-height:1.5">{picture(mapping)}{text}</div>'


def promises(mapping: Mapping) -> tuple[str, str]:
    """What `Mapping.facts` says about zeros and the loss, in sentences."""
    facts = mapping.facts
    yours = any(callable(value) and not isinstance(value, type) for value in mapping.constants().values())
    zeros = "Exact zeros where its function is 0." if yours else "Every probability is above 0."
    zeros = "Gives exact zeros." if facts.sparse else zeros
    if not facts.has_potential:
        return zeros, f"No Fenchel-Young loss: train with {mapping.own_loss}."
    end = "" if facts.margin is None else f", exactly 0 once the target leads by {facts.margin:g}"
    return zeros, f"Fenchel-Young loss{end}."


# -- the formula ------------------------------------------------------------------------------------------------------

_HIGH, _LOW = {"²": "2", "³": "3"}, {"ᵢ": "<i>i</i>", "ⱼ": "<i>j</i>", "₊": "+"}
_PIECES = re.compile(r"\^\(|[\^_]\w|[²³ᵢⱼ₊Σ]|[^\W\d_ᵢⱼΣ²³]+|.", flags=re.S)


def typeset(formula: str) -> str:
    """A plain-text formula as HTML: single letters in italics, `_x` lowered, `^x` and `^(...)` raised."""
    out, at = "", 0
    while piece := _PIECES.match(formula, at):
        word, at = piece[0], piece.end()
        if word == "^(":
            depths = itertools.accumulate((c == "(") - (c == ")") for c in formula[at:])
            inside = next((n for n, depth in enumerate(depths) if depth < 0), len(formula) - at)
            out, at = f"{out}<sup>{typeset(formula[at : at + inside])}</sup>", at + inside + 1
        elif word[0] in "^_" and len(word) > 1:
            tag = "sup" if word[0] == "^" else "sub"
            out += f"<{tag}>{typeset(word[1])}</{tag}>"
        elif word in _HIGH:
            out += f"<sup>{_HIGH[word]}</sup>"
        elif word in _LOW:
            out += f"<sub>{_LOW[word]}</sub>"
        else:
            out += f"<i>{word}</i>" if len(word) == 1 and word.isalpha() and word != "Σ" else html.escape(word)
    return out


# -- parameters -------------------------------------------------------------------------------------------------------


def _parameters(mapping: Mapping) -> list[str]:
    """The first parameter and those that differ from their default, as `α = 1.5`."""
    words = []
    for name, value in distinguishing(mapping):
        letter = _LETTERS.get(name, name)
        words.append(f"<i>{html.escape(letter)}</i> = {html.escape(_value(value))}")
    return words


def _value(value: Any) -> str:
    if is_array(value):
        learned = ", learned" if getattr(value, "requires_grad", False) else ""
        each = _known(value)
        if each is None or not each.size:
            return f"an array of shape {tuple(value.shape)}{learned}"
        if each.size == 1:
            return f"{each.item():.4g}{learned}"
        return f"{each.min():.4g} to {each.max():.4g}{learned}, of shape {tuple(value.shape)}"
    if callable(value) and not isinstance(value, Mapping):
        return function_name(value)
    text = f"{value:g}" if isinstance(value, float) else str(getattr(value, "name", None) or value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def _known(value: Any) -> np.ndarray | None:
    """The numbers of an array; None for a tracer, which has none."""
    try:
        return on_host(value)
    except Exception:  # each framework raises its own
        return None


# -- the picture ------------------------------------------------------------------------------------------------------


def picture(mapping: Mapping) -> str:
    """The probability of the first class over its score, as SVG; "" if it can't be drawn."""
    try:
        maps = _each(mapping)
        others = rivals(maps)
        lines = [curve(m, _GRID, others) for m in maps]
    except Exception:  # a user's function may raise anything, and the map must be shown all the same
        return ""
    finite = [p for p in lines if np.isfinite(p).all()]
    highest = max([1.0, *(float(np.ceil(p.max())) for p in finite)])
    drawn = [_line(p / highest, (n + 1) / len(lines)) for n, p in enumerate(lines) if np.isfinite(p).all()]
    if not drawn:
        return ""
    if len(lines) == 1:
        drawn.insert(0, _zeros(lines[0] == 0))
    scores = "".join(f", {other:g}" for other in others)
    middle = (_LEFT + _RIGHT) / 2
    rule = f'<path d="M{_LEFT} {_TOP}H{_RIGHT}M{_LEFT} {_BOTTOM}H{_RIGHT}M{middle:g} {_TOP}V{_BOTTOM}" stroke-opacity=".3"/>'
    words = [(6, _TOP + 4, f"{highest:g}"), (6, _BOTTOM + 4, "0")]
    words += [(x, _BOTTOM + 14, word) for x, word in ((_LEFT, "−4"), (middle, "0"), (_RIGHT, "4"))]
    words += [
        (middle, _BOTTOM + 28, f'probability of the first class, scores (<tspan font-style="italic">t</tspan>{scores})')
    ]
    words += [(middle, _BOTTOM + 41, "bolder lines: larger numbers")] * (len(lines) > 1)
    texts = "".join(f'<text x="{x:g}" y="{y}">{word}</text>' for x, y, word in words)
    high = 117 + 13 * (len(lines) > 1)
    return (
        f'<svg width="240" height="{high}" viewBox="0 0 240 {high}" role="img" fill="none" stroke="currentColor" '
        f'aria-label="The probability of the first class, scores (t{scores})">{rule}{"".join(drawn)}'
        f"<g {_WORDS}>{texts}</g></svg>"
    )


def _each(mapping: Mapping) -> list[Mapping]:
    """The map with numbers in place of arrays: at most `_LINES` of them, from the smallest to the largest."""
    arrays = mapping.params()
    if not arrays:
        return [mapping]
    rows = np.stack([a.ravel() for a in np.broadcast_arrays(*(on_host(a) for a in arrays.values()))], axis=-1)
    rows = np.unique(rows.astype(float), axis=0)
    shown = rows[np.unique(np.linspace(0, len(rows) - 1, _LINES).round().astype(int))]
    return [mapping.replace(**dict(zip(arrays, row.tolist()))) for row in shown]


def _place(t: Any, p: Any) -> tuple[Any, Any]:
    return _LEFT + (t + 4.0) / 8.0 * (_RIGHT - _LEFT), _BOTTOM + p * (_TOP - _BOTTOM)


def _line(p: np.ndarray, share: float) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(*_place(_GRID, p)))
    return f'<polyline points="{points}" stroke-width="2" stroke-opacity="{0.25 + 0.75 * share:.2g}"/>'


def _zeros(zero: np.ndarray) -> str:
    """A thick line wherever the probability is exactly 0; a long one is labelled."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], zero, [False]]).astype(int)))
    x, _ = _place(_GRID, 0.0)
    out = ""
    for start, end in zip(x[edges[::2]], x[edges[1::2] - 1]):
        out += f'<path d="M{start:.1f} {_BOTTOM}H{end + 0.1:.1f}" stroke-width="6" stroke-opacity=".4"/>'
        if end - start > 44:
            out += f'<text x="{(start + end) / 2:.1f}" y="{_BOTTOM - 6}" {_WORDS}>exactly 0</text>'
    return out
