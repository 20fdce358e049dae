"""Decoding with transformers: token for token beside its own warpers."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
from hf_models import build, its_own_warnings, tokens

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import anymax as A
from anymax import Entmax, Softmax, Sparsemax, SparseSoftmax, Taylor, hf

pytestmark = its_own_warnings


PIPES = {
    "temperature": (A.temperature(0.7), {"temperature": 0.7}),
    "top k": (A.topk(5), {"top_k": 5}),
    "top p": (A.topp(0.6), {"top_p": 0.6}),
    "min p": (A.minp(0.3), {"min_p": 0.3}),
    "all of them": (
        A.compose(A.temperature(1.4), A.topk(12), A.topp(0.9), A.minp(0.1)),
        {"temperature": 1.4, "top_k": 12, "top_p": 0.9, "min_p": 0.1},
    ),
}  # fmt: skip
GENERATED = {"max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0}


@contextlib.contextmanager
def one_uniform_a_row(seed):
    """torch.multinomial by the inverse of the distribution function, with the numbers that `sample` takes for this seed."""
    source, kept = torch.Generator().manual_seed(seed), torch.multinomial

    def inverse(p, num_samples, replacement=False, **_):
        assert num_samples == 1
        return A.sample(Softmax(), p.log(), generator=source)[:, None]

    torch.multinomial = inverse
    try:
        yield source
    finally:
        torch.multinomial = kept


@pytest.mark.whole(
    lambda pipe, model: (model, pipe) not in (("gpt2", "temperature"), ("gpt2", "top p"), ("bart", "all of them"))
)
@pytest.mark.parametrize("model", ["gpt2", "bart"])
@pytest.mark.parametrize("pipe", PIPES)
def test_draws_token_for_token_with_transformers_own_warpers(pipe, model):
    transform, own = PIPES[pipe]
    made, given = build(model, "eager"), {"input_ids": tokens(4, 7)}
    with one_uniform_a_row(3):
        want = made.generate(**given, do_sample=True, **({"top_k": 0} | own), **GENERATED)
    with one_uniform_a_row(3):
        processed = made.generate(
            **given, do_sample=True, top_k=0, logits_processor=[hf.LogitsProcessor(transform)], **GENERATED
        )
    drawn = made.generate(**given, custom_generate=hf.sample(transform, generator=3), **GENERATED)
    assert torch.equal(processed, want)
    assert torch.equal(drawn, want)
    assert len(want.unique()) > 8
    with one_uniform_a_row(4):
        other = made.generate(**given, do_sample=True, **({"top_k": 0} | own), **GENERATED)
    assert not torch.equal(other, want)


def test_processed_scores_are_log_p_of_the_warped():
    x, ids = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 2, tokens(3)
    own = transformers.LogitsProcessorList([
        transformers.TemperatureLogitsWarper(1.4), transformers.TopKLogitsWarper(12), transformers.TopPLogitsWarper(0.9),
        transformers.MinPLogitsWarper(0.1),
    ])  # fmt: skip
    got = hf.LogitsProcessor(PIPES["all of them"][0])(ids, x.clone())
    torch.testing.assert_close(got, own(ids, x.clone()).log_softmax(-1))
    for mapping in (Sparsemax(), Entmax(1.5), SparseSoftmax(k=3), Taylor(2)):
        torch.testing.assert_close(hf.LogitsProcessor(mapping)(ids, x).softmax(-1), A.apply(mapping, x))
        both = hf.LogitsProcessor(A.topk(4), mapping)(ids, x)
        torch.testing.assert_close(both.exp(), A.apply(mapping, A.topk(4)(x)))
    assert torch.equal(x, torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 2)


def test_greedy_search_takes_the_most_probable():
    made, given = build("llama", "eager"), {"input_ids": tokens(2, 7)}
    want = made.generate(**given, do_sample=False, **GENERATED)
    for processor in (hf.LogitsProcessor(Entmax(1.5)), hf.LogitsProcessor(A.topp(0.5)), hf.LogitsProcessor()):
        assert torch.equal(made.generate(**given, do_sample=False, logits_processor=[processor], **GENERATED), want)
    assert torch.equal(made.generate(**given, custom_generate=hf.sample(A.topk(1)), **GENERATED), want)


@pytest.mark.parametrize("mapping", [Softmax(), Sparsemax(), Entmax(1.5)], ids=lambda m: m.name)
def test_beams_add_up_log_p(mapping):
    """The sum that transformers gives, from the model's logits again; and of all continuations of two tokens the best is found."""
    made, prompt = build("gpt2", "eager"), tokens(2, 5)
    options = {
        "num_beams": 60,
        "num_return_sequences": 2,
        "length_penalty": 0.0,
        "max_new_tokens": 2,
        "min_new_tokens": 2,
    }
    options |= {"return_dict_in_generate": True, "output_scores": True, "pad_token_id": 0, "do_sample": False}
    found = made.generate(prompt, logits_processor=[hf.LogitsProcessor(A.topk(6), mapping)], **options)
    with torch.no_grad():
        for row in range(2):
            first = made(prompt[row : row + 1]).logits[0, -1].float().index_fill(0, torch.tensor(2), -math.inf)
            first = A.log_apply(mapping, A.topk(6)(first))
            longer = torch.cat([prompt[row].expand(50, -1), torch.arange(50)[:, None]], 1)
            second = made(longer).logits[:, -1].float().index_fill(1, torch.tensor(2), -math.inf)
            sums = first[:, None] + A.log_apply(mapping, A.topk(6)(second))
            best = sums.flatten().argmax()
            assert found.sequences[2 * row, 5:].tolist() == [int(best) // 50, int(best) % 50]
            torch.testing.assert_close(found.sequences_scores[2 * row], sums.max(), rtol=1e-4, atol=1e-5)


def test_beams_with_transformers_own_warpers():
    """Theirs cut log-probabilities and leave them unnormalised; with their own normalisation they are ours."""
    made, given = build("llama", "eager"), {"input_ids": tokens(2, 7)}
    options = {**GENERATED, "num_beams": 4, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    ours = made.generate(**given, logits_processor=[hf.LogitsProcessor(A.compose(A.topk(5), A.topp(0.7)))], **options)
    own = [transformers.TopKLogitsWarper(5), transformers.TopPLogitsWarper(0.7)]
    theirs = made.generate(**given, logits_processor=own, renormalize_logits=True, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores)


def test_only_what_has_a_probability_is_drawn():
    made, prompt = build("gpt2", "eager"), tokens(3, 5)
    for call in (
        {"custom_generate": hf.sample(Sparsemax(), generator=0)},
        {"do_sample": True, "top_k": 0, "logits_processor": [hf.LogitsProcessor(Sparsemax())]},
    ):
        found = made.generate(
            prompt, **call, **GENERATED, return_dict_in_generate=True, output_scores=True, output_logits=True
        )
        for step, (scores, logits) in enumerate(zip(found.scores, found.logits)):
            banned = logits.index_fill(1, torch.tensor(2), -math.inf)  # the end, which may not come before its time
            torch.testing.assert_close(scores, A.log_apply(Sparsemax(), banned))
            assert (scores.gather(-1, found.sequences[:, 5 + step, None]) > -math.inf).all()
        assert any((scores == -math.inf).sum() > 3 for scores in found.scores)


class Streamer:
    seen: list = []  # noqa: RUF012

    def put(self, value):
        self.seen.append(value.tolist())

    def end(self):
        self.seen.append("end")


def test_sample_goes_with_the_options_of_generate():
    made, prompt = build("gpt2", "eager"), tokens(2, 5)

    draw = hf.sample(A.topk(20), generator=1)
    plain = made.generate(prompt, custom_generate=draw, **GENERATED)
    assert torch.equal(made.generate(prompt, custom_generate=draw, **GENERATED), plain), "a seed begins anew"
    assert torch.equal(made.generate(prompt, custom_generate=draw, use_cache=False, **GENERATED), plain)
    going = hf.sample(A.topk(20), generator=torch.Generator().manual_seed(1))
    assert torch.equal(made.generate(prompt, custom_generate=going, **GENERATED), plain)
    assert not torch.equal(made.generate(prompt, custom_generate=going, **GENERATED), plain), "a generator goes on"
    for own, given in ((Streamer, {}), (lambda: None, {"streamer": Streamer()})):
        Streamer.seen = []
        made.generate(prompt[:1], custom_generate=hf.sample(generator=1, streamer=own()), **given, **GENERATED)
        assert Streamer.seen[-1] == "end"
        assert len(Streamer.seen) == 13 + len(given), "generate's own gets the prompt too"
    more = made.generate(prompt, custom_generate=draw, do_sample=True, top_k=0, num_return_sequences=3, **GENERATED)
    assert more.shape == (6, 17)
    assert len({tuple(row.tolist()) for row in more}) == 6
    sets = []
    for _ in range(2):
        transformers.set_seed(5)
        sets.append(made.generate(prompt, custom_generate=hf.sample(), **GENERATED))
    assert torch.equal(*sets)
    ended = made.generate(
        prompt,
        custom_generate=hf.sample(generator=0),
        max_new_tokens=12,
        eos_token_id=list(range(3, 20)),
        pad_token_id=0,
    )
    for row in ended[:, 5:].tolist():
        last = next(i for i, token in enumerate(row) if 3 <= token < 20)
        assert set(row[last + 1 :]) <= {0}
    penal = made.generate(
        prompt, custom_generate=hf.sample(A.topk(3), generator=0), no_repeat_ngram_size=1, **GENERATED
    )
    assert all(len(set(row)) == len(row) for row in penal[:, 5:].tolist())


def test_every_token_has_its_own_random_numbers():
    """A seed of NumPy gave each token the same number, and so did the seed of a transform."""
    made, prompt = build("gpt2", "eager"), tokens(2, 5)
    run = lambda draw, **more: made.generate(prompt, custom_generate=draw, **GENERATED, **more)  # noqa: E731
    for seed, same in ((7, np.int64(7)), ([7, 3], [np.int64(7), np.int32(3)]), ([7, 3], (7, 3))):
        want = run(hf.sample(generator=seed))
        assert torch.equal(run(hf.sample(generator=same)), want)
        assert all(len(set(row)) > 3 for row in want[:, 5:].tolist())
    # each row is cut to its least likely token, or not at all
    cuts: list = []
    spy = lambda x: cuts.append((x > -math.inf).sum(-1).tolist()) or x  # noqa: E731
    found = [
        run(hf.sample(A.compose(A.transforms.xtc(0.0, 0.5, generator=seed), spy), generator=2))
        for seed in (1, 1, [1, 5])
    ]
    assert torch.equal(found[0], found[1]), "a seed begins anew"
    for steps in (cuts[:12], cuts[12:24], cuts[24:]):
        assert all({1, 49} == set(row) for row in zip(*steps))
    processor = hf.LogitsProcessor(A.transforms.xtc(0.0, 0.5, generator=1))
    scores = torch.randn(2, 50)
    kept = [(processor(prompt, scores) > -math.inf).sum(-1).tolist() for _ in range(12)]
    assert all({1, 50} == set(row) for row in zip(*kept))
    assert processor.transform == A.transforms.xtc(0.0, 0.5, generator=1), "which stays as it was given"


def test_a_map_that_minds_an_offset_is_served_but_in_beams():
    normed = torch.randn(2, 50).log_softmax(-1)
    torch.testing.assert_close(hf.LogitsProcessor(Taylor(2))(tokens(2, 5), normed).exp(), A.apply(Taylor(2), normed))


def test_the_classes_of_transformers_stay_as_they_are():
    kind = transformers.GenerationMixin
    before = dict(vars(kind))
    made = build("gpt2", "eager")
    made.generate(tokens(1, 5), custom_generate=hf.sample(), **GENERATED)
    made.generate(tokens(1, 5), logits_processor=[hf.LogitsProcessor(Taylor(2))], **GENERATED)
    assert dict(vars(kind)) == before


def test_repr():
    assert repr(hf.LogitsProcessor(A.topk(3))) == "LogitsProcessor(transform=topk(k=3), mapping=Softmax())"
    assert (
        hf.LogitsProcessor(A.topk(3), "entmax15").mapping
        == hf.LogitsProcessor(mapping="entmax15").mapping
        == Entmax(1.5)
    )
