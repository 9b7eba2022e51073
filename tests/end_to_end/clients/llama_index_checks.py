"""LlamaIndex's OpenAILike."""

import asyncio
import os

from end_to_end.clients.question import MODEL, QUESTION, Topic, look_up
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

PROMPT = "Return a list of"
CHAT = [ChatMessage(role="system", content="Be short."), ChatMessage(role="user", content=QUESTION)]


def llm(**fields: object) -> OpenAILike:
    fixed = {"model": MODEL, "api_base": os.environ["OPENAI_BASE_URL"], "api_key": "unused", "temperature": 0}
    return OpenAILike(**{**fixed, "context_window": 2048, "max_retries": 0, **fields})


def chat(**fields: object) -> OpenAILike:
    return llm(is_chat_model=True, is_function_calling_model=True, **fields)


def test_a_completion_and_its_stream_have_the_same_text() -> None:
    whole = llm(max_tokens=6).complete(PROMPT).text
    assert "".join(chunk.delta for chunk in llm(max_tokens=6).stream_complete(PROMPT)) == whole != ""


def test_a_chat_has_the_same_text_streamed_and_over_asyncio() -> None:
    model = chat(max_tokens=6)
    whole = model.chat(CHAT)
    assert "".join(chunk.delta for chunk in model.stream_chat(CHAT)) == whole.message.content != ""
    assert whole.raw.usage.completion_tokens == 6

    async def texts() -> list[str]:
        stream = await model.astream_chat(CHAT)
        streamed = "".join([chunk.delta async for chunk in stream])
        return [streamed, str((await model.achat(CHAT)).message.content)]

    assert asyncio.run(texts()) == [whole.message.content] * 2


def test_a_required_tool_is_called_and_its_result_answered() -> None:
    tool = FunctionTool.from_defaults(fn=look_up)
    called = chat().chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    (call,) = chat().get_tool_calls_from_response(called)
    assert call.tool_name == "look_up"
    meaning = tool(**call.tool_kwargs).content
    assert meaning in ("found list", "found dict")
    result = ChatMessage(role="tool", content=meaning, additional_kwargs={"tool_call_id": call.tool_id})
    assert chat(max_tokens=8).chat([*CHAT, called.message, result]).message.content


def test_a_prediction_is_a_pydantic_model() -> None:
    model = chat(should_use_structured_outputs=True)
    assert isinstance(model.structured_predict(Topic, PromptTemplate(QUESTION)), Topic)
