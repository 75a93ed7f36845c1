"""The built-in decoder as Hugging Face's Llama, which computes the same: names of parameters, and ``config.json``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from workers.config import DecoderConfig

_OUTER = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_A_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}


def llama_name(name: str) -> str:
    """Llama's name of one of the decoder's parameters."""
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)\.weight", name)
    return f"model.layers.{layer[1]}.{_OF_A_LAYER[layer[2]]}.weight" if layer else _OUTER[name]


def llama_config(model: DecoderConfig, vocab_size: int, seq_len: int, dtype: str) -> dict[str, Any]:
    """``config.json`` for ``transformers``, also for versions before 5, which spell RoPE and dtype differently."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.dim,
        "intermediate_size": model.ffn_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.dim // model.num_heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": seq_len,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def check_llama_config(config: Mapping[str, Any], model: DecoderConfig) -> None:
    """Raise ValueError unless a model with this ``config.json`` computes what the job's decoder does.

    Only what the shapes of the tensors do not tell.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"config.json does not describe the job's model: its RoPE is {rope!r}")
    theirs = {
        "model_type": config.get("model_type"),
        "hidden_act": config.get("hidden_act", "silu"),
        "rope_type": rope.get("rope_type", rope.get("type", "default")),
        "num_attention_heads": config.get("num_attention_heads"),
        "num_key_value_heads": config.get("num_key_value_heads", config.get("num_attention_heads")),
        "rope_theta": rope.get("rope_theta", config.get("rope_theta", 10000.0)),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
    }
    ours = {
        "model_type": "llama",
        "hidden_act": "silu",
        "rope_type": "default",
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "rope_theta": model.rope_theta,
        "rms_norm_eps": model.norm_eps,
    }
    differing = [f"{key} is {theirs[key]!r}, not {ours[key]!r}" for key in ours if theirs[key] != ours[key]]
    if differing:
        raise ValueError(f"config.json does not describe the job's model: {'; '.join(differing)}")
