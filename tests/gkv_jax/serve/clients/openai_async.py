"""OpenAI's asynchronous client: answers side by side, and a stream that is left early.

python openai_async.py BASE_URL MODEL
"""

import asyncio
import sys
from typing import Literal

import openai
from pydantic import BaseModel, Field

base_url, model = sys.argv[1:]
hello = [{"role": "user", "content": "hi"}]


class Dice(BaseModel):
    eyes: int = Field(ge=1, le=6)
    colour: Literal["white", "black"]


async def main() -> None:
    async with openai.AsyncOpenAI(
        base_url=base_url, api_key="none", max_retries=0, timeout=60
    ) as client:
        chat = client.chat.completions
        rolled = await asyncio.gather(
            *(chat.parse(model=model, messages=hello, response_format=Dice) for _ in range(6))
        )
        assert all(isinstance(roll.choices[0].message.parsed, Dice) for roll in rolled)
        print("parse:", rolled[0].choices[0].message.parsed)

        async with chat.stream(model=model, messages=hello, response_format=Dice) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        assert isinstance(final.choices[0].message.parsed, Dice)

        async with await chat.create(
            model=model, messages=hello, max_tokens=5000, stream=True
        ) as stream:
            async for _ in stream:
                break  # the server ends the answer when the connection goes
        print("left early")

        answer = await client.responses.parse(model=model, input="hi", text_format=Dice)
        assert isinstance(answer.output_parsed, Dice)
        print("responses:", answer.output_parsed)


asyncio.run(main())
