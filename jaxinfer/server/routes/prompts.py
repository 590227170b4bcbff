"""Prompts from chats, and truncation.

Owns: the chat options of a request and the checks of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxinfer.engine.prompts import Prompt
from jaxinfer.server.openai.fields import field_error
from jaxinfer.server.openai.schema import ChatFields
from jaxinfer.server.routes.service import Service


async def chat_prompt(
    service: Service, request: ChatFields, messages: Sequence[Any], add_special_tokens: bool
) -> Prompt:
    """The prompt for ``messages``; raises ``RequestError``, ``TokenizerError`` or ``ApiError``."""
    template = request.chat_template
    if template is not None and not service.config.trust_request_chat_template:
        raise field_error(
            "chat_template",
            "chat_template of a request is a program and not run here; start the server with "
            "--trust-request-chat-template, or with --chat-template",
        )
    variables = {
        **service.config.default_chat_template_kwargs,
        **(request.chat_template_kwargs or {}),
    }
    text = await service.render(
        messages,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        template_kwargs=variables,
        chat_template=template if template is not None else service.config.chat_template,
    )
    return await service.encode(text, add_special_tokens=add_special_tokens)


def truncated(service: Service, prompt: Prompt, keep: int | None, max_tokens: int | None) -> Prompt:
    """The last ``keep`` tokens of a prompt; -1 keeps all that leave ``max_tokens`` of context."""
    if keep is None:
        return prompt
    if keep < 0:
        keep = max(service.client.limits.max_model_len - (max_tokens or 1), 1)
    return prompt if len(prompt.token_ids) <= keep else Prompt(None, prompt.token_ids[-keep:])
