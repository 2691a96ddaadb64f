"""The decode loop of a random model: milliseconds per step, guided and not, under both drivers.

The loops are those of ``gkv_jax.decode`` and the host side is ``gkv_jax.bridge.Session``, as in the
engine; only requests come from here, with prompts of one token and without text. Their grammar is one
row of a mask that stays the same: filling it costs a copy, about what a real engine's easy rows cost.
Beside them stands the same step without any conversation with the host.
"""

import dataclasses
import functools
import importlib.util
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu_check import masks, names
from benchmarks.gpu_check.rows import CheckFailed, Recorder
from benchmarks.gpu_check.scale import Scale
from pallas_kernels.dispatch import Implementation

# JSON Schemas are validated by jsonschema_rs, which grammar_host imports with everything else. No
# schema is validated here.
if importlib.util.find_spec("jsonschema_rs") is None:
    for _name in ("jsonschema_rs", "jsonschema_rs.canonical", "jsonschema_rs.canonical.schema"):
        sys.modules[_name] = mock.MagicMock()

from gkv_jax import decode, step
from gkv_jax.bridge import Session
from gkv_jax.cache import CacheSpec, init_cache
from gkv_jax.models.config import ModelConfig
from gkv_jax.models.llama import Llama
from gkv_jax.models.parameters import Parameter
from gkv_jax.models.rope_config import RopeConfig
from gkv_jax.request import Piece, Request
from gkv_jax.sampling import Sampling, greedy_rows
from gkv_jax.weights.parameters import tree_of
from grammar_host.backends.base import EngineMatcher
from grammar_host.matcher import GrammarMatcher

KINDS = ("unguided", "guided, few legal", "guided, all legal")
WARM_UP = 4
"""Steps at the beginning that do not count."""
_STOP = 0


class FixedMatcher(EngineMatcher):
    """A grammar whose mask never changes and that never ends."""

    def __init__(self, row: NDArray[np.int32]) -> None:
        self._row = row

    def accept_token(self, token_id: int) -> bool:
        return bool(self._row[token_id >> 5] >> (token_id & 31) & 1)

    def rollback(self, num_tokens: int) -> None:
        pass

    def fill_next_token_bitmask(self, bitmask: NDArray[np.int32], index: int) -> None:
        bitmask[index] = self._row

    def is_terminated(self) -> bool:
        return False

    def is_completed(self) -> bool:
        return False

    def forced_bytes(self) -> bytes:
        return b""

    def fork(self) -> "FixedMatcher":
        return FixedMatcher(self._row)


@dataclasses.dataclass(frozen=True)
class FixedGrammar:
    """What a request needs of a ``grammar_host.Grammar``."""

    row: NDArray[np.int32]
    vocab_size: int

    def matcher(self, stop_token_ids: Any = ()) -> GrammarMatcher:
        del stop_token_ids
        return GrammarMatcher(FixedMatcher(self.row), self.vocab_size, [_STOP])


class NoText:
    """A text stream for tokens that stand for no text."""

    stopped = False

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def grammar(kind: str, vocab_size: int) -> FixedGrammar | None:
    """Nothing for free text; four tokens of four tiles; or all but the stop token."""
    if kind == "unguided":
        return None
    legal = np.zeros(vocab_size, bool)
    if kind == "guided, few legal":
        legal[np.linspace(1, vocab_size - 1, 4).astype(int)] = True
    else:
        legal[:] = True
        legal[_STOP] = False
    return FixedGrammar(masks.pack(legal), vocab_size)


def random_model(scale: Scale, dtype: str) -> tuple[Llama, Any]:
    """A model of Llama-3.2-1B's shape and its parameters, made on the device."""
    config = ModelConfig(
        architecture="llama",
        vocab_size=scale.vocabulary,
        hidden_size=scale.hidden,
        intermediate_size=scale.ffn,
        num_layers=scale.layers,
        num_heads=scale.heads,
        num_kv_heads=scale.kv_heads,
        head_dim=scale.dims[0],
        rms_norm_eps=1e-5,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        rope=RopeConfig(theta=500_000.0),
        bos_token_id=None,
        eos_token_ids=(_STOP,),
    )

    @functools.partial(jax.jit, static_argnames="shape")
    def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return (scale.hidden**-0.5 * jax.random.normal(key, shape)).astype(dtype)

    seeds = itertools.count()

    def make(leaf: Parameter) -> jax.Array:
        if len(leaf.shape) == 1:
            return jnp.ones(leaf.shape, dtype)
        return normal(jax.random.key(next(seeds)), leaf.tree_shape)

    model = Llama(config)
    return model, tree_of(model, make)


