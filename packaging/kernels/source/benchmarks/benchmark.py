"""`kernels benchmark`: rows, a loss and attention, each against plain operations of torch."""

from __future__ import annotations

import torch
from kernels.benchmark import Benchmark


def sparsemax(x: torch.Tensor) -> torch.Tensor:
    values = x.float().sort(-1, descending=True).values
    sums = values.cumsum(-1) - 1.0
    rank = torch.arange(1, x.shape[-1] + 1, device=x.device)
    size = (rank * values > sums).sum(-1, keepdim=True)
    return (x.float() - sums.gather(-1, size - 1) / size).clamp(min=0).to(x.dtype)


class AnymaxBenchmark(Benchmark):
    seed: int = 0

    def setup_sparsemax(self):
        self.x = torch.randn(4096, 1024, device=self.device, dtype=torch.bfloat16)
        self.out = torch.empty_like(self.x)

    def benchmark_sparsemax(self):
        self.out = self.kernel.sparsemax(self.x)

    def verify_sparsemax(self) -> torch.Tensor:
        return sparsemax(self.x)

    def setup_softmax_of_a_vocabulary(self):
        self.x = torch.randn(512, 50_257, device=self.device, dtype=torch.bfloat16)
        self.out = torch.empty_like(self.x)

    def benchmark_softmax_of_a_vocabulary(self):
        self.out = self.kernel.softmax(self.x)

    def verify_softmax_of_a_vocabulary(self) -> torch.Tensor:
        return self.x.softmax(-1)

    def setup_cross_entropy(self):
        self.x = torch.randn(4096, 32_000, device=self.device, dtype=torch.bfloat16)
        self.y = torch.randint(32_000, (4096,), device=self.device)
        self.out = torch.empty((), device=self.device)

    def benchmark_cross_entropy(self):
        self.out = self.kernel.cross_entropy(self.x, self.y)

    def verify_cross_entropy(self) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.x.float(), self.y)

    def setup_sparse_attention(self):
        self.q, self.k, self.v = (
            torch.randn(1, 16, 2048, 64, device=self.device, dtype=torch.bfloat16) for _ in range(3)
        )
        self.out = torch.empty_like(self.q)

    def benchmark_sparse_attention(self):
        self.out = self.kernel.attention(self.q, self.k, self.v, "sparsemax", is_causal=True)

    def verify_sparse_attention(self) -> torch.Tensor:
        x = (self.q.float() @ self.k.float().mT) / 8.0
        keep = torch.ones_like(x[0, 0], dtype=torch.bool).tril()
        return (sparsemax(x.masked_fill(~keep, -1e9)) @ self.v.float()).to(self.v.dtype)
