"""`anymax.vllm.LogitsProcessor` under both interfaces of vLLM, with a stand-in for them, and what a request may ask for."""

import inspect
import math
import random
import types

import numpy as np
import pytest

import anymax
from anymax import transforms

torch = pytest.importorskip("torch")

import vllm_stand_in as stand_in

from anymax import vllm
from anymax.vllm import batch, processor, spec

PROCESSOR = processor.over((stand_in.ForV2, stand_in.ForV1))
N = 60  # classes

# what requests ask for, and what it is
ASKED = {
    "nothing": (None, None, None),
    "a string": ("temperature:T=0.7; topk:k=9; topp:p=0.8", ("temperature", 0.7), ("topk", 9), ("topp", 0.8), None),
    "other numbers": (["temperature:T=1.3", "top_k:k=5", "top-p:p=0.6"], ("temperature", 1.3), ("topk", 5), ("topp", 0.6), None),
    "whole numbers": (["temperature:T=1", "topk:k=7", "topp:p=1"], ("temperature", 1), ("topk", 7), ("topp", 1), None),
    "a map": (["entmax:alpha=1.5"], anymax.Entmax(1.5)),
    "a map and a cut": (["min_p:p=0.1", "sparsemax"], ("minp", 0.1), anymax.Sparsemax()),
    "dicts": ([{"name": "topk", "k": 3}, {"name": "entmax", "alpha": 1.3}], ("topk", 3), anymax.Entmax(1.3)),
    "a bias": ([{"name": "logit_bias", "bias": {"3": -2.0, "5": 1}}], ("logit_bias", {3: -2.0, 5: 1.0}), None),
    "bans of words": (
        [{"name": "sequence_bias", "bias": {"3": -math.inf, "4, 5": -1.0}}], ("sequence_bias", [-1], {(3,): -math.inf, (4, 5): -1.0}), None,
    ),
    "argmax": ("temperature:T=0", ("temperature", 0), None),
    "half": ("temperature:T=0.5", ("temperature", 0.5), None),
    "twice": ("temperature:T=2", ("temperature", 2), None),
    "l1": ("normalize:kind=l1", ("normalize", "l1"), None),
    "l2": ("normalize:kind=l2", ("normalize", "l2"), None),
    "two classes": ("topk:k=2", ("topk", 2), None),
    "five of two": ("topk:k=2,min_keep=5", ("topk", 2, 5), None),
    "another map": ("entmax:alpha=1.3", anymax.Entmax(1.3)),
    "softmax": ("softmax", None),
}  # fmt: skip


def asked(name):
    return ASKED[name][0]


def wanted(name, row):
    """What one row should become, by the library itself, one transform after the other."""
    _, *steps, mapping = ASKED[name]
    for step in steps:
        if step is not None:
            row = getattr(transforms, step[0])(*step[1:])(row)
    return row if mapping is None else anymax.log_apply(mapping, row)


def params(given, seed=None):
    return stand_in.SamplingParams(seed=seed, extra_args=None if given is None else {"anymax": given, "other": 1})


def scores(rows, seed=0):
    return torch.randn(rows, N, generator=torch.Generator().manual_seed(seed)) * 2.0


def close(got, want):
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


# -- what a request asks for ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ASKED)
def test_what_is_asked_for(name):
    if asked(name) is None:
        return
    found, x = vllm.read(asked(name)), scores(3)
    made = [part.make(**({"tokens": [-1]} if part.tokens else {})) for part in found.parts]
    close(batch._scores(x, anymax.compose(*made), found.mapping), wanted(name, x))


