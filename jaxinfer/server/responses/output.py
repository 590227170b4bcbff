"""The output items of a response as they grow, with the events of each change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET, UnsetType

from jaxinfer.server.api.choice_parts import NumberedCall
from jaxinfer.server.openai.responses import TokenLogprob
from jaxinfer.server.responses import objects
from jaxinfer.server.responses.objects import (
    CustomToolCall,
    FunctionCall,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Status,
    SummaryText,
)
from jaxinfer.server.responses.tools import Origin

# called with the type and the fields of each event, without its sequence number
type Emit = Callable[..., None]


@dataclass(frozen=True)
class TextForm:
    """A kind of item that consists of one text: its id's prefix, its parts and its events."""

    prefix: str
    item: Callable[[str, Status, list[Any]], OutputItem]
    part: Callable[..., Any]
    added: type[objects.Event]
    delta: type[objects.Event]
    done: type[objects.Event]
    ended: type[objects.Event]
    has_logprobs: bool = False


MESSAGE = TextForm(
    "msg",
    lambda id, status, parts: OutputMessage(id=id, status=status, content=parts),
    OutputText,
    objects.ContentPartAdded,
    objects.OutputTextDelta,
    objects.OutputTextDone,
    objects.ContentPartDone,
    has_logprobs=True,
)
THOUGHTS = TextForm(
    "rs",
    lambda id, status, parts: ReasoningItem(id=id, status=status, summary=[], content=parts),
    ReasoningText,
    objects.ContentPartAdded,
    objects.ReasoningTextDelta,
    objects.ReasoningTextDone,
    objects.ContentPartDone,
)
SUMMARY = TextForm(
    "rs",
    lambda id, status, parts: ReasoningItem(id=id, status=status, summary=parts, content=[]),
    SummaryText,
    objects.SummaryPartAdded,
    objects.SummaryTextDelta,
    objects.SummaryTextDone,
    objects.SummaryPartDone,
)


@dataclass(eq=False)
class _OpenText:
    """An item whose text still grows."""

    form: TextForm
    id: str
    texts: list[str] = field(default_factory=list[str])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])

    def part(self) -> Any:
        return self.form.part(text="".join(self.texts), **self.listed(self.logprobs))

    def item(self, status: Status) -> OutputItem:
        return self.form.item(self.id, status, [self.part()])

    def listed(self, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        """The field of logprobs, if this kind of item has it."""
        return {"logprobs": logprobs} if self.form.has_logprobs else {}


@dataclass(eq=False)
class _OpenCall:
    """A call whose arguments, or text, still grow."""

    id: str
    call: NumberedCall
    name: str
    namespace: str | UnsetType
    texts: list[str] = field(default_factory=list[str])

    def item(self, status: Status) -> FunctionCall | CustomToolCall:
        kind, name = (
            (CustomToolCall, "input") if self.call.is_custom else (FunctionCall, "arguments")
        )
        return kind(
            id=self.id,
            call_id=self.call.id,
            name=self.name,
            namespace=self.namespace,
            status=status,
            **{name: "".join(self.texts)},
        )


class OutputItems:
    """The items of one response; ids begin with ``name`` after their prefix. ``origins``: the
    request's tools by the names of functions.
    """

    def __init__(self, name: str, emit: Emit, origins: Mapping[str, Origin]) -> None:
        self._name = name
        self._emit = emit
        self._origins = origins
        self._ended: list[OutputItem] = []
        self._open: _OpenText | _OpenCall | None = None

    @property
    def listed(self) -> list[OutputItem]:
        """All items, the last one possibly in progress."""
        if self._open is None:
            return list(self._ended)
        return [*self._ended, self._open.item(Status.IN_PROGRESS)]

    def add_text(self, form: TextForm, text: str, logprobs: list[TokenLogprob]) -> None:
        """Add to the text of the last item, or of a new one if the last is of another kind."""
        last = self._open
        if not isinstance(last, _OpenText) or last.form is not form:
            self.end_item()
            last = self._open = self._begun(form)
        last.texts.append(text)
        last.logprobs += logprobs
        if text:
            self._emit(form.delta, **self._place(last.id), delta=text, **last.listed(logprobs))

    def begin_call(self, call: NumberedCall) -> None:
        """Add a call without its arguments."""
        self.end_item()
        origin = self._origins.get(call.name, Origin(call.name, None, call.is_custom))
        item_id = self._new_id("ctc" if call.is_custom else "fc")
        self._open = _OpenCall(item_id, call, origin.name, origin.namespace or UNSET)
        item = self._open.item(Status.IN_PROGRESS)
        self._emit(objects.OutputItemAdded, output_index=len(self._ended), item=item)

    def add_arguments(self, text: str) -> None:
        """Add to the arguments, or the text, of the begun call."""
        assert isinstance(last := self._open, _OpenCall)
        last.texts.append(text)
        kind = objects.CustomInputDelta if last.call.is_custom else objects.ArgumentsDelta
        self._emit(kind, **self._place(last.id), delta=text)

    def end_item(self, status: Status = Status.COMPLETED) -> None:
        """End the item that grows, if there is one."""
        if (last := self._open) is None:
            return
        self._open = None
        place, item = self._place(last.id), last.item(status)
        if isinstance(last, _OpenText):
            form, part = last.form, last.part()
            self._emit(form.done, **place, text=part.text, **last.listed(last.logprobs))
            self._emit(form.ended, **place, part=part)
        elif isinstance(item, CustomToolCall):
            self._emit(objects.CustomInputDone, **place, input=item.input)
        else:
            arguments = "".join(last.texts)
            self._emit(objects.ArgumentsDone, **place, name=last.name, arguments=arguments)
        self._emit(objects.OutputItemDone, output_index=len(self._ended), item=item)
        self._ended.append(item)

    def _begun(self, form: TextForm) -> _OpenText:
        item_id, index = self._new_id(form.prefix), len(self._ended)
        item = form.item(item_id, Status.IN_PROGRESS, [])
        self._emit(objects.OutputItemAdded, output_index=index, item=item)
        self._emit(form.added, **self._place(item_id), part=form.part(text=""))
        return _OpenText(form, item_id)

    def _new_id(self, prefix: str) -> str:
        return f"{prefix}_{self._name}_{len(self._ended)}"

    def _place(self, item_id: str) -> dict[str, Any]:
        return {"output_index": len(self._ended), "item_id": item_id}
