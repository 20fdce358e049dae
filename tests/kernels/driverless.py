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
from anymax.kernels.triton import replay

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


def numbers(launched):
    return [tuple(v.data_ptr() if isinstance(v, torch.Tensor) else v for v in one) for one in launched]


def main():
    driver.set_active(Driver())
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
