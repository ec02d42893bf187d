"""Which names mean secrets, and what is shown in place of their values."""

from __future__ import annotations

import time

import pytest

from headway.ipc.secrets import (
    MASK,
    is_secret,
    masked,
    masked_command,
    masked_line,
    masked_pairs,
    masked_text,
    secrets_among,
)

SECRETS = [
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "APIKEY"),
    *("GOOGLE_APPLICATION_CREDENTIALS", "DB_PASSWORD", "PGPASSWORD", "MYSQL_PWD", "MY_SECRETS"),
    *("hf-token", "--api-key", "apiKey", "openai.api_key", "GITHUB_PAT", "SENTRY_DSN", "key"),
]
PUBLIC = [
    *("TOKENIZERS_PARALLELISM", "MAX_TOKENS", "NCCL_DEBUG", "PWD", "KEYBOARD", "MONKEY", "PATH"),
    *("OMP_NUM_THREADS", "PASSES", "COMPASS_DIR", "CUDA_VISIBLE_DEVICES", "", "AUTHOR", "PATIENCE"),
]


def test_names_that_mean_secrets_are_told_from_those_that_only_look_like_them() -> None:
    assert [name for name in SECRETS + PUBLIC if is_secret(name)] == SECRETS


def test_a_password_in_a_url_is_a_secret_under_any_name() -> None:
    assert masked("HTTPS_PROXY", "http://jane:pw@proxy:80/a") == f"http://{MASK}@proxy:80/a"
    assert masked("HTTPS_PROXY", "http://proxy:80/@a") == "http://proxy:80/@a"
    assert masked("HF_TOKEN", "") == ""


def test_the_rest_of_a_value_that_lacks_its_quotes_is_masked_too() -> None:
    assert masked_pairs(["A=1", "HF_TOKEN=a", "b", "C=2", "d"]) == [
        *("A=1", f"HF_TOKEN={MASK}", MASK, "C=2", "d")
    ]
    assert masked_line("A=1 HF_TOKEN='a b'") == f"A=1 'HF_TOKEN={MASK}'"
    assert masked_line("A=1 HF_TOKEN='a b") == MASK
    assert masked_line("A=1  B='x y'") == "A=1  B='x y'"


def test_a_secret_among_the_words_of_a_command_is_masked() -> None:
    words = ["t.py", "--api-key", "a", "b", "--hf-token=c", "--env=HF_TOKEN=d", "--lr=1", "x=y"]
    assert masked_command(words) == [
        *("t.py", "--api-key", MASK, "b", f"--hf-token={MASK}"),
        *(f"--env=HF_TOKEN={MASK}", "--lr=1", "x=y"),
    ]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('-api_key = "sk-123456789"', '-api_key = "***"'),
        ("API_KEY=sk-1234567890 x", "API_KEY=*** x"),
        ('{"password": "hunter2hunter2"}', '{"password": "***"}'),
        ("https://me:word@host/x", "https://***@host/x"),
        ("key = jax.random(0)", "key = jax.random(0)"),
        ("KeyError: 'bad label'", "KeyError: 'bad label'"),
        ("tokenizer = 'bert-base-uncased'", "tokenizer = 'bert-base-uncased'"),
    ],
)
def test_secrets_are_masked_in_code_and_in_output(text: str, shown: str) -> None:
    assert masked_text(text) == shown


def test_masking_takes_no_longer_for_what_is_written_to_take_long() -> None:
    began = time.monotonic()
    for text in ("a-" * 100_000, "a=" * 100_000, "KEY='" * 40_000, "://" * 60_000):
        masked_text(text)
    assert time.monotonic() - began < 30


def test_secrets_that_a_run_was_given_are_masked_wherever_it_prints_them() -> None:
    words = ["--env", "A_PASSWORD=abcdefgh", "--key", "ijklmnop", "--lr", "1"]
    secrets = secrets_among(
        {"MY_API_TOKEN": "0123456789", "SHORT_KEY": "1", "LR": "12345678"}, words
    )
    printed = f"Namespace({words}) 401: bad token 0123456789, lr 12345678"
    shown = str(words).replace("abcdefgh", MASK).replace("ijklmnop", MASK)
    assert masked_text(printed, secrets) == f"Namespace({shown}) 401: bad token {MASK}, lr 12345678"
