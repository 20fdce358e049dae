"""The first call of a verb loads nothing that takes seconds: Dynamo, or sympy, which torch.autograd.grad loads with a given gradient."""

import subprocess
import sys

CALLS = """
import sys
import torch
import anymax as am

torch.manual_seed(0)
x, y = torch.randn(4, 10, requires_grad=True), torch.tensor([1, 2, 3, 4])
h, w = torch.randn(8, 16, requires_grad=True), torch.randn(1000, 16, requires_grad=True)
t = torch.randint(0, 1000, (8,))
q = torch.randn(1, 2, 16, 8, requires_grad=True)
calls = {
    "apply": lambda: am.sparsemax(x).sum().backward(),
    "fenchel_young": lambda: am.fenchel_young("entmax15", x, y).backward(),
    "nll": lambda: am.nll("sigsoftmax", x, y).backward(),
    "linear_loss, entmax15": lambda: am.linear_loss(h, w, t, "entmax15").backward(),
    "linear_loss, softmax": lambda: am.linear_loss(h, w, t).backward(),
    "linear_log_prob_entropy": lambda: am.linear_log_prob_entropy(h, w, t)[0].sum().backward(),
    "contrastive_loss": lambda: am.contrastive_loss(h, h.detach()).backward(),
    "attention": lambda: am.attention(q, q, q, "sparsemax").sum().backward(),
    "segment_apply": lambda: am.segment_apply("sparsemax", x[0], lengths=[4, 6]).sum().backward(),
    "sample": lambda: am.sample("softmax", x.detach(), generator=0),
    "threshold": lambda: am.threshold("entmax15", x.detach()),
}
for name, call in calls.items():
    call()
    for module in ("torch._dynamo", "sympy"):
        if module in sys.modules:
            sys.exit(f"{name} loads {module}")
print("light")
"""


def test_the_first_call_of_a_verb_loads_neither_dynamo_nor_sympy():
    run = subprocess.run([sys.executable, "-c", CALLS], capture_output=True, text=True, timeout=300)
    assert run.stdout == "light\n", run.stdout + run.stderr
