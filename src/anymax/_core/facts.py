"""What a map promises."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a map promises; `anymax.facts` gives it for a map, and every entry is checked by numbers in the tests.

    monotone: x_i > x_j implies p_i >= p_j.
    shift_invariant: p(x + c) = p(x) for every number c.
    sparse: some p_i can be exactly 0.
    has_potential: the Jacobian is symmetric, so p is a gradient and a Fenchel-Young loss exists.
    margin: the loss is 0 once the target's score leads all others by this much; None where it never is.

    >>> anymax.facts(anymax.Entmax(alpha=1.5))
    Facts(monotone=True, shift_invariant=True, sparse=True, has_potential=True, margin=2.0)
    """

    monotone: bool
    shift_invariant: bool
    sparse: bool
    has_potential: bool
    margin: float | None = None

    @property
    def strict(self) -> bool:
        """p_i > p_j exactly where x_i > x_j. Sparse maps break it: of two scores off the support neither has more than 0."""
        return self.monotone and not self.sparse
