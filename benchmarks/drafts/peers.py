"""Peers: transformers with XGrammar in this process, llama.cpp in one of its own.

Both read the same prompt tokens and answer one document after another: neither is asked to batch.
Grammars are compiled before the clock starts, as ours are.
"""

import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.drafts.documents import Answer, Document, Way
from benchmarks.peer import llama_for_causal_lm
from gkv_jax import UserError
from gkv_jax.weights import LoadedModel

TRANSFORMERS = "transformers"
LLAMA_CPP = "llama.cpp"

_SCRIPT = Path(__file__).with_name("llama_script.py")
_PATIENCE_S = 300.0
"""A document that takes longer is given up: some grammars never end."""


class TransformersPeer(Way):
    """``generate`` with XGrammar's logits processor, as its users run it: float32, the default cache."""

    def __init__(self, loaded: LoadedModel) -> None:
        import xgrammar

        self._model = llama_for_causal_lm(loaded.config, loaded.params)
        self._tokenizer = loaded.tokenizer
        self._stops = set(loaded.config.eos_token_ids)
        info = xgrammar.TokenizerInfo.from_huggingface(
            loaded.tokenizer, vocab_size=loaded.config.vocab_size
        )
        self._compiler = xgrammar.GrammarCompiler(info)

    def answer(self, documents: Sequence[Document], max_tokens: int) -> list[Answer]:
        return [self._answer(document, max_tokens) for document in documents]

    def _answer(self, document: Document, max_tokens: int) -> Answer:
        import torch
        import xgrammar

        try:
            grammar = self._compiler.compile_json_schema(json.dumps(document.schema))
        except Exception as error:  # of the engine: whatever a schema provokes
            return Answer(error=f"{type(error).__name__}: {error}")
        prompt = torch.tensor([document.prompt])
        stamps: list[float] = []

        def stamp(ids: Any, _scores: Any, **_: Any) -> Any:
            stamps.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        started = time.perf_counter()
        with torch.no_grad():
            output = self._model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=max_tokens,
                do_sample=False,
                logits_processor=[xgrammar.contrib.hf.LogitsProcessor(grammar)],
                stopping_criteria=[stamp],
                pad_token_id=self._tokenizer.eos_token_id,
            )
        new = output[0, len(document.prompt) :].tolist()
        finished = new[-1] in self._stops
        tokens = new[:-1] if finished else new
        return Answer(
            text=self._tokenizer.decode(tokens, skip_special_tokens=True),
            tokens=tokens,
            finished=finished,
            forwards=len(new),
            first_seconds=stamps[0] - started,
            seconds=stamps[-1] - started,
            spent=stamps[-1] - started,
        )


class LlamaCppPeer(Way):
    """llama.cpp on a GGUF file, by ``llama_script.py`` in another interpreter.

    A document whose process dies or takes too long is an error; the next one has a new process.
    """

    def __init__(self, command: Sequence[str | Path]) -> None:
        """``command`` starts something that speaks as ``llama_script.py`` does; see ``llama_cpp``."""
        self._command = command
        self._process: subprocess.Popen[str] | None = None
        self.versions: dict[str, str] = {}

    def answer(self, documents: Sequence[Document], max_tokens: int) -> list[Answer]:
        """Raises UserError if the process does not start; it says why."""
        return [self._answer(document, max_tokens) for document in documents]

    def __enter__(self) -> "LlamaCppPeer":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _answer(self, document: Document, max_tokens: int) -> Answer:
        process = self._process or self._start()
        request = {
            "prompt": document.prompt, "schema": document.schema, "max_tokens": max_tokens
        }  # fmt: skip
        value = _ask(process, json.dumps(request))
        if value is None:
            self._end()
            return Answer(error="the process died, or took too long")
        return Answer(**value, spent=value.get("seconds", 0.0))

    def _start(self) -> "subprocess.Popen[str]":
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
            self._process = process
            hello = _ask(process, None)
            if hello is None:
                self._end()
                errors.seek(0)
                raise UserError(f"{self._command[0]} did not start:\n{errors.read()[-2000:]}")
        self.versions = hello["versions"]
        return process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def llama_cpp(python: Path, gguf: Path, context: int) -> LlamaCppPeer:
    """llama.cpp by an interpreter that has it, for texts of ``context`` tokens, on all processors."""
    return LlamaCppPeer([python, _SCRIPT, gguf, str(context), str(os.cpu_count() or 1)])


def _ask(process: "subprocess.Popen[str]", line: str | None) -> dict[str, Any] | None:
    """What the process says next, to ``line`` if there is one; None if it has died or been ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    timer = threading.Timer(_PATIENCE_S, process.kill)
    timer.start()
    try:
        if line is not None:
            print(line, file=process.stdin, flush=True)
        said = process.stdout.readline()
    except OSError:
        return None
    finally:
        timer.cancel()
    return json.loads(said) if said.endswith("\n") else None
