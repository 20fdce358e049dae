"""`Facts`: the properties that a map declares."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Facts:
    """Properties of a map. `anymax.facts` returns those of any map; the tests check every one numerically.

    Parameters
    ----------
    monotone
        x_i > x_j implies p_i >= p_j.
    shift_invariant
        p(x + c) = p(x) for every number c.
    sparse
        Some p_i can be exactly 0.
    has_potential
        The Jacobian is symmetric, so p is a gradient and a Fenchel-Young loss exists.
    margin
        The loss is 0 once the target's score leads all others by this much; None if no lead over them is enough.
    ordered
        The order of the classes matters: p of permuted scores is not the permuted p.

    Examples
    --------
    >>> anymax.facts(anymax.Entmax(alpha=1.5))
    Facts(monotone=True, shift_invariant=True, sparse=True, has_potential=True, margin=2.0, ordered=False)
    """

    monotone: bool
    shift_invariant: bool
    sparse: bool
    has_potential: bool
    margin: float | None = None
    ordered: bool = False

    @property
    def strict(self) -> bool:
        """True if x_i > x_j always implies p_i > p_j. Sparse maps break this: two classes off the support both get 0."""
        return self.monotone and not self.sparse
