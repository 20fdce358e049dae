"""The margin head with classes on several processes, each with a batch of its own: the numbers of one process, as partial FC has it."""

import importlib.util

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from processes import together
from shard_cases import exact, numbers, same

import anymax as A

ROWS, CENTRES = numbers(11, 9, 6), numbers(10, 11, 6)
FEW, FEW_INDEX = numbers(11, 4, 6), torch.tensor([3, 0, 10, 7])


def head(group=None, mapping="softmax", **options):
    """A head with this process's part of the centres."""
    out = A.nn.MarginHead(6, 11, mapping, scale=4.0, group=group, **options).double()
    with torch.no_grad():
        out.weight.copy_(CENTRES[out.class_start : out.class_start + out.weight.shape[0]])
    return out


TARGET = torch.tensor([3, 0, 10, 7, -100, 2, 2, 5, 9])
MAPS = {  # a map, and targets
    "softmax": (lambda: "softmax", TARGET), "sparsemax": (lambda: "sparsemax", TARGET), "taylor": (lambda: "taylor", TARGET),
    "sink": (lambda: A.Sink("entmax15", torch.nn.Parameter(exact(0.5))), torch.tensor([3, 0, -1, 7, -100, 2, -1, 5, 9])),
}  # fmt: skip


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("rate", [1.0, 0.999])
def test_a_margin_head_over_processes(name, rate):
    """Each batch has another size; a rate that leaves no class out changes nothing."""
    (make, t), cuts = MAPS[name], (4, 0, 5)
    e, whole = ROWS.clone().requires_grad_(), head(None, make())
    want = whole(e, t)
    want.backward()
    same(head(None, make(), sample_rate=rate)(ROWS, t), want)

    def one(group):
        mine, here = head(group, make(), sample_rate=rate), slice(sum(cuts[: group.rank]), sum(cuts[: group.rank + 1]))
        part = ROWS[here].clone().requires_grad_()
        loss = mine(part, t[here])
        loss.backward()
        same(loss, want)
        same(part.grad, e.grad[here])
        classes = slice(mine.class_start, mine.class_start + len(mine.weight))
        for key, parameter in mine.named_parameters():
            gradient = dict(whole.named_parameters())[key].grad
            same(parameter.grad, gradient[classes] if key == "weight" else gradient)
        same(mine.probabilities(ROWS), whole.probabilities(ROWS)[:, classes])

    together(3, one)


def test_a_target_of_minus_one_is_the_sink_without_a_margin():
    make, t = MAPS["sink"]
    scores = 4.0 * A.margins.AM(0.35)(A.transforms.cosine(CENTRES)(ROWS), t.clamp(min=-1), -1)
    same(head(None, make())(ROWS, t), A.fenchel_young(A.Sink("entmax15", 0.5), scores, t, axis=-1))


def touched(mine, rows, t):
    mine(rows, t).backward()
    return mine.weight.grad.abs().sum(-1) > 0


def test_sampled_classes_hold_those_of_the_batch():
    t = torch.tensor([3, 3, 10, 7])
    torch.manual_seed(0)
    alone = head(sample_rate=0.4)
    moved = touched(alone, FEW, t)
    assert moved.sum() == 5
    assert moved[[3, 7, 10]].all()
    alone.eval()
    same(alone(FEW, t), head()(FEW, t))

    def one(group):
        mine, here = head(group, sample_rate=0.3), slice(2 * group.rank, 2 * group.rank + 2)
        moved = touched(mine, FEW[here], t[here])
        assert moved[t[(t >= mine.class_start) & (t < mine.class_start + len(moved))] - mine.class_start].all()
        assert moved.sum() == 2

    together(2, one)


@pytest.mark.parametrize("ignored", [0, 2])
def test_sampled_classes_are_not_taken_for_the_ignored_one(ignored):
    """Those of the batch are numbered 0, 1, 2 in such a step."""
    t, given = torch.tensor([3, ignored, 10, 7]), {"ignore_index": ignored, "reduction": "none"}
    want = head(**given)(FEW, t)
    assert (want > 0).tolist() == [True, False, True, True]
    same(head(sample_rate=0.999, **given)(FEW, t), want)
    for found in together(2, lambda g: head(g, sample_rate=0.999, **given)(FEW, t)):
        same(found, want.repeat(2))


def test_targets_of_another_dtype():
    mine = head(sample_rate=0.4).eval()
    same(mine(FEW, FEW_INDEX.to(torch.uint8)), mine(FEW, FEW_INDEX))
