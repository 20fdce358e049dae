"""A classifier whose classes lie on several processes: torchrun --nproc-per-node 2 docs/many_machines.py"""

import torch
import torch.distributed as dist

import anymax.distributed  # before the group is made: what of torch comes with it keeps the group that it finds, threads and all

CLASSES, FEATURES, ROWS, STEPS = 1000, 32, 64, 60


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    start, end = rank * CLASSES // size, (rank + 1) * CLASSES // size  # this process's classes
    generator = torch.Generator().manual_seed(0)  # the same rows and targets on every process
    x = torch.randn(ROWS, FEATURES, generator=generator)
    target = torch.randint(CLASSES, (ROWS,), generator=generator)
    weight = torch.zeros(end - start, FEATURES, requires_grad=True)  # of these classes alone
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
    with torch.no_grad():  # a collective of torch's own takes no tensor that has a graph
        p = anymax.distributed.apply("sparsemax", x @ weight.T)
        mass = p.sum(-1)
        dist.all_reduce(mass)
    if rank == 0:
        print(f"{size} processes, {end - start} classes each: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        print(f"the probabilities of a row sum to {mass.min():.4f} and {mass.max():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
