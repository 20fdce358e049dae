"""Before they compute, the processes of a group tell each other what their calls are, and whether one has failed.

This travels with the first collective of a call. Without it, calls that differ would give wrong results, or a collective with two
sizes, which kills processes; with it, all processes raise the same error. So each process must know the size of this collective before
it knows the calls of the others. It uses the *expected* size: that of the call that followed the same calls the last time. All processes
have made the same calls, so they expect the same. A process whose call has another size sends zeros of the expected size, and says so;
if all say so and agree, their data follow in one more collective.

A function with `group=` that sends its own data later compares its calls so:

    agreement = Agreement("contrastive_loss", as_group(...), x, room="")

    def verb():
        ...  # checks of the arguments
        agreement.say(reduction=reduction, rows=shape_of(x))  # what must be the same on every process
        agreement.settle()
        ...  # collectives

    return fail_together(agreement, verb)
"""

from __future__ import annotations

import inspect
import json
import zlib
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from .._array import Array, differentiates, is_array, is_floating, namespace
from .._core.mapping import Mapping
from .group import Expected, Group, Message

_BASE = 1 << 12  # of the two digits by which a number is sent: exact in fp32 up to 2^36
_MARKS = 1 << 24  # fp32 holds all integers up to this
# `Head.sends`: failed, no data, data in this collective, data in the next one
FAILED, NOTHING, HERE, FOLLOWS = range(4)
_ERRORS = {e.__name__: e for e in (TypeError, ValueError, IndexError, RuntimeError, NotImplementedError, KeyError)}


class Head(NamedTuple):
    """What each process tells the others."""

    sends: int
    size: int = 0  # its number of classes
    start: int | None = None  # the index of its first class, if the caller gives it
    count: int = 0  # of all classes, if the caller gives it
    most: int = 0  # candidates in its fullest row
    split: int = 0  # which parameters have one value for each class, as far as it can tell
    digest: int = 0  # a checksum of the words that must be the same everywhere
    mark: int = 0  # a checksum of the arrays that must be the same everywhere

    def coded(self) -> list[float]:
        """As numbers that fp32 can hold; the mark is added on the device."""
        two = (self.size, self.start or 0, self.count, self.most, self.split, self.digest)
        return [float(self.sends), float(self.start is not None), *[float(d) for v in two for d in divmod(v, _BASE)]]

    @classmethod
    def read(cls, row: list[float]) -> Head:
        sends, has_start, *digits, mark = map(int, row)
        # as `coded` wrote them
        size, start, count, most, split, digest = [
            a * _BASE + b for a, b in zip(digits[::2], digits[1::2], strict=True)
        ]
        return cls(sends, size, start if has_start else None, count, most, split, digest, mark)


WIDTH = len(Head(FAILED).coded()) + 1


