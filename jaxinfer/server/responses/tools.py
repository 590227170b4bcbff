"""The tools of a response in the form of a chat, without namespaces and hosted tools."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from jaxinfer.server.api.custom_tools import check_formats
from jaxinfer.server.api.fields import field_error
from jaxinfer.server.api.tools import check_function

# kinds of tools that OpenAI's servers run, or that only its models know how to call
HOSTED = (
    *("web_search", "web_search_2025_08_26", "web_search_preview"),
    *(
        "web_search_preview_2025_03_11",
        "file_search",
        "code_interpreter",
        "image_generation",
        "mcp",
    ),
    *("local_shell", "shell", "apply_patch", "computer", "computer_use_preview", "tool_search"),
    "programmatic_tool_calling",
)
# items of their calls
HOSTED_ITEMS = (
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
    *("mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
    *("local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output"),
    *("apply_patch_call", "apply_patch_call_output", "computer_call", "computer_call_output"),
    *("tool_search_call", "tool_search_output", "program", "program_output"),
)
CUSTOM, FUNCTION, NAMESPACE = "custom", "function", "namespace"
TOP = "functions"  # OpenAI's name of the namespace of tools that are in none
_SEPARATOR = "__"
_FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        FUNCTION: ("name", "description", "parameters", "strict"),
        CUSTOM: ("name", "description", "format"),
    }
)


class Origin(NamedTuple):
    """The tool that a function of the chat stands for, as the client knows it."""

    name: str
    namespace: str | None
    is_custom: bool


class _Placed(NamedTuple):
    """A tool and its place in the request."""

    where: str
    tool: Mapping[str, Any]
    namespace: str | None
    about: str = ""  # what the client says of the namespace, with its first tool


def joined_name(name: str, namespace: Any) -> str:
    """The name of a tool of a namespace among the functions of the chat."""
    if not isinstance(namespace, str) or namespace in ("", TOP):
        return name
    return f"{namespace.removesuffix(_SEPARATOR)}{_SEPARATOR}{name}"


def hosted(tools: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The path and kind of each tool that this server does not run."""
    return [
        (f"tools[{number}]", tool["type"])
        for number, tool in enumerate(tools)
        if tool.get("type") in HOSTED
    ]


def origins(tools: Sequence[Mapping[str, Any]]) -> dict[str, Origin]:
    """The client's tools by the names of their functions in the chat."""
    return {
        joined_name(one.tool["name"], one.namespace): Origin(
            one.tool["name"], one.namespace, one.tool["type"] == CUSTOM
        )
        for one in _placed(tools)
    }


def chat_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools in the form of a chat without hosted ones; raises ``ApiError`` for the others."""
    named: dict[str, dict[str, Any]] = {}
    placed = list(_placed(tools))
    check_formats((one.where, one.tool) for one in placed if one.tool["type"] == CUSTOM)
    for where, tool, namespace, about in placed:
        kind = tool["type"]
        fields = {name: tool[name] for name in _FIELDS[kind] if tool.get(name) is not None}
        check_function(where, fields, ())
        fields["name"] = joined_name(fields["name"], namespace)
        check_function(where, fields, named)
        if about:
            fields["description"] = "\n\n".join(filter(None, [fields.get("description"), about]))
        named[fields["name"]] = {"type": kind, kind: fields}
    return list(named.values())


def chat_choice(
    tools: Sequence[dict[str, Any]], choice: Any
) -> tuple[Sequence[dict[str, Any]], Any]:
    """The tools of a chat that a choice allows, and the choice in the form of a chat."""
    named = {(tool["type"], tool[tool["type"]]["name"]): tool for tool in tools}
    match choice:
        case None | str():
            return tools, choice
        case {"type": "function" | "custom" as kind, "name": str(name)}:
            return tools, {"type": kind, kind: {"name": joined_name(name, choice.get(NAMESPACE))}}
        case {"type": "allowed_tools", "mode": "auto" | "required", "tools": [*allowed]}:
            kept: set[tuple[str, str]] = set()
            for number, one in enumerate(cast("list[Any]", allowed)):
                key = _key(one)
                if key is None or key not in named:
                    where = f"tool_choice.tools[{number}]"
                    raise field_error(where, f"{where} must name a function of tools")
                kept.add(key)
            return [tool for key, tool in named.items() if key in kept], choice["mode"]
        case _:
            raise field_error(
                "tool_choice",
                'tool_choice must be none, auto, required, {"type": "function", "name": a function '
                'of tools} or {"type": "allowed_tools", "mode": auto or required, "tools": [...]}',
            )


def _key(choice: Any) -> tuple[str, str] | None:
    """The kind and the name of a tool of ``allowed_tools``."""
    if not isinstance(choice, Mapping) or not isinstance(choice.get("name"), str):
        return None
    return str(choice.get("type", FUNCTION)), joined_name(choice["name"], choice.get(NAMESPACE))


def _placed(tools: Sequence[Mapping[str, Any]]) -> Iterator[_Placed]:
    """The functions and custom tools, also those in namespaces; raises ``ApiError``."""
    for number, tool in enumerate(tools):
        where, kind = f"tools[{number}]", tool.get("type")
        if kind in HOSTED:
            continue
        if kind == NAMESPACE:
            yield from _of_namespace(where, tool)
        elif kind in _FIELDS:
            yield _Placed(where, tool, None)
        else:
            raise field_error(
                f"{where}.type",
                f"{where}.type {kind!r:.60} is not supported; use function, custom or namespace",
            )


def _of_namespace(where: str, space: Mapping[str, Any]) -> Iterator[_Placed]:
    name, tools = space.get("name"), space.get("tools")
    if not isinstance(name, str) or not name:
        raise field_error(f"{where}.name", f"{where}.name must be a string that is not empty")
    if not isinstance(tools, list | tuple):
        raise field_error(f"{where}.tools", f"{where}.tools must be a list of tools")
    about = space.get("description")
    about = f"{name}: {about}" if isinstance(about, str) and about else ""
    for number, tool in enumerate(cast("Sequence[Any]", tools)):
        place = f"{where}.tools[{number}]"
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind not in _FIELDS:
            raise field_error(f"{place}.type", f"{place}.type must be function or custom")
        yield _Placed(place, cast("Mapping[str, Any]", tool), name, about if number == 0 else "")
