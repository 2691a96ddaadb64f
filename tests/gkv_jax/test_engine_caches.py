"""Cache policies, shared prefixes and reports through the engine, on the random tiny model."""

import dataclasses
import functools
import gc
import time
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gkv_jax import CacheSpec, DraftModel, Engine, Guide, Sampling, ScriptedDrafts, UserError
from gkv_jax.cache.policies import POLICIES, Policy
from gkv_jax.errors import PromptTooLongError
from gkv_jax.models.llama import Llama
from gkv_jax.models.protocol import AttentionLayer
from tests.gkv_jax.tiny import byte_tokenizer, random_params, text_config

CONFIG = text_config()
MODEL = Llama(CONFIG)
PARAMS = random_params(CONFIG)
TOKENIZER = byte_tokenizer()
LONG = "A prompt that does not fit into sinks and window, so that a policy has to choose from it. "
SPECS = {
    "window": CacheSpec(sinks=2, window=24, max_drafts=3),
    "full": CacheSpec.full(110, max_drafts=3),
    "snapkv": CacheSpec(policy="snapkv", sinks=2, kept=8, window=16, max_drafts=3),
    "keydiff": CacheSpec(policy="keydiff", sinks=2, kept=8, window=16, max_drafts=3),
    "expected_attention": CacheSpec(
        policy="expected_attention", sinks=2, kept=8, window=16, max_drafts=3
    ),
    "tova": CacheSpec(policy="tova", sinks=2, kept=8, window=16, interval=8, max_drafts=3),
    "bfloat16": CacheSpec(sinks=2, window=24, max_drafts=3, dtype="bfloat16"),
    "h2o": CacheSpec(policy="h2o", sinks=2, kept=8, window=16, interval=8, max_drafts=3),
    "tova in chunks": CacheSpec(
        policy="tova", sinks=2, kept=8, window=16, interval=8, max_drafts=3, prefill="chunks"
    ),
    "snapkv, then h2o": CacheSpec(
        policy="snapkv", decode="h2o", sinks=2, kept=8, window=16, interval=4, max_drafts=3
    ),
    "quest": CacheSpec(
        policy="quest", sinks=0, window=256, budget=32, page=4, max_drafts=3, positions="text"
    ),
    "int8": CacheSpec(sinks=2, window=24, max_drafts=3, dtype="int8"),
    "fp8": CacheSpec(sinks=2, window=24, max_drafts=3, dtype="float8_e4m3fn"),
}
OTHERS = {"full", "snapkv", "keydiff", "expected_attention", "tova", "bfloat16", "h2o", "fp8"}
"""Two loops are compiled for each spec; these are like others, or tested without an engine."""


def specs(*names: str) -> list[Any]:
    """Parameters of a test: the names, of which ``OTHERS`` belong to the full size."""
    marks = {name: [pytest.mark.full] if name in OTHERS else [] for name in names}
    return [pytest.param(name, marks=marks[name], id=name) for name in names]


WORK: list[tuple[str, Guide | None, Sampling]] = [
    ("Short", None, Sampling(max_tokens=40)),
    (LONG, Guide.regex(r"[a-z]{3,12}( [a-z]{3,12}){2}\."), Sampling(max_tokens=40)),
    (LONG[3:], None, Sampling(max_tokens=40, temperature=1.1, seed=3)),
]

# Texts that the grammar forces, or that the prompt repeats: something for the sources to find.
PHRASES = Guide.choice(["so that a policy has to choose", "does not fit into sinks and window"])
DRAFTED: list[tuple[str, Guide | None, Sampling]] = [
    *WORK,
    (LONG, PHRASES, Sampling(max_tokens=40)),
    (LONG[1:], PHRASES, Sampling(max_tokens=40, temperature=1.0, seed=5)),
]

make = functools.partial(
    Engine, MODEL, tokenizer=TOKENIZER, params=PARAMS, slots=2, verify="always"
)


def run(engine: Engine, drafts: Any = None, work: Any = WORK, **options: Any) -> list[Any]:
    prompts, guides, samplings = zip(*work, strict=True)
    return engine.generate(
        list(prompts), guide=guides, sampling=samplings, drafts=drafts, **options
    )


def sampled_with(*changes: dict[str, Any]) -> list[tuple[str, Guide | None, Sampling]]:
    """``DRAFTED``, each with its changes, or all with the only ones."""
    each = changes * len(DRAFTED) if len(changes) == 1 else changes
    return [
        (prompt, guide, dataclasses.replace(sampling, **change))
        for (prompt, guide, sampling), change in zip(DRAFTED, each, strict=True)
    ]


