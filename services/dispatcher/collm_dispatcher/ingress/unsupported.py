"""Fields that change an answer and are not served: refused by name, unless their value leaves the answer as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from collm_common.errors import InvalidRequest

Neutral = Mapping[str, tuple[object, ...]]

NEITHER: Neutral = {
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "use_beam_search": (False,),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "prompt_logprobs": (0,),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "audio": (),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (True, False),
    "return_token_ids": (False,),
}
"""In chats and in plain completions, with the values besides null that change nothing."""

NOT_IN_CHATS: Neutral = {**NEITHER, "echo": (False,)}


def refuse(raw: Mapping[str, Any], neutral: Neutral) -> None:
    """Raises InvalidRequest for the first field, by name, that asks for what is not served."""
    for name in sorted(raw.keys() & neutral.keys()):
        if raw[name] is not None and raw[name] not in neutral[name]:
            raise InvalidRequest(f"{name} is not supported", param=name, code="unsupported_parameter")
