"""Copies from GPUs to host memory beside whatever else they do. No GPU is needed to import this."""

import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from flextrain.log import get_logger

PORTABLE = 1  # cudaHostRegisterPortable: pinned for all GPUs, not only the current one

log = get_logger(__name__)


class Lane:
    """Copies from one GPU, on a stream of its own, so that forward and backward go on meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._done: torch.cuda.Event | None = None

    def copy(self, views: list[Tensor], sources: Sequence[Tensor], changing: Sequence[bool]) -> None:
        """Start to copy `sources` as they are at this point of the current stream. Those `changing`, which the next
        forward may write to, are copied within the GPU first; the others must not change before `hold`."""
        fixed = [source.clone() if changes else source for source, changes in zip(sources, changing, strict=True)]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(views, fixed, non_blocking=True)
            self._done = self._stream.record_event()
        for tensor in fixed:
            tensor.record_stream(self._stream)  # its memory is not given to anybody else before the copy is done

    def settled(self) -> bool:
        return self._done is None or self._done.query()

    def wait(self) -> None:
        if self._done is not None:
            self._done.synchronize()

    def hold(self) -> None:
        """Order what is queued from now on behind the copy."""
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)


def pin(owner: object, blocks: list[Tensor], lanes: list[Lane]) -> bool:
    """Let GPUs write to host memory by themselves, for as long as `owner` lives and the last copy takes.

    Returns False, with a warning, where the system does not allow it (RLIMIT_MEMLOCK, containers): copies are as right
    as with it, but the trainer waits for them.
    """
    pinned: list[Tensor] = []
    weakref.finalize(owner, _unpin, pinned, lanes)
    for block in blocks:
        status = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.nbytes, PORTABLE))
        if status:
            log.warning("%d bytes cannot be pinned (CUDA error %d): snapshots will take longer", block.nbytes, status)
            _forget_error()
            return False
        pinned.append(block)
    return True


def _unpin(pinned: list[Tensor], lanes: list[Lane]) -> None:
    for lane in lanes:
        lane.wait()
    for block in pinned:
        torch.cuda.cudart().cudaHostUnregister(block.data_ptr())


def _forget_error() -> None:
    """CUDA repeats its last error to whoever asks next: let that be us."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
