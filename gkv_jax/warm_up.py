"""Compiling what requests will need before they come."""

import concurrent.futures
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from gkv_jax.cache import Cache
from gkv_jax.decode import device_loop
from gkv_jax.drafts import ScriptedDrafts
from gkv_jax.drafts.drafter import Drafter
from gkv_jax.prefill import SHORTEST, reading
from gkv_jax.request import Request
from gkv_jax.sampling import Sampling
from gkv_jax.scheduler import Scheduler
from gkv_jax.text import TextStream


def warm_up(scheduler: Scheduler, tokenizer: Any, prompt_tokens: int | None) -> None:
    """Compile the loops and the reading of prompts, then let each of them run; see ``Engine.warm_up``."""
    spec, drafts_by_model = scheduler.spec, scheduler.drafting is not None
    longest = prompt_tokens or spec.prefill_chunk + 1
    if not spec.selects(longest - 1):
        longest = min(longest, spec.prefill_chunk + 1)
    lengths = {min(spec.sinks + spec.window, longest)}  # the last that is never whole
    length = SHORTEST
    while length + 1 < longest:
        lengths.add(length + 1)
        length *= 2
    lengths.add(longest)
    _compile_together(scheduler, lengths)

    def serve(length: int, max_tokens: int, drafter: Drafter) -> None:
        request = Request(
            prompt=(0,) * length,
            sampling=Sampling(max_tokens=max_tokens, logit_bias={0: 100.0}),  # the drafts are right
            stop_token_ids=frozenset(),  # nothing shall end it early
            text_stream=TextStream(tokenizer),
            drafter=drafter,
        )
        scheduler.inbox.put(request)
        error = request.result().error
        if error is not None:
            raise error

    for length in sorted(lengths):
        serve(length, 1, Drafter(uses_model=drafts_by_model))
    # And the loops: the narrow one has run, the others run where there are drafts.
    if spec.max_drafts:
        drafts = {"warm-up": ScriptedDrafts((0,) * 4)}
        serve(2, 4, Drafter(sources=drafts))
        if drafts_by_model:
            # First it reads what came without it, several tokens in a pass, then one in a pass.
            serve(2, 4 + 2 * spec.max_drafts, Drafter(sources=drafts, uses_model=True))


def _compile_together(scheduler: Scheduler, lengths: Iterable[int]) -> None:
    """Compile the loops and what prompts of these lengths need, a program per core at a time.

    JAX finds them again when they are called with the same shapes. Those of a draft model, and
    small ones, are compiled when they are first called.
    """
    params, model, spec = scheduler.params, scheduler.model, scheduler.spec
    cache = scheduler.cache_shapes()
    widths = [1, *([spec.queries] if spec.max_drafts else [])]
    calls = {
        (call.size, len(call.at)): call  # a chunk and a whole prompt of one size are two programs
        for length in lengths
        for call in reading(params, (0,) * (length - 1), 0, model=model, spec=spec)
    }

    def compiled(compile: Callable[..., None], *args: Any) -> None:
        with scheduler.surroundings.entered():  # other settings are other programs
            compile(*args)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        # First those that take longest, the loops, the widest first.
        loops = [] if scheduler.loop == "host" else widths[::-1]
        waiting = [pool.submit(compiled, _compile_loop, scheduler, cache, width) for width in loops]
        waiting += [pool.submit(compiled, call.compile, cache) for call in calls.values()]
        for each in waiting:
            each.result()


def _compile_loop(scheduler: Scheduler, cache: Cache, width: int) -> None:
    device_loop.lower(
        scheduler.params,
        cache,
        np.zeros((scheduler.slots, width + 4), np.int32),
        np.zeros(scheduler.slots, np.int32),
        scheduler.sampling,
        np.int32(0),
        model=scheduler.model,
        spec=scheduler.spec,
        head=scheduler.head,
    ).compile()
