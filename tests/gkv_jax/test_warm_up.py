"""What ``Engine.warm_up`` compiles: each program once, however many threads do it."""

import collections

import pytest

from gkv_jax import CacheSpec, Guide, Sampling
from gkv_jax.scheduler import Loop
from tests.gkv_jax.serve.conftest import tiny_engine
from tests.gkv_jax.test_engine_drafts import DRAFT_MODELS, make


@pytest.mark.parametrize(
    ("cache", "prompt_tokens", "programs"),
    [
        # Chunks of 32 and 64 tokens; steps of one token and of eight.
        (
            CacheSpec(sinks=2, window=41, prefill_chunk=64, max_drafts=7),
            None,
            {"prefill_chunk": 2, "device_loop": 2},
        ),
        (
            CacheSpec(sinks=2, window=43, prefill_chunk=32, max_drafts=0),
            None,
            {"prefill_chunk": 1, "device_loop": 1},
        ),
        # Whole prompts of 64, 128 and 256 tokens, too.
        (
            CacheSpec(policy="snapkv", sinks=3, kept=9, window=47, max_drafts=3),
            200,
            {"prefill_chunk": 2, "prefill_whole": 3, "device_loop": 2},
        ),
    ],
)
def test_each_program_is_compiled_once(
    compiles: list[str],
    cache: CacheSpec,
    prompt_tokens: int | None,
    programs: dict[str, int],
) -> None:
    with tiny_engine(cache) as engine:
        compiles.clear()
        engine.warm_up(prompt_tokens)
        counted = collections.Counter(name.removeprefix("jit(").rstrip(")") for name in compiles)
        assert {name: counted[name] for name in programs} == programs
        engine.generate("Hello", guide=Guide.json(), sampling=Sampling(max_tokens=3))
        compiles.clear()
        prompts = ["x" * length for length in (1, 30, 60, 100, prompt_tokens or 300)]
        results = engine.generate(prompts, guide=Guide.json(), sampling=Sampling(max_tokens=3))
        assert all(result.error is None for result in results)
        assert compiles == []


@pytest.mark.parametrize("loop", ["host", pytest.param("device", marks=pytest.mark.full)])
def test_a_draft_model_is_compiled_too(compiles: list[str], loop: Loop) -> None:
    """Its passes of several tokens, after steps without it, and those of one token."""
    with make(loop=loop, draft=DRAFT_MODELS["a smaller cache"]) as engine:
        engine.warm_up()
        compiles.clear()
        prompts = ["x" * length for length in (1, 30, 60, 100)]
        for options in ({}, {"lookup": True}, {"draft_model": False}):
            sampling = Sampling(max_tokens=12, **options)
            for result in engine.generate(prompts, guide=Guide.json(), sampling=sampling):
                assert result.error is None
        assert compiles == []
