"""The offline API under vLLM's names: ``LLM(...).generate(prompts, SamplingParams(...))``.

Owns: ``LLM``. It drives the engine in the caller's thread; between calls nothing runs.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import batched
from typing import TYPE_CHECKING, Any, cast

from jaxinfer.core.collector import nothing_collected, old_left_alone
from jaxinfer.core.errors import EngineError, RequestError
from jaxinfer.core.progress import NoProgress, Progress
from jaxinfer.core.request import SamplingParams
from jaxinfer.engine.api.interrupts import interrupts_deferred
from jaxinfer.engine.api.vllm_args import engine_config
from jaxinfer.engine.facts import CheckedRequest
from jaxinfer.engine.news import EngineStats
from jaxinfer.engine.outputs import Collector, Delta, RequestOutput
from jaxinfer.engine.prompts import Prompt, encode, parse_prompts
from jaxinfer.engine.start.progress import progress_on
from jaxinfer.engine.start.start import start_engine

if TYPE_CHECKING:
    from jaxinfer.text.tokenizer import Tokenizer

ADDED_AT_ONCE = 64  # requests between looks for Ctrl-C, one of which takes as long as adding one


class LLM:
    """A model ready to answer. Arguments are vLLM's; see ``EngineConfig`` for what they mean.

    ``progress`` reports start-up and, with ``use_tqdm``, generation; by default bars on stderr.
    Raises a ``JaxinferError``, one clear sentence, when the model or a setting cannot be used.
    """

    def __init__(
        self, model: str | None = None, *, progress: Progress | None = None, **arguments: Any
    ) -> None:
        self._progress = progress or progress_on(sys.stderr)
        config = engine_config(model, arguments)
        if config.prefill_first is None:  # nobody watches single tokens
            config = replace(config, prefill_first=True)
        self.config = config
        self._engine = start_engine(config, self._progress)
        self._requests = 0
        self._answering = False

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        if self._engine.tokenizer is None:
            raise EngineError("this engine was built without a tokenizer (skip_tokenizer_init)")
        return self._engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """vLLM's defaults with the model's own generation_config over them."""
        return self._engine.facts.default_sampling

    def stats(self) -> EngineStats:
        """Counters since the engine was built."""
        return self._engine.stats()

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue one or several prompts; outputs come in the prompts' order.

        A prompt is a string, a list of token ids, ``{"prompt": str}`` or
        ``{"prompt_token_ids": [int]}``. Raises ``RequestError`` naming the prompt before any of
        them begins when one is invalid. ``priority`` has one number per prompt: lower runs first.
        """
        _refuse_lora(lora_request)
        parsed = parse_prompts(prompts, self._engine.tokenizer)
        return self._run(parsed, sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several: lists of ``{"role": ..., "content": ...}``.

        ``tools`` and ``chat_template_kwargs`` are shown to the chat template.
        """
        _refuse_lora(lora_request)
        variables = {**(chat_template_kwargs or {})}
        if tools is not None:
            variables["tools"] = tools
        several = bool(messages) and isinstance(messages[0], Sequence)
        conversations: Any = messages if several else [messages]
        tokenizer = self.get_tokenizer()
        parsed: list[Prompt] = []
        for conversation in conversations:
            text = tokenizer.render_chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=variables,
                chat_template=chat_template,
            )
            parsed.append(Prompt(text, encode(text, tokenizer, add_special_tokens=False)))
        return self._run(parsed, sampling_params, use_tqdm)

    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Sequence[SamplingParams],
        priorities: Sequence[int] | None = None,
    ) -> Generator[tuple[int, Delta]]:
        """Yield (number of the prompt, what it gained) as it comes. Closing it aborts the rest."""
        if priorities is None:
            priorities = [0] * len(prompts)
        if self._answering:
            raise EngineError("this LLM is already answering; use AsyncLLM for concurrent calls")
        self._answering = True
        numbers: dict[str, int] = {}
        try:
            with nothing_collected():  # until the first step is launched, its device waits
                self._add(self._checked(prompts, sampling_params, priorities), numbers)
                deltas = self._turn()
            while deltas or self._engine.has_work:
                for delta in deltas:
                    yield numbers[delta.request_id], delta
                deltas = self._turn()
        finally:
            self._abort(numbers)

    def check(self, prompt: Prompt, sampling_params: SamplingParams, priority: int = 0) -> None:
        """Raise ``RequestError`` when this request could never be answered."""
        self._engine.check(prompt.token_ids, sampling_params, priority=priority)

    def _checked(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Sequence[SamplingParams],
        priorities: Sequence[int],
    ) -> list[CheckedRequest]:
        """The requests as the engine takes them; none has begun when one of them is refused."""
        check, requests = self._engine.check, list[CheckedRequest]()
        given = zip(prompts, sampling_params, priorities, strict=True)
        for number, (prompt, params, priority) in enumerate(given):
            try:
                requests.append(check(prompt.token_ids, params, priority=priority))
            except RequestError as error:
                raise RequestError(f"prompt {number}: {error}") from None
        return requests

    def _add(self, requests: Sequence[CheckedRequest], numbers: dict[str, int]) -> None:
        """Give the requests to the engine, and note the number of each under its id."""
        for some in batched(enumerate(requests), ADDED_AT_ONCE):
            with interrupts_deferred():
                for number, request in some:
                    request_id = f"llm-{self._requests}"
                    self._requests += 1
                    self._engine.add_checked(request_id, request)
                    numbers[request_id] = number

    def _run(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priorities: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        params = self._params_for(prompts, sampling_params)
        levels = [0] * len(prompts)
        if priorities is not None:
            levels = _one_each("priorities", priorities, len(prompts))
        # made with the first news: until a batch's first step is launched, its device waits
        collectors: dict[int, Collector] = {}
        progress = self._progress if use_tqdm else NoProgress()
        with progress.task("generate", len(prompts)) as advance, old_left_alone():
            for number, delta in self.stream(prompts, params, levels):
                if number not in collectors:
                    collectors[number] = Collector(str(number), prompts[number], params[number])
                collectors[number].add(delta)
                if delta.error:
                    raise EngineError(f"prompt {number}: {delta.error}")
                if collectors[number].output.finished:
                    advance(1)
        return [collectors[number].output for number in range(len(prompts))]

    def _params_for(
        self, prompts: list[Prompt], given: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * len(prompts)
        several = _one_each("SamplingParams", given, len(prompts))
        for one in several:
            if not isinstance(one, SamplingParams):
                raise RequestError(f"sampling_params must be SamplingParams, got {one!r}")
        return several

    def _abort(self, request_ids: Mapping[str, int]) -> None:
        """End what is unfinished (a closed stream, an error), so that its pages are free again."""
        with interrupts_deferred():
            self._answering = False  # first: a step may raise, and the next call must say why
            for request_id in request_ids:
                self._engine.abort(request_id)
            while self._engine.has_work:
                self._engine.step()

    def _turn(self) -> tuple[Delta, ...]:
        if not self._engine.has_work:
            return ()
        with interrupts_deferred():
            return self._engine.step().deltas


def _refuse_lora(lora_request: object) -> None:
    if lora_request is not None:
        raise RequestError("lora_request is not supported; leave it out")


def _one_each(name: str, given: Any, prompts: int) -> list[Any]:
    """The items of an argument that holds one for each prompt."""
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
        raise RequestError(f"{name} must be a list, one for each prompt, got {given!r}")
    items = list(cast("Iterable[Any]", given))
    if len(items) != prompts:
        raise RequestError(f"{prompts} prompts came with {len(items)} {name}")
    return items
