"""Drafts through the engine: whatever their source, the output is that without them."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gkv_jax import CacheSpec, DraftModel, Engine, Guide, Sampling, ScriptedDrafts, UserError
from gkv_jax.bridge import GrammarTimeout, _FillWorker
from gkv_jax.decode import device_loop, drafting_loop
from gkv_jax.models.llama import Llama
from gkv_jax.request import RequestCancelled
from grammar_host.backends.scripted import Script, ScriptedBackend
from tests.gkv_jax.tiny import STOP, byte_tokenizer, random_params, text_config

CONFIG = text_config()
MODEL = Llama(CONFIG)
PARAMS = random_params(CONFIG)
TOKENIZER = byte_tokenizer()
SPEC = CacheSpec(sinks=4, window=60, max_drafts=3, prefill_chunk=32)
SCHEMA = Guide.json_schema(
    {
        "type": "object",
        "properties": {
            "identifier": {"type": "integer"},
            "colour": {"enum": ["red", "reddish brown", "green"]},
            "tags": {"type": "array", "items": {"const": "a long constant"}, "maxItems": 2},
        },
        "required": ["identifier", "colour", "tags"],
        "additionalProperties": False,
    },
    max_whitespace=0,
)
PROMPT = '{"identifier": 7, "colour": "red", "tags": ["a long constant"]} and once more: '
WORK: list[tuple[str, Guide | None, dict[str, Any]]] = [
    (PROMPT, SCHEMA, {"max_tokens": 120}),
    (PROMPT, SCHEMA, {"max_tokens": 120, "temperature": 1.2, "seed": 3}),
    ("Free text", None, {"max_tokens": 40, "temperature": 0.7, "seed": 1}),
    ("abcabcabcabc", Guide.regex("(abc)+"), {"max_tokens": 30}),
    ("x", Guide.choice(["yes, of course", "yes, perhaps", "no"]), {"max_tokens": 30}),
]
WAYS: list[dict[str, Any]] = [
    {},
    {"lookup": True},
    {"prediction": '{"identifier":12,"colour":"reddish brown","tags":[]}'},
    {"lookup": True, "jump": "off"},
    {"lookup": True, "prediction": "abcabcabc", "draft_model": False},
]

make = functools.partial(Engine, MODEL, PARAMS, TOKENIZER, cache=SPEC, slots=3, verify="always")


def run(engine: Engine, ways: list[dict[str, Any]], drafts: Any = None) -> list[Any]:
    """``WORK``, the first with the first of ``ways`` of drafting, and so on."""
    return engine.generate(
        [prompt for prompt, _, _ in WORK],
        guide=[guide for _, guide, _ in WORK],
        sampling=[Sampling(**o, **w) for (_, _, o), w in zip(WORK, ways, strict=True)],
        drafts=drafts,
    )


def outcome(results: list[Any]) -> list[Any]:
    return [(r.tokens, r.text, r.finish_reason, r.error) for r in results]


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    """``WORK`` in an engine that cannot draft."""
    spec = CacheSpec(sinks=4, window=60, prefill_chunk=32)
    with make(cache=spec) as engine:
        return outcome(run(engine, [{"jump": "off"}] * len(WORK)))


def noisy(params: Any, scale: float) -> Any:
    """Parameters that make nearly the same model."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: leaf + jnp.asarray(rng.normal(0, scale, leaf.shape), leaf.dtype), params
    )


def pruned(params: Any, rows: np.ndarray) -> Any:
    return {**params, "head": params["head"][rows]}


PRUNED = np.array([STOP, *range(20, 200)])
DRAFT_MODELS = {
    "itself": DraftModel(MODEL, PARAMS, TOKENIZER),
    "nearly itself": DraftModel(MODEL, noisy(PARAMS, 0.05), TOKENIZER),
    "a smaller cache": DraftModel(
        MODEL, PARAMS, TOKENIZER, CacheSpec(sinks=2, window=11, max_drafts=3, prefill_chunk=32)
    ),
    "pruned": DraftModel(MODEL, pruned(PARAMS, PRUNED), TOKENIZER, target_ids=PRUNED),
}


