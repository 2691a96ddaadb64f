"""The engine: a model, slots that requests queue for, and what callers do with them."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from gkv_jax.cache import CacheSpec, cache_dtype, check_layers
from gkv_jax.cache.storage import check_dtype
from gkv_jax.draft_model import Drafting, DraftModel
from gkv_jax.drafts import DraftSource, LookupDrafts, PredictedDrafts
from gkv_jax.drafts.drafter import Drafter
from gkv_jax.drafts.widths import Verify
from gkv_jax.errors import UserError
from gkv_jax.models.protocol import Decoder, Params
from gkv_jax.placement import difference, has_deleted
from gkv_jax.prompts import Prompt, PromptReader, as_batch
from gkv_jax.request import Request, Result, Stream
from gkv_jax.sampling import Sampling
from gkv_jax.scheduler import Loop, Scheduler
from gkv_jax.step import Head
from gkv_jax.text import TextStream
from gkv_jax.warm_up import warm_up
from grammar_host import Grammar, GrammarCompiler, GrammarError, Guide, TokenizerInfo
from grammar_host.backends import check_backend_name
from grammar_host.backends.base import Backend

Quantization = Literal["int8"]
"""How weights are rounded when a model is loaded: ``int8`` with a scale per output."""


class Engine:
    """Guided generation with a bounded cache.

    One engine thread owns the device. Requests get free slots in the order in which they came, and
    their prompts are read chunk by chunk. While others decode, reading and decoding take turns: so a
    stream waits for a chunk at most, and a long prompt gets half of the time at least.
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
        self.slots, self.loop, self.head = slots, loop, head
        self._backend = backend
        self._compiler: GrammarCompiler | None = None
        self._compiler_lock = threading.Lock()
        stops = {*stop_token_ids, tokenizer.eos_token_id} - {None}
        self._stop_token_ids = frozenset(t for t in stops if 0 <= t < model.vocab_size)
        self._prompts = PromptReader(tokenizer, model, self.spec)
        self._scheduler = Scheduler(
            model,
            params,
            self.spec,
            slots=slots,
            loop=loop,
            head=head,
            drafting=self._new_drafting(draft),
            verify=verify,
            watchdog_s=watchdog_s,
        )

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
        """Load a model by registry name, local folder, converted folder, GGUF file or Hugging Face id.

        ``dtype`` is that of weights and cache: by default bfloat16; on CPUs, where bfloat16 is
        emulated, float32; on NVIDIA GPUs before Ampere (T4, V100) float16, and float32 for families
        that it is too narrow for. ``quantize="int8"`` rounds the weights, layer by layer, which makes
        steps on CPUs about twice as fast. ``draft`` is a draft model, by such a name or as it is. The
        rest is as in ``Engine``.

        Raises:
          UserError: an unknown name (the known are listed), damaged or unserved files.
        """
        from gkv_jax.weights.orbax import is_quantized
        from gkv_jax.weights.parameters import quantize_in_turn
        from gkv_jax.weights.registry import load_model

        if quantize not in (None, *get_args(Quantization)):
            raise UserError(f"quantize is {quantize!r}; choose from {get_args(Quantization)}")

        def load(name: str) -> tuple[Decoder, Params, Any, Sequence[int]]:
            loaded = load_model(name, dtype=dtype)
            model, params = loaded.model, loaded.params
            if quantize is not None and not is_quantized(params):
                params = quantize_in_turn(model, params)
            return model, params, loaded.tokenizer, model.config.eos_token_ids

        model, params, tokenizer, stop_token_ids = load(name)
        return cls(
            model,
            params,
            tokenizer,
            cache=cache,
            slots=slots,
            loop=loop,
            head=head,
            stop_token_ids=stop_token_ids,
            backend=backend,
            watchdog_s=watchdog_s,
            draft=DraftModel(*load(draft)[:3]) if isinstance(draft, str) else draft,
            verify=verify,
        )

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype in which the model computes, and of the cache."""
        return cache_dtype(self._scheduler.params, self.model)

    @property
    def shapes(self) -> tuple[str, ...]:
        """What all weights are, the draft model's included: programs are compiled for it."""
        trees, drafting = [self._scheduler.params], self._scheduler.drafting
        specs: list[Any] = [self.model]
        if drafting is not None:
            trees.append(drafting.params)
            specs += [drafting.model, drafting.spec]
        shapes = [jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), tree) for tree in trees]
        return tuple(map(repr, [*specs, *shapes]))

    @property
    def queued(self) -> int:
        """Requests that wait for a slot."""
        return len(self._scheduler.inbox.waiting)

    @property
    def active(self) -> int:
        """Slots that are taken, by requests that decode or whose prompts are being read."""
        return self._scheduler.active

    @property
    def cache_bytes(self) -> int:
        """Bytes of the whole cache, the draft model's included."""
        return self._scheduler.cache_bytes

    @property
    def closed(self) -> bool:
        """Whether requests are refused from now on: after ``close``, or after a ``failure``."""
        return self._scheduler.inbox.closed

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine thread, if it was not ``close``: requests are refused since then.

        A device program that fails is none, as long as there is room for a new cache.
        """
        return self._scheduler.inbox.failure

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
        batch = as_batch(prompts)
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
        warm_up(self._scheduler, self.tokenizer, prompt_tokens)

    def prepare(
        self,
        prompt: Prompt,
        guide: Guide | Grammar | None = None,
        sampling: Sampling | None = None,
        drafts: DraftSource | None = None,
        backend: str | None = None,
        report: bool = False,
        trace: bool = False,
        marks: Mapping[int, str] | None = None,
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
          marks: from special tokens to what they write; others write nothing.

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
        self._prompts.check_length(len(tokens))
        self._check_bias(sampling)
        return Request(
            prompt=tokens,
            sampling=sampling,
            stop_token_ids=self._stop_token_ids,
            text_stream=TextStream(self.tokenizer, sampling.stop_texts, marks),
            grammar=self.compiler.compile(guide, backend) if isinstance(guide, Guide) else guide,
            drafter=self._new_drafter(tokens, sampling, drafts),
            wants_report=report,
            wants_trace=trace,
            cache_bytes=self.cache_bytes,
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
        uses_model = sampling.draft_model and self._scheduler.drafting is not None
        return Drafter(sampling.jump, sources, uses_model=uses_model)

    def submit(self, request: Request) -> None:
        """Queue a prepared request. Read ``request.pieces()`` or wait for ``request.result()``.

        Raises:
          EngineClosedError: after ``close``, or after a ``failure``.
          UserError: the request was submitted before.
        """
        self._scheduler.inbox.put(request)

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
        self._scheduler.prefixes.check(len(tokens))
        self._prompts.check_length(len(tokens) + 1)
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

        They are used as they are, and copied, from device to device, only if they lie elsewhere than the
        present ones. So a training step that donates its parameters takes them from the engine, too: give
        it the new ones after every such step.

        A draft model stays as it is: it may guess worse, and the output is that of the new weights.

        Args:
          params: in the model's layout, or the module that ``trainable`` made of it; of a model made by
            ``from_nnx`` or ``from_linen``, also the module or its state, or the variables.

        Raises:
          UserError: structure, shapes or dtypes differ from the present parameters, or some are deleted.
        """
        source = getattr(self.model, "params_of", None)  # of a user's own model
        if source is not None:
            params = source(params)
        elif callable(own := getattr(params, "params", None)):  # of one that ``trainable`` made
            params = own()
        if has_deleted(params):
            raise UserError(
                "params hold arrays that have been deleted, as by a training step that donates them; give "
                "those that the step returned"
            )
        if differs := difference(params, self._scheduler.params):
            raise UserError(
                f"params differ from the engine's: {differs}. Give all of them in the model's layout (of a "
                "module made by trainable, itself or module.params(); where the engine's weights are int8, "
                "model.quantize(params)), and make a new Engine for a different model"
            )
        self._scheduler.use(params)

    def close(self) -> None:
        """End what is running with ``EngineClosedError`` and wait for the engine thread's end."""
        self._scheduler.close()
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
        template: Mapping[str, Any] | None = None,
        answer: bool = True,
    ) -> tuple[int, ...]:
        """The tokens of a prompt, as ``prepare`` reads it.

        Args:
          prompt: a text, with the special tokens that the tokenizer puts around it; chat messages, in
            the tokenizer's chat template; or token ids, taken as they are.
          tools: functions that the chat template shall describe to the model, as in OpenAI's API.
          template: variables for the chat template, such as ``{"enable_thinking": False}``; one that it
            does not read changes nothing.
          answer: whether a chat ends with the template's opening of an answer.

        Raises:
          UserError: no prompt, or one that the tokenizer or its template does not take.
        """
        return self._prompts.encode(prompt, tools=tools, template=template, answer=answer)

    def _check_spec(self) -> None:
        spec, trained = self.spec, self.model.max_positions
        check_layers(spec, self.model)
        check_dtype(spec.dtype, jax.devices()[0].platform)
        if spec.max_tokens is None and spec.total > trained:
            raise UserError(
                f"cache holds {spec.total} tokens, more than the {trained} positions "
                "that the model was trained for; use a smaller window"
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

    def _new_drafting(self, draft: DraftModel | None) -> Drafting | None:
        if draft is None:
            return None
        if not isinstance(draft, DraftModel):
            raise UserError(
                f"draft is {draft!r}; give a DraftModel, or its name to Engine.from_pretrained"
            )
        draft.check(self.model, self.tokenizer)
        return Drafting(draft, self.spec, self.slots)


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [value] * count
    if len(value) != count:
        raise UserError(f"{name} has {len(value)} entries for {count} prompts; give one or {count}")
    return list(value)
