"""What is saved and loaded: GPT-2 with AdamW's two moments in fp32, and smaller ones of the same proportions."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from training import Shape, configure, make_model

from flextrain.checkpoint import Catalog, CheckpointSaver, Keep
from flextrain.checkpoint.shards import State, allocate_optimizer_state, model_state, optimizer_state
from flextrain.parallel import parallelize
from flextrain.storage import open_store
from flextrain.train.optim import build_optimizer
from flextrain.world import World

GPT2_124M = Shape(layers=12, width=768, heads=12, vocab_size=50304, seq_length=1024, batch_size=1)
BYTES_PER_WIDTH_SQUARED = 4 * 3 * (12 * 12 + 50304 / 768)  # weights and two moments: 12 blocks of 12 w², and the table


def shape_of(state_mb: float | None) -> Shape:
    """GPT-2 124M, or as many layers of less width, whose state has about that many MB."""
    if state_mb is None:
        return GPT2_124M
    width = max(1, round((state_mb * 1e6 / BYTES_PER_WIDTH_SQUARED) ** 0.5 / 24)) * 24
    vocab_size, seq_length = GPT2_124M.vocab_size * width // 768, GPT2_124M.seq_length * width // 768
    return dataclasses.replace(GPT2_124M, width=width, vocab_size=vocab_size, seq_length=seq_length)


@dataclass
class Subject:
    """A model and its optimizer, on this rank."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    shape: Shape

    @classmethod
    def make(cls, shape: Shape, *, allocate: bool = True) -> "Subject":
        """Sharded by FSDP2 where there are several ranks; with `allocate`, the moments exist and hold noise. Without it
        the weights are as a trainer has them that is about to resume: not drawn yet."""
        config = configure(shape, "unused", steps=1)
        config.distributed.strategy = "fsdp"
        model = make_model(config, seed=0 if allocate else None)
        if dist.is_initialized() and (size := dist.get_world_size()) > 1:
            rank = dist.get_rank()
            parallelize(model, config, World(rank, size, rank, size, 0), torch.device("cpu"))
        subject = cls(model, build_optimizer(model, config.training), shape)
        if allocate:
            allocate_optimizer_state(model, subject.optimizer)
            for tensor in local_tensors(subject.tensors).values():
                tensor.uniform_(0.0, 1e-3)
        return subject

    @cached_property
    def tensors(self) -> State:
        return model_state(self.model) | optimizer_state(self.model, self.optimizer)

    @cached_property
    def local(self) -> State:
        """What this rank holds of every tensor, sharing its memory."""
        return local_tensors(self.tensors)

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.local.values())

    def saver(self, root: Path) -> CheckpointSaver:
        return CheckpointSaver(Catalog(open_store(root)), self.model, self.optimizer, Keep(last_n=1))

    def step(self) -> None:
        """One optimizer step on a few random tokens."""
        tokens = torch.randint(0, self.shape.vocab_size, (1, min(64, self.shape.seq_length) + 1))
        loss = self.model(tokens[:, :-1], tokens[:, 1:]) / tokens.numel()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def local_tensors(state: State) -> State:
    return {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in state.items()}
