"""What docs/server.md shows and says is so."""

import json
import re
from pathlib import Path

import pytest

from gkv_jax.serve.protocol.chat import ChatCompletionRequest
from gkv_jax.serve.settings import Limits
from tests.gkv_jax.serve.conftest import MODEL, Served

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "server.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_code_of_the_page_runs(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(BLOCKS) == 3
    names: dict[str, object] = {"old": '{"age": 3}'}
    for block in BLOCKS:
        code = block.replace("smollm2-135m-instruct", MODEL).replace("8000", str(served.port))
        exec(code, names)
    person, _, arguments = capsys.readouterr().out.partition("\n")
    assert person.startswith("name=")
    assert set(json.loads(arguments)) == {"city"}


def test_every_field_of_a_chat_completion_is_in_the_table() -> None:
    section = PAGE.partition("## Fields of a chat completion")[2].partition("## Answers")[0]
    constraints = PAGE.partition("## What an answer obeys")[2].partition("## Tools")[0]
    for name in ChatCompletionRequest.model_fields:
        assert re.search(rf"`{name}[`.]", section + constraints), name


def test_every_limit_is_in_the_table_and_the_file() -> None:
    file = (ROOT / "configs" / "serve" / "default.toml").read_text("utf-8")
    for name in Limits.__dataclass_fields__:
        assert f"`limits.{name}`" in PAGE, name
        assert re.search(rf"^(# )?{name} = ", file, re.MULTILINE), name


def test_every_path_that_the_page_links_to_is_there() -> None:
    for page in ("server.md", "deployment.md", "servers-compared.md"):
        text = (ROOT / "docs" / page).read_text("utf-8")
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert (ROOT / "docs" / link).exists(), (page, link)
