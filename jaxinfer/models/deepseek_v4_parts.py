"""Names of DeepSeek-V4's tensors in files of transformers, and the published ones."""

from __future__ import annotations

# as transformers saves tensors, and as its modules have them
OTHER_NAMES: tuple[tuple[str, str], ...] = (
    *((rf"^{one}$", own) for one, own in (
        *((r"model\.embed_tokens\.weight", "embed.weight"), (r"lm_head\.weight", "head.weight")),
        (r"model\.hc_head\.hc_(fn|base|scale)", r"hc_head_\1"),
    )),
    *((rf"^(model\.layers\.\d+)\.{one}((?:\.weight)?)$", rf"\1.{own}\2") for one, own in (
        *(("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm")),
        *((rf"{one}_hc\.{part}", f"hc_{one}_{part}") for one in ("attn", "ffn")
          for part in ("fn", "base", "scale")),
        (r"attn\.norm", "attn.kv_norm"),
        *((rf"self_attn\.{one}", f"attn.{own}") for one, own in (
            *(("sinks", "attn_sink"), ("q_a_norm", "q_norm"), ("kv_norm", "kv_norm")),
            *(("q_a_proj", "wq_a"), ("q_b_proj", "wq_b"), ("kv_proj", "wkv")),
            *(("o_a_proj", "wo_a"), ("o_b_proj", "wo_b")),
            *((rf"compressor\.{one}{theirs}", f"{own}compressor.{ours}")
              for one, own in (("", ""), (r"indexer\.", "indexer."))
              for theirs, ours in (("position_bias", "ape"), ("kv_proj", "wkv"),
                                   ("gate_proj", "wgate"), ("kv_norm", "norm"))),
            (r"compressor\.indexer\.q_b_proj", "indexer.wq_b"),
            (r"compressor\.indexer\.scorer\.weights_proj", "indexer.weights_proj"),
        )),
        *((rf"mlp\.gate{theirs}", f"ffn.gate{ours}") for theirs, ours in (
            *(("", ""), (r"\.tid2eid", ".tid2eid"), (r"\.e_score_correction_bias", ".bias")),
        )),
        *((rf"mlp\.shared_experts\.{theirs}_proj", f"ffn.shared_experts.{ours}")
          for theirs, ours in (("gate", "w1"), ("up", "w3"), ("down", "w2"))),
    )),
    *((rf"^(model\.layers\.\d+)\.mlp\.(experts\.\d+)\.{theirs}_proj\.", rf"\1.ffn.\2.{ours}.")
      for theirs, ours in (("gate", "w1"), ("up", "w3"), ("down", "w2"))),
)  # fmt: skip
