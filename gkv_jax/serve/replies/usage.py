"""Tokens read and written, and the figures of a request."""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from gkv_jax.request import Result


class PromptTokensDetails(BaseModel):
    """Tokens of the prompt that were not read, because a shared prefix holds them."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Tokens of the reasoning, its tags included; and those of the request's prediction that were verified,
    and right or not.

    ``completion_tokens`` counts no rejected ones, nor accepted ones behind the start of a stop text.
    """

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    """Tokens read and written; the stop token is not counted. A prompt with several answers counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(cls, results: Sequence[Result], answers: int = 1, reasoning_tokens: int = 0) -> "Usage":
        """The usage of finished requests.

        Args:
          results: of all prompts, those to the first one first.
          answers: to each prompt.
          reasoning_tokens: those of the answers' tokens that are reasoning.
        """
        read = sum(result.stats["prompt_tokens"] for result in results[::answers])
        cached = sum(result.stats["prefix_tokens"] for result in results[::answers])
        written = sum(len(result.tokens) for result in results)
        predicted = [result.stats["drafts"].get("prediction") for result in results]
        accepted = sum(tally["accepted"] for tally in predicted if tally)
        proposed = sum(tally["proposed"] for tally in predicted if tally)
        return cls(
            prompt_tokens=read,
            completion_tokens=written,
            total_tokens=read + written,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=reasoning_tokens,
                accepted_prediction_tokens=accepted,
                rejected_prediction_tokens=proposed - accepted,
            ),
        )


def figures(results: Sequence[Result]) -> dict[str, Any]:
    """``gkv``: ``Result.stats`` of the one answer, or of each under ``choices``."""
    if len(results) == 1:
        return results[0].stats
    return {"choices": [result.stats for result in results]}
