"""Fields that clients know from OpenAI's API or other servers and that are not served here.

They are refused with the way out, unless their value asks for nothing.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Unserved:
    """A field that is known but not served.

    Attributes:
      way_out: what to do instead.
      neutral: values that ask for nothing, so that accepting them ignores nothing; null is one too.
    """

    way_out: str
    neutral: tuple[Any, ...] = ()

    def is_neutral(self, value: Any) -> bool:
        """Whether the value asks for nothing."""
        # By type as well: False equals 0, and 1 equals True.
        return value is None or any(type(value) is type(n) and value == n for n in self.neutral)

    def message(self, field: str) -> str:
        """What the client is told."""
        neutral = f" (other than {self.neutral[0]!r})" if self.neutral else ""
        return f"'{field}'{neutral} is not served: {self.way_out}"


_LEAVE_OUT = "leave it out"
_SCHEMA = "use response_format with type 'json_schema'"
_NO_TOOLS = (
    "describe the tools in a message and ask for a call as JSON, "
    "with response_format of type 'json_schema'"
)
_NO_PENALTY = "leave it out, or steer with temperature, top_p and min_p"
_ENUM = "use response_format with a schema of type string and an enum or a pattern"

UNSERVED_IN_REQUESTS: Mapping[str, Unserved] = {
    "n": Unserved(
        "send one request per choice, each with its own seed; they share a batch", neutral=(1,)
    ),
    "best_of": Unserved("send several requests and choose", neutral=(1,)),
    "logprobs": Unserved(_LEAVE_OUT, neutral=(False,)),
    "top_logprobs": Unserved(_LEAVE_OUT, neutral=(0,)),
    "logit_bias": Unserved(_LEAVE_OUT, neutral=({},)),
    "frequency_penalty": Unserved(_NO_PENALTY, neutral=(0, 0.0)),
    "presence_penalty": Unserved(_NO_PENALTY, neutral=(0, 0.0)),
    "repetition_penalty": Unserved(_NO_PENALTY, neutral=(1, 1.0)),
    "tools": Unserved(_NO_TOOLS, neutral=([],)),
    "tool_choice": Unserved(_NO_TOOLS, neutral=("none",)),
    # Without tools it says nothing about anything.
    "parallel_tool_calls": Unserved(_NO_TOOLS, neutral=(True, False)),
    "functions": Unserved(_NO_TOOLS),
    "function_call": Unserved(_NO_TOOLS, neutral=("none",)),
    "modalities": Unserved("text is what there is", neutral=(["text"],)),
    "audio": Unserved("text is what there is"),
    "reasoning_effort": Unserved("leave it out; max_completion_tokens bounds the answer"),
    "verbosity": Unserved("say in a message how long the answer shall be"),
    "service_tier": Unserved(_LEAVE_OUT, neutral=("auto", "default")),
    "store": Unserved("nothing is stored; leave it out", neutral=(False,)),
    "moderation": Unserved(_LEAVE_OUT),
    "prompt_cache_retention": Unserved(_LEAVE_OUT),
    "web_search_options": Unserved("put what the model should know into a message"),
    "structured_outputs": Unserved(_SCHEMA),
    "json_schema": Unserved(_SCHEMA),
    "guided_json": Unserved(_SCHEMA),
    "guided_choice": Unserved(_ENUM),
    "guided_regex": Unserved(_ENUM),
    "regex": Unserved(_ENUM),
    "guided_grammar": Unserved(_SCHEMA),
    "grammar": Unserved(_SCHEMA),
    "ebnf": Unserved(_SCHEMA),
    "guided_decoding_backend": Unserved(_LEAVE_OUT),
    "guided_whitespace_pattern": Unserved(_LEAVE_OUT),
    "min_tokens": Unserved("ask for minLength or minItems in a schema", neutral=(0,)),
    "ignore_eos": Unserved("ask for minLength or minItems in a schema", neutral=(False,)),
    "stop_token_ids": Unserved("use stop, with texts", neutral=([],)),
    "bad_words": Unserved("use a schema with a pattern or an enum", neutral=([],)),
    "use_beam_search": Unserved(_LEAVE_OUT, neutral=(False,)),
}

UNSERVED_IN_MESSAGES: Mapping[str, Unserved] = {
    "name": Unserved("write the name into the content; chat templates have no place for it"),
    "refusal": Unserved("write it into the content"),
    "annotations": Unserved(_LEAVE_OUT, neutral=([],)),
    "audio": Unserved("text is what there is"),
    "tool_calls": Unserved(_NO_TOOLS, neutral=([],)),
    "tool_call_id": Unserved(_NO_TOOLS),
    "function_call": Unserved(_NO_TOOLS),
    "reasoning_content": Unserved("write it into the content"),
}
