"""The engine: a fixed number of slots, requests that queue for them, and the loop that serves them."""

import collections
import math
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
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
from gkv_jax.request import Request, RequestCancelled, Result, Stream
from gkv_jax.sampling import Sampling, greedy_rows, set_row
from gkv_jax.step import Head
from gkv_jax.text import TextStream
from grammar_host import GrammarCompiler, GrammarError, Guide, TokenizerInfo
from grammar_host.backends import check_backend_name
from grammar_host.backends.base import Backend

Prompt = str | Sequence[Mapping[str, Any]]
"""A text to continue, or chat messages ``{"role": ..., "content": ...}``."""

Loop = Literal["device", "host"]

Quantization = Literal["int8"]
"""How weights are rounded when a model is loaded: ``int8`` with a scale per output."""


class Engine:
    """Guided generation with a bounded cache.

    One engine thread owns the device: it admits waiting requests to free slots, prefills them, and
    runs the decode loop until there is something else to do. Any thread may submit requests.

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
        for length in sorted(lengths | {longest}):
            reads_twice = Drafter(uses_model=self._drafting is not None)
            self._warm_up(length, Sampling(max_tokens=1), reads_twice)
        # And the loops: the narrow one has run, the others run where there are drafts.
        if self.spec.max_drafts:
            few = Sampling(max_tokens=4)
            self._warm_up(2, few, Drafter(sources={"warm-up": ScriptedDrafts((0,) * 4)}))
            if self._drafting is not None:
                self._warm_up(2, few, Drafter(uses_model=True))

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
        guide: Guide | None = None,
        sampling: Sampling | None = None,
        drafts: DraftSource | None = None,
        backend: str | None = None,
        report: bool = False,
    ) -> Request:
        """Check and compile everything that can be checked and compiled before a slot is taken.

        ``backend`` names the grammar engine for this request; the engine's own if None. ``report`` asks
        for ``Result.report``.

        Raises:
          UserError: prompt, sampling or cache do not go together, naming the field.
          GrammarError: the guide is invalid, unserved or allows nothing.
        """
        sampling = sampling or Sampling()
        for name, value, kind in (("guide", guide, Guide), ("sampling", sampling, Sampling)):
            if value is not None and not isinstance(value, kind):
                raise UserError(f"{name} is {value!r}; give a {kind.__name__}")
        tokens = self._encode(prompt)
        self._check_length(len(tokens))
        return Request(
            prompt=tokens,
            sampling=sampling,
            stop_token_ids=self._stop_token_ids,
            text_stream=TextStream(self.tokenizer, sampling.stop_texts),
            grammar=None if guide is None else self.compiler.compile(guide, backend),
            drafter=self._new_drafter(tokens, sampling, drafts),
            wants_report=report,
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
        tokens = self._encode(prompt, answer=False)
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

    def _encode(self, prompt: Prompt, *, answer: bool = True) -> tuple[int, ...]:
        if not isinstance(prompt, Sequence):
            raise UserError(f"prompt is {prompt!r}; give a string or a list of messages")
        if not prompt:
            raise UserError("prompt is empty; give at least one character or message")
        if isinstance(prompt, str):
            # Not verbose: a text longer than the trained length is no mistake here.
            tokens = self.tokenizer.encode(prompt, verbose=False)
        else:
            tokens = self._encode_chat(prompt, answer)
        if not tokens:
            raise UserError("prompt has no tokens; give at least one character or message")
        if max(tokens) >= self.model.vocab_size:
            raise UserError(
                f"prompt holds token {max(tokens)}, beyond the model's {self.model.vocab_size}; "
                "tokenizer and model do not belong together"
            )
        return tuple(tokens)

    def _encode_chat(self, messages: Sequence[Mapping[str, Any]], answer: bool) -> list[int]:
        import jinja2

        if not self.tokenizer.chat_template:
            raise UserError(
                "prompt is a chat, but the tokenizer has no chat template; give a string"
            )
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
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

    def _refused(self, error: Exception) -> Request:
        request = Request((), Sampling(), frozenset(), TextStream(self.tokenizer))
        request.finish("error", error)
        return request

    # The engine thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        """Serve until nothing is left to do."""
        while not self._inbox.closing and (self._inbox.waiting or self._session.any_active):
            try:
                self._admit_waiting()
                if self._session.any_active:
                    self._run()
            except Exception as error:
                # The device program failed. What was running is lost, and the cache with it.
                self._session.fail_all(error)
                self._session.close()
                del self._cache  # first, or there may be no room for the new one
                self._session, self._cache = self._new_session(), self._new_cache()
                if self._drafting is not None:
                    self._drafting.clear()
        if self._inbox.closing:
            self._session.fail_all(_closed())
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

    def _admit_waiting(self) -> None:
        waiting = self._inbox.waiting
        for request in [r for r in list(waiting) if r.cancelled]:
            waiting.remove(request)
            request.finish("error", RequestCancelled("the request was cancelled"))
        for slot in self._session.free_slots:
            if not waiting:
                return
            request = waiting.popleft()
            request.admitted = time.perf_counter()
            try:
                self._prefill(slot, request)
                set_row(self._sampling, slot, request.sampling)
                self._session.admit(slot, request)
            except Exception as error:  # of this request alone, unless it took the cache with it
                request.finish("error", error)
                caches = self._cache, self._drafting and self._drafting.cache
                if any(leaf.is_deleted() for leaf in jax.tree.leaves(caches)):
                    raise

    def _prefill(self, slot: int, request: Request) -> None:
        """Read a prompt, all but its last token: that one is the first step's input."""
        spec, model, tokens = self.spec, self.model, request.prompt[:-1]
        params, prefixes = self._weights
        self._cache = reset_row(self._cache, np.int32(slot), spec=spec, model=model)
        self._cache, start = prefixes.begin(self._cache, slot, tokens)
        request.prefix_tokens = start
        for cache in reading(
            params, self._cache, tokens, slot, model=model, spec=spec, start=start
        ):
            self._cache = cache
            self._check_wanted(request)
        if self._drafting is not None and request.drafter.uses_model:
            for _ in self._drafting.reads(slot, tokens):
                self._check_wanted(request)
        if request.shares_prefix:
            self._cache = prefixes.add(tokens, self._cache, slot)

    def _check_wanted(self, request: Request) -> None:
        if request.cancelled or self._inbox.closing:
            raise RequestCancelled("the request was cancelled while its prompt was read")

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


