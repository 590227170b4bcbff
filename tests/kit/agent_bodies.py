"""Requests as coding agents and chat pages send them, in words of our own.

The fields, their order and the kinds of tools are those of the programs' public sources; prompts,
descriptions and schemas are shortened and reworded. Owns: a class for each API's agent whose
``body`` is the next request, and the bodies of agents over chats.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# a patch as Codex has them: no rule contains itself
PATCH_GRAMMAR = """start: opening change+ closing
opening: "*** Begin Patch" LF
closing: "*** End Patch" LF?
change: added | deleted | updated
added: "*** Add File: " path LF ("+" /(.*)/ LF)+
deleted: "*** Delete File: " path LF
updated: "*** Update File: " path LF moved? lines?
path: /(.+)/
moved: "*** Move to: " path LF
lines: (place | line)+ last?
place: ("@@" | "@@ " /(.+)/) LF
line: ("+" | "-" | " ") /(.*)/ LF -> changed
last: "*** End of File" LF

%import common.LF
"""
PATCH = """*** Begin Patch
*** Update File: greet.py
@@ def greet():
-    print('hello')
+    print("hello, \\"you\\"")
*** Add File: notes.txt
+one < two & three
*** End Patch"""


def parameters(*required: str, **properties: Any) -> dict[str, Any]:
    """The schema of an object; a text in place of a schema is the name of a type."""
    schemas = {k: {"type": v} if isinstance(v, str) else v for k, v in properties.items()}
    return {
        "type": "object",
        "properties": schemas,
        "required": list(required),
        "additionalProperties": False,
    }


def _function(name: str, about: str, schema: Any, **fields: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "name": name,
        "description": about,
        "strict": False,
        "parameters": schema,
        **fields,
    }


WORDS = {"type": "array", "items": {"type": "string"}}
CODEX_TOOLS: list[dict[str, Any]] = [
    _function(
        "exec_command",
        "Runs a command in a terminal.",
        parameters("cmd", cmd="string", workdir="string", yield_time_ms="number", tty="boolean"),
    ),
    _function(
        "write_stdin",
        "Types into it.",
        parameters("session_id", session_id="number", chars="string"),
    ),
    _function(
        "update_plan",
        "Notes the steps of the work.",
        parameters(
            "plan",
            explanation="string",
            plan={
                "type": "array",
                "items": parameters("step", "status", step="string", status="string"),
            },
        ),
    ),
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files. The text is the patch itself.",
        "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR},
    },
    {
        "type": "namespace",
        "name": "mcp__docs",
        "description": "Pages of documentation.",
        "tools": [
            _function("find", "Finds pages.", parameters("words", words=WORDS), defer_loading=True),
            _function("read", "Reads a page.", parameters("page", page="string")),
        ],
    },
    {
        "type": "namespace",
        "name": "functions",
        "description": "",
        "tools": [_function("view_image", "Shows an image.", parameters("path", path="string"))],
    },
]
CODEX_SEARCH = {
    "type": "web_search",
    "external_web_access": False,
    "search_content_types": ["text"],
}


def _input_message(role: str, *texts: str, **fields: Any) -> dict[str, Any]:
    parts = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "role": role, "content": parts, **fields}


@dataclass
class Codex:
    """A session of Codex: nothing is stored, and each request has the whole conversation."""

    model: str
    tools: list[dict[str, Any]] = field(default_factory=lambda: list(CODEX_TOOLS))
    input: list[dict[str, Any]] = field(
        default_factory=lambda: [
            _input_message("developer", "<permissions>Ask before writing elsewhere.</permissions>"),
            _input_message(
                "user",
                "# AGENTS.md\n\nUse tabs.",
                "<environment><cwd>/home/a/project</cwd><shell>bash</shell></environment>",
            ),
            _input_message("user", "Make the greeting kinder."),
        ]
    )

    def body(self, **fields: Any) -> dict[str, Any]:
        """The next request."""
        return {
            "model": self.model,
            "instructions": "You change code on request. Be brief.",
            "input": self.input,
            "tools": self.tools,
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "0199-thread",
            "text": None,
            "client_metadata": {"installation": "a"},
            **fields,
        }

    def take(self, items: list[dict[str, Any]], outputs: dict[str, Any]) -> None:
        """Add the items of an answer, as this program sends them back, and the outputs of its calls
        by the name of the tool.
        """
        for item in items:
            sent = {key: value for key, value in item.items() if key not in ("id", "status")}
            match item["type"]:
                case "reasoning":  # its text is not sent back, a summary is
                    sent = {**sent, "content": None, "encrypted_content": None}
                case "message":
                    sent["phase"] = "commentary"
                case "custom_tool_call":
                    sent["status"] = "completed"
                case _:
                    pass
            self.input.append(sent)
        for item in items:
            if (kind := item["type"]) in ("function_call", "custom_tool_call"):
                output = {"type": f"{kind}_output", "call_id": item["call_id"]}
                self.input.append({**output, "output": outputs[item["name"]]})

    def ask(self, text: str) -> None:
        """Add a message of the user."""
        self.input.append(_input_message("user", text))


CACHED = {"type": "ephemeral", "ttl": "1h"}
SCHEMA = "http://json-schema.org/draft-07/schema#"
CLAUDE_TOOLS: list[dict[str, Any]] = [
    {
        "name": "Bash",
        "description": "Runs a command.",
        "input_schema": {
            "$schema": SCHEMA,
            **parameters(
                "command", command="string", timeout="number", run_in_background="boolean"
            ),
        },
    },
    {
        "name": "Edit",
        "description": "Replaces a text in a file.",
        "input_schema": parameters(
            *("file_path", "old_string", "new_string"),
            file_path="string",
            old_string="string",
            new_string="string",
            replace_all={"type": "boolean", "default": False},
        ),
        "eager_input_streaming": True,
    },
    {
        "name": "ToolSearch",
        "description": "Finds tools by their names.",
        "input_schema": parameters("query", query="string", max_results="number"),
    },
    {
        "name": "mcp__docs__read",
        "description": "Reads a page.",
        "input_schema": parameters("page", page="string"),
        "defer_loading": True,
        "cache_control": CACHED,
    },
]
CLAUDE_SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
CLAUDE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,some-beta-2099-01-01",
    "x-app": "cli",
    "x-stainless-lang": "js",
    "user-agent": "claude-cli/2.1 (external, cli)",
}
THINKING: dict[str, Any] = {
    "budget": {"type": "enabled", "budget_tokens": 4000},
    "adaptive": {"type": "adaptive", "display": "summarized"},
    "between": {"type": "between_tools"},
    "disabled": {"type": "disabled"},
    "absent": None,
}


@dataclass
class ClaudeCode:
    """A session of Claude Code."""

    model: str
    thinking: Any = None
    tools: list[dict[str, Any]] = field(default_factory=lambda: list(CLAUDE_TOOLS))
    messages: list[dict[str, Any]] = field(
        default_factory=lambda: [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>Use tabs.</system-reminder>"},
                    {"type": "text", "text": "Make it kinder.", "cache_control": CACHED},
                ],
            }
        ]
    )

    def body(self, **fields: Any) -> dict[str, Any]:
        """The next request."""
        return {
            "model": self.model,
            "messages": self.messages,
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=0a1b2;"},
                {"type": "text", "text": "You are a program for code.", "cache_control": CACHED},
                {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            ],
            "tools": self.tools,
            "metadata": {"user_id": '{"device_id":"a","session_id":"b"}'},
            "max_tokens": 32000,
            "thinking": self.thinking,
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "stream": True,
            **fields,
        }

    def take(self, blocks: list[dict[str, Any]], results: dict[str, Any]) -> None:
        """Add the blocks of an answer, as they are, and the results of its calls by the name of the
        tool, with a reminder as the program adds it.
        """
        self.messages.append({"role": "assistant", "content": blocks})
        found: list[dict[str, Any]] = [
            {"tool_use_id": one["id"], "type": "tool_result", **results[one["name"]]}
            for one in blocks
            if one["type"] == "tool_use"
        ]
        found.append(
            {"type": "text", "text": "<system-reminder>2 files changed.</system-reminder>"}
        )
        found[-1]["cache_control"] = CACHED
        self.messages.append({"role": "user", "content": found})

    def note(self, text: str) -> None:
        """Add instructions within the conversation."""
        self.messages.append({"role": "system", "content": [{"type": "text", "text": text}]})


def _chat_function(name: str, about: str, schema: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "description": about, "parameters": schema},
    }


_READ = _chat_function("read", "Reads a file.", parameters("filePath", filePath="string"))
_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "read", "arguments": '{"filePath":"a.py"}'},
}
_SYSTEM = {"role": "system", "content": "You change code."}
_USER = {"role": "user", "content": "Read a.py"}
_STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
# agents over chats: the first request, and one after a call
CHATS: dict[str, dict[str, Any]] = {
    "opencode": {
        "max_tokens": 4096,
        "temperature": 0.55,
        "top_p": 1,
        "messages": [
            _SYSTEM,
            _USER,
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "I read.",
                "tool_calls": [_CALL],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "<file>\n00001| a = 1\n</file>"},
        ],
        "tools": [_READ],
        "tool_choice": "auto",
        "reasoning_effort": "medium",
        **_STREAM,
    },
    "opencode title": {
        "max_tokens": 4096,
        "temperature": 0.5,
        "messages": [_SYSTEM, {"role": "user", "content": "Name this conversation:\n"}, _USER],
        **_STREAM,
    },
    "aider": {
        "messages": [
            _SYSTEM,
            {"role": "user", "content": "I switched to a new code base."},
            {"role": "assistant", "content": "Ok."},
            _USER,
            {
                "role": "system",
                "content": "Answer with blocks of <<<<<<< SEARCH and >>>>>>> REPLACE.",
            },
        ],
        "temperature": 0,
        "stream": True,
    },
    "Cline": {
        "messages": [
            _SYSTEM,
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<task>\nRead a.py\n</task>"},
                    {
                        "type": "text",
                        "text": "<environment_details>\n# Time\n</environment_details>",
                    },
                ],
            },
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {
                "role": "tool",
                "tool_call_id": "call_1",
                "content": [{"type": "text", "text": "a = 1"}, {"type": "text", "text": "(end)"}],
            },
        ],
        "temperature": 0,
        "tools": [_READ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        **_STREAM,
    },
    "open-webui": {
        "stream": True,
        "messages": [
            _USER,
            {"role": "assistant", "content": "It says a = 1."},
            {"role": "user", "content": "And b.py?"},
        ],
        "user": {"name": "a", "id": "1", "email": "a@example.org", "role": "user"},
        "tools": [_READ],
    },
    "open-webui title": {
        "messages": [{"role": "user", "content": "### Task:\nGive a title as JSON."}],
        "stream": False,
        "max_completion_tokens": 1000,
    },
}
