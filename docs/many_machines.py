"""A classifier whose classes lie on several processes: torchrun --nproc-per-node 2 docs/many_machines.py"""

import torch

# before the group is made: an optimiser loads this part of torch,
# which would keep the group and its threads until the process ends
import torch._dynamo
import torch.distributed as dist

import anymax.distributed

CLASSES, FEATURES, ROWS, STEPS = 1000, 32, 64, 60


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    # this process's classes
    start, end = rank * CLASSES // size, (rank + 1) * CLASSES // size
    # the same rows and targets on every process
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, FEATURES, generator=generator)
    target = torch.randint(CLASSES, (ROWS,), generator=generator)
    # the weight of these classes alone
    weight = torch.zeros(end - start, FEATURES, requires_grad=True)
    optimiser = torch.optim.SGD([weight], lr=1.0)
    losses = []
    for _ in range(STEPS):
        loss = anymax.distributed.fenchel_young(
            "sparsemax", x @ weight.T, target, class_start=start, class_count=CLASSES
        )
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    with torch.no_grad():  # torch's own collectives take no tensor with a graph
        p = anymax.distributed.apply("sparsemax", x @ weight.T)
        mass = p.sum(-1)
        dist.all_reduce(mass)
    if rank == 0:
        fall = f"loss {losses[0]:.3f} -> {losses[-1]:.3f}"
        print(f"{size} processes, {end - start} classes each: {fall}")
        sums = f"{mass.min():.4f} and {mass.max():.4f}"
        print(f"the probabilities of a row sum to {sums}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