def outcome(results: list[Any]) -> list[Any]:
    return [(r.tokens, r.finish_reason, r.error) for r in results]


@functools.cache
def undrafted(name: str) -> list[Any]:
    """``DRAFTED`` by steps of one token."""
    with make(cache=SPECS[name]) as engine:
        results = run(engine, work=sampled_with({"jump": "off"}))
    assert all(r.stats["drafts_proposed"] == 0 for r in results)
    assert all(r.error is None for r in results)
    return outcome(results)


def partly_right(outputs: list[Any]) -> list[ScriptedDrafts]:
    """Of five tokens, one is wrong."""
    rng, drafts = np.random.default_rng(0), []
    for tokens, *_ in outputs:
        guess = np.array([*tokens, 5, 6])
        wrong = rng.random(len(guess)) < 0.2
        guess[wrong] = rng.integers(0, CONFIG.vocab_size, wrong.sum())
        drafts.append(ScriptedDrafts(tuple(guess.tolist())))
    return drafts


@pytest.mark.parametrize("name", specs(*SPECS))
def test_drafts_change_nothing(name: str) -> None:
    plain = undrafted(name)
    scripted = partly_right(plain)
    with make(cache=SPECS[name]) as engine:
        results = run(engine, scripted, sampled_with({"jump": "off"}))
        assert outcome(results) == plain
        assert all(r.stats["drafts"]["custom"]["accepted"] > 0 for r in results)
        # Another source in each row, and in the first all of them.
        sources = ({"lookup": True}, {}, {"lookup": True}, {}, {"jump": "off", "lookup": True})
        results = run(engine, [*scripted[:2], None, None, None], sampled_with(*sources))
        assert outcome(results) == plain
        drafts = [r.stats["drafts"] for r in results]
        assert drafts[0]["custom"]["accepted"] > 0
        assert drafts[3]["forced"]["accepted"] > 0
        assert drafts[4]["lookup"]["accepted"] > 0


@pytest.mark.parametrize("name", specs("h2o", "snapkv, then h2o", "quest", "fp8"))
def test_the_host_driver_changes_nothing(name: str) -> None:
    plain = undrafted(name)
    with make(cache=SPECS[name], loop="host") as engine:
        assert outcome(run(engine, partly_right(plain), sampled_with({"lookup": True}))) == plain


def test_a_draft_model_beside_a_cache_that_evicts_by_score() -> None:
    """Its own cache streams; rows in which it drafts sit beside others."""
    plain = undrafted("snapkv, then h2o")
    draft = DraftModel(MODEL, random_params(CONFIG, seed=1), TOKENIZER)
    itself = DraftModel(MODEL, PARAMS, TOKENIZER)
    work = sampled_with({}, {"jump": "off"}, {"draft_model": False}, {"lookup": True}, {})
    for model in (draft, itself):
        with make(cache=SPECS["snapkv, then h2o"], draft=model) as engine:
            results = run(engine, work=work)
        assert outcome(results) == plain
        tallies = [r.stats["drafts"].get("model") for r in results]
        assert tallies[2] is None
        assert tallies[0]["proposed"] > 0
        assert tallies[1]["proposed"] > 0
    assert tallies[0]["accepted"] > 0
    assert tallies[1]["accepted"] > 0