REFUSED = [
    (5, r"expected a list of transforms and a map, such as \[.*\], got 5"),
    ([5], "expected a string such as 'topp:p=0.9' or a dict with a name, got 5"),
    ([{"p": 1}], "or a dict with a name"),
    ("topq:p=0.9", "no transform has this name, and there is no map 'topq'.*; the transform 'top[kp]' is near"),
    ("zzzzzzz", "the transforms are temperature, topk"),
    ("topp:q=0.9", "'topp:q=0.9': topp has no parameter 'q'; it takes p or min_keep"),
    ("topk:k=3,by=1", "it takes k or min_keep"),
    ("topp:0.9", "write topp:p=0.9"),
    ("top_p=0.9", "'top_p=0.9': write top_p:p=0.9"),
    ("repetition_penalty=1.2", "write repetition_penalty:penalty=1.2"),
    ("entmax:1.5", "write entmax:alpha=1.5"),
    ("topp:p=2", "topp: p must be above 0 and at most 1; got 2"),
    ("topk:k=2.5", "k must be an integer"),
    ("topk", r"topk: k is missing; write topk\(k\)"),
    ("entmax:alpha=-1", "alpha"),
    ("ranks", "gives each class a number of its own, and a row no distribution"),
    ("sparsemax; topp:p=0.9", r"a map comes last, and ' topp:p=0.9' follows Sparsemax\(\)"),
    ([{"name": "topk", "groups": 2}], "topk has no parameter 'groups'"),
    ([{"name": "entmax", "beta": 2}], "entmax has no parameter 'beta'; it takes alpha"),
    ([{"name": "nomap"}], "there is no map 'nomap'"),
    ("dry:tokens=some", "tokens must be one of 'all', 'prompt', 'output', got 'some'"),
    ("xtc:generator=-1", "generator must be a seed"),
    ("logit_bias:bias=x", "bias"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
@pytest.mark.parametrize("reader", ["read", "validate_params"])
def test_what_is_refused(given, message, reader):
    with pytest.raises(ValueError, match=message):
        vllm.read(given) if reader == "read" else PROCESSOR.validate_params(params(given))


def test_a_request_that_asks_for_nothing_is_fine():
    for given in (None, [], "", " ; "):
        PROCESSOR.validate_params(params(given))
        assert not PROCESSOR(None, states()).add_request(0, params(given))
    PROCESSOR.validate_params(stand_in.SamplingParams())


def test_every_transform_is_offered_or_takes_arrays():
    """A new transform belongs in the list of `spec`, or here."""
    arrays = {"cosine", "mask", "prior", "scalable", "mix"}
    made = {
        name for name in transforms.__all__
        if inspect.isfunction(getattr(transforms, name)) and "axis" in inspect.signature(getattr(transforms, name)).parameters
    }  # fmt: skip
    assert made - set(spec.MAKERS) - arrays == set()


# -- both interfaces -----------------------------------------------------------------------------------------------------------


def test_vllm_knows_it():
    assert issubclass(PROCESSOR, stand_in.ForV1)
    assert issubclass(PROCESSOR, stand_in.ForV2)
    assert PROCESSOR.__name__ == "LogitsProcessor"
    assert PROCESSOR.__doc__ == vllm.LogitsProcessor.__doc__
    assert not PROCESSOR(None, "cpu", False).is_argmax_invariant()
    assert processor._exists("nothing.of.this.name") is False


def test_the_interfaces_of_the_installed_vllm():
    """Where vLLM is installed: the stand-in has the methods, the parameters and the fields of the real interfaces."""
    pytest.importorskip("vllm", reason="vLLM is not installed; tests use a stand-in of version 0.33.0")
    real = dict(zip(("v2", "v1"), processor.interfaces(), strict=True))
    assert all(issubclass(vllm.LogitsProcessor, each) for each in real.values())
    for mine, theirs in ((stand_in.ForV2, real["v2"]), (stand_in.ForV1, real["v1"])):
        assert mine.__abstractmethods__ == theirs.__abstractmethods__
        for name in ("__init__", "apply", "validate_params"):
            assert list(inspect.signature(getattr(mine, name)).parameters) == list(
                inspect.signature(getattr(theirs, name)).parameters
            )
    from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState

    assert {d.name for d in MoveDirectionality} == {d.name for d in stand_in.MoveDirectionality}
    for mine, theirs in (
        (stand_in.BatchUpdate, BatchUpdate),
        (stand_in.LogitsContext, LogitsContext),
        (stand_in.LogitsProcRequestState, LogitsProcRequestState),
    ):
        assert list(mine.__dataclass_fields__) == list(theirs.__dataclass_fields__)


# -- model runner V1 -----------------------------------------------------------------------------------------------------------


def update(size, removed=(), added=(), moved=()):
    return stand_in.BatchUpdate(size, list(removed), list(added), list(moved))


def added(place, name, seed=None, prompt=(), output=None):
    given = asked(name) if isinstance(name, str) and name in ASKED else name
    return place, params(given, seed), list(prompt), [] if output is None else output


def served(requests, x, **of_each):
    """(the processor, the scores) of these requests alone, a row each; `of_each` has what else a request has."""
    ours = PROCESSOR(None, "cpu", False)
    given = [added(i, name, **{key: values[i] for key, values in of_each.items()}) for i, name in enumerate(requests)]
    ours.update_state(update(len(requests), added=given))
    return ours, ours.apply(x.clone())


def test_a_batch_of_many_kinds():
    x = scores(len(ASKED))
    _, y = served(ASKED, x)
    for i, name in enumerate(ASKED):
        close(y[i], wanted(name, x[i]))


@pytest.mark.whole(lambda seed: seed > 1)
@pytest.mark.parametrize("seed", range(4))
def test_requests_come_go_and_move(seed):
    """Some hundred steps of a batch, held to a list of names that is kept by hand."""
    choose, names = random.Random(seed), list(ASKED)
    ours, held = PROCESSOR(None, "cpu", False), []
    for step in range(60):
        gone = sorted((i for i in range(len(held)) if choose.random() < 0.25), reverse=True)
        new, moves = [], []
        for _ in range(choose.randrange(3)):  # first into the places that are free
            name, place = choose.choice(names), gone.pop() if gone else len(held)
            held[place : place + 1] = [name]
            new.append(added(place, name))
        for place in gone:
            held[place] = None
        removed = list(gone)
        while None in held:  # the last one fills a hole
            last = held.pop()
            if last is not None:
                hole = held.index(None)
                held[hole] = last
                moves.append((len(held), hole, stand_in.MoveDirectionality.UNIDIRECTIONAL))
        if len(held) > 1 and choose.random() < 0.5:
            a, b = choose.sample(range(len(held)), 2)
            held[a], held[b] = held[b], held[a]
            moves.append((a, b, stand_in.MoveDirectionality.SWAP))
        changed = removed or new or moves
        ours.update_state(update(len(held), removed, new, moves) if changed else None)
        x = scores(len(held), step)
        y = ours.apply(x.clone())
        for i, name in enumerate(held):
            close(y[i], wanted(name, x[i]))


def test_a_move_empties_its_place_and_what_leaves_is_forgotten():
    ours, x = PROCESSOR(None, "cpu", False), scores(2)
    ours.update_state(update(2, added=[added(0, "topk:k=2"), added(1, "topk:k=5")]))
    ours.update_state(update(2, moved=[(1, 0, stand_in.MoveDirectionality.UNIDIRECTIONAL)]))
    assert (ours.apply(x.clone()) > -math.inf).sum(-1).tolist() == [5, N]
    ours.update_state(update(0, removed=[0]))
    assert not ours._batch.requests


def calls(monkeypatch):
    """How many rows each call of a transform got."""
    seen, own = [], batch._scores
    monkeypatch.setattr(batch, "_scores", lambda x, *rest: seen.append(len(x)) or own(x, *rest))
    return seen


CALLS = {  # name -> (requests, how many rows each call gets: what differs in more than numbers goes apart)
    "numbers": (["a string", "other numbers", "whole numbers", "a string"] * 2, [8]),
    "nothing and a map beside": (["a string", "other numbers", "a map", "nothing"], [1, 2]),
    "words": (["l1", "l2"], [1, 1]),
    "the least to keep": (["two classes", "five of two"], [1, 1]),
    "maps": (["a map", "another map"], [1, 1]),
    "temperatures": (["argmax", "half", "twice"], [3]),
}


@pytest.mark.parametrize("case", CALLS)
def test_rows_of_one_kind_go_through_one_call(case, monkeypatch):
    requests, sizes = CALLS[case]
    seen, x = calls(monkeypatch), scores(len(requests))
    x[:, 3] = -math.inf
    ours, y = served(requests, x)
    assert sorted(seen) == sizes
    # none that failed and went on row by row
    assert sorted(len(group.rows) for group in ours._batch._groups[1]) == sizes
    for i, name in enumerate(requests):
        close(y[i], wanted(name, x[i]))


def test_a_row_with_nan_touches_no_other():
    x = scores(3)
    x[1, 4] = math.nan
    _, y = served(["a map"] * 3, x)
    assert y[1].isnan().all()
    close(y[[0, 2]], anymax.log_apply(anymax.Entmax(1.5), x[[0, 2]]))


def test_groups_are_made_once_for_a_batch(monkeypatch):
    ours, x, made = PROCESSOR(None, "cpu", False), scores(3), []
    own = batch.Batch._grouped
    monkeypatch.setattr(batch.Batch, "_grouped", lambda *given: made.append(1) or own(*given))
    ours.update_state(update(3, added=[added(i, "a string") for i in range(3)]))
    for _ in range(4):
        ours.update_state(None)
        ours.apply(x.clone())
    assert len(made) == 1
    ours.update_state(update(2, removed=[2]))
    ours.apply(x[:2].clone())
    assert len(made) == 2


def test_a_batch_without_a_request_of_ours_is_not_touched():
    ours, x = PROCESSOR(None, "cpu", False), scores(2)
    assert ours.apply(x) is x
    ours.update_state(update(2, added=[added(0, "nothing"), added(1, "a map")]))
    y = ours.apply(x)
    assert y.data_ptr() == x.data_ptr()
    ours.update_state(update(1, removed=[1]))
    assert torch.equal(ours.apply(x[:1].clone()), x[:1])


def test_masked_classes_stay_masked_and_a_masked_row_stays_so():
    x = scores(len(ASKED))
    x[:, ::2], x[3] = -math.inf, -math.inf
    _, y = served(ASKED, x)
    assert (y[:, ::2] == -math.inf).all()
    assert (y[3] == -math.inf).all()


def test_the_softmax_of_log_p_is_the_map():
    x = scores(2)
    p = served(["a map", "a map and a cut"], x)[1].softmax(-1)
    close(p[0], anymax.entmax15(x[0]))
    close(p[1], anymax.sparsemax(transforms.minp(0.1)(x[1])))


def test_penalties_see_the_tokens_as_they_grow():
    ours, x, output = PROCESSOR(None, "cpu", False), scores(4), [[], [], [], []]
    prompt = [[1, 2, 3], [4], [5, 6], [1, 2, 1, 2, N + 7]]
    given = [
        "repetition_penalty:penalty=1.5",
        "repetition_penalty:tokens=output,presence=0.5,frequency=0.25",
        "repetition_penalty:tokens=prompt,penalty=2.0",
        "dry:multiplier=0.8",
    ]
    ours.update_state(update(4, added=[added(i, given[i], prompt=prompt[i], output=output[i]) for i in range(4)]))
    for step in range(3):
        for tokens in output:
            tokens += [7 + step, 7]
        ours.update_state(None)
        y = ours.apply(x.clone())
        close(y[0], transforms.repetition_penalty(prompt[0] + output[0], 1.5)(x[0]))
        close(y[1], transforms.repetition_penalty(output[1], 1.0, 0.5, 0.25)(x[1]))
        close(y[2], transforms.repetition_penalty(prompt[2], 2.0)(x[2]))
        close(y[3], transforms.dry([1, 2, 1, 2, -1, *output[3]], 0.8)(x[3]))


def test_penalties_of_one_kind_go_through_one_call(monkeypatch):
    seen, x, tokens, penalties = calls(monkeypatch), scores(3), [[1], [2, 3], [4, 5, 6]], (1.5, 2.0, 1.1)
    _, y = served([f"repetition_penalty:penalty={p}" for p in penalties], x, prompt=tokens)
    assert seen == [3]
    for i, penalty in enumerate(penalties):
        close(y[i], transforms.repetition_penalty(tokens[i], penalty)(x[i]))


def test_random_numbers_are_the_requests_own():
    """A seeded request draws the same whatever is beside it, and goes on from token to token."""

    def run(places, size):
        ours = PROCESSOR(None, "cpu", False)
        mine = [added(place, "noise:kind=gumbel", seed=5) for place in places]
        others = [added(i, "noise:kind=gumbel", seed=100 + i) for i in range(size) if i not in places]
        ours.update_state(update(size, added=mine + others))
        return torch.stack([ours.apply(torch.zeros(size, N))[places[0]] for _ in range(3)])

    alone = run([0], 1)
    assert torch.equal(run([2], 4), alone)
    assert not torch.equal(alone[0], alone[1])
    ours = PROCESSOR(None, "cpu", False)
    ours.update_state(update(1, added=[added(0, "noise:kind=gumbel,generator=8", seed=5)]))
    want = transforms.noise("gumbel", generator=8)(torch.zeros(1, N))
    assert torch.equal(ours.apply(torch.zeros(1, N)), want)
    torch.manual_seed(3)
    ours.update_state(update(1, added=[added(0, "noise:kind=gumbel")]))
    got = ours.apply(torch.zeros(1, N))
    torch.manual_seed(3)
    assert torch.equal(got, transforms.noise("gumbel")(torch.zeros(1, N)))


def test_two_parts_that_draw_have_numbers_of_their_own():
    both, one = (served([["noise:kind=normal"] * n], torch.zeros(1, N), seed=[5])[1] for n in (2, 1))
    assert not torch.allclose(both, 2 * one)


def test_in_inference_mode_and_half_precision():
    x, requests = scores(2), ["a map and a cut", "a string"]
    with torch.inference_mode():
        ours, y = served(requests, x)
    for i, name in enumerate(requests):
        close(y[i], wanted(name, x[i]))
    assert ours.apply(x.bfloat16()).dtype == torch.bfloat16


# -- model runner V2 -----------------------------------------------------------------------------------------------------------


def states(slots=8, longest=16):
    def on_device(*shape):
        return types.SimpleNamespace(gpu=torch.zeros(*shape, dtype=torch.int32))

    return stand_in.LogitsProcRequestState(
        torch.device("cpu"), slots, N, on_device(slots, longest), on_device(slots), on_device(slots), on_device(slots)
    )


def context(slots, drafts=None, inputs=None, pos=None):
    """A batch of requests in these slots; drafts: how many each has, one row more than that."""
    rows = [1 + d for d in drafts] if drafts else [1] * len(slots)
    local = torch.cat([torch.arange(count) for count in rows])
    return stand_in.LogitsContext(
        torch.tensor([s for s, count in zip(slots, rows, strict=True) for _ in range(count)], dtype=torch.int32),
        torch.tensor(slots, dtype=torch.int32), np.array(slots, np.int32), local,
        torch.tensor(inputs or [0] * len(local)), torch.tensor(pos or [0] * len(local)), None,
    )  # fmt: skip


def test_slots():
    ours, names = PROCESSOR(None, states()), list(ASKED)
    for step in range(40):
        choose = random.Random(step)
        slots = choose.sample(range(8), choose.randrange(1, 8))
        held = {slot: choose.choice(names) for slot in slots}
        for slot, name in held.items():
            assert ours.add_request(slot, params(asked(name))) == (asked(name) is not None)
        ours.apply_staged_writes()
        for turn in range(2):
            choose.shuffle(slots)
            x = scores(len(slots), 2 * step + turn)
            y = ours.apply(x.clone(), context(slots))
            for row, slot in enumerate(slots):
                close(y[row], wanted(held[slot], x[row]))


def test_a_slot_is_used_again():
    ours, x = PROCESSOR(None, states()), scores(1)
    assert ours.add_request(3, params("topk:k=1"))
    assert not ours.add_request(3, params(None))
    assert torch.equal(ours.apply(x.clone(), context([3])), x)


def test_rows_of_drafts_belong_to_their_requests():
    ours, x = PROCESSOR(None, states()), scores(5)
    ours.add_request(6, params("topk:k=2"))
    ours.add_request(1, params("topk:k=5"))
    y = ours.apply(x.clone(), context([6, 1], [2, 1]))
    assert (y > -math.inf).sum(-1).tolist() == [2, 2, 2, 5, 5]


def test_tokens_of_slots_and_their_drafts():
    held = states()
    held.all_token_ids.gpu[6, :5] = torch.tensor([10, 11, 12, 13, 14])
    held.all_token_ids.gpu[1, :3] = torch.tensor([20, 21, 21])
    held.prompt_len.gpu[6], held.prompt_len.gpu[1] = 2, 3
    ours, x = PROCESSOR(None, held), scores(5)
    # slot 6 has five tokens, of which two are the prompt, and two drafts; slot 1 has three and one draft
    where = context([6, 1], [2, 1], inputs=[14, 30, 31, 21, 40], pos=[4, 5, 6, 2, 3])
    grown = [10, 11, 12, 13, 14], [10, 11, 12, 13, 14, 30], [10, 11, 12, 13, 14, 30, 31]
    seen = {
        "all": [*grown, [20, 21, 21], [20, 21, 21, 40]],
        "output": [[12, 13, 14], [12, 13, 14, 30], [12, 13, 14, 30, 31], [], [40]],
        "prompt": [[10, 11]] * 3 + [[20, 21, 21]] * 2,
    }
    for which, tokens in seen.items():
        for slot in (6, 1):
            ours.add_request(slot, params(f"repetition_penalty:tokens={which},frequency=0.5"))
        y = ours.apply(x.clone(), where)
        for row, before in enumerate(tokens):
            want = x[row] if not before else transforms.repetition_penalty(before, frequency=0.5)(x[row])
            close(y[row], want)
    assert held.all_token_ids.gpu[6, 5:].eq(0).all(), "what vLLM holds is not changed"


def test_a_seed_of_slots():
    runs = []
    for slots in ([2], [5, 2, 0]):
        ours = PROCESSOR(None, states())
        for slot in slots:
            ours.add_request(slot, params("noise:kind=normal", seed=slot))
        runs.append([ours.apply(torch.zeros(len(slots), N), context(slots))[slots.index(2)] for _ in range(2)])
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])
