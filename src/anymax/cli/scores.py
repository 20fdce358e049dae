"""Scores from the arguments of a command, or from standard input."""

from __future__ import annotations

import json
import math
import os
import re
import stat
import sys
from collections.abc import Sequence
from typing import Any

import click

STDIN = "-"


class Score(click.ParamType):
    """Numbers, as in `2`, `2,1,0.1` or `[2, 1]`, as a list; or `-`, which `rows_of` reads."""

    name = "score"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == STDIN or isinstance(value, list):
            return value
        pieces = "".join(" " if c in ",;[]()" else c for c in str(value)).split()
        if not str(value).strip() or not all(map(_is_number, pieces)):
            kind = "an unknown option" if str(value).startswith("-") else "not a number"
            self.fail(f"{value!r} is {kind}; scores are numbers such as 2 or -1.5 (see --help)", param, ctx)
        for piece in pieces:
            if not is_score(float(piece)):
                self.fail(
                    f"{piece!r} is not a score; only finite numbers are, and -inf, which masks its entry", param, ctx
                )
        return [float(piece) for piece in pieces]


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def is_score(number: float) -> bool:
    return not (math.isnan(number) or number == math.inf)


def rows_of(words: Sequence[Any], piped: bool = False) -> list[list[float]]:
    """The rows of scores given to a command: none, one from its arguments, or those of standard input.

    Parameters
    ----------
    piped
        Whether a command without scores reads what is piped into it.
    """
    if not words and piped and _is_piped():
        words = [STDIN]
    if STDIN not in words:
        row = [score for word in words for score in word]
        return [row] if row else []
    if len(words) > 1:
        raise click.UsageError("- reads all scores from standard input; give it alone, or numbers")
    if sys.stdin is None:
        raise click.UsageError("-: there is no standard input")
    try:
        rows = read(sys.stdin.read())
    except UnicodeDecodeError as error:
        raise click.UsageError(f"standard input is not text: {error}") from None
    except ValueError as error:
        raise click.UsageError(f"standard input, {error}") from None
    if not rows:
        raise click.UsageError("standard input has no scores; expected numbers, one row of them a line")
    return rows


def _is_piped() -> bool:
    """True if standard input is a pipe or a file; a terminal, or what is always empty, is neither."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def read(text: str) -> list[list[float]]:
    """Rows of numbers, one row per line, separated by commas, semicolons, tabs or spaces; or JSON. A column of numbers is one row."""
    text = text.lstrip("\ufeff").strip()
    rows = _json(text) if text.startswith("[") else None
    if rows is None:
        rows = [_line(line, i) for i, line in enumerate(text.splitlines(), start=1) if line.strip(" \t[]()")]
    column = len(rows) > 1 and all(len(row) == 1 for row in rows)
    return [[row[0] for row in rows]] if column else rows


def _json(text: str) -> list[list[float]] | None:
    """The numbers of a JSON list, or of the lists in it; None for anything else."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return None
    except RecursionError:  # of Python's own reader
        raise ValueError("its brackets are nested too deep; a list has scores, or lists of them") from None
    rows = found if all(isinstance(row, list) for row in found) else [found]
    return [_numbers([str(v) for v in row], f"list {i}") for i, row in enumerate(rows, start=1)]


def _line(line: str, i: int) -> list[float]:
    line = line.strip().strip("[]()").strip()
    words = re.split(r"[,;\t]", line.rstrip(",;")) if re.search(r"[,;\t]", line) else line.split()
    words = [word.strip() for word in words]
    if any(" " in word and all(map(_is_number, word.split())) for word in words):
        raise ValueError(
            f"line {i}, {line!r}: numbers are separated by commas or by spaces, not by both, and the decimal sign is a point"
        )
    return _numbers(words, f"line {i}")


def _numbers(words: Sequence[str], source: str) -> list[float]:
    if not words:
        raise ValueError(f"{source}: it is empty; a row has one score or more")
    for word in words:
        if not _is_number(word):
            raise ValueError(
                f"{source}: {word!r} is not a number; scores are numbers such as 2 or -1.5, without a header"
            )
        if not is_score(float(word)):
            raise ValueError(
                f"{source}: {word!r} is not a score; only finite numbers are, and -inf, which masks its entry"
            )
    return [float(word) for word in words]
