"""GRPO by google-tunix with rollouts by jaxinfer: a tiny Llama learns to say "a".

Needs the extra ``rl``, in an environment of its own: google-tunix wants an older safetensors.
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
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from jaxinfer.rl import TunixRollout

LETTERS = "abcdefghijklmnopqrstuvwxyz"
STEPS = 40


class Letters:
    """A tokenizer: 0 is padding, 1 the beginning, 2 the end, and the letters follow."""

    def encode(self, text, **_):
        return [3 + LETTERS.index(letter) for letter in text]

    def decode(self, ids, **_):
        return "".join(LETTERS[one - 3] for one in ids if one >= 3)

    def pad_id(self):
        return 0

    def bos_id(self):
        return 1

    def eos_id(self):
        return 2


def rewards(prompts, completions, **_):
    """The share of the letter a; one list of letters for each completion."""
    found = [text.count("a") / max(len(text), 1) for text in completions]
    HISTORY.append(float(np.mean(found)))
    return found


HISTORY = []
config = ModelConfig(
    num_layers=2,
    vocab_size=29,
    embed_dim=64,
    hidden_dim=128,
    num_heads=4,
    head_dim=16,
    num_kv_heads=2,
    rope_theta=1_000_000,
    norm_eps=1e-5,
)
folder = Path(tempfile.mkdtemp())
(folder / "config.json").write_text(
    json.dumps(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": config.embed_dim,
            "intermediate_size": config.hidden_dim,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "vocab_size": config.vocab_size,
            "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope_theta,
            "max_position_embeddings": 128,
            "tie_word_embeddings": False,
        }
    )
)
mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
with mesh:
    actor, reference = (Llama3(config, rngs=nnx.Rngs(params=0)) for _ in range(2))
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
                eval_every_n_steps=1000,
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
    learner = GRPOLearner(
        cluster, reward_fns=rewards, algo_config=GRPOConfig(num_generations=8, beta=0.0)
    )
    data = grain.MapDataset.source([{"prompts": text} for text in ("jax", "infer")] * STEPS)
    learner.train(data.batch(2))
    print("mean reward of the first and last 5 steps:", np.mean(HISTORY[:5]), np.mean(HISTORY[-5:]))
