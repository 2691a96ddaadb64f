"""The code in docs/caches.md runs as it is written there."""

import re
from pathlib import Path
from typing import Any

import pytest

from gkv_jax import CacheSpec, Engine
from gkv_jax.models.llama import Llama
from tests.gkv_jax.tiny import byte_tokenizer, random_params, text_config

PAGE = Path(__file__).parent.parent / "docs" / "caches.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def block_with(text: str) -> str:
    (block,) = [block for block in BLOCKS if text in block]
    return block


def test_every_spec_of_the_page_can_be_served() -> None:
    names: dict[str, Any] = {}
    exec(block_with("stream = CacheSpec()"), names)
    assert sum(isinstance(value, CacheSpec) for value in names.values()) == 10


def test_the_policy_of_the_page_is_short_and_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    block = block_with("LOUD_VALUES = Policy")
    assert len(block.splitlines()) < 40

    def tiny(name: str, **options: Any) -> Engine:
        config = text_config(max_position_embeddings=2048)
        return Engine(Llama(config), random_params(config), byte_tokenizer(), **options)

    monkeypatch.setattr(Engine, "from_pretrained", tiny)
    exec(block, {})
    assert capsys.readouterr().out == "loud_values (28, 28)\n"
