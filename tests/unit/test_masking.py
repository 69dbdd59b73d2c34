"""No secret is shown, and nothing that is none is hidden."""

from __future__ import annotations

from pathlib import Path

import pytest

from warmstart import flags, masking, presets, profile
from warmstart.masking import MASK

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "name",
    "HF_TOKEN HUGGING_FACE_HUB_TOKEN VLLM_API_KEY api-key OPENAI_API_KEY AWS_SECRET_ACCESS_KEY DB_PASSWORD "
    "env.MY_SECRET hf-token apiKey GITHUB_TOKEN passphrase PGPASSWORD DB_PASS MYSQL_PWD MY_AUTH PAT GITHUB_PAT "
    "KEY_PATH_PASSWORD MAX_TOKEN_SECRET TOKEN_FILE_CONTENT HFTOKEN PASSCODE PASSWORD_FILE MAX_API_KEY DB_PASS2".split(),
)
def test_these_names_are_secret(name: str) -> None:
    assert masking.secret(name)
    assert masking.value(name, "x") == MASK


@pytest.mark.parametrize(
    "name",
    "TOKENIZERS_PARALLELISM max-num-batched-tokens VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE tokenizer tokenizer-mode "
    "KEYBOARD MONKEY ssl-keyfile HF_TOKEN_PATH kv-cache-dtype TOKEN_LIMIT MAX_TOKENS KEY_PATH TOKEN_FILE PATH "
    "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS REGISTRY_AUTH_FILE SSH_AUTH_SOCK NUM_KEYS "
    "TIKTOKEN_ENCODINGS_BASE compilation-config.pass_config.fuse_act_quant".split(),
)
def test_these_are_not(name: str) -> None:
    assert not masking.secret(name)
    assert masking.value(name, "16") == "16"


def test_of_all_names_in_use_only_the_secret_ones_are_hidden() -> None:
    """Variables of images and of vLLM, its flags, and what presets set."""
    names: set[str] = set()
    for arch in profile.archs(ROOT):
        held = profile.load(ROOT, arch).profile
        names |= {*held.env, *(name for feature in held.features.values() for name in feature.env)}
    assert len(names) > 10
    for version in flags.versions(ROOT):
        known = flags.known(ROOT, version)
        assert known
        names |= known.names | known.env | set(known.alias)
    for name in presets.names(ROOT):
        preset = presets.load(ROOT, name)
        names |= preset.env.keys() | preset.flags.keys()
    switches = {"allow-credentials", "return-tokens-as-token-ids"}  # nothing stands behind them
    assert {name for name in names if masking.secret(name)} - switches == {"VLLM_API_KEY", "api-key", "hf-token"}


@pytest.mark.parametrize(
    "text",
    [
        "hf_AbCdEfGhIjKlMnOp",
        "token is hf_AbCdEfGhIjKlMnOp, keep it",
        "ghp_AbCdEfGhIjKlMnOpQrSt",
        "sk-AbCdEfGhIjKlMnOpQrSt",
        "Authorization: Bearer AbCdEfGhIjKlMnOp",
        "https://me:AbCdEfGhIjKlMnOp@example.org/x",
    ],
)
def test_tokens_are_masked_wherever_they_stand(text: str) -> None:
    assert "AbCdEfGhIjKlMnOp" not in masking.text(text)
    assert MASK in masking.text(text)


def test_plain_texts_stay() -> None:
    for text in ("hf_home is a folder", "https://huggingface.co/Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "a@b"):
        assert masking.text(text) == text


@pytest.mark.parametrize(
    "command",
    [
        ["podman", "run", "--env=HF_TOKEN=S3CRET", "image"],
        ["podman", "run", "-e", "HF_TOKEN=S3CRET", "image"],
        ["podman", "run", "--env", "HF_TOKEN=S3CRET", "image"],
        ["vllm", "serve", "m", "--api-key", "S3CRET", "--port", "1"],
        ["vllm", "serve", "m", "--api-key=S3CRET", "--port", "1"],
        ["vllm", "serve", "m", "--api-key", "S3CRET", "S3CRET", "--port", "1"],
        ["up", "p", "--set", "env.HF_TOKEN=S3CRET"],
        ["up", "p", "--set=env.HF_TOKEN=S3CRET"],
        ["HF_TOKEN=S3CRET", "vllm"],
    ],
)
def test_commands_are_masked(command: list[str]) -> None:
    shown = masking.words(command)
    assert "S3CRET" not in " ".join(shown)
    assert len(shown) == len(command)


def test_a_command_without_secrets_stays() -> None:
    command = ["podman", "run", "--env=A=b=c", "--env=HF_TOKEN", "i", "m", "--max-num-batched-tokens", "8192", "-"]
    assert masking.words(command) == command


def test_an_empty_secret_is_shown_as_such() -> None:
    assert masking.env({"HF_TOKEN": "", "A": "1"}) == {"HF_TOKEN": "", "A": "1"}
