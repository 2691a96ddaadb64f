"""Clients of a server, all in one event loop, with OpenAI's own package."""

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import openai
from tqdm import tqdm

from benchmarks.serve_load.workload import SCHEMAS, Task

MOST_RETRIES = 100


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a request.

    Attributes:
      error: its kind; None for an answer.
      refusals: HTTP 429 before it was taken.
      first_seconds: from sending it to the first text of a stream; None for others.
      token_seconds: per token after a stream's first; None for others.
      queue_seconds: that the server says it waited for a slot.
    """

    task: Task
    error: str | None = None
    refusals: int = 0
    text: str = ""
    finish_reason: str | None = None
    tokens: int = 0
    prompt_tokens: int = 0
    first_seconds: float | None = None
    token_seconds: float | None = None
    queue_seconds: float = 0.0


async def load(url: str, model: str, tasks: Sequence[Task], clients: int) -> list[Outcome]:
    """Answers to all tasks; each client sends one after another."""
    left = iter(tasks)
    outcomes: list[Outcome] = []
    async with openai.AsyncOpenAI(
        base_url=url, api_key="none", max_retries=0, timeout=900
    ) as client:
        with tqdm(total=len(tasks), desc=f"{clients} clients", disable=None) as bar:

            async def work() -> None:
                for task in left:
                    outcomes.append(await _answered(client, model, task))
                    bar.update()

            await asyncio.gather(*(work() for _ in range(clients)))
    return outcomes


async def _answered(client: openai.AsyncOpenAI, model: str, task: Task) -> Outcome:
    for refusals in range(MOST_RETRIES):
        try:
            return dataclasses.replace(await _ask(client, model, task), refusals=refusals)
        except openai.RateLimitError as error:
            await asyncio.sleep(float(error.response.headers["retry-after"]))
        except openai.APIStatusError as error:
            return Outcome(task, f"{error.status_code} {error.code}", refusals)
        except openai.APIError as error:  # in a stream, or of the connection
            return Outcome(task, error.code or type(error).__name__, refusals)
    return Outcome(task, "always 429", MOST_RETRIES)


def request(model: str, task: Task) -> dict[str, Any]:
    """The fields of a chat completion."""
    fields: dict[str, Any] = {
        "model": model,
        "messages": task.messages,
        "max_tokens": task.max_tokens,
        "seed": task.seed,
    }
    if task.schema is not None:
        schema = {"name": task.schema, "schema": SCHEMAS[task.schema], "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


async def _ask(client: openai.AsyncOpenAI, model: str, task: Task) -> Outcome:
    fields = request(model, task)
    if not task.stream:
        answer = await client.chat.completions.create(**fields)
        choice = answer.choices[0]
        return Outcome(
            task,
            text=choice.message.content,
            finish_reason=choice.finish_reason,
            tokens=answer.usage.completion_tokens,
            prompt_tokens=answer.usage.prompt_tokens,
            queue_seconds=answer.gkv["queue_seconds"],
        )
    began = time.perf_counter()
    first = last = None
    texts: list[str] = []
    reason, usage, stats = None, None, {}
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    async for chunk in await client.chat.completions.create(**fields):
        usage = chunk.usage or usage
        stats = getattr(chunk, "gkv", None) or stats
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            if choice.delta.content:
                last = time.perf_counter()
                first = first or last
                texts.append(choice.delta.content)
    if reason is None or usage is None:
        return Outcome(task, "stream without end")
    tokens = usage.completion_tokens
    return Outcome(
        task,
        text="".join(texts),
        finish_reason=reason,
        tokens=tokens,
        prompt_tokens=usage.prompt_tokens,
        first_seconds=None if first is None else first - began,
        token_seconds=None if first is None or tokens < 2 else (last - first) / (tokens - 1),
        queue_seconds=stats["queue_seconds"],
    )
