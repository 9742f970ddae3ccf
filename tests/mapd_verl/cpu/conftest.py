"""A random Qwen3 small enough for unit tests, with weights far from their tame initial values."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 97


def make_model(tied: bool = True, seed: int = 0) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=tied,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


@pytest.fixture(scope="session")
def model() -> Qwen3ForCausalLM:
    torch.set_num_threads(1)
    return make_model()
