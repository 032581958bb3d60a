"""Model shapes with names. The numbers are those of the papers: GPT-2 (Radford 2019), LLaMA (Touvron 2023, table 2)."""

from typing import Any

MODEL_PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "gpt2-124m": {
        "vocab_size": 50304,  # 50,257 rounded up to a multiple of 128, which tensor cores like
        "d_model": 768,
        "num_layers": 12,
        "num_heads": 12,
        "d_ff": 3072,
        "positions": "learned",
        "norm": "layernorm",
    },
    "llama-7b": {
        "vocab_size": 32000,
        "d_model": 4096,
        "num_layers": 32,
        "num_heads": 32,
        "d_ff": 11008,
        "activation": "swiglu",
        "tie_head": False,
    },
}
