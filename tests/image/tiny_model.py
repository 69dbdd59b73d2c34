"""Make a tiny hybrid model (gated-delta-net and full attention layers, as in Qwen3-Next) with random weights.

Runs inside an image with nothing but what the image holds: `python tiny_model.py OUT`. The same seed and the
same torch and transformers give the same bytes, so a served answer can be compared between starts and images.

The shapes are among the smallest that vLLM's kernels accept: attention heads of 64, gated-delta-net heads of
128 (32 is refused), and at least one mixture-of-experts layer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3NextConfig, Qwen3NextForCausalLM

LAYERS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 512
CONTEXT = 2048
TEXT = """
A kernel that is compiled once and kept does not have to be compiled again. The first start of a server builds
what the second start only reads: code for the device, verdicts of the autotuner, graphs, byte code. What is
known before the start belongs in the image, what only the machine knows belongs on the volume. Measure the
phases of a start, name them, and look for the longest one. The weights of this model are random, so its
answers mean nothing, yet the same question must bring the same answer, token for token and bit for bit,
whether the cache was empty or full.
"""
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of up to `VOCABULARY` entries, trained on `TEXT`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[0],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
    )


def make_config() -> Qwen3NextConfig:
    """Return the configuration: three gated-delta-net layers, then one attention layer with experts."""
    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=len(LAYERS),
        layer_types=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        mlp_only_layers=list(range(len(LAYERS) - 1)),
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=2,
    )
    config.architectures = ["Qwen3NextForCausalLM"]
    return config


def make_model(out: Path, seed: int) -> None:
    """Write configuration, tokenizer and bfloat16 weights to `out`, readable by every user."""
    out.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save_pretrained(out)
    torch.manual_seed(seed)
    model = Qwen3NextForCausalLM(make_config()).to(torch.bfloat16)
    # The usual 0.02 leaves all tokens about equally likely; with a wider head, prompts get different answers.
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    model.save_pretrained(out)
    # save_pretrained writes weights for their owner alone; images run as any user.
    for path in out.iterdir():
        path.chmod(0o644)


def main() -> None:
    """Read the command line and make the model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="directory to write to")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make_model(arguments.out, arguments.seed)
    print(arguments.out)


if __name__ == "__main__":
    main()
