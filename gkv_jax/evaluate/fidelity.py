"""How close a cache stays to the full one, on the full one's own continuation of a prompt.

No task and no right answer: the full cache is the measure. Its greedy continuation is fed to the other
cache token by token, whose next-token distributions are compared with the full cache's.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from gkv_jax.evaluate.dense import attention_rows
from gkv_jax.evaluate.runner import Runner
from gkv_jax.prefill import bucket, pad


@dataclasses.dataclass(frozen=True)
class Continuation:
    """What the full cache makes of a prompt of P tokens: n steps, one for each new token.

    Attributes:
      prompt: P token ids.
      tokens: the n tokens that the full cache continues with, greedily.
      logits: float32 ``[n,V]``.
      attention: the full attention of each step's query, float32 ``[num_layers,Hk,n,P+n-1]``.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: NDArray[np.float32]
    attention: NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Fidelity:
    """One cache against the full one, over the n steps of one continuation.

    Attributes:
      common_prefix: tokens before the first that greedy decoding would choose otherwise.
      equal: share of the n steps whose most probable token is that of the full cache.
      kl: mean KL divergence of the next-token distributions, ``KL(full || cache)``, in nats.
      attention_held: share of the full cache's attention that falls on tokens that the cache still
        holds, mean over layers, KV heads and steps.
    """

    common_prefix: int
    equal: float
    kl: float
    attention_held: float


def continuation(full: Runner, prompt: Sequence[int], new_tokens: int) -> Continuation:
    """Continue ``prompt`` greedily with the full cache; an end of text does not end it."""
    cache, token = full.read(prompt[:-1]), prompt[-1]
    logits, tokens = [], []
    for position in range(len(prompt) - 1, len(prompt) - 1 + new_tokens):
        row, cache = full.step(cache, token, position)
        token = int(row.argmax())
        logits.append(row)
        tokens.append(token)
    text = [*prompt, *tokens[:-1]]
    rows = attention_rows(
        full.params,
        jnp.asarray(pad(text, bucket(len(text)))),
        np.int32(len(prompt) - 1),
        model=full.model,
        count=new_tokens,
    )
    attention = np.asarray(rows[..., : len(text)])
    return Continuation(tuple(prompt), tuple(tokens), np.stack(logits), attention)


def fidelity(runner: Runner, full: Continuation) -> Fidelity:
    """Feed the full cache's continuation to another cache and compare."""
    cache, start = runner.read(full.prompt[:-1]), len(full.prompt) - 1
    logits, held = [], []
    for index, token in enumerate([full.prompt[-1], *full.tokens[:-1]]):
        seen = runner.held(cache, start + index)
        row, cache = runner.step(cache, token, start + index)
        logits.append(row)
        attention = full.attention[:, :, index, : start + index + 1]
        held.append((attention * seen).sum(axis=-1) / attention.sum(axis=-1))
    chosen = np.stack(logits)
    equal = chosen.argmax(axis=-1) == np.asarray(full.tokens)
    return Fidelity(
        common_prefix=int(np.cumprod(equal).sum()),
        equal=float(equal.mean()),
        kl=float(kl_divergence(full.logits, chosen).mean()),
        attention_held=float(np.mean(held)),
    )


def kl_divergence(p: NDArray[np.floating], q: NDArray[np.floating]) -> NDArray[np.float64]:
    """``KL(softmax(p) || softmax(q))`` of logits ``[...,V]``, in nats, float64 ``[...]``."""
    log_p, log_q = _log_softmax(p), _log_softmax(q)
    divergence: NDArray[np.float64] = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)
    return divergence


def _log_softmax(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
