"""A draft model: a smaller model of the same tokenizer that guesses what the decode loop verifies.

It runs inside the loop's program, between ``submit`` and the forward pass, on a bounded cache of its
own. It reads what has been accepted since its last turn, then drafts a token a pass. The host puts
each draft into the grammar at once, so that the next is drawn under the mask that will verify it (as
in TensorRT-LLM's drafting loop), and with the noise that will: the draft is then right wherever the
two models' scores order the noisy tokens alike.

A refused draft leaves its trace in both caches and in the grammar, and all three go back by the same
number: the caches by moving a position, see ``gkv_jax.cache.segments``.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gkv_jax import bridge
from gkv_jax.cache import (
    Cache,
    CacheSpec,
    cache_dtype,
    check_layers,
    init_cache,
    longest_text,
    reset_row,
)
from gkv_jax.errors import UserError
from gkv_jax.models.protocol import Decoder, Params
from gkv_jax.placement import settle, settle_beside
from gkv_jax.prefill import reading
from gkv_jax.step import StepInputs, forward, without_idle
from pallas_kernels.dispatch import Implementation
from pallas_kernels.masked_head import masked_head, project
from pallas_kernels.masked_sample import Rows, masked_sample


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """What ``Engine(draft=...)`` takes.

    Attributes:
      model: the architecture.
      params: its parameters, on device.
      tokenizer: its transformers tokenizer, to be compared with the engine's.
      cache: size and policy of its cache, which must have room for as many drafts as the engine's; None
        for the engine's sinks and window.
      target_ids: for a head with a pruned vocabulary, the token that each of its rows stands for, int32
        ``[Vd]`` (EAGLE's ``d2t``, but absolute: arXiv 2401.15077); None where head and tokenizer agree.
    """

    model: Decoder
    params: Params
    tokenizer: Any
    cache: CacheSpec | None = None
    target_ids: np.ndarray | None = None

    def spec_beside(self, target: CacheSpec) -> CacheSpec:
        """The cache's spec next to an engine's.

        Raises:
          UserError: it cannot take back as many drafts as the engine verifies.
        """
        if target.max_drafts == 0:
            raise UserError(
                "draft is given, but cache.max_drafts is 0, so that nothing is drafted; set it, to 7 say"
            )
        spec, trained = self.cache, self.model.max_positions
        if spec is None:
            if trained <= target.sinks:
                raise UserError(
                    f"draft.model was trained for {trained} positions, no more than the {target.sinks} sinks "
                    "of the engine's cache; give draft.cache"
                )
            window = min(target.total, trained) - target.sinks
            spec = CacheSpec(sinks=target.sinks, window=window, max_drafts=target.max_drafts)
        if spec.evictor is not None:
            raise UserError(
                f"draft.cache chooses tokens by {spec.evictor.name!r} while decoding, which cannot be "
                "taken back with a refused draft; use policy 'window' or decode 'stream'"
            )
        if spec.max_drafts < target.max_drafts:
            raise UserError(
                f"draft.cache.max_drafts is {spec.max_drafts}, less than the {target.max_drafts} drafts of "
                "the engine's cache, so that its ring could not take them back; set it as high"
            )
        if spec.max_tokens is None and spec.total > trained:
            raise UserError(
                f"draft.cache holds {spec.total} tokens, more than the {trained} positions that "
                "draft.model was trained for; use a smaller window"
            )
        check_layers(spec, self.model)
        return spec

    def check(self, model: Decoder, tokenizer: Any) -> None:
        """Raise UserError unless this model speaks in the tokens of ``model`` and ``tokenizer``."""
        ours, theirs = self.tokenizer.get_vocab(), tokenizer.get_vocab()
        if ours != theirs:
            differing = len(set(ours.items()) ^ set(theirs.items()))
            raise UserError(
                f"draft.tokenizer differs from the engine's in {differing} entries of the vocabulary; "
                "a draft model needs the tokenizer of the model that it drafts for"
            )
        if self.target_ids is None:
            if self.model.vocab_size != model.vocab_size:
                raise UserError(
                    f"draft.model has {self.model.vocab_size} tokens and the engine's "
                    f"{model.vocab_size}; name those of its head in draft.target_ids"
                )
            return
        rows = jax.eval_shape(self.model.head, self.params).shape[0]
        ids = np.asarray(self.target_ids)
        if ids.shape != (rows,) or ids.dtype.kind not in "iu":
            raise UserError(
                f"draft.target_ids is {ids.dtype} {list(ids.shape)}; it must be integers [{rows}], one "
                "for each row of the head"
            )
        if len(np.unique(ids)) != rows or not (ids.min() >= 0 and ids.max() < model.vocab_size):
            raise UserError(
                f"draft.target_ids must be different tokens from 0 to {model.vocab_size - 1}"
            )


class Drafting:
    """A draft model at work beside the slots of an engine: it owns the cache."""

    def __init__(self, draft: DraftModel, target: CacheSpec, slots: int) -> None:
        """``target`` is the spec of the engine's cache, ``slots`` the number of its rows."""
        self.model, self.spec = draft.model, draft.spec_beside(target)
        self.params = settle(draft.params)
        ids = draft.target_ids
        self.target_ids = None if ids is None else jnp.asarray(ids, jnp.int32)
        self._slots = slots
        self.clear()

    @property
    def limit(self) -> float:
        """Length of the longest text for which it drafts."""
        return longest_text(self.spec, self.model)

    def clear(self) -> None:
        """Start with an empty cache."""
        for leaf in jax.tree.leaves(self.__dict__.get("cache")):
            leaf.delete()  # first, or there may be no room for the new one
        cache = init_cache(self.spec, self.model, self._slots, cache_dtype(self.params, self.model))
        self.cache = settle_beside(cache, self.params)

    def reads(self, row: int, tokens: Sequence[int]) -> Iterator[int]:
        """Read a prompt into a row, one call of the device after the other.

        Yields before each call how many tokens it computes. Between calls, steps may change other rows.
        """
        self.cache = reset_row(self.cache, np.int32(row), spec=self.spec, model=self.model)
        for call in reading(self.params, tokens, row, model=self.model, spec=self.spec):
            yield call.size
            # Kept once it is there: a call that fails leaves a cache that says that it is lost.
            self.cache = jax.block_until_ready(call.run(self.cache))

    def one_pass(
        self,
        session: "bridge.Session",
        answer: np.ndarray,
        sampling: Rows,
        kernel: Implementation | None = None,
    ) -> np.ndarray:
        """A pass of ``draft``, driven by the host."""
        n = answer.shape[1] - 4
        inputs = _unpack(answer, width=n if answer[0, -1] == bridge.READ_MANY else 1)
        last, self.cache = _read(
            self.params, self.cache, inputs, model=self.model, spec=self.spec, kernel=kernel
        )
        masks = session.collect_for_draft()
        sampled = _choose(
            self.params, last, inputs, masks, sampling, self.target_ids,
            model=self.model, kernel=kernel,
        )  # fmt: skip
        return session.submit_draft(np.asarray(sampled))


def draft(
    params: Params,
    cache: Cache,
    answer: jax.Array,
    sampling: Rows,
    target_ids: jax.Array | None,
    handle: jax.Array,
    *,
    model: Decoder,
    spec: CacheSpec,
    vocab_size: int,
    kernel: Implementation | None = None,
) -> tuple[Cache, jax.Array]:
    """Draft until the host wants the drafts verified.

    Passes are N tokens wide while a row has several to read, else one: two loops around one body.

    Args:
      params, model, spec: the draft model's.
      cache: its cache, ``[B]`` rows.
      answer: int32 ``[B,N+4]``, see ``Session.submit``.
      sampling: as the target model samples.
      target_ids: int32 ``[Vd]``, see ``DraftModel``.
      handle: of the session.
      vocab_size: V of the target model.
      kernel: as in ``gkv_jax.decode.device_loop``.

    Returns:
      The cache, and the answer that has something to verify.
    """

    def one_pass(carry: tuple[Cache, jax.Array], width: int) -> tuple[Cache, jax.Array]:
        cache, answer = carry
        inputs = unpack(answer, width)
        last, cache = read(params, cache, inputs, model=model, spec=spec, kernel=kernel)
        masks = bridge.collect_for_draft(handle, last, vocab_size)
        sampled = choose_draft(
            params, last, inputs, masks, sampling, target_ids, model=model, kernel=kernel
        )
        return cache, bridge.submit_draft(handle, sampled, answer.shape[1] - 4)

    def passes(state: int, width: int, carry: tuple[Cache, jax.Array]) -> tuple[Cache, jax.Array]:
        def goes_on(carry: tuple[Cache, jax.Array]) -> jax.Array:
            return carry[1][0, -1] == state

        result: tuple[Cache, jax.Array] = jax.lax.while_loop(
            goes_on, lambda carry: one_pass(carry, width), carry
        )
        return result

    def turn(carry: tuple[Cache, jax.Array]) -> tuple[Cache, jax.Array]:
        return passes(bridge.READ_ONE, 1, passes(bridge.READ_MANY, answer.shape[1] - 4, carry))

    def is_drafting(carry: tuple[Cache, jax.Array]) -> jax.Array:
        return carry[1][0, -1] >= bridge.READ_ONE

    drafted: tuple[Cache, jax.Array] = jax.lax.while_loop(is_drafting, turn, (cache, answer))
    return drafted


def unpack(answer: jax.Array, width: int) -> StepInputs:
    """A pass's inputs from int32 ``[B,N+4]``, of which it reads ``width`` tokens."""
    return StepInputs(
        tokens=answer[:, :width],
        n_drafts=answer[:, -4],
        active=answer[:, -3] != 0,
        logprobs=jnp.zeros((), bool),
        go=answer[0, -1] != 0,
        next_pos=answer[:, -2],
    )


def read(
    params: Params,
    cache: Cache,
    inputs: StepInputs,
    *,
    model: Decoder,
    spec: CacheSpec,
    kernel: Implementation | None,
) -> tuple[jax.Array, Cache]:
    """The hidden state of each row's last token, ``[B,1,Dm]``, and the cache with all of them."""
    hidden, cache, _ = forward(params, cache, inputs, model=model, spec=spec, kernel=kernel)
    return jnp.take_along_axis(hidden, inputs.n_drafts[:, None, None], axis=1), cache


def choose_draft(
    params: Params,
    last: jax.Array,
    inputs: StepInputs,
    masks: jax.Array,
    sampling: Rows,
    target_ids: jax.Array | None,
    *,
    model: Decoder,
    kernel: Implementation | None,
) -> jax.Array:
    """Draw each row's next token, int32 ``[B,1]``, as the target model would.

    ``last`` is ``[B,1,Dm]``, ``masks`` int32 ``[B,1,W+1]`` over the target's vocabulary.
    """
    words, enabled, sampling = without_idle(masks, inputs.active[:, None], sampling)
    positions = (inputs.next_pos + inputs.n_drafts)[:, None]
    head = model.head(params)
    last = last.astype(head.dtype)
    if target_ids is None:
        return masked_head(
            last, head, words, enabled, positions, sampling, implementation=kernel
        ).tokens
    # Scattered over the whole vocabulary, masks and noise are those of the target's tokens.
    pruned = project(last, head)
    logits = jnp.full((*last.shape[:2], 32 * words.shape[-1]), -jnp.inf, pruned.dtype)
    logits = logits.at[..., target_ids].set(pruned)
    return masked_sample(logits, words, enabled, positions, sampling, implementation=kernel)


_read = jax.jit(read, static_argnames=("model", "spec", "kernel"), donate_argnames=("cache",))
_choose = jax.jit(choose_draft, static_argnames=("model", "kernel"))
_unpack = functools.partial(jax.jit, static_argnames=("width",))(unpack)
