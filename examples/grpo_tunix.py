"""GRPO by google-tunix with rollouts by jaxinfer: a tiny Llama learns to write only the letter a.

Needs the extra ``rl`` in an environment of its own: google-tunix wants an older safetensors.
"""

import functools
import json
import tempfile
from pathlib import Path

import grain
import jax
import numpy as np
import optax
from flax import nnx
from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.rl import common
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from jaxinfer.rl import TunixRollout

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PAD, BOS, EOS, FIRST = range(4)
STEPS = 40


class Letters:
    """A tokenizer with an id for each letter."""

    def encode(self, text, **_):
        return [FIRST + LETTERS.index(letter) for letter in text]

    def decode(self, ids, **_):
        return "".join(LETTERS[one - FIRST] for one in ids if one >= FIRST)

    def pad_id(self):
        return PAD

    def bos_id(self):
        return BOS

    def eos_id(self):
        return EOS


sizes = ModelConfig(
    num_layers=2,
    vocab_size=FIRST + len(LETTERS),
    embed_dim=64,
    hidden_dim=128,
    num_heads=4,
    head_dim=16,
    num_kv_heads=2,
    rope_theta=1_000_000,  # the only one that Tunix's Llama computes
    norm_eps=1e-5,
)
folder = Path(tempfile.mkdtemp())
hf_config = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": sizes.embed_dim,
    "intermediate_size": sizes.hidden_dim,
    "num_hidden_layers": sizes.num_layers,
    "num_attention_heads": sizes.num_heads,
    "num_key_value_heads": sizes.num_kv_heads,
    "vocab_size": sizes.vocab_size,
    "rms_norm_eps": sizes.norm_eps,
    "rope_theta": sizes.rope_theta,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
(folder / "config.json").write_text(json.dumps(hf_config))
mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
history = []


def reward(prompts, completions, **_):
    """The share of the letter a in each completion."""
    found = [text.count("a") / max(len(text), 1) for text in completions]
    history.append(float(np.mean(found)))
    return found


def largest_difference(cluster):
    """Between the logprobs of a rollout and the trainer's for the same tokens."""
    config = cluster.cluster_config.rollout_config
    rollout = cluster.rollout.generate(["jax", "infer"] * 8, config)
    completions = np.full((16, config.max_tokens_to_generate), PAD, np.int32)
    for row, tokens in zip(completions, rollout.tokens, strict=True):
        row[: len(tokens)] = tokens
    prompts, temperature = rollout.left_padded_prompt_tokens, config.temperature
    model = nnx.split(cluster.actor_trainer.model)
    trainer = common.compute_per_token_logps(
        *model, prompts, completions, PAD, EOS, temperature=temperature
    )
    return max(
        float(np.abs(row[: len(own)] - own).max())
        for row, own, tokens in zip(trainer, rollout.logprobs, rollout.tokens, strict=True)
        if PAD not in tokens  # the trainer takes the drawn token for padding
    )


with jax.set_mesh(mesh):
    actor, reference = (Llama3(sizes, rngs=nnx.Rngs(params=0)) for _ in range(2))
    cluster = RLCluster(
        actor=actor,
        reference=reference,
        tokenizer=Letters(),
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
            rollout_engine=functools.partial(
                TunixRollout, model=str(folder), dtype="float32", max_num_seqs=16
            ),
            training_config=RLTrainingConfig(
                actor_optimizer=optax.adam(3e-3),
                eval_every_n_steps=STEPS + 1,
                max_steps=STEPS,
                mini_batch_size=2,
                train_micro_batch_size=2,
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=12,
                max_prompt_length=8,
                kv_cache_size=64,
                temperature=0.9,
                seed=1,
            ),
        ),
    )
    print("logprobs of rollout and trainer differ by", largest_difference(cluster))
    grpo = GRPOConfig(num_generations=8, beta=0.0)
    learner = GRPOLearner(cluster, reward_fns=reward, algo_config=grpo)
    prompts = grain.MapDataset.source([{"prompts": text} for text in ("jax", "infer")] * STEPS)
    learner.train(prompts.batch(2))
    print("and after", cluster.rollout.llm.stats().weight_version, "updates by", end=" ")
    print(largest_difference(cluster))
    print(f"mean reward {np.mean(history[:5]):.2f} in the first 5 steps,", end=" ")
    print(f"{np.mean(history[-5:]):.2f} in the last 5")
