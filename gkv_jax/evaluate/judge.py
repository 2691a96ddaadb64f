"""Is an answer valid, and is it right? One document at a time; JSON Schemas are judged by jsonschema-rs.

The judge is not the engine that guided the model: an answer is parsed and validated anew, guided or
free. Only guides without a validator (regular expressions, grammars, choices, structural tags) are
judged by their grammar engine.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from gkv_jax.errors import UserError
from gkv_jax.request import Result
from grammar_host import Grammar, Guide
from grammar_host.reasoning import BLANKS


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of one document.

    Attributes:
      valid: whether the answer belongs to the guide's language: JSON that parses as a whole and
        validates, or a text that the grammar engine accepts from its first to its last token.
      exact: whether it is the expected value: equal as JSON values (see ``equal``), or equal as texts.
      fields: for each field of the expected value (see ``leaves``), how many of its leaves the answer
        has right, and how many there are. None is right where the answer does not parse; it need
        not be valid.
      problem: why it is not valid, in words; None if it is.
    """

    valid: bool
    exact: bool
    fields: Mapping[str, tuple[int, int]]
    problem: str | None = None


class Leaf(NamedTuple):
    """A leaf of a JSON value: JSON pointer (RFC 6901), the same with ``*`` for indices, and value."""

    pointer: str
    field: str
    value: Any


@dataclasses.dataclass(frozen=True)
class Judge:
    """Judges the answers to one document.

    Attributes:
      grammar: its compiled guide.
      expected: the JSON value, or the text where the guide is not one of JSON; see ``expected_value``.
      tokenizer: a transformers tokenizer, for reasoning that a special token ends.
      prompt_tokens: of the document's prompt.
    """

    grammar: Grammar
    expected: Any
    tokenizer: Any
    prompt_tokens: int

    def judge(self, result: Result) -> Verdict:
        """The verdict on what a model answered, whatever ended it."""
        guide, text = self.grammar.guide, result.text
        if guide.reasoning_end is not None and self._thinks(result, guide.reasoning_start):
            text = self._behind(result, guide.reasoning_end)
        parses, value, problem = True, text, None
        if is_json(guide):
            try:
                value = parse(text)
                problem = _json_problem(guide, value)
            except ValueError as error:
                parses, problem = False, f"it does not parse: {error}"
        elif result.error is None:
            problem = self._grammar_problem(result)
        if result.error is not None:
            problem = f"it ended in an error: {result.error}"
        found = {leaf.pointer: leaf.value for leaf in leaves(value)} if parses else {}
        fields: dict[str, tuple[int, int]] = {}
        for leaf in leaves(self.expected):
            is_right = leaf.pointer in found and equal(found[leaf.pointer], leaf.value)
            right, count = fields.get(leaf.field, (0, 0))
            fields[leaf.field] = right + is_right, count + 1
        is_exact = parses and equal(value, self.expected)
        return Verdict(problem is None, is_exact, fields, problem)

    def _grammar_problem(self, result: Result) -> str | None:
        matcher = self.grammar.matcher()
        for index, token in enumerate(result.tokens):
            if not matcher.accept_token(token):
                return f"token {index + 1} of {len(result.tokens)} does not fit the guide"
        return None if matcher.is_completed() else "it ends before the guide allows an end"

    def _thinks(self, result: Result, start: str | None) -> bool:
        """Whether there is reasoning, which only a start tag leaves open.

        Blanks may precede the tag where the answer may begin with them, as the grammar has it.
        """
        if start is None:
            return True
        info, matcher = self.grammar.tokenizer_info, self.grammar.matcher()
        for token in result.tokens:
            if info.special_tokens.get(token) == start:
                return True
            text = info.vocabulary[token]
            if not text or text[0] not in BLANKS:
                break
            if not matcher.accept_token(token):
                return False
            if text.strip(BLANKS):
                break
        if start in info.special_tokens.values():
            return False  # only the token counts
        return result.text.lstrip(BLANKS.decode()).startswith(start)

    def _behind(self, result: Result, end: str) -> str:
        """The text behind the tag that ends the reasoning; empty where there is no tag."""
        if end in result.text:
            return result.text.partition(end)[2]
        token = self.tokenizer.convert_tokens_to_ids(end)
        if token not in result.tokens:
            return ""
        rest = result.tokens[result.tokens.index(token) + 1 :]
        text: str = self.tokenizer.decode(rest, skip_special_tokens=True)
        return text


def is_json(guide: Guide) -> bool:
    """Whether answers are JSON documents, which a validator judges."""
    return guide.kind in ("json", "json_schema")


def expected_value(guide: Guide, expected: Any) -> Any:
    """What a caller expects of a guide's answers, as ``parse`` would read it.

    Raises:
      UserError: it is no JSON value, or no text where the guide is not one of JSON.
    """
    if not is_json(guide):
        if not isinstance(expected, str):
            raise UserError(f"expected is {expected!r}; under a guide of {guide.kind} give a text")
        return expected
    try:
        return json.loads(json.dumps(expected, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"expected is no JSON value: {error}") from None


def parse(text: str) -> Any:
    """The JSON value that the whole text is, but for blanks around it.

    Raises:
      ValueError: it is none. NaN is none, nor is a number that is too large for a float.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def equal(one: Any, other: Any) -> bool:
    """Whether two JSON values are the same: numbers by value (1 is 1.0), objects in any order."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one == other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and bool(one == other)


def leaves(value: Any, pointer: str = "", field: str = "") -> Iterator[Leaf]:
    """The leaves of a JSON value, in order.

    A leaf is a text, a number, true, false or null; an empty object or array is one, too. A value
    that is no object or array is a single leaf, whose pointer is empty.
    """
    if isinstance(value, dict) and value:
        for key, item in value.items():
            part = "/" + key.replace("~", "~0").replace("/", "~1")
            yield from leaves(item, pointer + part, field + part)
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from leaves(item, f"{pointer}/{index}", f"{field}/*")
    else:
        yield Leaf(pointer, field, value)


def _json_problem(guide: Guide, value: Any) -> str | None:
    if guide.kind == "json":
        return None if isinstance(value, dict) else "it is no JSON object"
    try:
        error = next(_validator(guide).iter_errors(value), None)
    except ValueError as failure:  # a text that UTF-8 cannot write, a pattern that gives up
        return f"it cannot be validated: {failure}"
    if error is None:
        return None
    where = "".join(f"/{part}" for part in error.instance_path)
    return f"at {where or 'the root'}: {error.message}"


@functools.lru_cache(maxsize=256)
def _validator(guide: Guide) -> Any:
    # Imported here: jsonschema-rs is only needed once there is a schema.
    from grammar_host.schema.reading import read_schema, validator_for

    return validator_for(read_schema(guide.document, strict=guide.strict).document)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too large for a float")
    return value
