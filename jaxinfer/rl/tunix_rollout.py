"""``TunixRollout``: an engine that generates for a trainer of google-tunix, in its process.

It is for ``ClusterConfig(rollout_engine=functools.partial(TunixRollout, model=FOLDER))``; the
interface is ``tunix.rl.rollout.base_rollout.BaseRollout`` of google-tunix 0.1.7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tunix.generate.mappings import MappingConfig  # pyright: ignore[reportMissingImports]
from tunix.rl.rollout.base_rollout import (  # pyright: ignore[reportMissingImports]
    BaseRollout,
    RolloutConfig,
    RolloutOutput,
)

from jaxinfer.core.progress import NO_PROGRESS
from jaxinfer.core.request import SamplingParams
from jaxinfer.engine.api.llm import LLM
from jaxinfer.engine.api.vllm_args import engine_config
from jaxinfer.engine.requests.outputs import CompletionOutput
from jaxinfer.engine.start.build import build_engine, plan_engine
from jaxinfer.models.base import Model, Params, forward_batch
from jaxinfer.rl.trainer_weights import TrainerWeights

MAPPINGS = "sglang_jax"  # of Tunix's mappings, those nearest to Hugging Face's names


class TunixRollout(BaseRollout):
    """Generates with the trainer's weights, which it takes on the device.

    ``model`` is the folder, or the config.json, of the architecture that ``rollout_actor`` has; its
    tensors are not read. ``settings`` are those of ``LLM``; ``max_model_len`` is by default the
    rollout's ``kv_cache_size``, ``dtype`` its ``data_type``. ``llm`` is the engine.

    Logprobs are of log_softmax(logits / temperature) before top_k and top_p, as Tunix's trainer
    computes them. An end token is the last of its ``tokens``. Request number n of the rollout draws
    with a seed that follows from n and from the config's ``seed``, so equal prompts get different
    answers, and a run can be repeated. Raises a ``JaxinferError`` if the model cannot be served.
    """

    def __init__(
        self,
        rollout_actor: Any,  # flax.nnx.Module
        tokenizer: Any,  # tunix.generate.tokenizer_adapter.TokenizerAdapter
        mesh: Any,  # jax.sharding.Mesh | None
        rollout_config: RolloutConfig,
        *,
        model: str,
        **settings: Any,
    ) -> None:
        from flax import nnx

        self._tokenizer = tokenizer
        self._temperature = rollout_config.temperature
        self._num_requests = 0
        defaults: dict[str, Any] = {
            "max_model_len": rollout_config.kv_cache_size,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "cpu_weights": "float32",
            "prefill_first": True,
        }
        if rollout_config.data_type is not None:
            defaults["dtype"] = jnp.dtype(rollout_config.data_type).name
        plan = plan_engine(engine_config(model, defaults | settings), mesh=mesh)
        mapping: Any = MappingConfig.build(
            rollout_config.rollout_mapping_config, rollout_actor, MAPPINGS
        )
        program = plan.program
        self._weights = TrainerWeights(program.model, program.placement, mapping.to_hf_mappings)
        params = self._weights.params(nnx.state(rollout_actor, nnx.Param))
        engine = build_engine(replace(plan, loaded=params))
        self.llm = LLM.of_engine(engine, plan.config, NO_PROGRESS)

    def generate(
        self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any
    ) -> RolloutOutput:
        """Answer each prompt; ``logits`` are not returned."""
        del kwargs
        self._temperature = rollout_config.temperature
        prompt_ids = [self._encoded(prompt) for prompt in prompts]
        outputs = self.llm.generate(
            [{"prompt_token_ids": ids} for ids in prompt_ids],
            [self._sampling(rollout_config) for _ in prompts],
            use_tqdm=False,
        )
        answers = [output.outputs[0] for output in outputs]
        tokens = [np.array(answer.token_ids, np.int32) for answer in answers]
        return RolloutOutput(
            text=[self._tokenizer.decode(answer.token_ids) for answer in answers],
            logits=None,  # type: ignore[arg-type]  # as Tunix's other engines
            tokens=tokens,
            left_padded_prompt_tokens=self._left_padded(
                prompt_ids, rollout_config.max_prompt_length
            ),
            logprobs=[_logprobs(answer) for answer in answers],
        )

    def get_per_token_logps(
        self,
        prompt_tokens: jax.Array,  # int32[B, P], padded on the left
        completion_tokens: jax.Array,  # int32[B, C], padded on the right
        completion_mask: jax.Array | None = None,
    ) -> jax.Array:  # float32[B, C]
        """Logprobs of completions by ``forward`` with the rollout's weights, at the temperature of
        the last ``generate``; 0 for padding.
        """
        del completion_mask  # padding is recognised by its token
        temperature = jnp.float32(self._temperature if self._temperature > 0 else 1.0)
        arguments = (prompt_tokens, completion_tokens, temperature)
        model = self.llm.model
        return _scores(model.model, self.pad_id(), model.params, *arguments)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Serve the trainer's new weights; see ``LLM.update_weights``."""
        del filter_types  # of the arrays in ``params``
        self.llm.update_weights(self._weights.params(params))

    def pad_id(self) -> int:
        """The tokenizer's padding token."""
        return int(self._tokenizer.pad_id())

    def eos_id(self) -> int:
        """The tokenizer's end token."""
        return int(self._tokenizer.eos_id())

    def model(self) -> None:
        """None: the engine has no module of Tunix's, so its weights are its own and are synced."""

    def _encoded(self, prompt: str) -> list[int]:
        """The ids of a prompt as Tunix's engines make them."""
        bos = self._tokenizer.bos_id()
        ids = [*([bos] if bos else []), *self._tokenizer.encode(prompt)]
        return [int(one) for one in self._tokenizer.dedup_bos_ids(ids)]

    def _sampling(self, config: RolloutConfig) -> SamplingParams:
        number, self._num_requests = self._num_requests, self._num_requests + 1
        return SamplingParams(
            temperature=config.temperature,
            top_k=config.top_k or 0,
            top_p=1.0 if config.top_p is None else config.top_p,
            max_tokens=config.max_tokens_to_generate,
            seed=None if config.seed is None else _seed(config.seed, number),
            ignore_eos=True,  # the trainer's end tokens count, not those of config.json
            stop_token_ids=tuple(config.eos_tokens or (self.eos_id(),)),
            logprobs=0,
            temperature_scaled_logprobs=True,
            detokenize=False,
        )

    def _left_padded(
        self, prompt_ids: Sequence[Sequence[int]], length: int
    ) -> np.ndarray:  # int32[B, P]
        longest = max(map(len, prompt_ids))
        if longest > length:  # as Tunix's engines do, so that few shapes are compiled
            length = 1 << (longest - 1).bit_length()
        padded = np.full((len(prompt_ids), length), self.pad_id(), np.int32)
        for row, ids in zip(padded, prompt_ids, strict=True):
            row[length - len(ids) :] = ids
        return padded


