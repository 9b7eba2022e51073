"""A receipt verifies in any engine that computes the same bits, and in one prefill; another one doesn't."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from engine.engines import engine_of, load
from engine.exact_bits import recording_logits
from engine.forward_passes import ForwardPass, watching
from engine.int8_layers import threads
from engine.pages import assert_consistent
from engine.prompts import request_of, requests_of
from engine.receipts import Content, finished, output, parse, random_inputs, receipts_of, rehashed, verify
from engine.scheduling import client_of, running
from llama_engine.errors import Cancelled, InvalidRequest
from llama_engine.events import Completion
from llama_engine.model.loader import Checkpoint

SAMPLED: Content = {
    "text_input": "Return a list of", "max_tokens": 30, "min_tokens": 30, "temperature": 0.9, "seed": 7,
    "repetition_penalty": 1.3, "frequency_penalty": 0.5, "receipt": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def exact() -> Checkpoint:
    """With few positions."""
    return replace(load("int8"), max_model_len=128)


@pytest.fixture(scope="module")
def receipt(exact: Checkpoint) -> str:
    """Of SAMPLED."""
    (receipt,) = receipts_of(engine_of(exact), SAMPLED)
    return receipt


def _as_javascript_writes(receipt: str) -> str:
    """Reverse the order of keys, and write whole floats as integers."""

    def plain(value: object) -> object:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in reversed(value.items())}
        if isinstance(value, list):
            return [plain(item) for item in value]
        return int(value) if isinstance(value, float) and value.is_integer() else value

    return json.dumps(plain(json.loads(receipt)), separators=(",", ":"))


@pytest.mark.parametrize("count", [30, pytest.param(70, marks=pytest.mark.long)])
def test_a_receipt_of_any_request_verifies_in_any_engine(exact: Checkpoint, count: int) -> None:
    randomness = random.Random(count)
    engine = engine_of(exact)
    receipts = receipts_of(engine, *[random_inputs(engine, randomness) for _ in range(count)])
    engines = [
        engine_of(exact, 1, prefix_cache="off"),
        engine_of(exact, 3, prefill_tokens="7"),
        engine_of(exact, 8, kv_cache_tokens="160"),
        engine,
    ]
    for verifier in engines:
        shares = [receipts[start : start + 9] for start in range(0, len(receipts), 9)]
        for share in shares:
            written = [randomness.choice((receipt, _as_javascript_writes(receipt))) for receipt in share]
            for receipt, verification in zip(
                share, verify(verifier, *written, beside=requests_of(exact, 3)), strict=True
            ):
                assert verification["equal"], (receipt, verification)
                assert verification["tokens"] == len(json.loads(receipt)["output_ids"])
                assert verification["finish_reason"] in ("stop", "length")


def test_a_verification_is_one_prefill_pass(exact: Checkpoint, receipt: str) -> None:
    passes: list[tuple[bool, int]] = []
    prompt = len(json.loads(receipt)["prompt_ids"])
    with watching(lambda forward: passes.append((forward.decodes, forward.tokens))):
        (verification,) = verify(engine_of(exact), receipt)
    assert verification == {"equal": True, "tokens": 30, "finish_reason": "length"}
    assert passes == [(False, prompt + 29)]


def test_chunks_of_a_verification_let_others_decode(exact: Checkpoint, receipt: str) -> None:
    passes: list[ForwardPass] = []
    others = requests_of(exact, 2, size=3, max_tokens=12)
    engine = engine_of(exact, prefill_tokens="5")
    beside = finished(engine_of(exact), others)
    with watching(passes.append):
        sequences = finished(engine, [*others, *parse(engine, verify_receipt=receipt)])
    assert [sequence.result for sequence in sequences[:2]] == [sequence.result for sequence in beside]
    assert json.loads(output(engine, sequences[2], "verification"))["equal"]
    chunks = [forward.tokens for forward in passes if not forward.decodes]
    assert max(chunks) <= 6
    assert len(chunks) >= 8


def test_a_preempted_verification_goes_on_where_it_was(exact: Checkpoint) -> None:
    (receipt,) = receipts_of(engine_of(exact), {**SAMPLED, "max_tokens": 40, "min_tokens": 40})
    engine = engine_of(exact, 4, prefill_tokens="2", kv_cache_tokens="128")
    (request,) = parse(engine, verify_receipt=receipt)
    # Verified beside older sequences that grow, it is the one that loses its pages.
    older = [engine.builder.build(other) for other in requests_of(exact, 2, size=14, max_tokens=60)]
    for sequence in older:
        engine.add(sequence)
    while not all(sequence.output_tokens for sequence in older):
        engine.step()
    verified, verifying = 0, engine.builder.build(request)
    engine.add(verifying)
    while engine.used_slots:
        before = verifying.num_output_tokens
        if engine.step().preempted:
            verified = max(verified, before)
        assert_consistent(engine)
    assert 0 < verified < 40
    assert json.loads(output(engine, verifying, "verification"))["equal"]


def test_a_cached_prefix_is_not_computed_again(int8: Checkpoint) -> None:
    engine = engine_of(int8)
    inputs = {"input_ids": list(range(100, 200)), "max_tokens": 9, "min_tokens": 9, "receipt": True}
    (receipt,) = receipts_of(engine, inputs)
    steps: list[int] = []
    with watching(lambda forward: steps.append(forward.tokens)):
        assert verify(engine, receipt)[0]["equal"]
    # Of the prompt what follows its last full page of 16, and all of the output but the last token.
    assert steps == [100 - 96 + 8]


def test_a_changed_token_is_found_with_the_logits_of_both(exact: Checkpoint) -> None:
    engine = engine_of(exact)
    with recording_logits() as logits_of:
        (sequence,) = finished(engine, parse(engine, **SAMPLED))
    receipt, tokens = output(engine, sequence, "receipt"), sequence.output_tokens
    (logits,) = logits_of.values()
    for verifier in (engine, engine_of(exact, prefill_tokens="7")):
        for index in (0, 1, 13, 29):
            claimed = (tokens[index] + 1) % 3000
            changed = rehashed(receipt, output_ids=[*tokens[:index], claimed, *tokens[index + 1 :]])
            (verification,) = verify(verifier, changed)
            assert (verification["equal"], verification["tokens"]) == (False, index)
            assert verification["finish_reason"] == ""
            for name, token in (("claimed", claimed), ("drawn", tokens[index])):
                candidate = verification["difference"][name]
                assert (candidate["token_id"], candidate["logit"]) == (token, float(logits[index][token]))
                assert candidate["text"] == engine.tokenizer.vocabulary.token_bytes[token].decode()


@pytest.mark.parametrize(
    ("inputs", "reason"), [({}, "length"), ({"min_tokens": 0, "stop_words": ["n"], "temperature": 0.0}, "stop")]
)
def test_a_cut_or_continued_output_is_not_equal(exact: Checkpoint, inputs: Content, reason: str) -> None:
    engine = engine_of(exact)
    (receipt,) = receipts_of(engine, {**SAMPLED, **inputs})
    tokens = json.loads(receipt)["output_ids"]
    assert verify(engine, receipt)[0]["finish_reason"] == reason
    cut = rehashed(receipt, output_ids=tokens[:-1])
    (verification,) = verify(engine, cut)
    assert verification == {"equal": False, "tokens": len(tokens) - 1, "finish_reason": ""}
    longer = rehashed(receipt, output_ids=[*tokens, 300], max_tokens=31 if reason == "stop" else 30)
    if reason == "length":
        with pytest.raises(InvalidRequest, match="receipt of 31 output tokens; it must be one of 1 to max_tokens, 30"):
            verify(engine, longer)
    else:
        assert verify(engine, longer) == [{"equal": False, "tokens": len(tokens), "finish_reason": "stop"}]


@pytest.mark.parametrize(
    "changed",
    [{"seed": "8"}, {"prompt_ids": [50, 60]}, {"temperature": 0.1}, {"frequency_penalty": -2.0},
     {"logit_bias": {"300": 100.0}}, {"max_tokens": 31}, {"bad_words": [" "]}, {"stop_words": ["e"], "min_tokens": 0}],
)  # fmt: skip
def test_other_inputs_under_a_new_hash_are_not_equal(exact: Checkpoint, receipt: str, changed: Content) -> None:
    (verification,) = verify(engine_of(exact), rehashed(receipt, **changed))
    assert not verification["equal"]


def test_a_resumed_request_has_the_receipt_of_the_whole(exact: Checkpoint, receipt: str) -> None:
    engine, tokens = engine_of(exact), json.loads(receipt)["output_ids"]
    for cut in (1, 14, 29):
        assert receipts_of(engine, {**SAMPLED, "resume_ids": tokens[:cut]}) == [receipt]


def test_two_threads_verify_what_one_has_generated(exact: Checkpoint, receipt: str) -> None:
    with threads(2):
        assert verify(engine_of(exact), receipt)[0]["equal"]
        assert receipts_of(engine_of(exact), SAMPLED) == [receipt]


def test_masks_that_leave_no_token_fail_as_in_a_request(exact: Checkpoint, receipt: str) -> None:
    engine = engine_of(exact)
    text = engine.tokenizer.vocabulary.token_bytes[300].decode()
    impossible = rehashed(receipt, allowed_token_ids=[300], bad_words=[text], ignore_eos=True)
    (sequence,) = finished(engine, parse(engine, verify_receipt=impossible))
    assert isinstance(sequence.result, InvalidRequest)
    assert str(sequence.result).startswith(
        "allowed_token_ids, bad_words, ignore_eos, min_tokens together allow no token"
    )


def test_engines_generate_gives_the_verified_text(exact: Checkpoint, receipt: str) -> None:
    engine = engine_of(exact)
    assert engine.generate(parse(engine, verify_receipt=receipt)) == engine.generate(parse(engine, **SAMPLED))


def test_verifications_are_counted_by_their_outcome(exact: Checkpoint, receipt: str) -> None:
    with running(exact, 2) as started:
        inputs = (
            receipt,
            rehashed(receipt, seed="8"),
            rehashed(receipt, output_ids=json.loads(receipt)["output_ids"][:9]),
        )
        sequences = started.add(*[request for text in inputs for request in parse(started.engine, verify_receipt=text)])
        started.finish(sequences)
        started.stats.close(60)
    counts = started.registry.counts
    assert counts["llama_requests_total length"] == 1
    assert counts["llama_requests_total different"] == 2
    assert "llama_generated_tokens_total" not in counts


def test_a_verification_makes_a_failing_engine_healthy_again(exact: Checkpoint, receipt: str) -> None:
    engine = engine_of(exact)
    engine.add(engine.builder.build(parse(engine, verify_receipt=receipt)[0]))
    step = engine.step()
    assert (step.sampled, step.succeeded, step.failed) == (0, True, False)


def test_a_cancelled_verification_frees_its_slot_and_pages(exact: Checkpoint, receipt: str) -> None:
    with running(exact, 2, prefill_tokens="8") as started:
        (verifying,) = started.add(*parse(started.engine, verify_receipt=receipt))
        started.pace.let(3)
        assert 0 < verifying.num_output_tokens < 30
        client_of(verifying).cancel()
        other = started.add(request_of(exact, 1))
        (result, answered) = started.finish([verifying, *other])
        assert isinstance(result, Cancelled)
        assert isinstance(answered, Completion)
        assert started.engine.used_slots == 0
        assert started.engine.take_cache_counts().used_pages == 0