IN_CI = ("keydiff", "expected_attention")
"""The policies of which ``test_drafts_change_nothing`` has no spec there."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in IN_CI else pytest.mark.full) for name in POLICIES],
)
def test_a_policy_serves_a_text_beyond_its_cache(name: str) -> None:
    with make(cache=CacheSpec(policy=name, sinks=2, kept=8, window=16)) as engine:
        (result,) = engine.generate(LONG, sampling=Sampling(max_tokens=20), report=True)
        assert result.error is None
        assert len(result.tokens) == 20
        layer = result.report.layers[0]
        assert layer.kept == (8, 8)
        assert layer.live == (25, 25)  # the next query brings its own


# Reports ------------------------------------------------------------------------------------------


def test_a_report_says_what_the_cache_holds() -> None:
    spec = CacheSpec(policy="h2o", sinks=2, kept=8, window=16)
    with make(cache=spec) as engine:
        results = run(engine, report=[True, False, True])
    assert results[1].report is None
    for result, (prompt, *_) in zip(results[::2], WORK[::2], strict=True):
        report = result.report
        length = len(TOKENIZER.encode(prompt)) + len(result.tokens) - 1
        assert report.text_length == length
        assert report.policy == "h2o"
        for layer in report.layers:
            for head, evicted in zip(layer.heads, layer.evicted, strict=True):
                assert len(head.held) == head.live == length - evicted
                assert head.sinks.tolist() == [0, 1]
                assert head.ring.tolist() == list(range(length - 15, length))


def test_a_report_does_not_keep_others_waiting() -> None:
    """Four requests over two slots, each with a report; and a cancelled one among them."""
    with make(cache=CacheSpec(sinks=2, window=16)) as engine:
        stream = engine.stream(LONG, sampling=Sampling(max_tokens=400))
        next(stream)
        stream.close()
        results = engine.generate(
            ["a", "b", "c", LONG], sampling=Sampling(max_tokens=9), report=True
        )
        assert all(r.report is not None and r.error is None for r in results)


# Prefixes -----------------------------------------------------------------------------------------

SYSTEM = "You are a careful assistant. Answer in one word. "


@pytest.fixture(scope="module")
def sharing() -> Iterator[Engine]:
    with make(cache=CacheSpec(sinks=64, window=64, prefill_chunk=32)) as engine:
        yield engine


@pytest.mark.parametrize("question", ["Yes or no?", "x", LONG * 2])
def test_a_shared_prefix_changes_nothing_but_the_work(sharing: Engine, question: str) -> None:
    sampling = Sampling(max_tokens=30, temperature=0.7, seed=2)
    with make(cache=sharing.spec) as fresh:
        (expected,) = fresh.generate(SYSTEM + question, sampling=sampling)
    assert expected.stats["prefix_tokens"] == 0
    length = sharing.share_prefix(SYSTEM)
    assert length == len(TOKENIZER.encode(SYSTEM))
    for result in sharing.generate([SYSTEM + question] * 3, sampling=sampling):
        assert result.tokens == expected.tokens
        assert result.stats["prefix_tokens"] == length


def test_a_part_of_a_prefix_is_shared_too(sharing: Engine) -> None:
    sharing.share_prefix(SYSTEM)
    prompt = SYSTEM[:20] + "?! Something else"
    with make(cache=sharing.spec) as fresh:
        (expected,) = fresh.generate(prompt, sampling=Sampling(max_tokens=20))
    (result,) = sharing.generate(prompt, sampling=Sampling(max_tokens=20))
    assert result.tokens == expected.tokens
    assert result.stats["prefix_tokens"] == 20


def test_a_prompt_that_is_the_prefix_still_has_a_first_step(sharing: Engine) -> None:
    length = sharing.share_prefix(SYSTEM)
    (result,) = sharing.generate(SYSTEM, sampling=Sampling(max_tokens=5))
    assert result.error is None
    assert result.stats["prefix_tokens"] == length - 1


def test_a_chat_shares_its_system_prompt(sharing: Engine) -> None:
    system = {"role": "user", "content": "Be brief."}
    length = sharing.share_prefix([system])
    (result,) = sharing.generate(
        [[system, {"role": "user", "content": "Why?"}]], sampling=Sampling(max_tokens=5)
    )
    assert result.stats["prefix_tokens"] == length


def test_a_prefix_that_would_be_evicted_is_refused(sharing: Engine) -> None:
    with pytest.raises(UserError, match=r"prefix has \d+ tokens.*set cache.sinks"):
        sharing.share_prefix(LONG * 2)


def test_a_prefix_that_could_not_be_used_is_refused(sharing: Engine) -> None:
    with (
        make(cache=CacheSpec.full(50)) as full,
        pytest.raises(UserError, match=r"set cache\.window"),
    ):
        full.share_prefix("y" * 60)
    with make(cache=CacheSpec.full(1000)) as full, pytest.raises(PromptTooLongError):
        full.share_prefix("y" * 700)  # the model was trained for 512
    with (
        make(cache=CacheSpec(sinks=64, window=64, dtype="int8", prefill_chunk=32)) as int8,
        pytest.raises(UserError, match="scales of int8 are those of a text's first 32"),
    ):
        int8.share_prefix("y" * 31)


def test_a_prefix_in_int8_changes_nothing() -> None:
    spec = CacheSpec(sinks=64, window=64, dtype="int8", prefill_chunk=32)
    with make(cache=spec) as engine:
        (expected,) = engine.generate(SYSTEM + LONG, sampling=Sampling(max_tokens=30))
        length = engine.share_prefix(SYSTEM)
        (result,) = engine.generate(SYSTEM + LONG, sampling=Sampling(max_tokens=30))
        assert result.stats["prefix_tokens"] == length
        assert result.tokens == expected.tokens


def test_selections_are_never_shared() -> None:
    with make(cache=CacheSpec(policy="snapkv", sinks=2, kept=8, window=60)) as engine:
        length = engine.share_prefix(SYSTEM)
        short, whole = engine.generate([SYSTEM + "?", SYSTEM + LONG])
        assert short.stats["prefix_tokens"] == length
        assert whole.stats["prefix_tokens"] == 0


def test_what_a_policy_remembers_is_that_of_the_whole_prefix() -> None:
    """H2O's sums of a longer prefix hold votes of tokens that the prompt does not have."""
    spec = CacheSpec(policy="h2o", sinks=2, kept=8, window=60, prefill="chunks", interval=8)
    prompts = [SYSTEM + LONG, SYSTEM[:20] + LONG]
    sampling = Sampling(max_tokens=30)
    with make(cache=spec) as fresh:
        expected = [r.tokens for r in fresh.generate(prompts, sampling=sampling)]
    with make(cache=spec) as engine:
        length = engine.share_prefix(SYSTEM)
        results = engine.generate(prompts, sampling=sampling)
        assert [r.tokens for r in results] == expected
        assert [r.stats["prefix_tokens"] for r in results] == [length, 0]