class Agreement:
    """One call: what its processes must agree on, and the collective in which they do.

    who: the verb. x: an array on the device of the collectives. room: where the verb is found, as the errors name it.
    """

    def __init__(
        self, who: str, group: Group, x: Any, message: Message | None = None, room: str = "distributed."
    ) -> None:
        self.who, self.group, self.x, self.name = who, group, x, f"anymax.{room}{who}"
        self.words: dict[str, str] = {"verb": who}  # what must be the same on every process
        self.same: dict[str, Array] = {}  # arrays that must be the same on every process, by name
        self._message = message  # of the next collective, once all know it
        self._open = group.strict and group.size > 1  # True until the others have heard from this process

    @property
    def agreed(self) -> bool:
        """True once all processes know each other's calls."""
        return self._message is not None

    def say(self, **words: Any) -> None:
        self.words |= {k.replace("_", " "): v if isinstance(v, str) else repr(v) for k, v in words.items()}

    def say_mapping(self, mapping: Mapping, of_classes: Collection[str] = ()) -> None:
        """of_classes: its parameters that may have one value for each class of this process."""
        kinds, constants = (int, float, str, type, type(None)), mapping.constants()
        fixed = {k: repr(v) for k, v in constants.items() if isinstance(v, kinds)}
        fixed |= {k: v.__qualname__ for k, v in constants.items() if inspect.isfunction(v)}
        self.say(map=f"{mapping.name}({', '.join(f'{k}={v}' for k, v in fixed.items())})")
        for name, value in mapping.params().items():
            learned = "learned values" if differentiates(value) else "values"
            words = f"{learned} along the classes, of {value.ndim} axes" if name in of_classes else described(value)
            self.say(**{f"{mapping.name}'s_{name}": words})

    def exchange(self, payload: Array | None, head: Head) -> tuple[Array | None, list[Head]]:
        """The payloads of all processes, [size, *shape of the payload], and their heads; raise if the calls differ."""
        group, xp = self.group, namespace(self.x)
        expected: Expected = group.expected
        actual = None if payload is None else Message(payload.numel(), payload.dtype)
        message = actual if actual is not None and group.size == 1 else self._message or expected.next()
        sends = NOTHING if actual is None else HERE if actual == message else FOLLOWS
        head = head._replace(sends=sends, digest=zlib.crc32(json.dumps(self.words).encode()))
        marked = None if self.agreed or not self.same else mark(xp.concat([_bits(a) for a in self.same.values()]))
        stacked, heads = self._send(payload if sends == HERE else None, message, head, marked)
        self._failures(heads, None)
        if len({h.start is None for h in heads}) > 1:
            raise ValueError(
                f"{self.name}: class_start is given on some processes only; give it on all of them, or on none"
            )
        if len({(h.digest, h.sends) for h in heads}) > 1:
            self._differences()
        if len({h.mark for h in heads}) > 1:
            self._different_entries()
        if payload is None:
            return None, heads
        self._open = False
        if actual is not None and actual != self._message:
            expected.came(actual)
        if sends == FOLLOWS:
            stacked = group.stack(xp.reshape(payload, (-1,)))
        return xp.reshape(stacked, (group.size, *payload.shape)), heads

    def compare(self, head: Head) -> list[Head]:
        """The heads of all processes, before any data; raise if the calls differ. Later this process tells no other that it fails."""
        _, heads = self.exchange(None, head)
        self._open = False
        return heads

    def expect(self, message: Message) -> None:
        """All processes know the message of the next collective."""
        self._message = message

    def settle(self, size: int = 0) -> list[int]:
        """Compare the calls of a verb that sends its data later; return the size that each process gives, by rank.

        Where values are not known, as in JAX, one program is the call of all devices, and there is nothing to compare.
        """
        if not self.group.strict:
            return [size] * self.group.size
        return [head.size for head in self.compare(Head(HERE, size))]

    def failed(self, error: Exception) -> None:
        """Tell the others, if they have not heard from this process yet, and raise the error that all of them raise."""
        if not self._open:
            return
        self._open = False
        _, heads = self._send(None, self._message or self.group.expected.next(), Head(FAILED), None)
        self._failures(heads, error)

    def _send(self, payload: Array | None, message: Message, head: Head, marked: Any) -> tuple[Array, list[Head]]:
        xp, as_sent = namespace(self.x), {"dtype": message.dtype, "device": self.x.device}
        numbers = xp.asarray(head.coded(), **as_sent)
        last = xp.zeros((1,), **as_sent) if marked is None else xp.astype(marked, message.dtype)
        body = xp.zeros((message.count,), **as_sent) if payload is None else xp.reshape(payload, (-1,))
        sent = self.group.stack(xp.concat([body, numbers, xp.reshape(last, (1,))]))
        return sent[:, :-WIDTH], [Head.read(row) for row in sent[:, -WIDTH:].tolist()]

    # -- errors, the same on every process ---------------------------------------------------------------------------------------

    def _failures(self, heads: list[Head], error: Exception | None) -> None:
        """Raise the errors of the processes that failed; return if all failed alike, since each then raises its own."""
        if all(h.sends != FAILED for h in heads):
            return
        self._open = False
        texts = self.group.texts("" if error is None else f"{type(error).__name__}\n{self.name}\n{error}", self.x)
        said = {i: text.split("\n", 2) for i, text in enumerate(texts) if text}
        if len(said) == len(heads) and len(set(texts)) == 1:
            return
        kind, name, _ = next(iter(said.values()))
        words = _by_text({i: text for i, (_, _, text) in said.items()})
        each = "; ".join(f"{ranks}: {text}" for text, ranks in words.items())
        raise _ERRORS.get(kind, RuntimeError)(f"{name}: {each}") from error

    def _differences(self) -> None:
        """Raise an error that says how the calls differ."""
        self._open = False
        each = [json.loads(text) for text in self.group.texts(json.dumps(self.words), self.x)]
        names = [name for name in each[0] if any(words.get(name) != each[0][name] for words in each)]
        names += sorted({name for words in each for name in words if name not in each[0]})
        who = self.name
        if "verb" in names:
            who, names = "anymax", ["verb"]
        said = [f"{name} is {_where([words.get(name, 'not there') for words in each])}" for name in names]
        raise RuntimeError(f"{who}: the processes of the group ask for different things: {'; '.join(said)}")

    def _different_entries(self) -> None:
        """Raise an error that names the first entry that differs between the processes."""
        self._open = False
        for name, mine in self.same.items():
            each = self.group.gathered(_bits(mine))
            differs = (each != each[:1]).any(0)
            if differs.any():
                at = int(differs.nonzero()[0, 0])
                values = self.group.gathered(mine.reshape(-1)[at : at + 1])[:, 0].tolist()
                words = _where([f"{value:g}" if isinstance(value, float) else str(value) for value in values])
                raise ValueError(f"{self.name}: {name} must be the same on every process; its entry {at} is {words}")


