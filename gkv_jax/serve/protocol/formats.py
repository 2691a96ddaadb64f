"""What an answer must obey, in the words of OpenAI, vLLM, SGLang, TensorRT-LLM and llama.cpp.

Their fields say the same things in different places. Each becomes a ``Constraint``; a request may have one.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from gkv_jax.serve.errors import ApiError, invalid_guide
from gkv_jax.serve.protocol.base import Strict, Text, only
from grammar_host import Guide, GuideError
from grammar_host.guide import DEFAULT_MAX_WHITESPACE


@dataclasses.dataclass(frozen=True)
class Constraint:
    """What an answer must obey.

    Attributes:
      field: of the request, in dotted form.
      build: makes the guide; raises GuideError.
      backend: the grammar engine asked for; None takes the server's.
      name: the client's name of the schema, if it has one.
    """

    field: str
    build: Callable[[], Guide]
    backend: str | None = None
    name: str | None = None

    def guide(self) -> Guide:
        """The guide.

        Raises:
          ApiError: it is malformed, too large, or accepts nothing.
        """
        try:
            return self.build()
        except GuideError as error:
            raise self.error(error) from error

    def error(self, error: GuideError) -> ApiError:
        """What the client is told of a guide that cannot be enforced."""
        return invalid_guide(error, self.field, self.name)


class JsonSchemaFormat(Strict):
    """A named schema. It is enforced whether ``strict`` or not, its keys in their order."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: Text | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's ``response_format``.

    ``json_object`` may bring a schema, as in llama.cpp; ``structural_tag`` is XGrammar's, as in vLLM and
    SGLang; ``regex`` and ``ebnf`` are TensorRT-LLM's. ``lark`` is ours.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag", "regex", "ebnf", "lark"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    regex: str | None = None
    ebnf: str | None = None
    lark: str | None = None
    format: dict[str, Any] | None = Field(None, description="of a structural tag")
    structures: list[dict[str, Any]] | None = Field(None, description="of the older structural tag")
    triggers: list[str] | None = Field(None, description="of the older structural tag")

    @model_validator(mode="after")
    def _check_fields(self) -> "ResponseFormat":
        given = {name for name in _DETAILS if getattr(self, name) is not None}
        needed, optional = _DETAILS_OF.get(self.type, (set(), set()))
        if self.type == "structural_tag":
            old = {"structures", "triggers"}
            needed = {"format"} if "format" in given or not given & old else old
        if missing := needed - given:
            name = min(missing).rstrip("_")
            raise ValueError(f"type {self.type!r} and a field {name!r} go together")
        if extra := given - needed - optional:
            name = min(extra).rstrip("_")
            raise ValueError(
                f"a field {name!r} beside 'type' does not go with type {self.type!r}; leave one out"
            )
        return self

    def constraint(self) -> Constraint | None:
        """None for free text."""
        if self.type == "text":
            return None
        name = self.json_schema.name if self.json_schema else None
        return Constraint("response_format", self._guide, name=name)

    def _guide(self) -> Guide:
        if self.json_schema is not None:
            return Guide.json_schema(
                self.json_schema.schema_, strict=self.json_schema.strict or False
            )
        if self.schema_ is not None:
            return Guide.json_schema(self.schema_)
        if self.regex is not None:
            return Guide.regex(self.regex)
        if self.ebnf is not None:
            return Guide.grammar(self.ebnf)
        if self.lark is not None:
            return Guide.lark(self.lark)
        if self.type == "structural_tag":
            fields = ("type", "format", "structures", "triggers")
            values = {name: getattr(self, name) for name in fields}
            return Guide.structural_tag({n: v for n, v in values.items() if v is not None})
        return Guide.json()


_DETAILS = ("json_schema", "schema_", "regex", "ebnf", "lark", "format", "structures", "triggers")
_DETAILS_OF: dict[str, tuple[set[str], set[str]]] = {
    "json_object": (set(), {"schema_"}),
    "json_schema": ({"json_schema"}, set()),
    "regex": ({"regex"}, set()),
    "ebnf": ({"ebnf"}, set()),
    "lark": ({"lark"}, set()),
}
"""Fields that a type needs, and those that it may have."""


def _own_name(backend: Any) -> Any:
    return "llguidance" if backend == "guidance" else backend


BackendName = Annotated[str, BeforeValidator(_own_name)]
"""A grammar engine; vLLM's word for LLGuidance is ``guidance``."""

Schema = Annotated[
    dict[str, Any] | bool | str, only(dict, bool, str, expected="a JSON Schema, or its text")
]
Tag = Annotated[dict[str, Any] | str, only(dict, str, expected="an object, or its text")]

_KINDS = ("json", "regex", "choice", "grammar", "lark", "json_object", "structural_tag")


