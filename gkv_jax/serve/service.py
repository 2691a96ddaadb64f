"""From a request that is well-formed to an answer under way: what all generating routes share."""

import asyncio
import contextlib
import dataclasses
import math
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import anyio.to_thread

from gkv_jax.engine import Engine, Prompt
from gkv_jax.errors import EngineClosedError, PromptTooLongError, UserError
from gkv_jax.request import Request
from gkv_jax.sampling import Sampling
from gkv_jax.serve.chats import ChatReader, Reading
from gkv_jax.serve.errors import (
    ApiError,
    engine_failed,
    failed_generation,
    logger,
    refused,
    shutting_down,
)
from gkv_jax.serve.generation import Answer
from gkv_jax.serve.metrics import Metrics
from gkv_jax.serve.protocol.formats import Constraint
from gkv_jax.serve.protocol.sampling import CacheWanted
from gkv_jax.serve.settings import Chat, Limits
from gkv_jax.serve.tools import Conversation
from grammar_host import CompileCrashError, Grammar, GrammarError, GuideError


@dataclasses.dataclass(frozen=True)
class Job:
    """What a request asks the engine for.

    Attributes:
      prompts: each is answered once for each of ``samplings``.
      prompt_field: what the client calls them.
      samplings: how to sample each answer to a prompt.
      seconds: how long it may take.
      constraint: what the answers must obey; None for free text.
      marks: what special tokens write, see ``Tags``.
      trace: whether to tell where tokens are from.
      cache: the cache that the client counts on.
    """

    prompts: Sequence[Prompt]
    prompt_field: str
    samplings: Sequence[Sampling]
    seconds: float
    constraint: Constraint | None = None
    marks: Mapping[int, str] = dataclasses.field(default_factory=dict)
    trace: bool = False
    cache: CacheWanted | None = None


@dataclasses.dataclass(frozen=True)
class ReadChat:
    """A request that is a chat, as far as it is ready for the engine.

    Attributes:
      talk: what is said.
      prompt: its tokens.
      reading: how the answer is to be read.
      constraint: what the answer must obey, its reasoning included; None for free text.
      leaves_out_reasoning: whether the template did not read reasoning of earlier turns.
    """

    talk: Conversation
    prompt: tuple[int, ...]
    reading: Reading
    constraint: Constraint | None
    leaves_out_reasoning: bool

    @property
    def marks(self) -> Mapping[int, str]:
        """What special tokens write in the text of the answer."""
        of_calls = self.talk.call_format.marks if self.talk.may_call else {}
        return {**of_calls, **self.reading.marks}


LEFT_OUT = '299 gkv_jax "reasoning_content is left out: the chat template does not read it"'
"""The header ``Warning`` of an answer to ``ReadChat.leaves_out_reasoning``."""


class Admission:
    """Counts the answers that are under way: as many as there are slots, and so many that may wait.

    The engine serves them in the order in which they came. Any thread may use it.

    Attributes:
      places: the most answers that it lets in.
    """

    def __init__(self, slots: int, size: int) -> None:
        """``size``: answers that may wait."""
        self._slots, self.places = slots, slots + size
        self._count, self._lock = 0, threading.Lock()
        self._seconds = 1.0
        """A running mean of what an answer takes."""

    def enter(self, count: int) -> None:
        """Take places; ``count`` is at most ``places``.

        Raises:
          ApiError: so many are not free; it says when to come back.
        """
        with self._lock:
            if self._count + count > self.places:
                waiting = max(0, self._count - self._slots)
                # By then as many places are free as there are slots.
                seconds = min(60, math.ceil(self._seconds))
                message = (
                    f"{waiting} answers wait already, as many as may; try again in {seconds} s"
                )
                headers = {"Retry-After": str(seconds)}
                raise ApiError(429, message, code="queue_full", headers=headers)
            self._count += count

    def leave(self, count: int) -> None:
        """Give places back."""
        with self._lock:
            self._count -= count

    def observe(self, seconds: float) -> None:
        """An answer took so long."""
        with self._lock:
            self._seconds += 0.1 * (seconds - self._seconds)


class Places:
    """Places of answers that are being prepared, as a context.

    Its end gives back those that no request of the engine has taken over.
    """

    def __init__(self, admission: Admission, count: int) -> None:
        self._admission, self._count = admission, count

    def __enter__(self) -> "Places":
        """Raises ApiError if so many are not free."""
        self._admission.enter(self._count)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._admission.leave(self._count)

    def hand_over(self) -> None:
        """From now on each request gives its place back when it ends."""
        self._count = 0


