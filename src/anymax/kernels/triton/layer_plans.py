"""How output layers are cut: tiles of scores, and parts of the classes. The numbers are tuned on a GPU by tools/gpu.py."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Panel:
    """A tile of scores is [M rows, N classes], computed from F features at a time. In half precision F is at least 64, since Triton 3.6
    multiplies narrower tiles wrongly on Hopper."""

    M: int
    N: int
    F: int
    warps: int
    stages: int


PANELS = {  # by kernel: (half precision, fp32)
    "sums": (Panel(128, 128, 64, 8, 3), Panel(64, 64, 32, 4, 2)),
    "slopes": (Panel(128, 128, 64, 8, 3), Panel(64, 64, 32, 4, 2)),
    "candidates": (Panel(128, 128, 64, 8, 3), Panel(64, 64, 32, 4, 2)),
}
TURNS, MOST_PANELS = 2, 16  # programs for each processor, and the most parts of the classes
forced_panels: list[Panel] = []  # set by the tuner and the tests


def panel(kernel: str, size: int) -> Panel:
    """`size`: bytes of a number."""
    return forced_panels[-1] if forced_panels else PANELS[kernel][size > 2]


def parts_of(p: Panel, tall: int, n: int, processors: int) -> tuple[int, int]:
    """(parts of the classes, classes of a part), where `tall` programs share the rows."""
    tiles = -(-n // p.N)
    parts = max(1, min(MOST_PANELS, TURNS * processors // tall, tiles))
    span = -(-tiles // parts) * p.N
    return -(-n // span), span