class Bench:
    """One batch size of the model: the loops, timed by the clock of the last row."""

    def __init__(self, scale: Scale, batch: int) -> None:
        dtype = "float32" if scale.interpret else "bfloat16"
        self._model, self._params = random_model(scale, dtype)
        self._batch, self._steps, self._dtype = batch, scale.steps, jnp.dtype(dtype)
        self._spec = CacheSpec(sinks=4, window=scale.window)

    def loop(self, loop: str, kind: str, kernel: Implementation) -> Mapping[str, float]:
        """Milliseconds per step of one run after another that compiles."""
        self._run(loop, kind, kernel, WARM_UP + 2)
        return {"ms": statistics.median(self._run(loop, kind, kernel) for _ in range(3))}

    def alone(self, kind: str, kernel: Implementation) -> Mapping[str, float]:
        """The same steps with masks that are on the device, and nothing to tell the host."""
        session, _ = self._seated(kind, self._steps)
        first, masks = session.inputs(), session.collect()
        run = functools.partial(
            steps_alone, self._params, answer=first, next_pos=session.positions(), masks=masks,
            sampling=greedy_rows(self._batch), model=self._model, spec=self._spec, kernel=kernel,
        )  # fmt: skip
        session.close()

        def seconds() -> float:
            cache = jax.block_until_ready(self._new_cache())
            began = time.perf_counter()
            jax.block_until_ready(run(cache, count=np.int32(self._steps)))
            return time.perf_counter() - began

        seconds()
        return {"ms": 1e3 * statistics.median(seconds() for _ in range(3)) / self._steps}

    def _seated(self, kind: str, tokens: int) -> tuple[Session, list[Request]]:
        """A session with a request in every slot, and these."""
        session = Session(self._spec, self._batch, self._model.vocab_size)
        requests = [
            Request(
                prompt=(17 + row,),
                sampling=Sampling(max_tokens=tokens),
                stop_token_ids=frozenset(),
                text_stream=NoText(),  # type: ignore[arg-type]  # there is no tokenizer
                grammar=grammar(kind, self._model.vocab_size),  # type: ignore[arg-type]  # nor an engine
            )
            for row in range(self._batch)
        ]
        for slot, request in enumerate(requests):
            session.admit(slot, request)
        return session, requests

    def _new_cache(self) -> Any:
        return init_cache(self._spec, self._model, self._batch, self._dtype)

    def _run(self, loop: str, kind: str, kernel: Implementation, tokens: int = 0) -> float:
        tokens = tokens or self._steps + WARM_UP
        session, requests = self._seated(kind, tokens)
        stamps: list[float] = []

        def tick(piece: Piece | None) -> None:
            if piece is not None:
                stamps.append(time.perf_counter())

        requests[-1].sink = tick
        options: dict[str, Any] = {"model": self._model, "spec": self._spec, "kernel": kernel}
        sampling, cache = greedy_rows(self._batch), self._new_cache()
        try:
            if loop == "host":
                cache = decode.host_loop(self._params, cache, session, sampling, **options)
            else:
                cache = decode.device_loop(
                    self._params, cache, session.inputs(), session.positions(), sampling,
                    np.int32(session.handle), **options,
                )  # fmt: skip
            jax.block_until_ready(cache)
        finally:
            session.close()
        for request in requests:
            if request.error is not None:
                raise request.error
            if len(request.tokens) != tokens:
                raise CheckFailed(f"{len(request.tokens)} tokens instead of {tokens}")
        return 1e3 * (stamps[-1] - stamps[WARM_UP]) / (len(stamps) - 1 - WARM_UP)


@functools.partial(jax.jit, static_argnames=("model", "spec", "kernel"), donate_argnames=("cache",))
def steps_alone(
    params: Any,
    cache: Any,
    *,
    count: jax.Array,
    answer: jax.Array,
    next_pos: jax.Array,
    masks: jax.Array,
    sampling: Any,
    model: Llama,
    spec: CacheSpec,
    kernel: Implementation,
) -> Any:
    """``count`` steps of ``step.forward`` and ``step.choose``.

    ``answer`` and ``next_pos`` are a session's inputs, ``masks`` what it collects.
    """

    def body(_: jax.Array, carry: Any) -> Any:
        cache, inputs = carry
        hidden, cache, _ = step.forward(
            params, cache, inputs, model=model, spec=spec, kernel=kernel
        )
        sampled, next_pos = step.choose(
            params, hidden, inputs, masks, sampling, model=model, kernel=kernel, head="masked"
        )
        return cache, dataclasses.replace(inputs, tokens=sampled[:, :1], next_pos=next_pos)

    first = step.StepInputs.unpack(answer, next_pos)
    return jax.lax.fori_loop(0, count, body, (cache, first))


def run(recorder: Recorder, scale: Scale, batch: int) -> None:
    """All loops and kinds: with the kernels, then, as far as time goes, without."""
    bench = Bench(scale, batch)
    kernels: tuple[Implementation, ...] = ("xla",) if scale.interpret else ("triton", "xla")
    for kernel in kernels:
        # The device loop last: where its callbacks never come back, the others have their figures.
        ways: dict[str, Callable[[str], Mapping[str, float]]] = {
            "no host": functools.partial(bench.alone, kernel=kernel),
            "host loop": functools.partial(bench.loop, "host", kernel=kernel),
            "device loop": functools.partial(bench.loop, "device", kernel=kernel),
        }
        for way, measure in ways.items():
            for kind in KINDS:
                one = functools.partial(measure, kind)
                recorder.run(names.decode(kernel, way, batch, kind), one, "measured")
