"""Cubics through the values of a function at Chebyshev's nodes, of which tables for the C++ engine are made."""

from __future__ import annotations

import numpy as np

NODES = 0.5 - 0.5 * np.cos(np.pi * (np.arange(4) + 0.5) / 4)  # Chebyshev's, in [0, 1]


def through(u: np.ndarray, f: np.ndarray) -> np.ndarray:
    """The coefficients [..., 4] of the cubics through f at u, [..., 4], by Newton's divided differences."""
    slope, parts = f, [f[..., 0]]
    for degree in (1, 2, 3):
        slope = np.diff(slope, axis=-1) / (u[..., degree:] - u[..., :-degree])
        parts.append(slope[..., 0])
    (a, b, c, d), (u0, u1, u2) = parts, (u[..., i] for i in range(3))
    return np.stack(
        [
            a - u0 * (b - u1 * (c - u2 * d)),
            b - c * (u0 + u1) + d * (u0 * u1 + u0 * u2 + u1 * u2),
            c - d * (u0 + u1 + u2),
            d,
        ],
        axis=-1,
    )