class Service:
    """What the routes share.

    Attributes:
      engine: does the work.
      model: what clients call the model.
      limits: how much one request may ask for.
      metrics: what ended requests are counted in.
      admission: who may wait.
      chats: reads chats.
    """

    def __init__(
        self,
        engine: Engine,
        model: str,
        limits: Limits,
        metrics: Metrics,
        admission: Admission,
        chat: Chat,
    ) -> None:
        """Raises UserError if ``chat`` is not for the engine's model."""
        self.engine, self.model, self.limits = engine, model, limits
        self.metrics, self.admission = metrics, admission
        self.chats = ChatReader(engine.tokenizer, chat)
        if self.chats.tags is not None:
            with contextlib.suppress(GrammarError):  # no guide at all: requests are told so
                self.chats.tags.check(engine.compiler.tokenizer_info)

    def check_model(self, model: str | None) -> None:
        """Raises ApiError unless this model is served; None takes the one that there is."""
        if model not in (None, self.model):
            message = f"The model '{model}' does not exist; this server has '{self.model}'"
            raise ApiError(404, message, param="model", code="model_not_found")

    def places(self, samplings: Sequence[Sampling], prompts: int = 1) -> Places:
        """Places for answers to ``prompts`` prompts. Whatever takes time waits until they are taken.

        Raises:
          ApiError: so many answers are never served at once, or none is any more.
        """
        if self.engine.closed:
            raise shutting_down() if self.engine.failure is None else engine_failed()
        count, limit = prompts * len(samplings), min(self.limits.answers, self.admission.places)
        if count > limit:
            asked, param = f"{len(samplings)} answers are asked for (n)", "n"
            if prompts > 1:
                asked = f"{prompts} prompts with {len(samplings)} answers each are asked for"
                param = "prompt"
            message = f"{asked}; this server takes {limit} answers in one request: send fewer"
            raise ApiError(400, message, param=param, code="invalid_value")
        return Places(self.admission, count)

    async def start(self, job: Job, places: Places) -> Answer:
        """Compile what is to be obeyed, read the prompts' tokens, and submit.

        ``places`` have been entered; the answer takes them over.

        Raises:
          ApiError: the request cannot be served.
        """
        self._check_cache(job.cache)
        grammar = None if job.constraint is None else await self.compile(job.constraint)
        requests = await anyio.to_thread.run_sync(self._prepare, job, grammar)
        places.hand_over()
        try:
            return Answer(self.engine, requests, self._on_end, job.seconds)
        except EngineClosedError as error:
            raise failed_generation(error) from error

    async def compile(self, constraint: Constraint) -> Grammar:
        """The grammar of a constraint. Waiting for it takes no thread.

        Raises:
          ApiError: it cannot be enforced.
        """
        guide = await anyio.to_thread.run_sync(constraint.guide)
        size = len(guide.text.encode())
        if size > self.limits.schema_bytes:
            message = f"{constraint.field} has {size} bytes; this server allows {self.limits.schema_bytes}"
            code = "grammar_too_complex"
            raise ApiError(400, message, param=constraint.field, code=code)
        try:
            compiler = await anyio.to_thread.run_sync(lambda: self.engine.compiler)
            return await asyncio.wrap_future(compiler.submit(guide, constraint.backend))
        except GuideError as error:
            if isinstance(error, CompileCrashError):
                logger.error("a guide brought its compilation down", exc_info=error)
            raise constraint.error(error) from error
        except GrammarError as error:  # not the guide's fault
            logger.error("guides cannot be compiled", exc_info=error)
            raise failed_generation(error) from error

    def tokens(
        self,
        prompt: Prompt,
        field: str,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None,
        answer: bool = True,
    ) -> tuple[int, ...]:
        """A prompt's tokens, as ``Engine.encode`` has them.

        Raises:
          ApiError: it cannot be read, or is too long.
        """
        try:
            tokens = self.engine.encode(prompt, tools=tools, template=template, answer=answer)
        except UserError as error:
            raise refused(error, field) from error
        if len(tokens) > self.limits.prompt_tokens:
            message = (
                f"{field}: {len(tokens)} tokens, and this server reads at most "
                f"{self.limits.prompt_tokens}; shorten it"
            )
            raise ApiError(400, message, param=field, code="context_length_exceeded")
        return tokens

    def read(
        self,
        talk: Conversation,
        field: str,
        template: Mapping[str, Any],
        constraint: Constraint | None,
        *,
        leaves_out_reasoning: bool,
    ) -> ReadChat:
        """Read a chat's prompt, whose end says how its answer is to be read.

        Args:
          talk: what is said.
          field: what the client calls it.
          template: variables for the chat template.
          constraint: what the answer must obey behind its reasoning.
          leaves_out_reasoning: see ``ReadChat``.

        Raises:
          ApiError: the prompt cannot be read, or is too long.
        """
        prompt = self.tokens(talk.messages, field, tools=talk.tools_for_template, template=template)
        reading = self.chats.reading(prompt)
        return ReadChat(talk, prompt, reading, reading.constraint(constraint), leaves_out_reasoning)

    def _prepare(self, job: Job, grammar: Grammar | None) -> list[Request]:
        """Everything else that can be refused; runs in a thread."""
        requests = []
        for prompt in job.prompts:
            tokens = self.tokens(prompt, job.prompt_field)
            for sampling in job.samplings:
                try:
                    request = self.engine.prepare(
                        tokens, grammar, sampling, trace=job.trace, marks=job.marks
                    )
                except PromptTooLongError as error:
                    code = "context_length_exceeded"
                    raise ApiError(400, str(error), param=job.prompt_field, code=code) from error
                except UserError as error:
                    raise refused(error, job.prompt_field) from error
                requests.append(request)
        return requests

    def _on_end(self, request: Request) -> None:
        self.admission.leave(1)
        if request.submitted:
            self.metrics.count(request)
            if request.admitted:
                self.admission.observe(request.ended - request.admitted)

    def _check_cache(self, wanted: CacheWanted | None) -> None:
        spec = self.engine.spec
        served = {
            "policy": spec.policy_name,
            "sinks": spec.sinks,
            "kept": spec.kept,
            "window": spec.window,
        }
        for name, value in served.items():
            asked = getattr(wanted, name, None)
            if asked not in (None, value):
                facts = ", ".join(f"{n}={v!r}" for n, v in served.items())
                message = (
                    f"cache.{name} is {asked!r}; all slots of this server have the cache {facts}: "
                    "leave it out, or ask another server"
                )
                raise ApiError(400, message, param=f"cache.{name}", code="invalid_value")
