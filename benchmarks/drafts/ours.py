"""Ways of this engine: the same requests with different drafts."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from benchmarks.drafts.documents import Answer, Document, Way
from gkv_jax import CacheSpec, Engine, Piece, Sampling
from gkv_jax.draft_model import DraftModel
from gkv_jax.models.protocol import Params
from gkv_jax.models.transformer import Transformer
from gkv_jax.request import Request
from gkv_jax.weights import LoadedModel

OFF = "off"
MODEL = "model"
INT8 = " int8"
"""How the names of ways end that run on int8 weights."""
MAX_DRAFTS = 7
SAMPLINGS: dict[str, dict[str, Any]] = {
    OFF: {"jump": "off"},
    "verify": {"jump": "verify"},
    "force": {"jump": "force"},
    "lookup": {"jump": "verify", "lookup": True},
    MODEL: {"jump": "verify"},
}
"""Fields of ``Sampling`` by way. All run in one engine, but for ``MODEL``, whose engine has a draft model,
and those on int8 weights."""


def plain(name: str) -> str:
    """The way ``name`` on the weights as they are."""
    return name.removesuffix(INT8)


def baseline(name: str) -> str:
    """The way without drafts on the same weights as ``name``."""
    return OFF + (INT8 if name.endswith(INT8) else "")


class EngineWay(Way):
    """All documents of a turn are submitted at once; the engine fills free slots from them."""

    def __init__(self, engine: Engine, fields: Mapping[str, Any]) -> None:
        """``fields`` are those of ``Sampling``."""
        self._engine, self._fields = engine, fields

    def warm_up(self, documents: Sequence[Document], max_tokens: int) -> None:
        self._engine.warm_up(max(len(each.prompt) for each in documents))
        self.answer(documents[: self._engine.slots], max_tokens)

    def answer(self, documents: Sequence[Document], max_tokens: int) -> list[Answer]:
        """Grammars are compiled before the clock starts."""
        sampling = Sampling(max_tokens=max_tokens, **self._fields)
        requests = [self._engine.prepare(each.messages, each.guide, sampling) for each in documents]
        pieces: list[list[tuple[float, Piece]]] = []
        for request in requests:
            pieces.append([])
            request.sink = _stamping(pieces[-1])
        started = time.perf_counter()
        for request in requests:
            self._engine.submit(request)
        answers = [_answer(each, came) for each, came in zip(requests, pieces, strict=True)]
        spent = (max(request.ended for request in requests) - started) / len(requests)
        return [dataclasses.replace(answer, spent=spent) for answer in answers]


def _stamping(pieces: list[tuple[float, Piece]]) -> Any:
    """A sink that keeps pieces with tokens, and when they came."""

    def sink(piece: Piece | None) -> None:
        if piece is not None and piece.tokens:
            pieces.append((time.perf_counter(), piece))

    return sink


def _answer(request: Request, pieces: Sequence[tuple[float, Piece]]) -> Answer:
    result = request.result()
    if result.error is not None:
        return Answer(error=f"{type(result.error).__name__}: {result.error}")
    at, piece = pieces[0] if pieces else (request.ended, Piece("", ()))
    return Answer(
        text=result.text,
        tokens=result.tokens,
        finished=result.finish_reason == "stop",
        forwards=result.stats["forwards"],
        first_tokens=len(piece.tokens),
        first_seconds=at - request.admitted,
        seconds=request.ended - request.admitted,
        drafts=result.stats["drafts"],
    )


@dataclasses.dataclass(frozen=True)
class Served:
    """A model as engines take it, so that all share the weights."""

    model: Transformer
    params: Params
    tokenizer: Any

    @classmethod
    def of(cls, loaded: LoadedModel) -> "Served":
        return cls(loaded.model, loaded.params, loaded.tokenizer)

    @property
    def as_draft(self) -> DraftModel:
        return DraftModel(self.model, self.params, self.tokenizer)

    @property
    def int8(self) -> "Served":
        """The same with int8 weights."""
        return dataclasses.replace(self, params=jax.jit(self.model.quantize)(self.params))

    def engine(self, batch: int, length: int, draft: DraftModel | None = None) -> Engine:
        """An engine of ``batch`` slots for texts of ``length``, with a draft model if there is one."""
        return Engine(
            self.model,
            self.params,
            self.tokenizer,
            cache=CacheSpec(sinks=4, window=length - 4, max_drafts=MAX_DRAFTS),
            slots=batch,
            stop_token_ids=self.model.config.eos_token_ids,
            draft=draft,
        )


@contextlib.contextmanager
def engine_ways(
    served: Served, draft: DraftModel | None, names: Sequence[str], batch: int, length: int
) -> Iterator[dict[str, Way]]:
    """The ways called ``names`` of ``SAMPLINGS``, in engines of ``batch`` slots."""

    def kind(name: str) -> tuple[bool, bool]:
        return name.endswith(INT8), plain(name) == MODEL

    with contextlib.ExitStack() as stack:
        engines: dict[tuple[bool, bool], Engine] = {}
        for is_int8, drafting in sorted({kind(name) for name in names}):
            weights = served.int8 if is_int8 else served
            engine = weights.engine(batch, length, draft if drafting else None)
            engines[is_int8, drafting] = stack.enter_context(engine)
        yield {name: EngineWay(engines[kind(name)], SAMPLINGS[plain(name)]) for name in names}