def test_pages_of_a_prefix_have_their_bounds() -> None:
    with make(cache=SPECS["quest"]) as engine:
        (expected,) = engine.generate(SYSTEM + LONG, sampling=Sampling(max_tokens=30))
        length = engine.share_prefix(SYSTEM)
        for result in engine.generate([SYSTEM + LONG] * 2, sampling=Sampling(max_tokens=30)):
            assert result.tokens == expected.tokens
            assert result.stats["prefix_tokens"] == length


def test_a_part_beyond_a_window_of_the_model_is_not_shared() -> None:
    """The local layer has dropped the end of that part while it read the rest."""

    class Local(Llama):
        @property
        def layers(self) -> tuple[AttentionLayer, ...]:
            local = dataclasses.replace(super().layers[0], window=8)
            return (local, *super().layers[1:])

    prompts = [SYSTEM[:20] + "?! " + LONG, SYSTEM + LONG]
    options = {"cache": CacheSpec(sinks=64, window=64), "slots": 1}
    with Engine(Local(CONFIG), PARAMS, TOKENIZER, **options) as engine:
        expected = [r.tokens for r in engine.generate(prompts)]
        length = engine.share_prefix(SYSTEM)
        results = engine.generate(prompts)
        assert [r.tokens for r in results] == expected
        assert [r.stats["prefix_tokens"] for r in results] == [0, length]


def test_new_weights_forget_prefixes() -> None:
    with make(cache=CacheSpec(sinks=64, window=64)) as engine:
        engine.share_prefix(SYSTEM)
        engine.update_params(jax.tree.map(lambda leaf: leaf * 1.01, PARAMS))
        (result,) = engine.generate(SYSTEM + "?", sampling=Sampling(max_tokens=3))
        assert result.stats["prefix_tokens"] == 0


def test_neither_prefixes_nor_old_weights_outlive_new_ones() -> None:
    params = jax.tree.map(jnp.array, PARAMS)
    old = weakref.ref(params["embed"])
    with make(params=params, cache=CacheSpec(sinks=64, window=64)) as engine:
        engine.share_prefix(SYSTEM)
        engine.update_params(jax.tree.map(lambda leaf: leaf * 1.01, params))
        del params
        # The engine thread may still stand in the call whose result it has just handed out.
        until = time.monotonic() + 30
        while old() is not None and time.monotonic() < until:
            time.sleep(0.01)
            gc.collect()
        assert old() is None


def test_sharing_compiles_nothing_on_a_request(compiles: list[str]) -> None:
    with make(cache=CacheSpec(sinks=64, window=63)) as engine:
        engine.warm_up()
        length = engine.share_prefix(SYSTEM)
        compiles.clear()
        (result,) = engine.generate(SYSTEM + "Why?", sampling=Sampling(max_tokens=3))
        assert result.stats["prefix_tokens"] == length
        assert compiles == []


def test_the_last_eight_prefixes_are_held(sharing: Engine) -> None:
    for letter in "abcdefghi":
        sharing.share_prefix(letter * 10)
    results = sharing.generate([c * 12 for c in "abi"], sampling=Sampling(max_tokens=2))
    assert [r.stats["prefix_tokens"] for r in results] == [0, 10, 10]


