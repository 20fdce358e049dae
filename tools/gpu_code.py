"""What the compiler made of a kernel: its registers, its memory, and the loops of its instructions."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

SHARED = {"sm_80": 164, "sm_90": 228, "sm_100": 228}  # KiB of a multiprocessor


@dataclasses.dataclass(frozen=True)
class Loop:
    """What is between a label and the branch back to it, without the loops inside."""

    fp64: int
    loads: int
    inner: bool  # it has a loop of its own

    @property
    def tiles(self) -> bool:
        """A loop over the tiles of a row, which reads memory; else a solver's."""
        return self.loads > 0 and not self.inner


@dataclasses.dataclass(frozen=True)
class Figures:
    kernel: str
    target: str
    warps: int
    registers: int
    stack: int  # bytes of a thread that do not fit its registers
    shared: int  # bytes of a program
    barriers: int
    instructions: int
    fp64_in_loops: int  # in those over tiles
    wide_loads: int  # of 128 bits and more
    loads: int

    @property
    def per_processor(self) -> int:
        """Programs that fit a multiprocessor at the same time."""
        granted = -(-max(self.registers, 1) * 32 // 256) * 256 * self.warps
        by_shared = SHARED[self.target] * 1024 // (self.shared + 1024)
        return max(1, min(65536 // granted, by_shared, 64 // self.warps, 32))


_FP64 = re.compile(r"\b(DADD|DMUL|DFMA|DSETP|DMNMX|F2F\.F64|F2F\.F32\.F64|I2F\.F64|F2I\.F64|MUFU\.\w*64H)")


def figures(made: Any, target: str) -> Figures:
    """Of a kernel compiled for an NVIDIA target."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(made.asm["cubin"])

        def tool(path: str, *words: str) -> str:
            return subprocess.run([path, *words, str(cubin)], capture_output=True, text=True, check=True).stdout

        usage = tool(knobs.nvidia.cuobjdump.path, "-res-usage")
        text = tool(knobs.nvidia.nvdisasm.path, "-c", "-ndf")  # without an analysis that nothing of this needs
    said = {name: int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK")}  # type: ignore[index]
    code, loops = listed(text)
    return Figures(
        made.metadata.name, target, made.metadata.num_warps, said["REG"], said["STACK"], made.metadata.shared, _count(r"\bBAR\.", code),
        len(code), sum(loop.fp64 for loop in loops if loop.tiles), _count(r"\bLDG\S*\.(128|256)", code), _count(r"\bLDG", code),
    )  # fmt: skip


def listed(text: str) -> tuple[list[str], tuple[Loop, ...]]:
    """The instructions of a kernel and its loops, of what nvdisasm prints."""
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in map(str.strip, text.splitlines()):
        if match := re.match(r"(\.L_\w+):", line):
            labels[match[1]] = len(code)
        elif re.match(r"/\*[0-9a-f]+\*/", line):
            code.append(re.sub(r"^/\*[0-9a-f]+\*/\s*", "", line))
    named = {at: name for name, at in labels.items()}  # the end of a kernel is a branch to itself, and padding
    while code and (code[-1].startswith("NOP") or f"({named.get(len(code) - 1)})" in code[-1]):
        code.pop()
    return code, loops_of(code, labels)


def loops_of(code: list[str], labels: dict[str, int]) -> tuple[Loop, ...]:
    ends: dict[int, int] = {}  # several branches back to one label are one loop
    for i, line in enumerate(code):
        match = re.search(r"\bBRA\b.*?(\.L_\w+)", line)
        if match and labels.get(match[1], i + 1) <= i and labels[match[1]] != i:
            ends[labels[match[1]]] = i + 1
    follow = flow(code, labels)
    spans = {(begin, end) for begin, end in ends.items() if not reached(follow, end - 1, begin)}
    loops = []
    for begin, end in sorted(spans):
        inside = [(b, e) for b, e in spans if (b, e) != (begin, end) and begin <= b and e <= end]
        own = [c for i, c in enumerate(code[begin:end], begin) if not any(b <= i < e for b, e in inside)]
        loops.append(Loop(_count(_FP64, own), _count(r"\bLDG", own), bool(inside)))
    return tuple(loops)


def flow(code: list[str], labels: dict[str, int]) -> list[list[int]]:
    """What may follow each instruction."""
    joins: dict[str, list[int]] = {}  # where the threads of a barrier meet again
    for line in code:
        if match := re.search(r"\bBSSY\S*\s+(B\d+),.*?(\.L_\w+)", line):
            joins.setdefault(match[1], []).append(labels[match[2]])
    follow = []
    for i, line in enumerate(code):
        to = [i + 1] if i + 1 < len(code) else []
        if re.match(r"(BRA(\.U)?\s+`|(EXIT|RET|BRX|JMP)\b)", line):  # without a condition of any kind
            to = []
        if (match := re.search(r"\b(BRA|CALL)\b.*?(\.L_\w+)", line)) and match[2] in labels:
            to.append(labels[match[2]])
        if match := re.search(r"\bBSYNC\S*\s+(B\d+)", line):
            to += joins.get(match[1], [])
        follow.append([t for t in to if t < len(code)])
    return follow


def reached(follow: list[list[int]], end: int, without: int) -> bool:
    """Whether an instruction can be come to around another: a branch back to that one is then no loop, but the way home from a block that
    the compiler has put behind all others because it is seldom wanted."""
    seen, waiting = {0, without}, [0] if without else []
    while waiting:
        i = waiting.pop()
        if i == end:
            return True
        new = [t for t in follow[i] if t not in seen]
        seen.update(new)
        waiting += new
    return False


def _count(pattern: str | re.Pattern[str], code: list[str]) -> int:
    return sum(bool(re.search(pattern, line)) for line in code)