@pytest.fixture(scope="module", params=["device", "host"])
def drafting(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with make(loop=request.param, draft=DRAFT_MODELS["nearly itself"]) as engine:
        yield engine


def test_every_source_in_a_mixed_batch(drafting: Engine, plain: list[Any]) -> None:
    """Each request with another way of drafting, the ways turned round; both drivers."""
    sources = set()
    for turn in range(len(WAYS)):
        results = run(drafting, WAYS[turn:] + WAYS[:turn])
        assert outcome(results) == plain
        for result in results:
            stats = result.stats
            sources |= stats["drafts"].keys()
            tallies = stats["drafts"].values()
            assert stats["drafts_proposed"] == sum(t["proposed"] for t in tallies)
            assert stats["drafts_accepted"] == sum(t["accepted"] for t in tallies)
            assert all(t["accepted"] <= t["proposed"] for t in tallies)
    assert sources == {"forced", "lookup", "prediction", "model"}


def test_a_source_of_the_caller_s_own(drafting: Engine, plain: list[Any]) -> None:
    rng, drafts = np.random.default_rng(2), []
    for tokens, *_ in plain:
        guess = np.array([*tokens, STOP, 5])
        wrong = rng.random(len(guess)) < 0.2
        guess[wrong] = rng.integers(0, CONFIG.vocab_size, wrong.sum())
        drafts.append(ScriptedDrafts(tuple(guess.tolist())))
    results = run(drafting, [{"jump": "off"}] * len(WORK), drafts)
    assert outcome(results) == plain
    assert all(r.stats["drafts"]["custom"]["accepted"] > 0 for r in results)


def test_nothing_is_accepted_behind_the_end(plain: list[Any]) -> None:
    """Neither behind a stop token, which is never drafted, nor behind a stop text or the last token."""
    with make() as engine:
        for end in ({"max_tokens": 40}, {"max_tokens": 7}, {"max_tokens": 40, "stop": "x"}):
            (expected,) = engine.generate("Free text", sampling=Sampling(jump="off", **end))
            guess = (*expected.tokens, STOP, *expected.tokens)
            for guide, prompt in ((None, "Free text"), (Guide.regex("[a-w]{9}x[a-z]*"), "x")):
                sampling = Sampling(jump="off", **end)
                (result,) = engine.generate(
                    prompt, guide=guide, sampling=sampling, drafts=ScriptedDrafts(guess)
                )
                assert result.error is None
                assert result.stats["drafts_accepted"] <= len(result.tokens) + 1
                assert result.stats["tokens_per_forward"] <= SPEC.queries


@pytest.mark.parametrize("name", [n for n in DRAFT_MODELS if n != "nearly itself"])
def test_a_draft_model_guesses_under_the_same_masks_and_noise(name: str, plain: list[Any]) -> None:
    """A model that drafts for itself is always right, sampled or greedy, guided or free."""
    with make(draft=DRAFT_MODELS[name]) as engine:
        results = run(engine, [{"jump": "off"}] * len(WORK))
        assert outcome(results) == plain
        for result in results:
            tally = result.stats["drafts"]["model"]
            assert tally["accepted"] > 0
            if name == "itself":
                assert tally["accepted"] == tally["proposed"]
                needed = -(-(len(result.tokens) + 1) // SPEC.queries)
                assert result.stats["forwards"] <= needed + 1


def test_nothing_compiles_after_the_warm_up() -> None:
    with make(draft=DRAFT_MODELS["itself"]) as engine:
        engine.warm_up()
        compiled = device_loop._cache_size(), drafting_loop._cache_size()
        run(engine, WAYS)
        assert (device_loop._cache_size(), drafting_loop._cache_size()) == compiled


# Forced tokens ------------------------------------------------------------------------------------


def test_forced_tokens_save_forward_passes(plain: list[Any]) -> None:
    with make() as engine:
        (off,) = engine.generate(PROMPT, guide=SCHEMA, sampling=Sampling(jump="off"))
        (on,) = engine.generate(PROMPT, guide=SCHEMA)
        assert on.tokens == off.tokens
        assert on.stats["drafts"]["forced"]["accepted"] > 20
        assert on.stats["forwards"] < 0.7 * off.stats["forwards"]
        assert on.stats["tokens_per_forward"] > 1.4 * off.stats["tokens_per_forward"]


def test_what_is_forced_does_not_depend_on_the_room_for_drafts() -> None:
    """Nor on other drafts; and it is what the tokenizer would write."""
    outputs = []
    for most in (0, 1, 3):
        spec = CacheSpec(sinks=4, window=60, max_drafts=most, prefill_chunk=32)
        with make(cache=spec) as engine:
            outputs.append(outcome(run(engine, [{"jump": "force"}] * len(WORK))))
            if most:
                ways = [{"jump": "force", "lookup": True}] * len(WORK)
                outputs.append(outcome(run(engine, ways)))
    assert all(output == outputs[0] for output in outputs)
    with make() as engine:
        (result,) = engine.generate(PROMPT, guide=SCHEMA, sampling=Sampling(jump="force"))
        tally = result.stats["drafts"]["forced"]
        assert tally["accepted"] == tally["proposed"] > 20


# Trouble ------------------------------------------------------------------------------------------


class _At:
    """A draft source that does something when the text is long enough, and proposes nothing."""

    def __init__(self, length: int, act: Callable[[], None]) -> None:
        self.length, self.act = length, act
        self.has_acted = False

    def propose(self, output: Sequence[int], ahead: Sequence[int], limit: int) -> Sequence[int]:
        if len(output) >= self.length and not self.has_acted:
            self.has_acted = True
            self.act()
        return ()


def test_a_source_that_raises_on_the_way_fails_its_request_alone(
    drafting: Engine, plain: list[Any]
) -> None:
    def fail() -> None:
        raise RuntimeError("no more drafts")

    results = run(drafting, [{}] * len(WORK), [None, _At(20, fail), None, None, None])
    assert outcome(results[:1] + results[2:]) == plain[:1] + plain[2:]
    failed = results[1]
    assert failed.finish_reason == "error"
    assert "no more drafts" in str(failed.error)
    assert len(failed.tokens) >= 20
    assert failed.tokens == plain[1][0][: len(failed.tokens)]
    assert failed.stats["drafts"]["model"]["proposed"] > 0


def test_a_request_cancelled_while_it_drafts(drafting: Engine, plain: list[Any]) -> None:
    """Its passes are under way when it happens; the slot's next request reads nothing of it."""
    prompt, _, options = WORK[2]
    for length in (3, 4, 5, 6):
        source = _At(length, lambda: None)
        endless = drafting.prepare(prompt, sampling=Sampling(max_tokens=400), drafts=source)
        source.act = endless.cancel
        drafting.submit(endless)
        beside = run(drafting, [{}] * len(WORK))
        result = endless.result()
        assert isinstance(result.error, RequestCancelled)
        assert length <= len(result.tokens) < length + SPEC.queries
        assert result.stats["drafts"]["model"]["proposed"] > 0
        assert outcome(beside) == plain
    (again,) = drafting.generate(prompt, sampling=Sampling(**options))
    assert outcome([again]) == plain[2:3]


@pytest.mark.parametrize("loop", ["device", "host"])
def test_a_fill_that_never_comes_back_while_drafting(
    loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for once; its batch fails, the row without a grammar, too; the engine goes on."""
    waits: list[bool] = []
    wait = _FillWorker.wait

    def counted(worker: _FillWorker, timeout_s: float) -> bool:
        waits.append(wait(worker, timeout_s))
        return waits[-1]

    backend = ScriptedBackend(Script.of([range(97, 123)] * 8, fill_delay_s=3.0))
    draft = DRAFT_MODELS["itself"]
    with make(draft=draft, loop=loop, backend=backend, watchdog_s=0.3) as engine:
        (expected,) = engine.generate("Once", sampling=Sampling(max_tokens=20))
        stuck = engine.prepare("x", Guide.regex("ignored"))

        def arrive() -> None:
            # However long the first prompt took to be compiled for.
            engine._scheduler.inbox.next_turn = 0.0
            engine.submit(stuck)

        beside = engine.prepare("Once", sampling=Sampling(max_tokens=20), drafts=_At(1, arrive))
        monkeypatch.setattr(_FillWorker, "wait", counted)
        engine.submit(beside)
        assert isinstance(beside.result().error, GrammarTimeout)
        assert isinstance(stuck.result().error, GrammarTimeout)
        (again,) = engine.generate("Once", sampling=Sampling(max_tokens=20))
        assert waits.count(False) == 1
        assert outcome([again]) == outcome([expected])
        assert again.stats["drafts"]["model"]["accepted"] > 0


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft", "cache", "message"),
    [
        ({}, CacheSpec(window=60), "cache.max_drafts is 0"),
        ({"cache": CacheSpec(window=60, max_drafts=2)}, SPEC, "draft.cache.max_drafts is 2, less"),
        (
            {"cache": CacheSpec(policy="h2o", kept=8, window=20, interval=4, max_drafts=3)},
            SPEC,
            "draft.cache chooses tokens by 'h2o'",
        ),
        (
            {"cache": CacheSpec(window=600, max_drafts=3)},
            SPEC,
            "draft.cache holds 604 tokens, more than the 512",
        ),
        ({"model": Llama(text_config(vocab_size=300))}, SPEC, "draft.model has 300 tokens"),
        ({"target_ids": np.arange(7)}, SPEC, "draft.target_ids is int64 [7]"),
        ({"target_ids": np.full(290, 5)}, SPEC, "different tokens from 0 to 289"),
        ({"target_ids": np.arange(290) + 1}, SPEC, "different tokens from 0 to 289"),
    ],
)
def test_a_draft_model_that_cannot_be_served(
    draft: dict[str, Any], cache: CacheSpec, message: str
) -> None:
    values = {"model": MODEL, "params": PARAMS, "tokenizer": TOKENIZER} | draft
    with pytest.raises(UserError) as refusal:
        make(cache=cache, draft=DraftModel(**values))
    assert message in str(refusal.value)


def test_a_draft_model_of_another_tokenizer() -> None:
    other = byte_tokenizer()
    other.add_tokens(["word"])
    with pytest.raises(UserError, match=r"draft.tokenizer differs .* in 1 entries"):
        make(draft=DraftModel(MODEL, PARAMS, other))


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"lookup": True}, "sampling.lookup is given, but cache.max_drafts is 0"),
        ({"prediction": "x"}, "sampling.prediction is given, but cache.max_drafts is 0"),
    ],
)
def test_drafts_without_room(sampling: dict[str, Any], message: str) -> None:
    with make(cache=CacheSpec(window=60)) as engine:
        (result,) = engine.generate("x", sampling=Sampling(**sampling))
        assert message in str(result.error)
        (result,) = engine.generate("x", drafts=ScriptedDrafts((1,)))
        assert "drafts is given, but cache.max_drafts is 0" in str(result.error)


def test_a_prediction_that_is_too_long_or_empty() -> None:
    with make() as engine:
        for prediction in ("x" * 32_769, ""):
            (result,) = engine.generate("x", sampling=Sampling(prediction=prediction))
            assert "sampling.prediction" in str(result.error)
            assert isinstance(result.error, UserError)


@pytest.mark.parametrize(
    ("field", "value"), [("jump", "yes"), ("lookup", 1), ("prediction", 7), ("draft_model", "x")]
)
def test_fields_of_the_wrong_kind(field: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"sampling.{field} is {value!r}"):
        Sampling(**{field: value})


def test_options_of_the_wrong_kind() -> None:
    with pytest.raises(UserError, match="verify is 'never'"):
        make(verify="never")
    with pytest.raises(UserError, match="draft is 'tiny'; give a DraftModel"):
        make(draft="tiny")
    with make() as engine, pytest.raises(UserError, match="drafts is one source for 2 prompts"):
        engine.generate(["a", "b"], drafts=ScriptedDrafts((1,)))