@partial(jax.jit, static_argnums=(0, 1))
def _scores(
    model: Model,
    pad_id: int,
    params: Params,
    prompts: jax.Array,  # int32[B, P]
    completions: jax.Array,  # int32[B, C]
    temperature: jax.Array,  # float32[]
) -> jax.Array:  # float32[B, C]
    """The logprob of each completion token; see ``TunixRollout.get_per_token_logps``."""
    real = completions != pad_id
    num_padding = jnp.sum(jnp.cumsum(prompts != pad_id, axis=1) == 0, axis=1)
    ids = jax.vmap(lambda row, count: jnp.roll(row, -count))(
        jnp.concatenate([prompts, completions], axis=1), num_padding
    )
    lengths = jnp.full(len(ids), ids.shape[1], jnp.int32)
    logits = forward_batch(model, params, ids, lengths) / temperature
    starts = prompts.shape[1] - num_padding  # of the completions in ``ids``
    positions = starts[:, None] + jnp.arange(completions.shape[1])
    rows = jnp.take_along_axis(logits, positions[:, :, None] - 1, axis=1)  # float32[B, C, V]
    picked = jnp.take_along_axis(rows, completions[:, :, None], axis=2)[:, :, 0]
    return jnp.where(real, picked - jax.nn.logsumexp(rows, axis=2), 0.0)


def _logprobs(answer: CompletionOutput) -> np.ndarray:  # float32[T]
    """The logprob of each drawn token."""
    positions: Sequence[Mapping[int, Any]] = answer.logprobs or ()
    pairs = zip(answer.token_ids, positions, strict=True)
    return np.array([position[token].logprob for token, position in pairs], np.float32)


def _seed(given: Any, number: int) -> int:
    """The seed of request ``number``: of an int, or of a key of ``jax.random``."""
    if isinstance(given, jax.Array) and jnp.issubdtype(given.dtype, jax.dtypes.prng_key):
        given = jax.random.key_data(given)
    words = [int(one) & 0xFFFF_FFFF for one in np.atleast_1d(np.asarray(given)).ravel()]
    return int(np.random.SeedSequence([*words, number]).generate_state(1, np.uint64)[0] >> 1)
