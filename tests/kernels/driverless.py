"""Triton's own launches without a GPU: its compiler makes the kernels for sm_90, and what it would launch is kept. For test_triton.py.

It says whether a call that repeats hands Triton's launcher the same arguments as Triton does itself, with addresses as numbers.
"""

from __future__ import annotations

import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import anymax as am
from anymax.kernels import triton as engine
from anymax.kernels.triton import attention, replay

LAUNCHED: list[tuple] = []


class Launcher:
    def __init__(self, source, metadata):
        pass

    def __call__(self, x, y, z, stream, function, packed, metadata, enter, leave, *args):
        LAUNCHED.append((x, y, z, function, packed, *args))


class Utils:
    def load_binary(self, name, kernel, shared, device):
        return object(), f"{name} {len(kernel)}", 32, 0, 1024

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448, "multiprocessor_count": 132}


class Driver:
    launcher_cls, utils = Launcher, Utils()

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")


def calls(x, p, g, t, memory):
    """A forward pass, its gradient, a loss and its gradient, in this memory."""
    launch, link = engine.load(), engine.triton_link(am.SparseSoftmax(k=5))
    launch.run("p", link, x, out=p)
    launch.backward(link, False, None, p, g, memory[0])
    launch.run("loss", link, x, index=t, value=memory[1], state=memory[2], ignore=-100)
    launch.run("grad", link, x, out=memory[0], index=t, scale=memory[3], state=memory[2], ignore=-100)


def attend(q, k, v, g, keep):
    """Attention and its gradients, and the last query alone, whose keys are cut in parts."""
    job = attention.Job("power", 2, 0.5, 0.125, 0.0, True, -1, -1, 0, 0.0, False, False)
    out, saved = attention.forward(job, q, k, v, {"keep": keep}, True)
    found = attention.backward(job, q, k, v, {"keep": keep}, out, saved, g, {"q", "k", "v"})
    last, _ = attention.forward(job._replace(causal=False), q[:, :, :1], k, v, {}, False)
    return out, *saved, *found.values(), last


def numbers(launched):
    """With addresses as numbers."""

    def plain(v):
        return v.data_ptr() if isinstance(v, torch.Tensor) else tuple(map(plain, v)) if isinstance(v, tuple) else v

    return [plain(one) for one in launched]


def attention_repeats():
    """The second call of the same layout has no tensor in its launches, and the arguments that Triton would be given."""
    LAUNCHED.clear()
    replay._known.clear()
    made, memory = [], []
    for _again in range(2):
        q, k, v, g = (torch.zeros(1, 2, n, 64, dtype=torch.bfloat16) for n in (64, 4096, 4096, 64))
        made.append((q, k, v, g, torch.ones(1, 1, 64, 4096, dtype=torch.bool)))
        memory.append(attend(*made[-1]))  # kept, so that no address is taken again
    half = len(LAUNCHED) // 2
    first, second = LAUNCHED[:half], LAUNCHED[half:]
    assert [one[3] for one in first] != []
    assert [one[4] for one in first] == [one[4] for one in second]
    assert len([one for one in replay._known.values() if one is not None]) == 3
    assert numbers(second) == second
    given = {t.data_ptr() for t in (*made[1], *memory[1])}
    before = {t.data_ptr() for t in (*made[0], *memory[0])} - given - {0}
    for one, two in zip(numbers(first), second, strict=True):
        assert len(flat(one)) == len(flat(two))
        for a, b in zip(flat(one), flat(two)):
            assert a == b or isinstance(a, int)
            assert b not in before
            assert a not in before or b in given


def flat(values):
    return [part for v in values for part in (flat(v) if isinstance(v, tuple) else [v])]


def main():
    driver.set_active(Driver())
    attention_repeats()
    LAUNCHED.clear()
    replay._known.clear()
    made = []
    for again in range(2):
        x, p, g = (torch.randn(8, 64, generator=torch.Generator().manual_seed(n + 3 * again)) for n in range(3))
        memory = torch.empty(8, 64), torch.empty(2, 8), torch.empty(8, 4), torch.ones(())
        made.append((x, p, g, torch.arange(8), memory))
        calls(*made[-1])
    first, second = LAUNCHED[:4], LAUNCHED[4:]
    assert len(second) == 4 == len([one for one in replay._known.values() if one is not None])
    assert any(isinstance(v, torch.Tensor) for v in first[0])
    assert not any(isinstance(v, torch.Tensor) for one in second for v in one)
    LAUNCHED.clear()
    replay._known.clear()
    calls(*made[-1])
    assert numbers(LAUNCHED) == second
    assert numbers(first) != second
    sys.stdout.write("the same\n")


if __name__ == "__main__":
    main()
