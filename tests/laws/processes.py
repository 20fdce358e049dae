"""Processes for the tests of `anymax.distributed`: threads of one process that exchange what a group would, and real ones on gloo."""

import os
import subprocess
import sys
import tempfile
import threading
import traceback

import torch

from anymax.autodiff.torch_group import TorchGroup, first_expected

WAIT = 60.0  # seconds; a thread that waits longer is an error


class Hub:
    """What the threads of one group share."""

    def __init__(self, size):
        self.size, self.barrier, self.box = size, threading.Barrier(size, timeout=WAIT), [None] * size


class Threads(TorchGroup):
    """A thread as a process of a group; `calls` counts how often it communicates, and `numbers` how many numbers it sends."""

    strict = True

    def __init__(self, hub, rank):
        self.hub, self.size, self.rank, self.calls, self.numbers = hub, hub.size, rank, 0, 0
        self.expected = first_expected()

    def gathered(self, a):
        self.calls += 1
        self.numbers += a.numel()
        self.hub.box[self.rank] = a.detach().clone()
        self.hub.barrier.wait()
        sizes = {tuple(b.shape) for b in self.hub.box}
        out = torch.stack(self.hub.box) if len(sizes) == 1 else None
        self.hub.barrier.wait()
        assert out is not None, f"a collective of different shapes: {sizes}"
        return out

    def summed(self, a):
        return self.gathered(a).sum(0)


def together(size, f):
    """[f(group of process 0), ...], all at once; the first error of any of them."""
    hub, out, errors = Hub(size), [None] * size, []

    def work(rank):
        try:
            out[rank] = f(Threads(hub, rank))
        except BaseException as error:
            errors.append((isinstance(error, threading.BrokenBarrierError), rank, error, traceback.format_exc()))
            hub.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(2 * WAIT)
        assert not t.is_alive(), "a thread waits for ever"
    if errors:
        raise sorted(errors, key=lambda e: e[:2])[0][2]
    return out


HEAD = """
import datetime, sys
import torch
import torch.distributed as dist
rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=30)
)
"""

# Without the interpreter's end: a thread of gloo that frees a tensor by then aborts the process (github.com/pytorch/pytorch/issues/190489).
TAIL = """
import os
sys.stdout.flush()
os._exit(0)
"""


def started(size, program):
    """The processes of a group on the loopback address, each with this program between HEAD and TAIL."""
    folder = tempfile.mkdtemp()
    path = os.pathsep.join(filter(None, sys.path))
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": path,
        "PYTHONFAULTHANDLER": "1",
    }
    return [
        subprocess.Popen(
            [sys.executable, "-c", HEAD + program + TAIL, str(rank), str(size), os.path.join(folder, "store")],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip


def ended(many, seconds=120):
    """(exit status, output, errors) of each; none is left behind."""
    try:
        said = [one.communicate(timeout=seconds) for one in many]
    finally:
        for one in many:
            one.kill()
    return [(one.returncode, *said) for one, said in zip(many, said)]


def all_right(size, program):
    """Each process of the program ends well and prints "right", and nothing else."""
    many = ended(started(size, program), 60 * max(size, 2))
    # what went wrong in one process shows in the others as a connection that ends: all have their say
    wrong = [
        (rank, status, out[-500:], err[-3000:])
        for rank, (status, out, err) in enumerate(many)
        if (status, out) != (0, "right\n")
    ]
    assert not wrong, "\n".join(f"process {rank} ended with {status}: {out}\n{err}" for rank, status, out, err in wrong)
