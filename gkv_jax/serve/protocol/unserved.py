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


LEAVE_OUT = "leave it out"
_TEXT = "text is what there is"

_IN_BOTH: Mapping[str, Unserved] = {
    "best_of": Unserved("ask for n answers and choose", neutral=(1,)),
    "repetition_penalty": Unserved("use frequency_penalty and presence_penalty", neutral=(1, 1.0)),
    "min_tokens": Unserved("ask for minLength or minItems in a schema", neutral=(0,)),
    "ignore_eos": Unserved("ask for minLength or minItems in a schema", neutral=(False,)),
    "stop_token_ids": Unserved("use stop, with texts", neutral=([],)),
    "bad_words": Unserved("use logit_bias, or a schema with a pattern", neutral=([],)),
    "use_beam_search": Unserved(LEAVE_OUT, neutral=(False,)),
    "skip_special_tokens": Unserved("special tokens have no text here", neutral=(True,)),
    "spaces_between_special_tokens": Unserved("special tokens have no text", neutral=(True,)),
    "include_stop_str_in_output": Unserved("add the stop text yourself", neutral=(False,)),
    "truncate_prompt_tokens": Unserved("shorten the prompt yourself"),
    "prompt_logprobs": Unserved(LEAVE_OUT),
    "priority": Unserved("requests are served in their order", neutral=(0,)),
    "echo": Unserved("put the prompt before the answer yourself", neutral=(False,)),
}

UNSERVED_IN_CHATS: Mapping[str, Unserved] = {
    **_IN_BOTH,
    "functions": Unserved("use tools"),
    "function_call": Unserved("use tool_choice", neutral=("none",)),
    "modalities": Unserved(_TEXT, neutral=(["text"],)),
    "audio": Unserved(_TEXT),
    "verbosity": Unserved("say in a message how long the answer shall be"),
    "service_tier": Unserved(LEAVE_OUT, neutral=("auto", "default")),
    "store": Unserved("nothing is stored; leave it out", neutral=(False,)),
    "moderation": Unserved(LEAVE_OUT),
    "prompt_cache_retention": Unserved(LEAVE_OUT),
    "web_search_options": Unserved("put what the model should know into a message"),
    "chat_template": Unserved("the model's own is used; chat_template_kwargs are for it"),
    "reasoning": Unserved("use reasoning_effort, or chat_template_kwargs"),
    "separate_reasoning": Unserved("it is told in reasoning_content", neutral=(True,)),
    "include_reasoning": Unserved("it is told in reasoning_content", neutral=(True,)),
    "thinking_budget": Unserved("max_completion_tokens bounds reasoning and answer together"),
    "add_generation_prompt": Unserved("answers always begin a turn", neutral=(True,)),
    "continue_final_message": Unserved("use /v1/completions", neutral=(False,)),
    "documents": Unserved("put them into a message", neutral=([],)),
}

UNSERVED_IN_COMPLETIONS: Mapping[str, Unserved] = {
    **_IN_BOTH,
    "suffix": Unserved("the model writes what follows, not what stands between", neutral=("",)),
}

UNSERVED_IN_MESSAGES: Mapping[str, Unserved] = {
    "name": Unserved("write the name into the content; chat templates have no place for it"),
    "refusal": Unserved("write it into the content"),
    "annotations": Unserved(LEAVE_OUT, neutral=([],)),
    "audio": Unserved(_TEXT),
    "function_call": Unserved("use tool_calls"),
    "reasoning": Unserved("call it reasoning_content"),
}
