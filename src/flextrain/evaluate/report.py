"""What an evaluation found, as a small frozen record that flows pass on. Torch-free."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flextrain.units import format_count


@dataclass(frozen=True)
class EvalReport:
    """Losses in nats per token, accuracies as shares; all but the samples over the same held-out tokens.

    `unigram` guesses by how often each token occurs in the training split, `uniform` guesses blindly. Each sample is
    {"prompt": …, "text": the continuation}.
    """

    loss: float
    perplexity: float
    bits_per_byte: float
    accuracy: float
    unigram_loss: float
    unigram_accuracy: float
    uniform_loss: float
    tokens: int
    step: int
    samples: tuple[dict[str, str], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold."""
        return {**asdict(self), "samples": [dict(sample) for sample in self.samples]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "EvalReport":
        return cls(**{**values, "samples": tuple(dict(sample) for sample in values["samples"])})

    def summary(self) -> str:
        """The figures beside their baselines, then every sample, as text for a terminal."""
        rows = [
            (f"step {self.step}", "model", "unigram", "uniform"),
            (
                "loss (nats per token)",
                *(f"{loss:.4f}" for loss in (self.loss, self.unigram_loss, self.uniform_loss)),
            ),
            ("next-token accuracy", f"{self.accuracy:.2%}", f"{self.unigram_accuracy:.2%}", ""),
            ("perplexity", f"{self.perplexity:.2f}", "", ""),
            ("bits per byte", f"{self.bits_per_byte:.3f}", "", ""),
        ]
        lines = [f"{name:<22}{model:>10}{unigram:>10}{uniform:>10}".rstrip() for name, model, unigram, uniform in rows]
        lines.append(f"over {format_count(self.tokens)} held-out tokens")
        return "\n".join([*lines, *(f"\n> {sample['prompt']}{sample['text']}" for sample in self.samples)])
