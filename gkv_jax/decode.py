"""The decode loop: one compiled program with fixed shapes, and the same steps under a host driver.

    while any row is active:
        hidden  = forward(tokens)                    the last accepted token and drafts, N per row
        masks   = collect()                          filled by the host meanwhile
        sampled = sample(head(hidden) under masks)   the output, whatever the drafts were
        n_new   = 1 + drafts that equal it           and so many positions are kept
        cache   = commit(n_new)                      what has left the window may stay, if a policy says so
        tokens  = submit(sampled, n_new)             the host accepts, stops, streams, proposes

Where a row has a bias or penalties, a branch of ``sample`` fetches what to add to its logits.

Verification is sample-then-compare: a draft counts if it equals the token sampled before it. With
noise keyed by seed and position, the output is the same with drafts and without.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from gkv_jax import bridge
from gkv_jax.cache import Cache, CacheSpec, commit
from gkv_jax.draft_model import Drafting, draft
from gkv_jax.models.protocol import Decoder, Params
from gkv_jax.placement import settle_beside
from gkv_jax.step import Head, StepInputs, choose, forward
from pallas_kernels.dispatch import Implementation
from pallas_kernels.masked_sample import Rows


def verify(
    params: Params,
    cache: Cache,
    inputs: StepInputs,
    sampling: Rows,
    handle: jax.Array,
    *,
    model: Decoder,
    spec: CacheSpec,
    kernel: Implementation | None,
    head: Head,
) -> tuple[Cache, jax.Array, jax.Array]:
    """One step inside a compiled loop: the cache, what the host answers, and the next positions."""
    hidden, cache, pending = forward(params, cache, inputs, model=model, spec=spec, kernel=kernel)
    masks = bridge.collect(handle, hidden, model.vocab_size)
    sampled, next_pos = choose(
        params,
        hidden,
        inputs,
        masks,
        sampling,
        model=model,
        kernel=kernel,
        head=head,
        bias=lambda: bridge.collect_bias(handle, inputs.tokens, model.vocab_size),
    )
    cache = commit(cache, pending, inputs.next_pos, next_pos, model=model, spec=spec)
    return cache, bridge.submit(handle, sampled, inputs.tokens.shape[1]), next_pos


@functools.partial(
    jax.jit, static_argnames=("model", "spec", "kernel", "head"), donate_argnames=("cache",)
)
def device_loop(
    params: Params,
    cache: Cache,
    answer: jax.Array,
    next_pos: jax.Array,
    sampling: Rows,
    handle: jax.Array,
    *,
    model: Decoder,
    spec: CacheSpec,
    kernel: Implementation | None = None,
    head: Head = "masked",
) -> Cache:
    """Decode until the host says stop, without leaving the device.

    Args:
      params: the model's parameters.
      cache: the batch's cache; donated, updated in place.
      answer: int32 ``[B,n+4]``, first inputs (``Session.inputs``). Their width is that of the loop: ``n``
        is 1, or ``spec.queries``.
      next_pos: int32 ``[B]``.
      sampling: parameters of each row.
      handle: int32 scalar, the session that ``submit`` and ``collect`` talk to.
      model: static. spec: static. kernel: static; the implementation of all kernels, see
        ``pallas_kernels.dispatch``. head: static.
    """

    def body(carry: tuple[Cache, StepInputs]) -> tuple[Cache, StepInputs]:
        cache, answer, next_pos = verify(
            params, *carry, sampling, handle, model=model, spec=spec, kernel=kernel, head=head
        )
        return cache, StepInputs.unpack(answer, next_pos)

    first = StepInputs.unpack(answer, next_pos)
    cache, _ = jax.lax.while_loop(lambda carry: carry[1].go, body, (cache, first))
    return cache


@functools.partial(
    jax.jit,
    static_argnames=("model", "spec", "draft_model", "draft_spec", "kernel", "head"),
    donate_argnames=("cache", "draft_cache"),
)
def drafting_loop(
    params: Params,
    cache: Cache,
    draft_params: Params,
    draft_cache: Cache,
    answer: jax.Array,
    next_pos: jax.Array,
    sampling: Rows,
    target_ids: jax.Array | None,
    handle: jax.Array,
    *,
    model: Decoder,
    spec: CacheSpec,
    draft_model: Decoder,
    draft_spec: CacheSpec,
    kernel: Implementation | None = None,
    head: Head = "masked",
) -> tuple[Cache, Cache]:
    """``device_loop`` with a draft model's passes before each step, see ``gkv_jax.draft_model``.

    Args:
      draft_params, draft_model, draft_spec: the draft model's, the latter two static.
      draft_cache: ``[B]`` rows; donated.
      target_ids: int32 ``[Vd]`` for a draft model with a pruned vocabulary.
      answer: int32 ``[B,N+4]``, of the full width.

    The other arguments are those of ``device_loop``. Returns both caches.
    """
    Carry = tuple[Cache, Cache, jax.Array, jax.Array]

    def body(carry: Carry) -> Carry:
        cache, draft_cache, answer, next_pos = carry
        draft_cache, answer = draft(
            draft_params, draft_cache, answer, sampling, target_ids, handle,
            model=draft_model, spec=draft_spec, vocab_size=model.vocab_size, kernel=kernel,
        )  # fmt: skip
        inputs = StepInputs.unpack(answer, next_pos)
        cache, answer, next_pos = verify(
            params,
            cache,
            inputs,
            sampling,
            handle,
            model=model,
            spec=spec,
            kernel=kernel,
            head=head,
        )
        return cache, draft_cache, answer, next_pos

    cache, draft_cache, *_ = jax.lax.while_loop(
        lambda carry: carry[2][0, -1] != 0, body, (cache, draft_cache, answer, next_pos)
    )
    return cache, draft_cache


_forward = jax.jit(forward, static_argnames=("model", "spec", "kernel"), donate_argnames=("cache",))


@functools.partial(jax.jit, static_argnames=("model", "kernel", "head"))
def _choose(
    params: Params,
    hidden: jax.Array,
    inputs: StepInputs,
    masks: jax.Array,
    sampling: Rows,
    bias: jax.Array,
    *,
    model: Decoder,
    kernel: Implementation | None,
    head: Head,
) -> tuple[jax.Array, jax.Array]:
    return choose(
        params,
        hidden,
        inputs,
        masks,
        sampling,
        model=model,
        kernel=kernel,
        head=head,
        bias=lambda: bias,
    )


_commit = jax.jit(commit, static_argnames=("model", "spec"), donate_argnames=("cache",))
_unpack = jax.jit(StepInputs.unpack)


def host_loop(
    params: Params,
    cache: Cache,
    session: bridge.Session,
    sampling: Rows,
    *,
    model: Decoder,
    spec: CacheSpec,
    kernel: Implementation | None = None,
    head: Head = "masked",
    drafting: Drafting | None = None,
) -> Cache:
    """The same steps driven from Python: for runtimes without callbacks, and as a cross-check.

    The forward pass is dispatched and runs while this thread waits for the masks. ``drafting`` is there
    if the session's program is ``"drafting"``.
    """
    answer = session.inputs()
    next_pos = settle_beside(jnp.asarray(session.positions()), cache.slots)
    # On the device, so that steps without bias, which do not read it, move nothing there.
    n = answer.shape[1] - 4
    no_bias = jax.device_put(np.zeros((len(answer), model.vocab_size + n - 1), np.float32))
    while answer[0, -1]:
        while answer[0, -1] >= bridge.READ_ONE:
            assert drafting is not None
            answer = drafting.one_pass(session, answer, sampling, kernel)
        inputs = _unpack(answer, next_pos)
        hidden, cache, pending = _forward(
            params, cache, inputs, model=model, spec=spec, kernel=kernel
        )
        sampled, next_pos = _choose(
            params,
            hidden,
            inputs,
            session.collect(),
            sampling,
            session.collect_bias() if np.any(answer[:, -2] & bridge.IS_BIASED) else no_bias,
            model=model,
            kernel=kernel,
            head=head,
        )
        if any(pending):
            cache = _commit(cache, pending, inputs.next_pos, next_pos, model=model, spec=spec)
        answer = session.submit(np.asarray(sampled))
    return cache