class _Inbox:
    """What other threads leave for the engine thread. The loop's callbacks look at it, lock-free."""

    def __init__(self) -> None:
        self.waiting: collections.deque[Request] = collections.deque()
        self.closing = False
        self.reload = False
        self.wake = threading.Event()
        self._open = True
        self._lock = threading.Lock()  # between put and drain only, never held during a wait

    def put(self, request: Request) -> None:
        with self._lock:
            if not self._open:
                raise _closed()
            self.waiting.append(request)
        self.wake.set()

    def drain(self, error: Exception) -> None:
        """Take no more requests, and end those that wait."""
        with self._lock:
            self._open = False
        while self.waiting:
            self.waiting.popleft().finish("error", error)

    def wants_attention(self, slot_is_free: bool) -> bool:
        """Whether the loop should pause for the engine thread."""
        if self.closing or self.reload:
            return True
        # A copy: other threads append while this one looks.
        return bool(self.waiting) and (slot_is_free or any(r.cancelled for r in list(self.waiting)))


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


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if not isinstance(prompts, Sequence):
        raise UserError(f"prompts is {prompts!r}; give a string, messages, or a list of those")
    is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Mapping))
    return cast(list[Prompt], [prompts] if is_one else list(prompts))


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [value] * count
    if len(value) != count:
        raise UserError(f"{name} has {len(value)} entries for {count} prompts; give one or {count}")
    return list(value)
