"""The engine: a fixed number of slots, requests that queue for them, and the loop that serves them."""

import collections
import concurrent.futures
import dataclasses
import math
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np

from gkv_jax.bridge import Session
from gkv_jax.cache import Cache, CacheSpec, cache_dtype, check_layers, init_cache, reset_row
from gkv_jax.cache.report import report as report_of
from gkv_jax.cache.storage import check_dtype
from gkv_jax.decode import device_loop, drafting_loop, host_loop
from gkv_jax.draft_model import Drafting, DraftModel
from gkv_jax.drafts import DraftSource, LookupDrafts, PredictedDrafts, ScriptedDrafts
from gkv_jax.drafts.drafter import Drafter
from gkv_jax.drafts.widths import Verify
from gkv_jax.errors import EngineClosedError, PromptTooLongError, UserError
from gkv_jax.models.protocol import Decoder, Params
from gkv_jax.prefill import SHORTEST, reading
from gkv_jax.prefix import PrefixStore
from gkv_jax.request import Request, Result, Stream
from gkv_jax.sampling import Sampling, greedy_rows, set_row
from gkv_jax.step import Head
from gkv_jax.text import TextStream
from grammar_host import Grammar, GrammarCompiler, GrammarError, Guide, TokenizerInfo
from grammar_host.backends import check_backend_name
from grammar_host.backends.base import Backend

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]
"""A text to continue, chat messages ``{"role": ..., "content": ...}``, or token ids."""

Loop = Literal["device", "host"]

Quantization = Literal["int8"]
"""How weights are rounded when a model is loaded: ``int8`` with a scale per output."""


