"""Benchmarks of anymax against softmax and against other packages: `python -m benchmarks` from the repository root."""
