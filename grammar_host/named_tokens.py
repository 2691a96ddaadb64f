"""The special tokens that a guide names: the only ones that its texts may be written with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from grammar_host.guide import Guide
from grammar_host.tag_checks import STYLE_MARKERS
from grammar_host.tags import tag_formats
from grammar_host.tokenizer import TokenizerInfo

# The places where a guide refers to tokens by id: `Token(5, 6)` in EBNF, `<[5-7]>` in Lark, and
# these keys of structural tags.
_TOKEN_LISTS = re.compile(r"Token\(([\d,\s]*)\)|<\[([\d,\s-]*)\]>")
_TOKEN_RANGE = re.compile(r"\b(\d{1,9})\b(?:\s*-\s*(\d{1,9})\b)?")
_TOKEN_KEYS = ("token", "exclude_tokens", "trigger_tokens")


def named_special_tokens(guide: Guide, tokenizer_info: TokenizerInfo) -> frozenset[int]:
    """The special tokens that a guide refers to, by text or by id."""
    if guide.kind not in ("grammar", "lark", "structural_tag"):
        return frozenset()
    listed = np.zeros(tokenizer_info.vocab_size, dtype=np.bool_)
    texts = [guide.text]
    if guide.kind == "structural_tag":
        texts = [*_tag_texts(guide.document)]
        for token in _tag_token_ids(guide.document):
            listed[token : token + 1] = True
    for text in texts:
        for low, high in _listed_token_ids(text):
            listed[low : high + 1] = True
    return frozenset(
        token
        for token, name in tokenizer_info.special_tokens.items()
        if name and (listed[token] or any(name in text for text in texts))
    )


def _tag_texts(document: dict[str, Any]) -> Iterator[str]:
    """Every string of a structural tag outside of its schemas, and what its styles write."""
    for _, node in tag_formats(document):
        yield from STYLE_MARKERS.get(node.get("style", ""), ())
    yield from _strings(document)


def _strings(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, list):
        for item in node:
            yield from _strings(item)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key != "json_schema":
                yield from _strings(value)


def _listed_token_ids(text: str) -> Iterator[tuple[int, int]]:
    """First and last id of every range of tokens that an EBNF or Lark text lists by number."""
    for match in _TOKEN_LISTS.finditer(text):
        for low, high in _TOKEN_RANGE.findall(match[1] or match[2] or ""):
            yield int(low), int(high or low)


def _tag_token_ids(node: Any) -> Iterator[int]:
    if isinstance(node, list):
        for item in node:
            yield from _tag_token_ids(item)
    elif isinstance(node, dict):
        for key in _TOKEN_KEYS:
            value = node.get(key)
            for token in value if isinstance(value, list) else [value]:
                if type(token) is int and token >= 0:
                    yield token
        if node.get("type") == "token_dispatch" and isinstance(node.get("rules"), list):
            for rule in node["rules"]:
                if isinstance(rule, list) and rule and type(rule[0]) is int:
                    yield max(rule[0], 0)
        for key, value in node.items():
            if key != "json_schema":
                yield from _tag_token_ids(value)
