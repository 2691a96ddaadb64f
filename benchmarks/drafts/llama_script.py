"""Documents by llama.cpp: a script for an interpreter that has llama-cpp-python, and nothing of ours.

``python -m benchmarks.drafts.llama_script MODEL.gguf CONTEXT THREADS`` speaks as ``serving`` says.
There is no option for compact documents: llama.cpp's grammars always allow blanks between JSON tokens.

Greedy. The grammar is consulted as llama.cpp's own programs do (``common_sampler_sample``): the best
token is tried first, and the whole vocabulary is masked only where it is refused. ``Llama.generate``
would mask the whole vocabulary at every token. The clock starts when the grammar is ready, and nothing
of an earlier prompt is reused.
"""

import ctypes
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.drafts.serving import serve

_TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class GrammarSampler:
    """The best token that a grammar allows; to be closed."""

    def __init__(self, llama: llama_cpp.Llama, schema: Any) -> None:
        """Raises ValueError, or whatever the converter raises, for a schema that is refused."""
        grammar = llama_cpp.LlamaGrammar.from_json_schema(json.dumps(schema), verbose=False)
        self._context = llama.ctx
        self._sampler = llama_cpp.llama_sampler_init_grammar(
            llama_cpp.llama_model_get_vocab(llama.model), grammar._grammar.encode(), b"root"
        )
        if not self._sampler:
            raise ValueError("the grammar made of the schema is refused")
        self._all = np.zeros(llama.n_vocab(), _TOKEN_DATA)
        self._one = np.zeros(1, _TOKEN_DATA)

    def sample(self) -> int:
        """The next token after what was evaluated last; the grammar accepts it."""
        pointer = llama_cpp.llama_get_logits_ith(self._context, -1)
        logits = np.ctypeslib.as_array(pointer, self._all.shape)
        token = int(logits.argmax())
        self._one["id"] = token
        self._one["logit"] = 1.0
        self._mask(self._one)
        if np.isneginf(self._one["logit"][0]):
            self._all["id"] = np.arange(len(self._all))
            self._all["logit"] = logits
            self._mask(self._all)
            token = int(self._all["logit"].argmax())
        llama_cpp.llama_sampler_accept(self._sampler, token)
        return token

    def close(self) -> None:
        llama_cpp.llama_sampler_free(self._sampler)

    def _mask(self, candidates: np.ndarray) -> None:
        """Put the logits of refused tokens to minus infinity."""
        data = candidates.ctypes.data_as(llama_cpp.llama_token_data_p)
        array = llama_cpp.llama_token_data_array(data, len(candidates), -1, False)
        llama_cpp.llama_sampler_apply(self._sampler, ctypes.byref(array))


def answer(
    llama: llama_cpp.Llama, prompt: Sequence[int], schema: Any, max_tokens: int
) -> dict[str, Any]:
    """One document, timed."""
    sampler = GrammarSampler(llama, schema)
    try:
        vocab = llama_cpp.llama_model_get_vocab(llama.model)
        tokens: list[int] = []
        ended: list[float] = []
        finished = False
        llama.reset()
        started = time.perf_counter()
        while len(tokens) < max_tokens:
            llama.eval(tokens[-1:] or prompt)
            token = sampler.sample()
            ended.append(time.perf_counter())
            finished = llama_cpp.llama_vocab_is_eog(vocab, token)
            if finished:
                break
            tokens.append(token)
    finally:
        sampler.close()
    return {
        "text": llama.detokenize(tokens).decode("utf-8", errors="replace"),
        "tokens": tokens,
        "finished": finished,
        "forwards": len(ended),
        "first_seconds": ended[0] - started,
        "seconds": ended[-1] - started,
    }


def loaded(model: str, context: str, threads: str) -> Callable[..., dict[str, Any]]:
    """What answers requests to a model."""
    llama = llama_cpp.Llama(
        model, n_ctx=int(context), n_threads=int(threads), n_threads_batch=int(threads),
        verbose=False,
    )  # fmt: skip
    llama.eval([0])  # warms up; a process that died of a schema is replaced in the midst of a run
    return functools.partial(answer, llama)


if __name__ == "__main__":
    serve(lambda: loaded(*sys.argv[1:]), ["llama-cpp-python"])