class StructuredOutputs(Strict):
    """vLLM's ``structured_outputs``: exactly one language, and options."""

    json_: Schema | None = Field(None, alias="json", description="a JSON Schema, or its text")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = Field(None, description="GBNF, llama.cpp's EBNF; see lark")
    lark: str | None = None
    json_object: Literal[True] | None = None
    structural_tag: Tag | None = None
    backend: BackendName | None = Field(None, description="auto, llguidance, xgrammar or outlines")
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = Field(
        None,
        description="changes nothing: an engine that is asked for serves, or the request fails",
    )

    @model_validator(mode="after")
    def _check_kind(self) -> "StructuredOutputs":
        given = self._given()
        if len(given) != 1:
            found = f"found {' and '.join(given)}" if given else "there is none"
            raise ValueError(f"exactly one of {', '.join(_KINDS)} is needed; {found}")
        if given[0] not in ("json", "json_object"):
            for name in ("whitespace_pattern", "disable_any_whitespace"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} rules the blanks of JSON; leave it out with {given[0]}"
                    )
        if self.disable_additional_properties and given[0] != "json":
            raise ValueError("disable_additional_properties goes with json; leave it out")
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise ValueError("whitespace_pattern excludes disable_any_whitespace; leave one out")
        return self

    def _given(self) -> list[str]:
        values = {name: getattr(self, name + "_" * (name == "json")) for name in _KINDS}
        return [name for name, value in values.items() if value is not None]

    def constraint(self, field: str = "structured_outputs") -> Constraint:
        """The one language."""
        return Constraint(f"{field}.{self._given()[0]}", self._guide, self.backend)

    def _guide(self) -> Guide:
        blanks: dict[str, Any] = {
            "whitespace_pattern": self.whitespace_pattern,
            "max_whitespace": 0 if self.disable_any_whitespace else DEFAULT_MAX_WHITESPACE,
        }
        if self.json_ is not None:
            strict = self.disable_additional_properties or False
            return Guide.json_schema(self.json_, strict=strict, **blanks)
        if self.json_object:
            return Guide.json(**blanks)
        if self.regex is not None:
            return Guide.regex(self.regex)
        if self.choice is not None:
            return Guide.choice(self.choice)
        if self.grammar is not None:
            return Guide.grammar(self.grammar)
        if self.lark is not None:
            return Guide.lark(self.lark)
        assert self.structural_tag is not None
        return Guide.structural_tag(self.structural_tag)


class Constrained(BaseModel):
    """The fields of a request that constrain its answer, wherever they are from."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = Field(None, description="structured_outputs.json")
    guided_regex: str | None = Field(None, description="structured_outputs.regex")
    guided_choice: list[str] | None = Field(None, description="structured_outputs.choice")
    guided_grammar: str | None = Field(None, description="structured_outputs.grammar")
    guided_json_object: Literal[True] | None = Field(
        None, description="structured_outputs.json_object"
    )
    guided_decoding_backend: BackendName | None = Field(
        None, description="structured_outputs.backend"
    )
    guided_whitespace_pattern: str | None = Field(
        None, description="structured_outputs.whitespace_pattern"
    )
    grammar: str | None = Field(None, description="GBNF, as llama.cpp has it")
    json_schema: dict[str, Any] | None = Field(None, description="as llama.cpp has it")
    regex: str | None = Field(None, description="as SGLang has it")
    ebnf: str | None = Field(None, description="as SGLang has it")
    backend: BackendName | None = Field(
        None, description="grammar engine: auto, llguidance, xgrammar or outlines"
    )

    @property
    def legacy_fields(self) -> list[str]:
        """Fields that vLLM had once and that are translated."""
        return [name for name in sorted(self.model_fields_set) if name.startswith("guided_")]

    def constraint(self) -> Constraint | None:
        """What the answer must obey; None for free text.

        Raises:
          ApiError: more than one constraint, or an option of a constraint that is not there.
        """
        found = list(self._constraints())
        if len(found) > 1:
            fields = " and ".join(c.field for c in found)
            message = f"{fields} each constrain the answer; leave all but one out"
            raise ApiError(400, message, param=found[1].field, code="invalid_value")
        options = ("guided_decoding_backend", "guided_whitespace_pattern")
        for name in options:
            if getattr(self, name) is not None and not (
                found and found[0].field.startswith("guided_")
            ):
                message = f"{name} goes with guided_json and the like; leave it out"
                raise ApiError(400, message, param=name, code="invalid_value")
        if not found:
            if self.backend is not None:
                message = (
                    "backend names what enforces a constraint, and there is none; leave it out"
                )
                raise ApiError(400, message, param="backend", code="invalid_value")
            return None
        (constraint,) = found
        if self.backend is None:
            return constraint
        if constraint.backend not in (None, self.backend):
            message = (
                f"backend is {self.backend!r} and {constraint.field} asks for another; give one"
            )
            raise ApiError(400, message, param="backend", code="invalid_value")
        return dataclasses.replace(constraint, backend=self.backend)

    def _constraints(self) -> Iterator[Constraint]:
        if self.response_format is not None:
            constraint = self.response_format.constraint()
            if constraint is not None:
                yield constraint
        if self.structured_outputs is not None:
            yield self.structured_outputs.constraint()
        yield from self._legacy()
        if (text := self.grammar) is not None:
            yield Constraint("grammar", lambda: Guide.grammar(text))
        if (schema := self.json_schema) is not None:
            yield Constraint("json_schema", lambda: Guide.json_schema(schema))
        if (pattern := self.regex) is not None:
            yield Constraint("regex", lambda: Guide.regex(pattern))
        if (ebnf := self.ebnf) is not None:
            yield Constraint("ebnf", lambda: Guide.grammar(ebnf))

    def _legacy(self) -> Iterator[Constraint]:
        backend, pattern = self.guided_decoding_backend, self.guided_whitespace_pattern
        for kind in ("json", "regex", "choice", "grammar", "json_object"):
            value = getattr(self, f"guided_{kind}")
            if value is None:
                continue
            of_json = pattern if kind.startswith("json") else None
            if pattern is not None and of_json is None:
                message = f"guided_whitespace_pattern rules JSON; leave it out with guided_{kind}"
                raise ApiError(
                    400, message, param="guided_whitespace_pattern", code="invalid_value"
                )
            asked = StructuredOutputs.model_validate(
                {kind: value, "backend": backend, "whitespace_pattern": of_json}
            )
            yield dataclasses.replace(asked.constraint(), field=f"guided_{kind}")