class Engine:
    """Guided generation with a bounded cache.

    One engine thread owns the device. Requests get free slots in the order in which they came, and
    their prompts are read chunk by chunk. While others decode, reading and decoding take turns, each
    for as long as the other: so a stream waits for a chunk at most, and a long prompt gets on.
    Any thread may submit requests.

    Use as a context manager, or call ``close``.
    """

    def __init__(
        self,
        model: Decoder,
        params: Params,
        tokenizer: Any,
        *,
        cache: CacheSpec | None = None,
        slots: int = 8,
        loop: Loop = "device",
        head: Head = "masked",
        stop_token_ids: Sequence[int] = (),
        backend: str | Backend = "auto",
        watchdog_s: float = 60.0,
        draft: DraftModel | None = None,
        verify: Verify = "faster",
    ) -> None:
        """Wrap a live model.

        Args:
          model: the architecture.
          params: its parameters, on device; the cache takes the dtype of the first floating one.
          tokenizer: a transformers fast tokenizer.
          cache: size and policy of the cache; ``CacheSpec().with_drafts()`` if None.
          slots: requests decoded at once; more of them queue.
          loop: ``device`` runs the whole loop in one compiled program; ``host`` drives the same
            steps from Python.
          head: ``masked`` reads the LM head only where some row of the batch has a legal token (the
            faster the narrower grammars are); ``full`` always reads all of it, so that the rounding
            of a row's logits never depends on its neighbours' grammars.
          stop_token_ids: ends of a generation besides the tokenizer's own.
          backend: the grammar engine, by name or as an instance.
          watchdog_s: longest wait for a step's masks before its requests fail.
          draft: a smaller model of the same tokenizer that drafts for this one.
          verify: when drafts are verified: ``faster``, where a wider step has been seen to cost less than
            the drafts save; ``always``, whatever it costs.

        Raises:
          UserError: options that cannot be served, or not together, naming the field.
        """
        if slots < 1:
            raise UserError(f"slots is {slots}; it must be at least 1")
        if loop not in ("device", "host"):
            raise UserError(f"loop is {loop!r}; choose 'device' or 'host'")
        if head not in ("masked", "full"):
            raise UserError(f"head is {head!r}; choose 'masked' or 'full'")
        if verify not in get_args(Verify):
            raise UserError(f"verify is {verify!r}; choose from {get_args(Verify)}")
        if isinstance(backend, str):
            try:
                check_backend_name(backend)
            except ValueError as error:
                raise UserError(f"backend: {error}") from error
        self.model, self.tokenizer = model, tokenizer
        self.spec = cache or CacheSpec().with_drafts()
        self._check_spec()
        self._verify: Verify = verify
        self._drafting = self._new_drafting(draft, slots)
        self.slots, self.loop, self.head = slots, loop, head
        self._watchdog_s, self._backend = watchdog_s, backend
        # One attribute, so that no thread ever sees prefixes that other weights have read.
        self._weights = params, PrefixStore(self.spec, model)
        self._compiler: GrammarCompiler | None = None
        self._compiler_lock = threading.Lock()
        stops = {*stop_token_ids, tokenizer.eos_token_id} - {None}
        self._stop_token_ids = frozenset(t for t in stops if 0 <= t < model.vocab_size)
        self._cache = self._new_cache()
        self._cache_bytes = self._cache.nbytes
        if self._drafting is not None:
            self._cache_bytes += self._drafting.cache.nbytes
        self._inbox = _Inbox()
        self._session = self._new_session()
        self._sampling = greedy_rows(slots)
        # The thread holds the engine only while there is work, so that an engine nobody uses any
        # more is freed with its weights; the finaliser also runs when the interpreter ends.
        self._thread = threading.Thread(
            target=_serve, args=(weakref.ref(self), self._inbox), name="gkv-engine", daemon=True
        )
        self._thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._inbox, self._thread)

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        *,
        dtype: str | None = None,
        quantize: Quantization | None = None,
        cache: CacheSpec | None = None,
        slots: int = 8,
        loop: Loop = "device",
        head: Head = "masked",
        backend: str = "auto",
        watchdog_s: float = 60.0,
        draft: str | DraftModel | None = None,
        verify: Verify = "faster",
    ) -> "Engine":
        """Load a model by registry name, local folder, GGUF file or Hugging Face id.

        ``dtype`` is that of weights and cache: by default bfloat16 on accelerators and float32 on
        CPUs, where bfloat16 is emulated. ``quantize="int8"`` rounds the weights, which makes
        steps on CPUs about twice as fast. ``draft`` is a draft model, by such a name or as it is. The
        rest is as in ``Engine``.

        Raises:
          UserError: an unknown name (the known are listed), damaged or unserved files.
        """
        from gkv_jax.models.llama import Llama
        from gkv_jax.weights.registry import load_model

        if quantize not in (None, *get_args(Quantization)):
            raise UserError(f"quantize is {quantize!r}; choose from {get_args(Quantization)}")
        if dtype is None:
            dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"

        def load(name: str) -> tuple[Llama, Params, Any]:
            loaded = load_model(name, dtype=dtype)
            model = Llama(loaded.config)
            params = model.from_checkpoint(loaded.params)
            tokenizer = loaded.tokenizer
            del loaded  # the checkpoint's layout is not needed beside the cache
            return model, params if quantize is None else jax.jit(model.quantize)(params), tokenizer

        model, params, tokenizer = load(name)
        return cls(
            model,
            params,
            tokenizer,
            cache=cache,
            slots=slots,
            loop=loop,
            head=head,
            stop_token_ids=model.config.eos_token_ids,
            backend=backend,
            watchdog_s=watchdog_s,
            draft=DraftModel(*load(draft)) if isinstance(draft, str) else draft,
            verify=verify,
        )

    @property
    def _params(self) -> Params:
        return self._weights[0]

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the weights and the cache."""
        return cache_dtype(self._params)

    @property
    def queued(self) -> int:
        """Requests that wait for a slot."""
        return len(self._inbox.waiting)

    @property
    def active(self) -> int:
        """Slots that are taken, by requests that decode or whose prompts are being read."""
        return self.slots - len(self._free_slots())

    @property
    def cache_bytes(self) -> int:
        """Bytes of the whole cache, the draft model's included."""
        return self._cache_bytes

    @property
    def closed(self) -> bool:
        """Whether requests are refused from now on: after ``close``, or without an engine thread."""
        return self._inbox.closing or not self._inbox.is_open

    @property
    def compiler(self) -> GrammarCompiler:
        """Compiles guides for this model; made on first use, so that free text needs none of it.

        Raises:
          GrammarError: the tokenizer cannot be used for guided decoding.
          UserError: the environment asks for an impossible cache limit.
        """
        with self._compiler_lock:
            if self._compiler is None:
                self._compiler = self._new_compiler()
                self._compiler.start()
            return self._compiler

    def _new_compiler(self) -> GrammarCompiler:
        info = TokenizerInfo.from_transformers(
            self.tokenizer,
            vocab_size=self.model.vocab_size,
            stop_token_ids=sorted(self._stop_token_ids),
        )
        try:
            return GrammarCompiler(info, backend=self._backend)
        except GrammarError:
            raise
        except ValueError as error:
            raise UserError(str(error)) from error

    # Requests ---------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        guide: Guide | Sequence[Guide | None] | None = None,
        sampling: Sampling | Sequence[Sampling] | None = None,
        drafts: DraftSource | Sequence[DraftSource | None] | None = None,
        backend: str | Sequence[str | None] | None = None,
        report: bool | Sequence[bool] = False,
    ) -> list[Result]:
        """Answer any number of prompts; results come in their order.

        ``guide``, ``sampling``, ``drafts``, ``backend`` (the grammar engine; the engine's own if None)
        and ``report`` (whether ``Result.report`` shall say what the cache held at the end, for which the
        loop pauses) are one for all or one for each; a draft source follows one text, so there is one for
        each. A request that cannot be served has
        ``finish_reason == "error"`` and says why; the others are not disturbed.
        """
        batch = _as_batch(prompts)
        guides = _one_each("guide", guide, len(batch))
        samplings = _one_each("sampling", sampling, len(batch))
        if drafts is not None and not isinstance(drafts, Sequence) and len(batch) > 1:
            raise UserError(
                f"drafts is one source for {len(batch)} prompts, but a source follows one text; give a "
                "list with one for each, or None"
            )
        sources = _one_each("drafts", drafts, len(batch))
        backends = _one_each("backend", backend, len(batch))
        reports = _one_each("report", report, len(batch))
        requests: list[Request] = []
        try:
            for each in zip(batch, guides, samplings, sources, backends, reports, strict=True):
                try:
                    request = self.prepare(*each)
                except (UserError, GrammarError) as error:
                    request = self._refused(error)
                else:
                    self.submit(request)
                requests.append(request)
            return [request.result() for request in requests]
        except BaseException:  # an interrupt must not leave work behind
            for request in requests:
                request.cancel()
            raise

    def stream(
        self,
        prompt: Prompt,
        *,
        guide: Guide | None = None,
        sampling: Sampling | None = None,
        drafts: DraftSource | None = None,
        backend: str | None = None,
    ) -> Stream:
        """The answer to one prompt, piece by piece. Dropping the iterator cancels the request.

        Raises:
          UserError or GrammarError: the request cannot be served (raised by the call itself).
          Exception: whatever ended the request on the way, after the pieces that came before it.
        """
        request = self.prepare(prompt, guide, sampling, drafts, backend)
        self.submit(request)
        return Stream(request)

    def warm_up(self, prompt_tokens: int | None = None) -> None:
        """Compile what requests will need, so that none of them waits for it.

        Args:
          prompt_tokens: longest prompt to prepare for, where a policy reads prompts in one piece; one
            prefill chunk if None, which is all that others need.
        """
        longest = prompt_tokens or self.spec.prefill_chunk + 1
        if not self.spec.selects(longest - 1):
            longest = min(longest, self.spec.prefill_chunk + 1)
        lengths = {min(self.spec.sinks + self.spec.window, longest)}  # the last that is never whole
        length = SHORTEST
        while length + 1 < longest:
            lengths.add(length + 1)
            length *= 2
        lengths.add(longest)
        self._compile_together(lengths)
        for length in sorted(lengths):
            reads_twice = Drafter(uses_model=self._drafting is not None)
            self._warm_up(length, Sampling(max_tokens=1), reads_twice)
        # And the loops: the narrow one has run, the others run where there are drafts.
        if self.spec.max_drafts:
            few = Sampling(max_tokens=4)
            self._warm_up(2, few, Drafter(sources={"warm-up": ScriptedDrafts((0,) * 4)}))
            if self._drafting is not None:
                self._warm_up(2, few, Drafter(uses_model=True))

    def _compile_together(self, lengths: Iterable[int]) -> None:
        """Compile the loops and what prompts of these lengths need, a program per core at a time.

        JAX finds them again when they are called with the same shapes. Those of a draft model, and
        small ones, are compiled when they are first called.
        """
        cache = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self._cache)
        widths = [1, *([self.spec.queries] if self.spec.max_drafts else [])]
        calls = {
            call.size: call
            for length in lengths
            for call in reading(
                self._params, (0,) * (length - 1), 0, model=self.model, spec=self.spec
            )
        }
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            # First those that take longest, the loops, the widest first.
            loops = [] if self.loop == "host" else widths[::-1]
            compiled = [pool.submit(self._compile_loop, cache, width) for width in loops]
            compiled += [pool.submit(call.compile, cache) for call in calls.values()]
            for each in compiled:
                each.result()

    def _compile_loop(self, cache: Cache, width: int) -> None:
        device_loop.lower(
            self._params,
            cache,
            np.zeros((self.slots, width + 4), np.int32),
            np.zeros(self.slots, np.int32),
            self._sampling,
            np.int32(0),
            model=self.model,
            spec=self.spec,
            head=self.head,
        ).compile()

    def _warm_up(self, length: int, sampling: Sampling, drafter: Drafter | None = None) -> None:
        request = Request(
            prompt=(0,) * length,
            sampling=sampling,
            stop_token_ids=frozenset(),  # nothing shall end it early
            text_stream=TextStream(self.tokenizer),
            drafter=drafter or Drafter(),
        )
        self.submit(request)
        error = request.result().error
        if error is not None:
            raise error

    def prepare(
        self,
        prompt: Prompt,
        guide: Guide | Grammar | None = None,
        sampling: Sampling | None = None,
        drafts: DraftSource | None = None,
        backend: str | None = None,
        report: bool = False,
        trace: bool = False,
    ) -> Request:
        """Check and compile everything that can be checked and compiled before a slot is taken.

        Args:
          prompt: text, messages or token ids, see ``encode``.
          guide: or what ``compiler.compile`` has made of one, which several requests may share.
          sampling: ``Sampling()`` if None.
          drafts: a source of its own.
          backend: name of the grammar engine for this request; the engine's own if None.
          report: whether ``Result.report`` shall say what the cache held at the end.
          trace: whether ``Piece.trace`` shall say how each token came to be.

        Raises:
          UserError: prompt, sampling or cache do not go together, naming the field.
          GrammarError: the guide is invalid, unserved or allows nothing.
        """
        sampling = sampling or Sampling()
        if not isinstance(sampling, Sampling):
            raise UserError(f"sampling is {sampling!r}; give a Sampling")
        if not isinstance(guide, Guide | Grammar | None):
            raise UserError(f"guide is {guide!r}; give a Guide, or a compiled Grammar")
        if isinstance(guide, Grammar) and backend is not None:
            raise UserError(
                f"backend is {backend!r}, but the guide is compiled already, for {guide.backend!r}; "
                "leave backend out"
            )
        tokens = self.encode(prompt)
        self._check_length(len(tokens))
        self._check_bias(sampling)
        return Request(
            prompt=tokens,
            sampling=sampling,
            stop_token_ids=self._stop_token_ids,
            text_stream=TextStream(self.tokenizer, sampling.stop_texts),
            grammar=self.compiler.compile(guide, backend) if isinstance(guide, Guide) else guide,
            drafter=self._new_drafter(tokens, sampling, drafts),
            wants_report=report,
            wants_trace=trace,
            cache_bytes=self._cache_bytes,
        )

    def _new_drafter(
        self, prompt: tuple[int, ...], sampling: Sampling, drafts: DraftSource | None
    ) -> Drafter:
        asked = {
            "drafts": drafts is not None,
            "sampling.prediction": sampling.prediction is not None,
            "sampling.lookup": sampling.lookup,
        }
        if self.spec.max_drafts == 0 and any(asked.values()):
            name = next(name for name, is_asked in asked.items() if is_asked)
            raise UserError(
                f"{name} is given, but cache.max_drafts is 0, so that nothing can be drafted; "
                "set it, to 7 say"
            )
        sources: dict[str, DraftSource] = {}
        if drafts is not None:
            sources["custom"] = drafts
        if sampling.prediction is not None:
            tokens = self.tokenizer.encode(
                sampling.prediction, add_special_tokens=False, verbose=False
            )
            sources["prediction"] = PredictedDrafts(tokens)
        if sampling.lookup:
            sources["lookup"] = LookupDrafts(prompt)
        uses_model = sampling.draft_model and self._drafting is not None
        return Drafter(sampling.jump, sources, uses_model=uses_model)

    def submit(self, request: Request) -> None:
        """Queue a prepared request. Read ``request.pieces()`` or wait for ``request.result()``.

        Raises:
          EngineClosedError: after ``close``.
          UserError: the request was submitted before.
        """
        if request.submitted:
            raise UserError("request was submitted before; prepare a new one")
        request.submitted = time.perf_counter()
        self._inbox.put(request)

    def share_prefix(self, prompt: Prompt) -> int:
        """Read a prompt's beginning once, for all later prompts that begin with the same tokens.

        Such a prompt is read from there on (``stats["prefix_tokens"]`` says how much was saved). A part
        of the prefix is shared, too, where the cache of a part is part of the cache (not in int8, not
        under a ``decode`` policy, not beyond a model's own window). A chat prefix should hold whole
        messages, such as the system prompt; it is read without the template's opening of an answer.
        The last eight are held, each in a row of the cache's size. Prompts that a score policy reads
        whole share nothing: what it keeps of them depends on their ends.

        Returns:
          Tokens in the prefix. With ``CacheSpec.sinks`` of as many, it is never evicted, either.

        Raises:
          UserError: the prefix is invalid, or longer than the cache holds without evicting.
          Exception: whatever kept it from being read.
        """
        tokens = self.encode(prompt, answer=False)
        self._weights[1].check(len(tokens))
        self._check_length(len(tokens) + 1)
        # A request's last prompt token is its first step's input and not in the cache before.
        request = Request(
            prompt=(*tokens, tokens[-1]),
            sampling=Sampling(max_tokens=1),
            stop_token_ids=self._stop_token_ids,
            text_stream=TextStream(self.tokenizer),
            shares_prefix=True,
        )
        self.submit(request)
        error = request.result().error
        if error is not None:
            raise error
        return len(tokens)

    # Weights and lifetime -----------------------------------------------------------------------

    def update_params(self, params: Params) -> None:
        """Use new weights from the next loop run on, without a compile. Shared prefixes are forgotten.

        A draft model stays as it is: it may guess worse, and the output is that of the new weights.

        Raises:
          UserError: structure, shapes or dtypes differ from the present parameters.
        """

        def signature(tree: Params) -> Any:
            return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)

        if signature(params) != signature(self._params):
            raise UserError(
                "params differ in structure, shape or dtype from the engine's; make a new Engine for a "
                "different model, and where the engine's weights are int8, give model.quantize(params)"
            )
        self._weights = params, PrefixStore(self.spec, self.model)
        self._inbox.reload = True

    def close(self) -> None:
        """End what is running with ``EngineClosedError`` and wait for the engine thread's end."""
        self._finalizer()
        with self._compiler_lock:
            if self._compiler is not None:
                self._compiler.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Before a slot is taken -----------------------------------------------------------------------

    def encode(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        answer: bool = True,
    ) -> tuple[int, ...]:
        """The tokens of a prompt, as ``prepare`` reads it.

        Args:
          prompt: a text, with the special tokens that the tokenizer puts around it; chat messages, in
            the tokenizer's chat template; or token ids, taken as they are.
          tools: functions that the chat template shall describe to the model, as in OpenAI's API.
          answer: whether a chat ends with the template's opening of an answer.

        Raises:
          UserError: no prompt, or one that the tokenizer or its template does not take.
        """
        if not isinstance(prompt, Sequence):
            raise UserError(f"prompt is {prompt!r}; give a string, a list of messages or token ids")
        if not prompt:
            raise UserError("prompt is empty; give at least one character, message or token id")
        is_chat = not isinstance(prompt, str) and not _is_id(prompt[0])
        if tools and not is_chat:
            raise UserError("tools are given, but prompt is no chat; give a list of messages")
        if isinstance(prompt, str):
            # Not verbose: a text longer than the trained length is no mistake here.
            tokens = self.tokenizer.encode(prompt, verbose=False)
        elif is_chat:
            tokens = self._encode_chat(cast(Sequence[Mapping[str, Any]], prompt), tools, answer)
        else:
            tokens = list(prompt)
            wrong = [t for t in tokens if not _is_id(t) or not 0 <= t < self.model.vocab_size]
            if wrong:
                raise UserError(
                    f"prompt holds {wrong[0]!r}, which is no token id; they are integers from 0 to "
                    f"{self.model.vocab_size - 1}"
                )
        if not tokens:
            raise UserError("prompt has no tokens; give at least one character or message")
        if max(tokens) >= self.model.vocab_size:
            raise UserError(
                f"prompt holds token {max(tokens)}, beyond the model's {self.model.vocab_size}; "
                "tokenizer and model do not belong together"
            )
        return tuple(map(int, tokens))

    def _encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        answer: bool,
    ) -> list[int]:
        import jinja2

        if not self.tokenizer.chat_template:
            raise UserError(
                "prompt is a chat, but the tokenizer has no chat template; give a string"
            )
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=answer,
                tokenize=True,
                return_dict=False,
                tokenizer_kwargs={"verbose": False},
            )
        except (jinja2.TemplateError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"prompt: the chat template refuses the messages ({error}); each needs "
                "'role' and 'content'"
            ) from error

    def _check_spec(self) -> None:
        spec, trained = self.spec, self.model.max_positions
        self._max_tokens = spec.longest_text(trained)
        check_layers(spec, self.model)
        check_dtype(spec.dtype, jax.devices()[0].platform)
        if spec.max_tokens is None and spec.total > trained:
            raise UserError(
                f"cache holds {spec.total} tokens, more than the {trained} positions "
                "that the model was trained for; use a smaller window"
            )

    def _check_length(self, length: int) -> None:
        trained = self.model.max_positions
        problem = None
        if self.spec.max_tokens is not None:
            if length > self._max_tokens:
                problem = (
                    f"policy {self.spec.policy_name!r} has room for {self._max_tokens} (the cache holds "
                    f"{self.spec.max_tokens}, the model was trained for {trained})"
                )
        elif self.spec.selects(length - 1) and length > trained:
            problem = (
                f"policy {self.spec.policy_name!r} reads it in one piece and the model was trained "
                f"for {trained} positions"
            )
        elif length > self._max_tokens:
            problem = (
                f"policy {self.spec.policy_name!r} keeps tokens at their positions in the text and "
                f"the model was trained for {trained}"
            )
        if problem:
            raise PromptTooLongError(
                f"prompt has {length} tokens, but {problem}; shorten it, or use policy 'window'"
            )

    def _check_bias(self, sampling: Sampling) -> None:
        token = max(dict(sampling.logit_bias), default=0)
        if token >= self.model.vocab_size:
            raise UserError(
                f"sampling.logit_bias names token {token}, beyond the model's {self.model.vocab_size}"
            )

    def _refused(self, error: Exception) -> Request:
        request = Request((), Sampling(), frozenset(), TextStream(self.tokenizer))
        request.finish("error", error)
        return request

    # The engine thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        """Serve until nothing is left to do."""
        inbox = self._inbox
        while not inbox.closing and (
            inbox.waiting or inbox.reading is not None or self._session.any_active
        ):
            try:
                self._drop_cancelled()
                self._read_on()
                if self._session.any_active:
                    self._run()
            except Exception as error:
                # The device program failed. What was running is lost, and the cache with it.
                self._end_all(error)
                del self._cache  # first, or there may be no room for the new one
                self._session, self._cache = self._new_session(), self._new_cache()
                if self._drafting is not None:
                    self._drafting.clear()
        if inbox.closing:
            self._end_all(_closed())

    def _end_all(self, error: Exception) -> None:
        """End what is being read and what decodes, and the session with it."""
        if (reading := self._inbox.reading) is not None:
            self._inbox.reading = None
            reading.request.finish("error", error)
        self._session.fail_all(error)
        self._session.close()

    def _run(self) -> None:
        """Decode until the session wants something else."""
        self._inbox.reload = False
        session, drafting = self._session, self._drafting
        if self.loop == "host":
            self._cache = host_loop(
                self._params,
                self._cache,
                session,
                self._sampling,
                model=self.model,
                spec=self.spec,
                head=self.head,
                drafting=drafting,
            )
        else:
            self._run_on_device(session, drafting)
        self._report_ended()
        if session.broken:
            session.close()
            self._session = self._new_session()

    def _run_on_device(self, session: Session, drafting: Drafting | None) -> None:
        answer, positions = session.inputs(), session.positions()
        handle = np.int32(session.handle)
        if session.program != "drafting":
            self._cache = device_loop(
                self._params,
                self._cache,
                answer,
                positions,
                self._sampling,
                handle,
                model=self.model,
                spec=self.spec,
                head=self.head,
            )
        else:
            assert drafting is not None
            self._cache, drafting.cache = drafting_loop(
                self._params,
                self._cache,
                drafting.params,
                drafting.cache,
                answer,
                positions,
                self._sampling,
                drafting.target_ids,
                handle,
                model=self.model,
                spec=self.spec,
                draft_model=drafting.model,
                draft_spec=drafting.spec,
                head=self.head,
            )
        jax.block_until_ready(self._cache)

    def _report_ended(self) -> None:
        """Read the rows of requests that want a report, before others are seated there."""
        for ended in self._session.take_ended():
            try:
                ended.request.report = report_of(
                    self._cache, ended.slot, ended.position, spec=self.spec, model=self.model
                )
            except Exception as error:  # of this request alone
                ended.request.finish("error", error)
            else:
                ended.request.finish(ended.reason)

    def _drop_cancelled(self) -> None:
        """End what was cancelled before it decoded."""
        inbox = self._inbox
        for request in [r for r in list(inbox.waiting) if r.cancelled]:
            inbox.waiting.remove(request)
            request.finish("error", request.cancellation)
        if inbox.reading is not None and inbox.reading.request.cancelled:
            request, inbox.reading = inbox.reading.request, None
            request.finish("error", request.cancellation)

    def _read_on(self) -> None:
        """Read waiting prompts: all of them while nobody decodes, else for one turn.

        A turn reads as many tokens as a chunk has, short prompts together or a part of a long one, and
        one call of the device at least. Then it is the turn of the decode loop, for as long.
        """
        inbox, session = self._inbox, self._session
        if session.any_active and time.perf_counter() < inbox.next_turn:
            return
        began, room, has_read = time.perf_counter(), self.spec.longest_chunk, False
        while not inbox.closing and (reading := self._present_reading()) is not None:
            if session.any_active and has_read and reading.size > room:
                break
            room, has_read = room - reading.size, True
            self._go_on(reading)
            self._drop_cancelled()
        if has_read:
            inbox.next_turn = 2 * time.perf_counter() - began

    def _present_reading(self) -> "_Reading | None":
        """What is being read: if nothing, the first of those that wait, where a slot is free for it."""
        inbox = self._inbox
        while inbox.reading is None and inbox.waiting and (free := self._free_slots()):
            request = inbox.waiting[0]
            request.admitted = time.perf_counter()
            inbox.reading = _Reading(free[0], request, self._reads(free[0], request))
            inbox.waiting.popleft()
            self._go_on(inbox.reading)  # to its first call, or to its end if it needs none
        return inbox.reading

    def _go_on(self, reading: "_Reading") -> None:
        """Read a prompt up to the next call of the device, or to its end."""
        try:
            reading.size = next(reading.calls)
        except StopIteration:
            self._inbox.reading = None
        except Exception as error:  # of this request alone, unless it took the cache with it
            self._inbox.reading = None
            reading.request.finish("error", error)
            caches = self._cache, self._drafting and self._drafting.cache
            if any(leaf.is_deleted() for leaf in jax.tree.leaves(caches)):
                raise
            jax.block_until_ready(caches)

    def _reads(self, slot: int, request: Request) -> Iterator[int]:
        """Read a prompt, all but its last token: that one is the first step's input. Then seat it.

        Yields before each call of the device how many tokens it computes. In between, the decode loop
        may run: it writes nothing into the rows of slots without a request.
        """
        spec, model, tokens = self.spec, self.model, request.prompt[:-1]
        params, prefixes = self._weights
        self._cache = reset_row(self._cache, np.int32(slot), spec=spec, model=model)
        self._cache, start = prefixes.begin(self._cache, slot, tokens)
        request.prefix_tokens = start
        for call in reading(params, tokens, slot, model=model, spec=spec, start=start):
            yield call.size
            # Kept once it is there: a call that fails leaves a cache that says that it is lost.
            self._cache = jax.block_until_ready(call.run(self._cache))
        if self._drafting is not None and request.drafter.uses_model:
            yield from self._drafting.reads(slot, tokens)
        if request.shares_prefix:
            self._cache = prefixes.add(tokens, self._cache, slot)
        set_row(self._sampling, slot, request.sampling)
        self._session.admit(slot, request)

    def _free_slots(self) -> list[int]:
        reading = self._inbox.reading
        taken = None if reading is None else reading.slot
        return [slot for slot in self._session.free_slots if slot != taken]

    def _new_drafting(self, draft: DraftModel | None, slots: int) -> Drafting | None:
        if draft is None:
            return None
        if not isinstance(draft, DraftModel):
            raise UserError(
                f"draft is {draft!r}; give a DraftModel, or its name to Engine.from_pretrained"
            )
        draft.check(self.model, self.tokenizer)
        return Drafting(draft, self.spec, slots)

    def _new_cache(self) -> Cache:
        return init_cache(self.spec, self.model, self.slots, self.dtype)

    def _new_session(self) -> Session:
        inbox, limit = self._inbox, self._max_tokens
        session = Session(
            self.spec,
            self.slots,
            self.model.vocab_size,
            max_tokens=None if math.isinf(limit) else int(limit),
            watchdog_s=self._watchdog_s,
            wants_pause=lambda: inbox.wants_attention(bool(session.free_slots)),
            verify=self._verify,
            draft_limit=0 if self._drafting is None else self._drafting.limit,
        )
        return session


