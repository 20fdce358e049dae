"""How names are spelled: which are the same, and which known one is nearest to a wrong one."""

from __future__ import annotations

from collections.abc import Iterable

LONGEST = 64  # characters of a name; a longer one is near to none, since finding the nearest takes time that grows with the square


def bare(name: str) -> str:
    """A name without its case, its dashes and its blanks, by which names are compared."""
    return name.strip().lower().replace("-", "").replace("_", "").replace(" ", "")


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that is spelled most like this one, whatever the case and the dashes; None if none is near."""
    if len(name) > LONGEST:
        return None
    import difflib  # late: for a name that is wrong

    # of a class and a function with one spelling, the one that begins as the name does
    bare_names = {bare(each): each for each in sorted(known, key=lambda each: each[:1].isupper() == name[:1].isupper())}
    near = difflib.get_close_matches(bare(name), bare_names, 1, cutoff)
    return bare_names[near[0]] if near else None
