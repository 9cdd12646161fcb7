"""LangChain's ChatOpenAI over ``moechat serve``: chat, streams, tools, schemas, errors, and leaving early."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, Literal

import httpx
import pytest
from serve_support import PATIENCE_S, ServerProcess

pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import BadRequestError, NotFoundError
from pydantic import BaseModel

STORY = "Tell me a story about a fox."


def model(server: ServerProcess, **options: Any) -> ChatOpenAI:
    given: dict[str, Any] = {"model": "default", "temperature": 0, "max_tokens": 24, **options}
    return ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE_S, max_retries=0, **given)


def test_a_chat_has_text_usage_and_a_reason(demo: ServerProcess) -> None:
    answer = model(demo).invoke([SystemMessage("You tell stories."), HumanMessage(STORY)])
    assert isinstance(answer.content, str)
    assert len(answer.content) > 40
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 24
    assert answer.response_metadata["finish_reason"] == "length"
    again = model(demo).invoke([HumanMessage("Hi"), AIMessage("Hello!"), HumanMessage(STORY)])
    assert again.usage_metadata is not None
    assert again.usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"] - 20


def test_a_stream_has_the_same_text_in_pieces(demo: ServerProcess) -> None:
    chunks = list(model(demo, stream_usage=True).stream(STORY))
    text = "".join(str(chunk.content) for chunk in chunks)
    assert text == model(demo).invoke(STORY).content
    assert sum(bool(chunk.content) for chunk in chunks) > 10
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == 24


def test_several_prompts_are_answered_side_by_side(demo: ServerProcess) -> None:
    prompts = [STORY, "What can you do?", "Hello!"]
    one_by_one = [model(demo).invoke(prompt).content for prompt in prompts]
    assert [answer.content for answer in model(demo).batch(prompts)] == one_by_one

    async def together() -> list[Any]:
        async with httpx.AsyncClient() as client:  # LangChain's own outlives the loop that it belongs to
            answers = await model(demo, http_async_client=client).abatch(prompts)
            return [answer.content for answer in answers]

    assert asyncio.run(together()) == one_by_one


class Animal(BaseModel):
    """An animal of a story."""

    name: Literal["fox", "owl"]
    legs: Literal[2, 4]
    wild: bool


def test_an_answer_in_a_schema_becomes_an_object(demo: ServerProcess) -> None:
    asked = model(demo, max_tokens=200).with_structured_output(Animal, method="json_schema")
    found = asked.invoke("Describe an animal.")
    assert isinstance(found, Animal)
    plain = {
        "title": "Choice",
        "type": "object",
        "properties": {"animal": {"enum": ["fox", "owl"]}},
        "required": ["animal"],
        "additionalProperties": False,
    }
    chosen = (
        model(demo, max_tokens=100).with_structured_output(plain, method="json_schema").invoke("An animal?")
    )
    assert chosen in ({"animal": "fox"}, {"animal": "owl"})


@tool
def weather(city: Literal["Rome", "Oslo"], days: Literal[1, 2, 3]) -> str:
    """The weather of a city."""
    return f"{city}: sun for {days} days"


def test_a_tool_goes_there_and_back(tools: ServerProcess, calls_soon: dict[str, int]) -> None:
    bound = model(tools, max_tokens=300, logit_bias=calls_soon).bind_tools(
        [weather], tool_choice="required", parallel_tool_calls=False
    )
    asked: list[Any] = [HumanMessage("How is the weather in Rome?")]
    answer = bound.invoke(asked)
    call = answer.tool_calls[0]
    assert call["name"] == "weather"
    assert call["args"]["city"] in ("Rome", "Oslo")
    assert call["args"]["days"] in (1, 2, 3)
    result = weather.invoke(call["args"])
    asked += [answer, ToolMessage(result, tool_call_id=call["id"])]
    final = model(tools).bind_tools([weather], tool_choice="none").invoke(asked)
    assert final.usage_metadata is not None
    assert final.usage_metadata["input_tokens"] > len(result) // 8
    pieces = list(bound.stream(asked[:1]))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert [(one["name"], one["args"]) for one in whole.tool_calls] == [(call["name"], call["args"])]


def test_errors_are_those_that_clients_know(demo: ServerProcess) -> None:
    with pytest.raises(NotFoundError, match="no model nothing"):
        model(demo, model="nothing").invoke(STORY)
    with pytest.raises(BadRequestError, match="temperature"):
        model(demo, temperature=-1).invoke(STORY)
    with pytest.raises(BadRequestError) as error:
        model(demo).invoke("a fox and " * 5000)
    assert error.value.code == "context_length_exceeded"


def test_leaving_a_stream_ends_the_answer(demo: ServerProcess) -> None:
    before = demo.metric("output_tokens_total")
    stream = model(demo, max_tokens=900).stream(STORY)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    demo.wait_idle()
    assert demo.metric("output_tokens_total") - before < 400

    async def cancelled() -> None:
        begun = asyncio.Event()

        async def consume(client: httpx.AsyncClient) -> None:
            async for _ in model(demo, max_tokens=900, http_async_client=client).astream(STORY):
                begun.set()
                await asyncio.sleep(0)  # pieces that have arrived already are handed out without a pause

        async with httpx.AsyncClient() as client:
            task = asyncio.ensure_future(consume(client))
            waiting = asyncio.ensure_future(begun.wait())
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            assert begun.is_set()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(cancelled())
    demo.wait_idle()
    assert model(demo).invoke(STORY).content


def test_threads_share_a_client(demo: ServerProcess) -> None:
    client = model(demo, max_tokens=8)
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(str(client.invoke(STORY).content))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(found) == 4
    assert len(set(found)) == 1
