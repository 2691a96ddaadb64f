"""What docs/caches.md, docs/drafts.md and docs/models.md say in code is so."""

import re
from pathlib import Path
from typing import Any

import pytest

from gkv_jax import CacheSpec, Engine
from gkv_jax.models.families import FAMILIES
from gkv_jax.models.llama import Llama
from tests.gkv_jax.tiny import byte_tokenizer, random_params, text_config

DOCS = Path(__file__).parent.parent / "docs"
BLOCKS = [
    block
    for page in ("caches.md", "drafts.md")
    for block in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)
]


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


def test_the_draft_source_of_the_page_works() -> None:
    names: dict[str, Any] = {}
    exec(block_with("class Echo"), names)
    assert names["Echo"]().propose([1, 2, 3], [1], 2) == [3, 1]
    config = text_config(max_position_embeddings=2048)
    spec = CacheSpec(sinks=4, window=60, max_drafts=3)
    with Engine(Llama(config), random_params(config), byte_tokenizer(), cache=spec) as engine:
        outputs = [engine.generate("ab", drafts=each)[0].tokens for each in (None, names["Echo"]())]
    assert outputs[0] == outputs[1]


def test_the_family_of_the_page_is_the_one_that_ships() -> None:
    page, folder = (DOCS / "models.md").read_text("utf-8"), DOCS.parent / "gkv_jax" / "models"
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert block in (folder / "qwen3.py").read_text("utf-8")
    lengths = re.findall(r"^\| `(\w+\.py)` \| (\d+) \|", page, re.MULTILINE)
    assert len(lengths) == 6
    for name, lines in lengths:
        assert abs(len((folder / name).read_text("utf-8").splitlines()) - int(lines)) <= 10
    for family in FAMILIES:
        assert all(f"`{name}`" in page for name in family.MODEL_TYPES + family.GGUF_ARCHITECTURES)
