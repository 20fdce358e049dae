"""`check_mapping` tests a map against the laws of the contract numerically, and names each law that it breaks."""

from __future__ import annotations

from collections.abc import Callable

from .._core.mapping import Mapping
from .._core.names import as_mapping
from .._core.options import check_keywords
from .case import BrokenLaw, Case
from .on_frameworks import frameworks, parameters, traced
from .on_numpy import (
    data,
    derivative,
    distribution,
    formulas,
    loss,
    masked,
    monotone,
    permutation,
    poisoned,
    shift_invariant,
    sparse,
)

LAWS: tuple[Callable[[Case], None], ...] = (
    data, distribution, masked, poisoned, permutation, monotone, shift_invariant, sparse, formulas, derivative, loss, parameters,
    frameworks, traced,
)  # fmt: skip


@check_keywords()
def check_mapping(mapping: Mapping, *, n: int = 7, seed: int = 0) -> tuple[str, ...]:
    """Tests your own map numerically against the laws that every map obeys.

    Use it while you write a map, and in its tests. It checks sums, masks, NaN, the facts, whether the formulas agree, the Jacobian, the
    loss and its gradient, and parameters. It runs on NumPy, and on torch and JAX if you have imported them, there also with vmap, masked
    gradients and torch.compile.

    Parameters
    ----------
    mapping
        The map, such as `MyMap()`.
    n
        The number of classes of the test rows; it must fit a parameter with one value per class.
    seed
        The seed of the random scores, an integer of at least 0.

    Returns
    -------
    tuple[str, ...]
        The names of the laws. If the map breaks any, it raises an `AssertionError` that names each and says where.

    Examples
    --------
    >>> anymax.check_mapping(anymax.Sparsemax())[:3]
    ('data', 'distribution', 'masked')
    """
    mapping = as_mapping(mapping, "check_mapping")
    case, broken = Case(mapping, n, seed), []
    for law in LAWS:
        try:
            law(case)
        except BrokenLaw as error:
            broken.append(f"{law.__name__}: {error}")
        except Exception as error:
            broken.append(f"{law.__name__}: {type(error).__name__}: {error}")
    if broken:
        raise BrokenLaw(
            f"{mapping!r} breaks {len(broken)} of {len(LAWS)} laws\n" + "\n".join(f"  {line}" for line in broken)
        )
    return tuple(law.__name__ for law in LAWS)