# Limits and errors ----------------------------------------------------------------------------------


def test_a_text_ends_where_old_tokens_would_be_farther_than_trained() -> None:
    model = Llama(dataclasses.replace(CONFIG, max_position_embeddings=64))
    spec = CacheSpec(policy="h2o", sinks=2, kept=8, window=16)
    with Engine(model, PARAMS, TOKENIZER, cache=spec, slots=1) as engine:
        (result,) = engine.generate("x" * 40, sampling=Sampling(max_tokens=100))
        assert (result.finish_reason, len(result.tokens)) == ("length", 64 - 40 + 1)
        (result,) = engine.generate("x" * 65)
        assert isinstance(result.error, PromptTooLongError)
    for streams in (CacheSpec(sinks=2, window=16), CacheSpec(sinks=0, window=16, positions="text")):
        with Engine(model, PARAMS, TOKENIZER, cache=streams, slots=1) as engine:
            (result,) = engine.generate("x" * 40, sampling=Sampling(max_tokens=100))
            assert len(result.tokens) == 100 or result.finish_reason == "stop"


def test_a_changed_policy_has_the_positions_that_it_needs() -> None:
    spec = CacheSpec(policy="snapkv", kept=4)
    assert spec.by_rank
    evicting = dataclasses.replace(spec, decode="h2o", interval=8)
    assert not evicting.by_rank
    assert dataclasses.replace(evicting, decode="stream", interval=1).by_rank


@pytest.mark.parametrize(("needs", "observe"), [("atention_mass", None), ("keys", 0)])
def test_a_policy_that_says_what_cannot_be_is_refused(needs: Any, observe: int | None) -> None:
    with pytest.raises(UserError, match=r"policy\.(needs is .atention|observe is 0)"):
        Policy("mine", lambda evidence, spec: evidence.k[..., 0], needs=needs, observe=observe)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policy": "streaming"}, r"cache.policy is 'streaming'; choose from .*snapkv"),
        ({"policy": "snapkv"}, "cache.kept is 0 under policy 'snapkv'"),
        ({"kept": 4}, "cache.kept is 4 under policy 'window'"),
        ({"decode": "h2o"}, "cache.decode is 'h2o' under policy 'window'"),
        ({"policy": "snapkv", "kept": 4, "decode": "quest"}, "cache.decode is 'quest'"),
        ({"policy": "h2o", "kept": 4, "positions": "cache"}, "use positions 'text'"),
        ({"policy": "h2o", "kept": 4, "max_drafts": 3}, "set interval to at least 4"),
        ({"policy": "snapkv", "kept": 4, "interval": 8}, "cache.interval is 8"),
        ({"policy": "snapkv", "kept": 4, "prefill": "chunks"}, "cache.prefill 'chunks'"),
        (
            {"policy": "snapkv", "kept": 4, "decode": "h2o", "prefill": "chunks"},
            "differs from policy 'snapkv'",
        ),
        (
            {"policy": "expected_attention", "kept": 4, "decode": "expected_attention"},
            "needs the queries of a whole prompt",
        ),
        ({"policy": "quest", "window": 64}, "multiple of page .16. and at least"),
        ({"policy": "quest", "window": 64, "budget": 50}, "cache.budget is 50"),
        ({"budget": 64}, "only policy 'quest'"),
        ({"observe": 8}, "cache.observe is 8, which policy 'window' does not read"),
        ({"policy": "snapkv", "kept": 4, "page": 8}, "cache.page is 8"),
        ({"policy": "full", "decode": "stream"}, "cache.decode is set under policy 'full'"),
        ({"policy": ["snapkv"]}, "cache.policy is"),
        ({"memory": "host"}, "cache.memory is 'host' under policy 'window'"),
        ({"dtype": "int4"}, "cache.dtype is 'int4'; choose from"),
        ({"dtype": "float8"}, "cache.dtype is 'float8'; choose from"),
        ({"dtype": ""}, "cache.dtype is ''; choose from"),
        ({"pool": 4}, "it must be odd"),
        ({"pooling": "sum"}, "cache.pooling is 'sum'"),
        ({"prefill": "all"}, "cache.prefill is 'all'"),
        ({"positions": "true"}, "cache.positions is 'true'"),
        ({"window": 0}, "cache.window is 0"),
        ({"interval": True}, "cache.interval is True"),
    ],
)
def test_what_cannot_be_served_is_said(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        CacheSpec(**fields)
