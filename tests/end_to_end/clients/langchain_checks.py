"""LangChain's ChatOpenAI, OpenAI and OpenAIEmbeddings."""

from __future__ import annotations

import asyncio
from functools import reduce
from operator import add

import pytest
from end_to_end.clients.question import MODEL, QUESTION, Topic
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings


def chat(**fields: object) -> ChatOpenAI:
    return ChatOpenAI(**{"model": MODEL, "temperature": 0, "max_retries": 0, **fields})


def test_streams_have_the_text_and_the_usage_of_the_whole_answer() -> None:
    messages = [SystemMessage("Be short."), HumanMessage(QUESTION)]
    whole = chat(max_tokens=6).invoke(messages)
    assert whole.response_metadata["finish_reason"] == "length"
    chunks = list(chat(max_tokens=6, stream_usage=True).stream(messages))
    assert sum(bool(chunk.content) for chunk in chunks) > 1
    assert (joined := reduce(add, chunks)).content == whole.content
    assert joined.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"] == 6

    async def stream() -> str:
        return "".join([str(chunk.content) async for chunk in chat(max_tokens=6).astream(messages)])

    assert asyncio.run(stream()) == whole.content


def test_a_batch_is_answered_in_order() -> None:
    questions = [QUESTION, "What is a dict?", "What is a file?"]
    answers = chat(max_tokens=8).batch(questions)
    assert [answer.content for answer in answers] == [
        chat(max_tokens=8).invoke(question).content for question in questions
    ]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_a_pydantic_model(method: str) -> None:
    assert isinstance(chat().with_structured_output(Topic, method=method).invoke(QUESTION), Topic)


@pytest.mark.parametrize("choice", ["any", "Topic"])
def test_a_bound_tool_is_called_with_valid_arguments(choice: str) -> None:
    (call,) = chat().bind_tools([Topic], tool_choice=choice, parallel_tool_calls=False).invoke(QUESTION).tool_calls
    assert call["name"] == "Topic"
    Topic.model_validate(call["args"])


def test_a_streamed_call_is_joined_and_answered() -> None:
    called = reduce(add, chat().bind_tools([Topic], tool_choice="Topic", strict=True).stream(QUESTION))
    (call,) = called.tool_calls
    Topic.model_validate(call["args"])
    conversation = [HumanMessage(QUESTION), AIMessage("", tool_calls=[call]), ToolMessage("2", tool_call_id=call["id"])]
    assert chat(max_tokens=8).bind_tools([Topic], tool_choice="none").invoke(conversation).content


def test_log_probabilities_and_stops() -> None:
    answer = chat(max_tokens=3, logprobs=True, top_logprobs=2, seed=3, stop=["zz"]).invoke(QUESTION)
    assert [len(token["top_logprobs"]) for token in answer.response_metadata["logprobs"]["content"]] == [2, 2, 2]


def test_a_completion_and_its_stream_have_the_same_text() -> None:
    model = OpenAI(model=MODEL, temperature=0, max_tokens=8)
    assert "".join(model.stream("Return a list of")) == model.invoke("Return a list of") != ""


def test_a_prompt_beyond_the_context_is_an_error_of_its_own() -> None:
    with pytest.raises(ContextOverflowError):
        chat().invoke("word " * 3000)


def test_a_response_and_its_stream_have_the_same_text_and_usage() -> None:
    model = chat(use_responses_api=True, max_tokens=6)
    whole, joined = model.invoke(QUESTION), reduce(add, model.stream(QUESTION))
    assert whole.text == joined.text != ""
    assert whole.usage_metadata["output_tokens"] == joined.usage_metadata["output_tokens"] == 6


def test_a_call_in_a_response_is_answered() -> None:
    model = chat(use_responses_api=True)
    called = model.bind_tools([Topic], tool_choice="Topic", strict=True).invoke(QUESTION)
    (call,) = called.tool_calls
    Topic.model_validate(call["args"])
    conversation = [HumanMessage(QUESTION), called, ToolMessage("2", tool_call_id=call["id"])]
    assert model.bind_tools([Topic], tool_choice="none").invoke(conversation).text


def test_documents_have_the_embeddings_of_their_texts() -> None:
    embeddings = OpenAIEmbeddings(model=MODEL, check_embedding_ctx_length=False)
    texts = [QUESTION, "What is a dict?"]
    assert embeddings.embed_documents(texts) == [embeddings.embed_query(text) for text in texts]
    (short,) = OpenAIEmbeddings(model=MODEL, check_embedding_ctx_length=False, dimensions=8).embed_documents(texts[:1])
    assert len(short) == 8
