"""Fields of other backends' clients and the outputs they ask for, over Triton: shapes, names, streams, parameters."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from numpy.typing import NDArray
from server.clients import WIRES, ask, at_once, everywhere, post, tensors
from server.servers import EMBEDDED
from server.streams import events, sse_response
from tokenizers import Tokenizer
from triton_local.server import LocalTriton

PROMPT = "Return a list of the"
TWELVE: dict[str, object] = {
    "text_input": PROMPT, "max_tokens": 12, "min_tokens": 12, "temperature": 0.0, "repetition_penalty": 1.0,
}  # fmt: skip
HOT = {**TWELVE, "temperature": 1.5, "seed": 5}
ASKED = {"return_log_probs": True, "num_logprobs": 2, "prompt_logprobs": 1, "return_perf_metrics": True}
TIMES = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")
ALWAYS = {"text_output", "finish_reason", "stop_reason", "num_input_tokens", "num_output_tokens"}
OPTIONAL = {"output_log_probs", "cum_log_probs", "logprobs", "prompt_logprobs", "num_cached_tokens", *TIMES}


def _outputs(server: LocalTriton, **inputs: object) -> dict[str, NDArray[Any]]:
    """Ask over gRPC; return every output by name."""
    with tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:
        result = client.infer("llama", tensors(tritonclient.grpc.InferInput, inputs), client_timeout=120)
        return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


def _tokens(text: str) -> list[int]:
    found: list[int] = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json")).encode(text).ids
    return found


def test_outputs_have_one_dimension_and_only_those_that_are_asked_for(triton: LocalTriton) -> None:
    # Nothing is masked, so that greedy sampling takes the likeliest token.
    twelve = {**TWELVE, "min_tokens": 0, "ignore_eos": True}
    plain = _outputs(triton, **twelve)
    assert set(plain) == ALWAYS
    assert {output.shape for output in plain.values()} == {(1,)}
    asked = _outputs(triton, **twelve, **ASKED)
    assert set(asked) == ALWAYS | OPTIONAL
    assert asked["text_output"].tolist() == plain["text_output"].tolist()
    shapes = {name: output.shape for name, output in asked.items()}
    assert shapes == {**dict.fromkeys(asked, (1,)), "output_log_probs": (1, 12)}
    assert math.isclose(asked["cum_log_probs"][0], asked["output_log_probs"].sum(), rel_tol=1e-5)
    of_tokens = json.loads(asked["logprobs"][0])
    first = [next(iter(entries.values()))["logprob"] for entries in of_tokens]
    assert np.allclose(first, asked["output_log_probs"][0], atol=1e-6)
    assert all(len(entries) == 2 and next(iter(entries.values()))["rank"] == 1 for entries in of_tokens)
    assert "".join(next(iter(entries.values()))["decoded_token"] for entries in of_tokens).startswith(
        plain["text_output"][0].decode().split("\ufffd")[0]
    )
    nothing, *of_prompt = json.loads(asked["prompt_logprobs"][0])
    assert nothing is None
    assert [int(next(iter(entries))) for entries in of_prompt] == _tokens(PROMPT)[1:]
    times = [int(asked[name][0]) for name in TIMES]
    assert times == sorted(times)


def test_choices_come_in_order_and_the_first_one_is_the_request_without_others(triton: LocalTriton) -> None:
    several = _outputs(triton, **HOT, n=4, return_perf_metrics=True)
    assert several["text_output"].shape == (4,)
    assert several["text_output"][0].decode() == ask(triton, **HOT).text
    assert len(set(several["text_output"].tolist())) == 4
    prompt = several["num_input_tokens"][0]
    assert several["num_cached_tokens"].tolist() == [0, prompt, prompt, prompt]
    rows: dict[str, object] = {
        "text_input": [[PROMPT], [PROMPT]], "max_tokens": [[12], [12]], "min_tokens": [[12], [12]],
        "temperature": [[1.5], [1.5]], "seed": [[5], [5]], "n": [[1], [3]],
    }  # fmt: skip
    together = _outputs(triton, **rows)["text_output"].tolist()
    assert together == [several["text_output"][0], *several["text_output"][:3]]


def test_a_stream_of_several_choices_names_the_choice_of_each_chunk(streaming: LocalTriton) -> None:
    whole = _outputs_of_stream(streaming, **HOT, n=3)
    texts = {index: "".join(chunk["text_output"] for chunk in chunks) for index, chunks in whole.items()}
    assert sorted(texts) == [0, 1, 2]
    assert texts[0] == "".join(chunk["text_output"] for chunk in _outputs_of_stream(streaming, **HOT)[0])
    assert all(chunks[-1]["finish_reason"] == "length" for chunks in whole.values())
    assert all(sum(chunk["num_output_tokens"] for chunk in chunks) == 12 for chunks in whole.values())


def _outputs_of_stream(server: LocalTriton, **inputs: object) -> dict[int, list[dict[str, Any]]]:
    """Return the chunks of each choice."""
    chunks: dict[int, list[dict[str, Any]]] = {}
    with sse_response(server, inputs) as response:
        for event in events(response):
            assert "error" not in event, event
            chunks.setdefault(event.get("sequence_index", 0), []).append(event)
    return chunks


def test_the_chunks_of_a_stream_carry_their_own_tokens_log_probabilities(streaming: LocalTriton) -> None:
    (chunks,) = _outputs_of_stream(streaming, **TWELVE, **ASKED).values()
    whole = [value for chunk in chunks for value in _listed(chunk["output_log_probs"])]
    assert len(whole) == 12
    assert [len(json.loads(chunk["logprobs"])) for chunk in chunks] == [chunk["num_output_tokens"] for chunk in chunks]
    assert ["prompt_logprobs" in chunk for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    assert ["arrival_time_ns" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert ["stop_reason" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert math.isclose(chunks[-1]["cum_log_probs"], sum(whole), rel_tol=1e-4)


def _listed(value: object) -> list[float]:
    """Return the values of an output in JSON, where /generate makes a list of one the value itself."""
    return value if isinstance(value, list) else [value]  # type: ignore[list-item]  # a number


def test_a_prompt_of_tokens_is_the_same_as_its_text(triton: LocalTriton) -> None:
    inputs = {name: value for name, value in TWELVE.items() if name != "text_input"}
    by_tokens = at_once([partial(ask, triton, wire, **inputs, input_ids=_tokens(PROMPT)) for wire in WIRES])
    assert by_tokens == [everywhere(triton, **TWELVE)] * len(WIRES)


def test_a_bias_forces_a_token_and_a_stop_token_ends_the_text(triton: LocalTriton) -> None:
    (token,) = set(_tokens(" zebra")[-1:])
    forced = {**TWELVE, "logit_bias": json.dumps({str(token): 100}), "repetition_penalty": 1.0}
    piece = everywhere(triton, **forced).text
    assert len(set(piece.split(piece[: len(piece) // 12]))) == 1
    stopped = _outputs(triton, **forced | {"min_tokens": 0}, stop_token_ids=[token])
    assert (stopped["text_output"][0], stopped["stop_reason"][0]) == (b"", str(token).encode())
    assert stopped["num_output_tokens"][0] == 1
    only = _outputs(triton, **TWELVE, allowed_token_ids=[token])
    assert only["text_output"][0].decode() == piece


def test_biases_of_words_force_their_tokens_and_a_min_p_of_one_leaves_the_likeliest(triton: LocalTriton) -> None:
    words = {"embedding_bias_words": [" zebra"], "embedding_bias_weights": [100.0]}
    piece = everywhere(triton, **TWELVE, **words).text
    assert piece
    assert set(piece) <= set(" zebra")
    assert everywhere(triton, **HOT, min_p=1.0) == everywhere(triton, **TWELVE)


def test_a_stop_string_is_named_as_the_reason(triton: LocalTriton) -> None:
    text = ask(triton, **TWELVE).text
    stop = text[4:6]
    stopped = _outputs(triton, **TWELVE | {"min_tokens": 0}, stop=["absent \N{SNOWMAN}", stop])
    assert (stopped["stop_reason"][0].decode(), stopped["finish_reason"][0]) == (stop, b"stop")


@pytest.mark.parametrize(
    "neutral",
    [
        {"pad_id": 0, "beam_width": 1, "length_penalty": 1.5, "end_id": -1},
        {"num_return_sequences": 1, "min_length": 12, "random_seed": 3},
        {"top_p": 0.0, "temperature": 1.5},
        {"sampling_parameters": json.dumps({"temperature": "0", "max_tokens": "12", "min_tokens": 12, "top_k": -1})},
    ],
)
def test_what_clients_of_other_backends_send_has_the_same_meaning(
    triton: LocalTriton, neutral: dict[str, object]
) -> None:
    given = {*neutral, *json.loads(str(neutral.get("sampling_parameters", "{}")))}
    inputs = {name: value for name, value in TWELVE.items() if name not in given}
    if "min_length" in neutral:
        del inputs["min_tokens"]
    assert everywhere(triton, **inputs, **neutral) == everywhere(triton, **TWELVE)


def test_request_parameters_are_inputs(triton: LocalTriton) -> None:
    prompt = {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": [PROMPT]}
    parameters = {name: value for name, value in TWELVE.items() if name != "text_input"}
    answered = post(triton, "infer", {"inputs": [prompt], "parameters": parameters}).json()
    outputs = {output["name"]: output for output in answered["outputs"]}
    assert outputs["text_output"]["shape"] == [1]
    assert outputs["text_output"]["data"] == [ask(triton, **TWELVE).text]
    twice = post(triton, "infer", {"inputs": [prompt], "parameters": {"seed": 1, "random_seed": 2}})
    assert twice.status_code == 400
    assert "seed is 1 and random_seed is 2; the field must have one value" in twice.json()["error"]


def test_a_request_without_a_prompt_is_refused_by_the_model(triton: LocalTriton) -> None:
    refused = post(triton, "generate", {"max_tokens": 3})
    assert refused.status_code == 400
    assert "text_input is missing, and so is input_ids" in refused.json()["error"]


def test_max_tokens_beyond_the_room_is_cut_where_the_request_says_so(triton: LocalTriton) -> None:
    answer = ask(triton, text_input=PROMPT, max_tokens=2000, truncate_max_tokens=True, temperature=0.0, stop=["e"])
    assert answer.finish_reason in ("stop", "length")
