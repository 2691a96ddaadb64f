"""What an answer with tools must obey."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from gkv_jax.serve.errors import ApiError
from gkv_jax.serve.protocol.formats import Constraint
from gkv_jax.serve.tools.formats import HERMES_FORMAT, CallFormat
from grammar_host import Guide, GuideError, UnsupportedGuideError
from grammar_host.schema.strict import close_objects
from grammar_host.tools import tools_error

_DOCUMENT = "/format/elements/0"
"""Where the client's own constraint stands in a structural tag of `_document_or_calls`."""


@dataclass(frozen=True)
class ToolsConstraint(Constraint):
    """What an answer with tools must obey; errors are said of the field that is at fault.

    Attributes:
      tools: all of them, as the client sent them.
      beside: the client's own constraint, which the answer obeys if it calls nothing.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    beside: Constraint | None = None

    def guide(self) -> Guide:
        """The guide.

        Raises:
          ApiError: about ``tools``, ``tool_choice``, or the client's own constraint.
        """
        try:
            return self.build()
        except GuideError as error:
            raise _tool_error(error) from error

    def error(self, error: GuideError) -> ApiError:
        """What the client is told of a guide that cannot be compiled."""
        pointer = error.pointer or ""
        if self.beside is None or not f"{pointer}/".startswith(f"{_DOCUMENT}/"):
            return _tool_error(tools_error(error, self.build(), self.tools))
        reason = error.reason
        if isinstance(error, UnsupportedGuideError):
            reason = (
                "it is not enforced in an answer that may be calls instead; leave it out of the schema, "
                "or set tool_choice to 'none' or 'required'"
            )
        schema = f"{_DOCUMENT}/json_schema"
        inside = pointer.removeprefix(schema) if pointer.startswith(schema) else None
        return self.beside.error(type(error)(error.param, reason, pointer=inside))


def tools_constraint(
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None,
    parallel: bool | None,
    beside: Constraint | None = None,
    *,
    call_format: CallFormat = HERMES_FORMAT,
) -> Constraint | None:
    """What an answer must obey.

    With ``"auto"`` and a constraint of the client's own (JSON or a choice), the answer is either calls and
    nothing else, or a text that obeys it.

    Args:
      tools: in the form of Chat Completions or of Responses.
      tool_choice: of either API; None is ``"auto"`` if there are tools. ``allowed_tools`` narrows what may
        be called.
      parallel: whether there may be several calls; None is true.
      beside: the client's own constraint.
      call_format: how calls are written.

    Returns:
      ``beside`` itself if there is nothing to call.

    Raises:
      ApiError: fields that contradict each other, or a choice of tools that are not there.
    """
    if tools is not None and not tools:
        _refuse("tools", "tools is empty; leave it out")
    if tools is None:
        if tool_choice not in (None, "none", "auto"):
            _refuse("tool_choice", "tool_choice needs tools; give tools, or leave it out")
        return beside
    known = tuple(tools)
    try:
        Guide.tools(known, "none")  # all are checked, whichever may be called
    except GuideError as error:
        raise _tool_error(error) from error
    offered, choice = _narrowed(known, "auto" if tool_choice is None else tool_choice)
    if choice == "none":
        return beside
    if beside is not None and choice != "auto":
        _refuse(
            "tool_choice",
            f"tool_choice asks for a call and {beside.field} for something else; leave one of them out",
        )
    if beside is not None and beside.backend not in (None, "auto", "xgrammar"):
        _refuse(
            "backend",
            f"backend is {beside.backend!r}; calls are enforced by 'xgrammar', or leave it out",
        )
    several = parallel is not False

    def build() -> Guide:
        if beside is None:
            guide = Guide.tools(offered, choice, parallel=several, form=call_format.form)
            assert guide is not None  # the choice is not "none"
            return guide
        return _document_or_calls(beside, offered, several, call_format)

    # Only one engine serves calls, whichever the server prefers.
    return ToolsConstraint("tools", build, "auto", tools=known, beside=beside)


def may_call(
    tools: Sequence[Mapping[str, Any]] | None, tool_choice: str | Mapping[str, Any] | None
) -> bool:
    """Whether an answer may hold calls, so that they have to be looked for."""
    return bool(tools) and tool_choice != "none"


def must_call(
    tools: Sequence[Mapping[str, Any]] | None, tool_choice: str | Mapping[str, Any] | None
) -> bool:
    """Whether an answer is calls and nothing else.

    Raises:
      ApiError: a choice of tools that are not there.
    """
    if not tools or tool_choice is None:
        return False
    return _narrowed(tuple(tools), tool_choice)[1] not in ("none", "auto")


def offered_names(
    tools: Sequence[Mapping[str, Any]] | None, tool_choice: str | Mapping[str, Any] | None
) -> list[str]:
    """The functions that may be called.

    Raises:
      ApiError: a choice of tools that are not there.
    """
    if not tools or tool_choice is None:
        return [str(_name(tool)) for tool in tools or ()]
    return [str(_name(tool)) for tool in _narrowed(tuple(tools), tool_choice)[0]]


def _narrowed(
    tools: tuple[Mapping[str, Any], ...], choice: str | Mapping[str, Any]
) -> tuple[tuple[Mapping[str, Any], ...], str | Mapping[str, Any]]:
    """The tools that may be called, and the choice among them."""
    names = [_name(tool) for tool in tools]
    there_are = f"no tool has this name; there are: {', '.join(map(str, names))}"
    if isinstance(choice, str):
        return tools, choice
    if choice.get("type") == "function":
        name = _name(choice)
        if name not in names:
            param = "tool_choice.function.name" if "function" in choice else "tool_choice.name"
            _refuse(param, f"Invalid value: {name!r}; {there_are}")
        return tools, choice
    nested = "allowed_tools" in choice
    allowed = choice["allowed_tools"] if nested else choice
    wanted = [_name(tool) for tool in allowed["tools"]]
    for index, name in enumerate(wanted):
        if name not in names:
            place = "tool_choice.allowed_tools.tools" if nested else "tool_choice.tools"
            _refuse(f"{place}.{index}", f"Invalid value: {name!r}; {there_are}")
    return tuple(tool for tool in tools if _name(tool) in wanted), str(allowed["mode"])


def _name(tool: Mapping[str, Any]) -> Any:
    return tool.get("function", tool).get("name")


def _document_or_calls(
    beside: Constraint,
    tools: Sequence[Mapping[str, Any]],
    parallel: bool,
    call_format: CallFormat,
) -> Guide:
    try:
        own = beside.build()
    except GuideError as error:
        raise beside.error(error) from error
    if own.kind in ("json", "json_schema") and not call_format.allows_json_beside:
        _refuse(
            beside.field,
            f"{beside.field} asks for JSON, and so as the served model writes calls, the two could not be "
            "told apart; leave out the tools, or set tool_choice to 'none' or 'required'",
        )
    calls = Guide.tools(tools, "required", parallel=parallel, form=call_format.form)
    assert calls is not None  # the choice is not "none"
    elements = [_own_format(own, beside.field), calls.document["format"]]
    tag = {"type": "structural_tag", "format": {"type": "or", "elements": elements}}
    guide = Guide.structural_tag(tag)
    if own.reasoning_end is None:
        return guide
    return guide.after_reasoning(own.reasoning_end, start=own.reasoning_start)


def _own_format(own: Guide, field: str) -> dict[str, Any]:
    """A guide as a part of a structural tag. Raises ApiError if it cannot be one."""
    if own.kind == "choice":
        choices = [{"type": "const_string", "value": text} for text in own.document]
        return {"type": "or", "elements": choices}
    if own.kind not in ("json", "json_schema"):
        _refuse(
            field,
            f"{field} cannot be combined with calls; leave out the tools, set tool_choice to 'none', or "
            "ask for JSON or a choice",
        )
    if own.whitespace_pattern is not None:
        _refuse(
            field, f"a whitespace_pattern cannot be combined with calls; leave it out of {field}"
        )
    schema = {"type": "object"} if own.kind == "json" else own.document
    if own.strict and isinstance(schema, dict):
        close_objects(schema)
    blanks = None if own.max_whitespace == "free" else own.max_whitespace
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": blanks}


def _tool_error(error: GuideError) -> ApiError:
    where = "" if error.pointer is None else f"In {error.pointer or 'the root'}: "
    kind = "Invalid schema for" if error.param == "tools" else "Invalid value for"
    message = f"{kind} {error.param}: {where}{error.reason}"
    return ApiError(400, message, param=error.param, code=error.code, pointer=error.pointer)


def _refuse(param: str, message: str) -> NoReturn:
    raise ApiError(400, message, param=param, code="invalid_value")
