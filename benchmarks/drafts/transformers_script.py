"""Documents by transformers with XGrammar: ``python -m benchmarks.drafts.transformers_script MODEL``.

It speaks as ``serving`` says. It has a process of its own because a schema may crash XGrammar, and
with it the process.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.drafts.serving import serve
from benchmarks.peer import GuidedTransformers, llama_for_causal_lm
from gkv_jax.weights import load_model


def loaded(name: str) -> Callable[..., dict[str, Any]]:
    """What answers requests to a model, on all processors."""
    torch.set_num_threads(os.cpu_count() or 1)
    model = load_model(name, dtype="float32")
    stops = set(model.config.eos_token_ids)
    peer = GuidedTransformers(llama_for_causal_lm(model.model, model.params), model.tokenizer)
    peer.generate(torch.tensor([[0, 0]]), 2)

    def answer(prompt: Sequence[int], schema: Any, max_tokens: int) -> dict[str, Any]:
        # Compact, and by the standard where the closed schema says nothing, as ours.
        grammar = peer.compile(
            schema, any_whitespace=False, separators=(",", ":"), strict_mode=False
        )
        started = time.perf_counter()
        [new], stamps = peer.generate(torch.tensor([prompt]), max_tokens, grammar)
        finished = new[-1] in stops
        tokens = new[:-1] if finished else new
        return {
            "text": model.tokenizer.decode(tokens, skip_special_tokens=True),
            "tokens": tokens,
            "finished": finished,
            "forwards": len(new),
            "first_seconds": stamps[0] - started,
            "seconds": stamps[-1] - started,
        }

    return answer


if __name__ == "__main__":
    serve(lambda: loaded(*sys.argv[1:]), ["torch", "transformers", "xgrammar"])
