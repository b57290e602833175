"""GPT-2, LLaMA and Mamba of `transformers`, in the environment of hugging_face.txt."""

from common import randomized, write
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

MODELS = {
    "gpt2": (GPT2LMHeadModel, GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=61, n_positions=40)),
    "llama": (
        LlamaForCausalLM,
        LlamaConfig(
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=61,
            rope_theta=5_000.0,
        ),
    ),
    "mamba": (
        MambaForCausalLM,
        MambaConfig(hidden_size=32, state_size=8, num_hidden_layers=2, vocab_size=61, time_step_rank=3),
    ),
}

for name, (cls, config) in MODELS.items():
    model = randomized(cls(config))
    tied = ("lm_head.weight",) if config.tie_word_embeddings else ()
    write(name, model, {**config.to_dict(), "architectures": [cls.__name__]}, config.vocab_size, tied)
