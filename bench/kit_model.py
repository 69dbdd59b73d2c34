"""A hybrid model large enough that its kernels are those of real ones: `python bench/kit_model.py OUT`.

Eight layers of Qwen3-Next's shapes, three of gated-delta-net to one of attention, 32 experts. Configuration and
tokenizer only: vLLM makes up the weights with `--load-format dummy`. Needs tokenizers, torch and transformers.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.image import tiny_model

CONTEXT = 8192
SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 8,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "mlp_only_layers": [],
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "max_position_embeddings": CONTEXT,
}


def main() -> None:
    """Write the model's folder."""
    out = Path(sys.argv[1])
    config = tiny_model.make_config()
    for name, value in SHAPE.items():
        setattr(config, name, value)
    config.dtype = "bfloat16"
    config.save_pretrained(out)
    tiny_model.make_tokenizer().save_pretrained(out)


if __name__ == "__main__":
    main()
