"""Tools: what requests say of them, what the model reads, what it may write, and reading that back."""

from gkv_jax.serve.tools.conversation import Conversation, ServedFormat, check_conversation
from gkv_jax.serve.tools.formats import HERMES_FORMAT, CallFormat, Shown
from gkv_jax.serve.tools.guides import ToolsConstraint, may_call, tools_constraint
from gkv_jax.serve.tools.parser import (
    AnswerCall,
    AnswerEvent,
    CallArguments,
    CallBegins,
    CallEnds,
    ReadAnswer,
    TextDelta,
    ToolCallParser,
)
from gkv_jax.serve.tools.render import Rendered, TemplateStyle, render
from gkv_jax.serve.tools.types import (
    FunctionCall,
    FunctionDefinition,
    Tool,
    ToolCallField,
    ToolChoice,
    refuse_other_tools,
)

__all__ = [
    "HERMES_FORMAT",
    "AnswerCall",
    "AnswerEvent",
    "CallArguments",
    "CallBegins",
    "CallEnds",
    "CallFormat",
    "Conversation",
    "FunctionCall",
    "FunctionDefinition",
    "ReadAnswer",
    "Rendered",
    "ServedFormat",
    "Shown",
    "TemplateStyle",
    "TextDelta",
    "Tool",
    "ToolCallField",
    "ToolCallParser",
    "ToolChoice",
    "ToolsConstraint",
    "check_conversation",
    "may_call",
    "refuse_other_tools",
    "render",
    "tools_constraint",
]
