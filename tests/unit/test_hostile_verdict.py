"""What a hostile request may get: a refusal in the model's or Triton's own words; and how a wrong answer is shown."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from server.fuzzing.attacks import CLOSED, CONTROL, GONE, HUNG, Attack, GrpcCall, Outcome, RawBytes
from server.fuzzing.drawing import drawn, shrunk
from server.fuzzing.verdict import fault

REQUEST = RawBytes("/generate", "http", b"POST ...", "request")
CALL = GrpcCall("ModelInfer", "/inference.GRPCInferenceService/ModelInfer", (b"",))
CONTROLLING = GrpcCall(f"{CONTROL} over gRPC", "/inference.GRPCInferenceService/LogSettings", (b"",))
OF_A_BATCH = (
    "incomplete string data for inference input 'text_input', expecting string of length 9 but only 4 bytes available"
)


@pytest.mark.parametrize(
    ("attack", "outcome"),
    [
        (REQUEST, Outcome("200")),
        (REQUEST, Outcome("400", ("top_k is -2; it must be a whole number, at least -1",))),
        (REQUEST, Outcome("400", ('"Z\'x" is no input of this model, and so no request parameter',))),
        (REQUEST, Outcome("500", ("failed to parse the request JSON buffer: Invalid value. at 9",))),
        (RawBytes("elsewhere", "http", b"", "odd request"), Outcome(CLOSED)),
        (CALL, Outcome("INVALID_ARGUMENT", ("[request id: 'a] b'] input 'seed' already exists in request",))),
        (CONTROLLING, Outcome("UNAVAILABLE", ("This protocol is restricted, expecting header 'k'",))),
    ],
)
def test_a_refusal_in_known_words_is_no_fault(attack: Attack, outcome: Outcome) -> None:
    assert fault(attack, outcome) is None


@pytest.mark.parametrize(
    ("attack", "outcome", "said"),
    [
        (REQUEST, Outcome(HUNG), "hung"),
        (CALL, Outcome(GONE), "gone"),
        (REQUEST, Outcome(CLOSED), "closed without an answer"),
        (REQUEST, Outcome("500", ("top_k is -2; it must be a whole number",)), "500 from the model"),
        (REQUEST, Outcome("500"), "500: ()"),
        (REQUEST, Outcome("400", ("Traceback (most recent call last):",)), "400 in unknown words"),
        (CALL, Outcome("INVALID_ARGUMENT", (OF_A_BATCH,)), "for one request of the batch, this one or another"),
        (CONTROLLING, Outcome("OK"), "without the key"),
        (REQUEST, Outcome("200", undocumented="Undocumented Content-Type"), "Undocumented Content-Type"),
    ],
)
def test_silence_a_server_error_and_unknown_words_are_faults(attack: Attack, outcome: Outcome, said: str) -> None:
    assert said in str(fault(attack, outcome))


def test_a_fault_shrinks_to_the_smallest_attack_that_has_it() -> None:
    batch = drawn(st.binary(max_size=60).map(lambda raw: RawBytes("x", "http", raw)), 60, 3)

    def has_fault(attack: Attack) -> bool:
        assert isinstance(attack, RawBytes)
        return len(attack.raw) >= 5

    found = next(attack for attack in batch.attacks[20:] if has_fault(attack))
    said = shrunk(batch, found, has_fault)
    assert repr(RawBytes("x", "http", bytes(5))) in said
    assert "@reproduce_failure" in said
    assert "alone has no fault" in shrunk(batch, found, lambda attack: False)
