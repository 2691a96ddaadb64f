"""Every keyword of JSON Schema: enforced, or refused by name."""

from __future__ import annotations

import jsonschema_specifications
import pytest

from tests.grammar_host.keyword_cases import CASES
from tests.grammar_host.keywords import BACKENDS, PAGE, page, results

NOT_WRITTEN = {
    '"\x7f"',  # LLGuidance wants this character escaped
    "1.5",  # as a multiple of 0.25 it is written 1.50
    '{"a": 1, "b": 2}',  # where a subschema orders b before a
}
"""Valid documents that no mask leads to, because the same value can be written in another way."""

KEYWORDS = list(dict.fromkeys(case.keyword for case in CASES))


def test_no_keyword_is_missing() -> None:
    defined: set[str] = set()
    for address in jsonschema_specifications.REGISTRY:
        if "draft-03" not in address:
            defined |= set(
                jsonschema_specifications.REGISTRY.contents(address).get("properties", {})
            )
    assert defined - set(KEYWORDS) == set()


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_auto_is_right(keyword: str) -> None:
    """What is served is fully right; what is refused has a code that says so."""
    for result in results("auto"):
        if result.case.keyword == keyword:
            assert result.accepted == (), result.case.schema
            assert {*result.rejected} <= NOT_WRITTEN, result.case.schema
            assert result.code in (None, "unsupported_schema_feature"), result.case.schema


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_engine_completes_what_is_invalid(backend: str) -> None:
    assert [result for result in results(backend) if result.accepted] == []


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "python -m tests.grammar_host.keywords --write"
    )
