"""StepLoader: the micro-batches of one optimizer step for one rank, as a function of the step's number.

Shape suffixes: B sequences of a micro-batch, T tokens of its longest one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flextrain.data.order import Ids, SampleOrder, cut
from flextrain.errors import DataError
from flextrain.world import World

IGNORED = -100  # label of positions that are not counted, as in torch's cross_entropy and transformers


@dataclass(frozen=True)
class Micro:
    """One forward pass: labels_BT[b, t] is the token after input_ids_BT[b, t], or IGNORED. `tokens` are counted."""

    input_ids_BT: Tensor  # int64
    labels_BT: Tensor  # int64
    tokens: int


@dataclass(frozen=True)
class StepBatch:
    """This rank's part of a step: as many micro-batches as every other rank has. `ids` are its samples, in order."""

    micros: list[Micro]
    tokens: int
    ids: Ids


class StepLoader:
    """Cuts the global order for this rank. Stateless in the step, so resuming is asking for another step.

    `dataset` is map-style. Its items are token tensors (T + 1 long, shifted here); dicts with "input_ids" and perhaps
    "labels" (not shifted, as transformers has them), "targets" (each the token after its input, as ResumableDataset has
    them) or "attention_mask" (0: not counted). Sequences of unequal length are padded on the right with labels IGNORED.
    """

    def __init__(
        self,
        dataset: Any,
        order: SampleOrder,
        *,
        global_batch: int,
        micro_batch: int,
        world: World,
        device: str | torch.device = "cpu",
        start_position: int = 0,
    ) -> None:
        """Step s reads positions [start_position + s·global_batch, …). Raises DataError for a dataset without length,
        and for an order over another number of samples."""
        assert global_batch >= 1 <= micro_batch, "batches hold at least one sample"
        self.dataset, self.order, self.world = dataset, order, world
        self.global_batch, self.micro_batch, self.start_position = global_batch, micro_batch, start_position
        self.device = torch.device(device)
        self._check_length()
        tokens_per_sample = getattr(dataset, "tokens_per_sample", None)
        self.tokens_per_step: int | None = tokens_per_sample * global_batch if tokens_per_sample else None
        self._dummy_length = tokens_per_sample or 1

    def step(self, step: int) -> StepBatch:
        """Raises DataError where an item of the dataset is no sequence of tokens."""
        first = self.start_position + step * self.global_batch
        pieces = cut(self.global_batch, self.micro_batch, self.world.rank, self.world.size)
        lo, hi = pieces[0][0], pieces[-1][1]
        ids = self.order.ids(first + lo, hi - lo)
        micros = [self._micro(ids[start - lo : end - lo]) for start, end in pieces]
        return StepBatch(micros, sum(micro.tokens for micro in micros), ids)

    def _micro(self, ids: Ids) -> Micro:
        if not len(ids):  # nothing is left for this rank, but its peers' collectives need a forward pass from it too
            input_ids_BT = torch.zeros(1, self._dummy_length, dtype=torch.int64)
            labels_BT = torch.full_like(input_ids_BT, IGNORED)
        elif getattr(self.dataset, "pre_shifted", False):
            input_ids_BT, labels_BT = self.dataset.batch(ids)
        else:
            input_ids_BT, labels_BT = _pad([_shift(item, i) for item, i in zip(self._items(ids), ids, strict=True)])
        tokens = int((labels_BT != IGNORED).sum())
        return Micro(self._to_device(input_ids_BT), self._to_device(labels_BT), tokens)

    def _items(self, ids: Ids) -> Sequence[Any]:
        if hasattr(self.dataset, "__getitems__"):
            items: Sequence[Any] = self.dataset.__getitems__(ids.tolist())
            return items
        return [self.dataset[i] for i in ids.tolist()]

    def _to_device(self, tensor: Tensor) -> Tensor:
        if self.device.type != "cuda":
            return tensor.to(self.device)
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def _check_length(self) -> None:
        kind = type(self.dataset).__name__
        try:
            length = len(self.dataset)
        except TypeError as error:
            raise DataError(
                f"{kind} has no length, so no sample of it can be found again",
                number=23,
                remedy="give a map-style dataset (with __len__ and __getitem__), or build an index of the text",
            ) from error
        if length != self.order.num_samples:
            raise DataError(
                f"{kind} has {length} samples, the order is over {self.order.num_samples}",
                number=23,
                remedy="make the order for this dataset: SampleOrder(len(dataset), seed)",
            )


def _shift(item: Any, sample_id: int) -> tuple[Tensor, Tensor]:
    """(inputs, labels) of one sequence: each one token shorter than it, unless it brings its own targets."""
    fields = item if isinstance(item, Mapping) else {"input_ids": item}
    if "input_ids" not in fields:
        raise _no_tokens(sample_id, f"a mapping with {', '.join(map(str, fields))}")
    tokens = _tokens(fields["input_ids"], sample_id)
    known = ("labels", "targets", "attention_mask")
    others = {key: _tokens(fields[key], sample_id) for key in known if fields.get(key) is not None}
    for name, other in others.items():
        if other.shape != tokens.shape:
            raise _no_tokens(sample_id, f"a dict of {len(tokens)} input_ids and {len(other)} {name}")
    if "targets" in others:
        return tokens, others["targets"]
    labels = others.get("labels", tokens)
    if "attention_mask" in others:
        labels = labels.masked_fill(others["attention_mask"] == 0, IGNORED)
    return tokens[:-1], labels[1:]


def _tokens(value: Any, sample_id: int) -> Tensor:
    try:
        tokens = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _no_tokens(sample_id, f"a {type(value).__name__}") from error
    if tokens.dim() != 1 or tokens.is_floating_point() or tokens.is_complex():
        raise _no_tokens(sample_id, f"a {tokens.dtype} tensor of shape {tuple(tokens.shape)}")
    return tokens.to("cpu", torch.int64)


def _no_tokens(sample_id: int, found: str) -> DataError:
    return DataError(
        f"sample {sample_id} of the dataset is {found}; expected a 1-D tensor of token ids, or a dict with input_ids "
        "and perhaps labels and attention_mask of the same length",
        number=24,
        remedy="return one of these from the dataset's __getitem__",
    )


def _pad(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    length = max(1, *(len(inputs) for inputs, _ in rows))
    input_ids_BT = torch.zeros(len(rows), length, dtype=torch.int64)
    labels_BT = torch.full((len(rows), length), IGNORED, dtype=torch.int64)
    for row, (inputs, labels) in enumerate(rows):
        input_ids_BT[row, : len(inputs)] = inputs
        labels_BT[row, : len(labels)] = labels
    return input_ids_BT, labels_BT
