"""What a hostile request may get: a refusal in the model's or Triton's own words; and how a wrong answer is shown."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from server.fuzzing.attack import CLOSED, CONTROL, GONE, HUNG, GrpcCall, Outcome, RawBytes
from server.fuzzing.campaign import by_fault
from server.fuzzing.drawing import drawn, shrunk
from server.fuzzing.sending import Attack
from server.fuzzing.values import packed, packed_row, survivable
from server.fuzzing.verdict import fault
from server.malformed import ISOLATED

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
        (REQUEST, Outcome("400", ("'x' is no input of this model, and so no request parameter",))),
        (
            REQUEST,
            Outcome("400", ("\"Z'x\" is no input of this model, and so no request parameter (did you mean 'x'?)",)),
        ),
        (REQUEST, Outcome("400", ("text_input has an element of 9 bytes, of which 4 arrived",))),
        (REQUEST, Outcome("500", ("failed to parse the request JSON buffer: Invalid value. at 9",))),
        (REQUEST, Outcome("405")),
        (RawBytes("elsewhere", "http", b"", "odd request"), Outcome(CLOSED)),
        (RawBytes("bytes on the gRPC port", "grpc", b"x"), Outcome(CLOSED)),
        (CALL, Outcome("INTERNAL", ("Unable to parse request",))),
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
        (CALL, Outcome("INTERNAL", ("decoding failed",)), "INTERNAL: "),
        (CALL, Outcome("INVALID_ARGUMENT", (OF_A_BATCH,)), "for one request of the batch, this one or another"),
        (RawBytes(f"{CONTROL} over HTTP", "http", b"", "request"), Outcome("200"), "without the key"),
        (CONTROLLING, Outcome("OK"), "without the key"),
        (REQUEST, Outcome("200", undocumented="Undocumented Content-Type"), "Undocumented Content-Type"),
    ],
)
def test_silence_a_server_error_and_unknown_words_are_faults(attack: Attack, outcome: Outcome, said: str) -> None:
    assert said in str(fault(attack, outcome))


@pytest.mark.parametrize(
    ("shape", "survives"),
    [
        ([1, 4], True),
        ("x", True),
        ([2**31 - 1, 2**63 - 1], False),
        ([2**33], False),
        (2**40, False),
        ([-(2**62)], False),
        ([1e30], False),
        ([1024, 1024], False),
    ],
)
def test_shapes_that_end_triton_are_known(shape: object, survives: bool) -> None:
    assert survivable(shape) == survives


def test_attacks_are_grouped_by_fault_so_that_the_one_with_it_alone_is_found() -> None:
    assert by_fault([(CALL, "a"), (REQUEST, "b"), (CONTROLLING, "a")]) == {"a": [CALL, CONTROLLING], "b": [REQUEST]}


@pytest.mark.skipif(not ISOLATED, reason="no C++ compiler: such texts would fail other attacks, and are not drawn")
def test_texts_longer_than_their_bytes_are_drawn() -> None:
    drawn_rows = drawn(packed_row(["one", "two"], "BYTES").map(lambda raw: RawBytes("x", "http", raw)), 200, 1)
    rows = {attack.raw for attack in drawn_rows.attacks if isinstance(attack, RawBytes)}
    longer = [row for row in rows if row != packed("one", "BYTES") + packed("two", "BYTES")]
    assert len(longer) >= 3
    for row in longer:
        assert row.startswith(packed("one", "BYTES"))
        assert int.from_bytes(row[7:11], "little") > len(row[11:])


def test_a_seed_gives_the_same_attacks_and_a_fault_shrinks_to_the_smallest_one() -> None:
    strategy = st.binary(max_size=60).map(lambda raw: RawBytes("x", "http", raw))
    batch = drawn(strategy, 60, 3)
    assert len(batch.attacks) == 60
    assert drawn(strategy, 60, 3).attacks == batch.attacks
    assert drawn(strategy, 60, 4).attacks != batch.attacks

    def has_fault(attack: Attack) -> bool:
        assert isinstance(attack, RawBytes)
        return len(attack.raw) >= 5

    found = next(attack for attack in batch.attacks[20:] if has_fault(attack))
    said = shrunk(batch, found, has_fault)
    assert repr(RawBytes("x", "http", bytes(5))) in said
    assert "@reproduce_failure" in said
    assert "alone has no fault" in shrunk(batch, found, lambda attack: False)
