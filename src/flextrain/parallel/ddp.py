"""Replicated weights: DistributedDataParallel whose gradients are sums, as the token-weighted loss wants them."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def replicate(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    """Wrap a model so that `backward` leaves the sum (not the mean) over ranks in every gradient."""
    wrapped = DistributedDataParallel(
        model, device_ids=[device] if device.type == "cuda" else None, gradient_as_bucket_view=True
    )
    wrapped.register_comm_hook(None, _sum)
    return wrapped


def settle_buckets(module: nn.Module, backward: Callable[[], object]) -> None:
    """Let DDP lay out its buckets for good, by one backward pass whose gradients the caller throws away.

    DDP orders its buckets anew after the first backward of a process. With three ranks or more the order decides how
    each sum is rounded, so without this a resumed run would differ in the last bit from one that was never stopped.
    """
    if isinstance(module, DistributedDataParallel):
        backward()  # the forward after it takes the new layout


def _sum(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    reduced: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda future: future.value()[0])
    return reduced
