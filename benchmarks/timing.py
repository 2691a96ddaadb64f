"""Milliseconds per decode step, measured alike in this engine and in transformers."""

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema

from benchmarks.peer import GuidedTransformers
from gkv_jax import Engine, Guide, Sampling


@dataclasses.dataclass(frozen=True)
class Task:
    """What all engines are asked: one chat prompt in every row, decoded greedily.

    Attributes:
      messages: the chat.
      tokens: most tokens to generate, for every row.
      schema: JSON Schema that the output must follow, or None for free text.
    """

    messages: Sequence[Mapping[str, str]]
    tokens: int
    schema: Mapping[str, Any] | None = None

    def check(self, text: str, finished: bool) -> None:
        """Raise ValueError (``jsonschema``'s for a schema) unless the output is as it should be.

        A finished document obeys its schema; free text is to go on until its tokens are used up, so
        that all engines do the same number of steps.
        """
        if self.schema is None and finished:
            raise ValueError(f"the free text ended early: {text!r}")
        if self.schema is not None and finished:
            jsonschema.validate(json.loads(text), self.schema)


@dataclasses.dataclass(frozen=True)
class Timing:
    """One run of a task: time per step between the first and the last token, prefill excluded."""

    ms_per_step: float
    steps: int
    tokens: tuple[int, ...]


def time_engine(engine: Engine, task: Task, batch: int) -> Timing:
    """Run ``task`` in ``batch`` slots of ``engine``.

    The clock is that of the request admitted last: when its first token comes, all rows decode.

    Raises:
      Exception: whatever ended a request early.
      ValueError: an output that its schema refuses, or too few steps to time.
    """
    guide = None if task.schema is None else Guide.json_schema(task.schema)
    sampling = Sampling(max_tokens=task.tokens)
    requests = [engine.prepare(task.messages, guide, sampling) for _ in range(batch)]
    for request in requests:
        engine.submit(request)
    stamps = [time.perf_counter() for piece in requests[-1].pieces() if piece.tokens]
    for request in requests:
        result = request.result()
        if result.error is not None:
            raise result.error
        task.check(result.text, finished=result.finish_reason == "stop")
    return _timing(stamps, requests[-1].tokens)


class TransformersPeer:
    """``GuidedTransformers``, timed. Torch uses as many threads as it finds processors."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        """``model`` is a ``LlamaForCausalLM`` and ``tokenizer`` the one that belongs to it."""
        self._peer = GuidedTransformers(model, tokenizer)

    def time(self, task: Task, batch: int) -> Timing:
        """Run ``task`` in ``batch`` rows. Raises as ``time_engine`` does."""
        tokenizer = self._peer.tokenizer
        prompt = tokenizer.apply_chat_template(
            list(task.messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"].repeat(batch, 1)
        grammar = None if task.schema is None else self._peer.compile(task.schema)
        rows, stamps = self._peer.generate(prompt, task.tokens, grammar)
        for row in rows:
            finished = tokenizer.eos_token_id in row
            task.check(tokenizer.decode(row, skip_special_tokens=True), finished)
        return _timing(stamps, [t for t in rows[-1] if t != tokenizer.eos_token_id])


def _timing(stamps: Sequence[float], tokens: Sequence[int]) -> Timing:
    steps = len(stamps) - 1
    if steps < 1:
        raise ValueError(f"{len(tokens)} tokens are too few to time a step")
    return Timing(1e3 * (stamps[-1] - stamps[0]) / steps, steps, tuple(tokens))
