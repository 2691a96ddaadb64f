"""What guided neighbours cost a stream of free text, in time per token, compared with free ones."""

import asyncio
import contextlib
import statistics
import time
from typing import Any, Literal

import openai
from tqdm import tqdm

Neighbours = Literal["guided", "free"]

NEIGHBOUR_TOKENS = 4096
"""More than they write before the stream has ended."""
_ENDLESS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "minItems": 4096,
}


async def measure(
    url: str, model: str, stops: list[int], slots: int, tokens: int, rounds: int
) -> dict[Neighbours, list[float]]:
    """Seconds per token of the stream, for each round.

    Args:
      stops: tokens that end an answer; no answer chooses them.
      slots: of the server; all of them are busy.
      tokens: that the stream writes.
      rounds: each with both kinds of neighbours; the first is thrown away.
    """
    seconds: dict[Neighbours, list[float]] = {"guided": [], "free": []}
    async with openai.AsyncOpenAI(
        base_url=url, api_key="none", max_retries=0, timeout=900
    ) as client:
        for number in tqdm(range(rounds + 1), desc="rounds", disable=None):
            order: list[Neighbours] = ["guided", "free"] if number % 2 else ["free", "guided"]
            for kind in order:
                value = await _round(client, model, stops, slots - 1, tokens, kind)
                if number > 0:
                    seconds[kind].append(value)
    return seconds


async def _round(
    client: openai.AsyncOpenAI,
    model: str,
    stops: list[int],
    count: int,
    tokens: int,
    kind: Neighbours,
) -> float:
    fields: dict[str, Any] = {"model": model, "stream": True, "temperature": 1.0}
    fields["logit_bias"] = {str(token): -100 for token in stops}
    if kind == "guided":
        schema = {"name": "people", "schema": _ENDLESS}
        beside = fields | {"response_format": {"type": "json_schema", "json_schema": schema}}
    else:
        beside = fields
    async with contextlib.AsyncExitStack() as stack:
        neighbours = []
        for seed in range(count):
            messages = [{"role": "user", "content": "List people, as JSON."}]
            stream = await client.chat.completions.create(
                **beside, messages=messages, max_tokens=NEIGHBOUR_TOKENS, seed=seed
            )
            neighbours.append(await stack.enter_async_context(stream))
        # From here on all of them decode, and their prompts have been read.
        await asyncio.gather(*(_until_text(stream) for stream in neighbours))
        readers = [asyncio.create_task(_until_end(stream)) for stream in neighbours]
        try:
            value = await _seconds_per_token(client, fields, tokens)
            if any(reader.done() for reader in readers):
                raise RuntimeError("a neighbour ended before the stream that is timed")
            return value
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)


async def _seconds_per_token(
    client: openai.AsyncOpenAI, fields: dict[str, Any], tokens: int
) -> float:
    messages = [{"role": "user", "content": "Tell a long story."}]
    times = []
    async with await client.chat.completions.create(
        **fields, messages=messages, max_tokens=tokens, seed=1
    ) as stream:
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                times.append(time.perf_counter())
    return (times[-1] - times[0]) / (tokens - 1)


async def _until_text(stream: Any) -> None:
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            return


async def _until_end(stream: Any) -> None:
    async for _ in stream:
        pass


def ratio(seconds: dict[Neighbours, list[float]]) -> float:
    """Median time per token beside guided neighbours to that beside free ones."""
    return statistics.median(seconds["guided"]) / statistics.median(seconds["free"])
