"""What losses hold at their peak, in inputs and results."""

from __future__ import annotations

import sys

import pytest
from engine_state import in_a_child

MEMORY = """
import gc, torch, anymax
torch.set_num_threads(1)

def kilobytes(word):
    return int(next(line for line in open("/proc/self/status") if line.startswith(word)).split()[1]) * 1024

x, y = torch.randn(4000, 1000).requires_grad_(), torch.arange(4000) % 1000
for mapping in (anymax.Taylor(), anymax.Sigsoftmax(), anymax.Entmax(0.7)):
    both = lambda x, y: torch.autograd.grad(anymax.nll(mapping, x, y), x)
    both(x[:10].detach().requires_grad_(), y[:10])
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")
    before = kilobytes("VmRSS")
    gradient = both(x, y)
    print((x.nbytes + kilobytes("VmHWM") - before) / (2 * x.nbytes))
    del gradient
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.whole
def test_a_likelihood_of_class_indices_holds_little():
    """p or log p, the gradient by it and that by the scores: with the scores twice what is given and given back."""
    pytest.importorskip("torch")
    factors = in_a_child(MEMORY, ANYMAX_KEPT_MB="0", MALLOC_MMAP_THRESHOLD_="131072").split()
    assert max(map(float, factors)) < 2.1, factors