def fail_together(agreement: Agreement, verb: Callable[[], Any]) -> Any:
    """`verb()`; if it fails on one process before all have agreed, it fails on all, with the same message."""
    try:
        return verb()
    except Exception as error:
        agreement.failed(error)
        raise


def _by_text(said: dict[int, str]) -> dict[str, str]:
    """The texts of the processes, each once, and who said it: "process 0", "processes 1 and 2"."""
    by: dict[str, list[int]] = {}
    for i, text in said.items():
        by.setdefault(text, []).append(i)
    out = {}
    for text, ranks in by.items():
        names = [str(i) for i in ranks[:4]] + ([f"{len(ranks) - 4} more"] if len(ranks) > 4 else [])
        out[text] = f"process {names[0]}" if len(names) == 1 else f"processes {', '.join(names[:-1])} and {names[-1]}"
    return out


def _where(texts: list[str]) -> str:
    """The texts of all processes, by rank: "3 on process 0, 4 on processes 1 and 2"."""
    return ", ".join(f"{text} on {ranks}" for text, ranks in _by_text(dict(enumerate(texts))).items())


def _bits(a: Array) -> Array:
    """The entries as integers, those of floating-point numbers by their bits, in one axis."""
    xp = namespace(a)
    flat = a.detach().reshape(-1)
    if is_floating(a):
        flat = flat.contiguous().view({1: xp.int8, 2: xp.int16, 4: xp.int32, 8: xp.int64}[a.element_size()])
    return flat.to(xp.int64)


def mark(integers: Array) -> Array:
    """A hash of the integers, from 0 to 2^24 - 1."""
    flat = integers.reshape(-1)
    flat = flat ^ (flat >> 31) ^ (flat >> 47)  # the bits of 1.0 or 2.5 are all at the upper end
    factors = flat.new_ones(flat.shape).cumsum(0) * 2654435761 + 1013904223  # these wrap around
    return ((flat * factors).sum() >> 20) & (_MARKS - 1)


def described(value: Any) -> str:
    """A parameter, as the processes compare it."""
    if not is_array(value):
        return repr(value)
    return f"{'a learned' if differentiates(value) else 'an'} array of shape {tuple(value.shape)}"
