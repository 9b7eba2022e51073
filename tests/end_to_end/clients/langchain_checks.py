"""LangChain's ChatOpenAI and OpenAIEmbeddings."""

from __future__ import annotations

import asyncio
from functools import reduce
from operator import add

from end_to_end.clients.question import MODEL, QUESTION, Topic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings


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


def test_structured_output_is_a_pydantic_model() -> None:
    assert isinstance(chat().with_structured_output(Topic, method="json_schema").invoke(QUESTION), Topic)


def test_a_streamed_call_is_joined_and_answered() -> None:
    called = reduce(add, chat().bind_tools([Topic], tool_choice="Topic", strict=True).stream(QUESTION))
    (call,) = called.tool_calls
    Topic.model_validate(call["args"])
    conversation = [HumanMessage(QUESTION), AIMessage("", tool_calls=[call]), ToolMessage("2", tool_call_id=call["id"])]
    assert chat(max_tokens=8).bind_tools([Topic], tool_choice="none").invoke(conversation).content


def test_a_response_and_its_stream_have_the_same_text_and_usage() -> None:
    model = chat(use_responses_api=True, max_tokens=6)
    whole, joined = model.invoke(QUESTION), reduce(add, model.stream(QUESTION))
    assert whole.text == joined.text != ""
    assert whole.usage_metadata["output_tokens"] == joined.usage_metadata["output_tokens"] == 6


def test_documents_have_the_embeddings_of_their_texts() -> None:
    embeddings = OpenAIEmbeddings(model=MODEL, check_embedding_ctx_length=False)
    texts = [QUESTION, "What is a dict?"]
    assert embeddings.embed_documents(texts) == [embeddings.embed_query(text) for text in texts]
    (short,) = OpenAIEmbeddings(model=MODEL, check_embedding_ctx_length=False, dimensions=8).embed_documents(texts[:1])
    assert len(short) == 8
