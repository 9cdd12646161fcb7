"""An agent of Pydantic AI over ``moechat serve``: it calls tools until it has its answer, and streams."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest
from serve_support import PATIENCE_S, ServerProcess

pytest.importorskip("pydantic_ai", reason="pydantic-ai-slim is not installed")

from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, RunUsage, UsageLimitExceeded, UsageLimits
from pydantic_ai.messages import ToolCallPart, ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings


def model(server: ServerProcess, name: str = "default") -> OpenAIChatModel:
    provider = OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
    settings = ModelSettings(temperature=0, max_tokens=120, timeout=PATIENCE_S)
    return OpenAIChatModel(name, provider=provider, settings=settings)


def test_an_agent_calls_its_tool_and_answers_from_the_result(demo: ServerProcess) -> None:
    asked: list[str] = []
    agent = Agent(model(demo))

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        asked.append(city)
        return '{"weather": "sunny", "temperature": 18}'

    run = agent.run_sync("What is the weather in Paris?")
    assert asked == ["Paris"]
    parts = [part for message in run.all_messages() for part in message.parts]
    (call,) = [part for part in parts if isinstance(part, ToolCallPart)]
    (result,) = [part for part in parts if isinstance(part, ToolReturnPart)]
    assert call.args_as_dict() == {"city": "Paris"}
    assert result.tool_call_id == call.tool_call_id
    assert "18" in run.output
    used: RunUsage = run.usage
    assert (used.requests, used.tool_calls) == (2, 1)
    assert used.input_tokens > 20
    assert used.output_tokens > 10


class Animal(BaseModel):
    animal: Literal["fox", "owl", "bear"]
    legs: Literal[2, 4]


def test_an_answer_of_a_type_comes_by_schema(demo: ServerProcess) -> None:
    agent = Agent(model(demo), output_type=NativeOutput(Animal))
    assert isinstance(agent.run_sync("Which animal?").output, Animal)


def test_an_agent_streams_and_goes_on_with_a_conversation(demo: ServerProcess) -> None:
    agent = Agent(model(demo), system_prompt="You tell stories.")

    async def talk() -> tuple[list[str], str, int]:
        async with agent.run_stream("Tell me a story about a fox.") as run:
            pieces = [piece async for piece in run.stream_text(delta=True, debounce_by=None)]
            before = run.all_messages()
        again = await agent.run("And then?", message_history=before)
        return pieces, again.output, again.usage.input_tokens

    pieces, more, tokens = asyncio.run(talk())
    assert len(pieces) > 10
    assert more
    assert tokens > 100  # the story is in the second request


def test_an_agent_ends_with_the_errors_of_the_server_and_with_its_own_limits(demo: ServerProcess) -> None:
    with pytest.raises(ModelHTTPError) as missing:
        Agent(model(demo, "nothing")).run_sync("Hello")
    assert missing.value.status_code == 404
    with pytest.raises(ModelHTTPError) as long:
        Agent(model(demo)).run_sync("a fox and " * 5000)
    assert long.value.status_code == 400
    assert "context_length_exceeded" in str(long.value)
    with pytest.raises(UsageLimitExceeded):
        Agent(model(demo)).run_sync("Tell me a story.", usage_limits=UsageLimits(output_tokens_limit=5))