@dataclasses.dataclass
class _Reading:
    """A request whose prompt is being read into the row of its slot.

    Attributes:
      slot: free for the session until the request is seated there.
      request: not cancelled when it was last looked at.
      calls: reads on up to the next call of the device.
      size: tokens that this next call computes.
    """

    slot: int
    request: Request
    calls: Iterator[int]
    size: int = 0


class _Inbox:
    """What the engine thread has to turn to. The loop's callbacks look at it, lock-free.

    Other threads write ``waiting``, ``closing`` and ``reload``; the engine thread the rest.
    """

    def __init__(self) -> None:
        self.waiting: collections.deque[Request] = collections.deque()
        self.closing = False
        self.reload = False
        self.wake = threading.Event()
        self.is_open = True
        self.reading: _Reading | None = None
        self.next_turn = 0.0
        """``time.perf_counter`` at which prompts are read on."""
        self._lock = threading.Lock()  # between put and drain only, never held during a wait

    def put(self, request: Request) -> None:
        with self._lock:
            if not self.is_open:
                raise _closed()
            self.waiting.append(request)
        self.wake.set()

    def drain(self, error: Exception) -> None:
        """Take no more requests, and end those that wait."""
        with self._lock:
            self.is_open = False
        while self.waiting:
            self.waiting.popleft().finish("error", error)

    def wants_attention(self, slot_is_free: bool) -> bool:
        """Whether the loop should pause for the engine thread."""
        if self.closing or self.reload:
            return True
        reading = self.reading
        if reading is not None and reading.request.cancelled:
            return True
        # A copy: other threads append while this one looks.
        if self.waiting and any(r.cancelled for r in list(self.waiting)):
            return True
        has_turn = reading is not None or (bool(self.waiting) and slot_is_free)
        return has_turn and time.perf_counter() >= self.next_turn


def _serve(engine_ref: "weakref.ref[Engine]", inbox: _Inbox) -> None:
    """The engine thread. Whatever ends it, no request is left waiting."""
    error: Exception = _closed()
    try:
        while not inbox.closing:
            inbox.wake.wait()
            inbox.wake.clear()
            engine = engine_ref()
            if engine is None:
                return
            engine._work()
            del engine
    except Exception as failure:
        error = failure
    finally:
        inbox.drain(error)


def _stop(inbox: _Inbox, thread: threading.Thread) -> None:
    inbox.closing = True
    inbox.wake.set()
    if threading.current_thread() is not thread:
        thread.join()


def _closed() -> EngineClosedError:
    return EngineClosedError("the engine was closed; make a new one")


def _is_id(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if not isinstance(prompts, Sequence):
        raise UserError(f"prompts is {prompts!r}; give a string, messages, or a list of those")
    is_one = isinstance(prompts, str) or (
        len(prompts) > 0 and (isinstance(prompts[0], Mapping) or _is_id(prompts[0]))
    )
    return cast(list[Prompt], [prompts] if is_one else list(prompts))


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [value] * count
    if len(value) != count:
        raise UserError(f"{name} has {len(value)} entries for {count} prompts; give one or {count}")
    return list(value)
