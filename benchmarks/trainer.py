"""What DistributedTrainer costs over a bare loop, and how it compares with transformers' Trainer.

Overhead: the trainer (events, progress lines, order, loader, accounting; all as in any run) and a bare loop train equal
models with equal batches, losses, clipping and optimizers, and take turns step by step in one process. The bare loop
finds its batches in memory. The benchmark fails if the two do not compute the same losses.

Tokens per second: GPT-2 of one shape with random weights, trained by transformers' Trainer at its defaults and by
flextrain, the same transformers model and our own decoder. Where there is no CUDA: fp32 and one thread, a small shape.
Where there is: bf16 and GPT-2 124M.
"""

import contextlib
import copy
import importlib.util
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from common import Claim, Spread, benchmark_parser, interleave, print_table, report
from torch import Tensor, nn
from training import (
    UNCOUNTED_STEPS,
    RandomTokens,
    Seconds,
    Shape,
    StepClock,
    configure,
    counted,
    device_type,
    make_model,
    median_seconds,
    now,
    train,
)

from flextrain.config import Config
from flextrain.data import SampleOrder
from flextrain.model.loss import token_loss_sum
from flextrain.train.hooks import Progress
from flextrain.train.optim import build_optimizer
from flextrain.train.step import StepResult

OWN, COMPILED = "flextrain, own GPT", "flextrain, own GPT, compiled"
HUB, THEIRS = "flextrain, transformers GPT2", "transformers Trainer"
RATIO_GOALS = {OWN: ">= 1", COMPILED: ">= 2.5", HUB: ">= 1"}
KINDS = {"cpu": ("wall", "cpu"), "cuda": ("wall",)}  # of time; one thread's CPU time is an idle machine's wall time
SPREAD = ("median", "lowest", "highest")
MAX_LOSS_DIFFERENCE = {"cpu": 1e-5, "cuda": 2e-2}  # relative; bf16 kernels may add in another order


SHAPES = {
    "cpu": Shape(layers=4, width=256, heads=4, vocab_size=8192, seq_length=256, batch_size=4),
    "cuda": Shape(layers=12, width=768, heads=12, vocab_size=50304, seq_length=1024, batch_size=64),
}
OVERHEAD_STEPS = 4  # times as many as for tokens per second: its steps are shorter and the difference is small
OVERHEAD_BATCH_SIZE = {"cpu": 1, "cuda": 64}  # as short a step as the claim is about: 100 ms and a little more
NEXT_TO_NOTHING = Shape(layers=1, width=16, heads=2, vocab_size=64, seq_length=16, batch_size=1)


class ForTransformers(RandomTokens):
    """The same, as transformers' Trainer takes them: as long as the context, shifted inside the model."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:  # type: ignore[override]
        row = self.tokens[index, :-1]
        return {"input_ids": row, "labels": row}


class Beside(StepClock):
    """Takes a step of the bare loop after every step of the trainer, and times both."""

    def __init__(self, bare_steps: Iterator[float]) -> None:
        super().__init__()
        self.bare_seconds: list[Seconds] = []
        self.losses: list[tuple[float, float]] = []
        self._bare_steps = bare_steps

    def after_step(self, progress: Progress | None = None, result: StepResult | None = None) -> None:
        super().after_step(progress, result)
        assert result is not None
        began = now()
        bare_loss = next(self._bare_steps)
        self.bare_seconds.append(now() - began)
        self.losses.append((float(result.loss_sum) / result.tokens, bare_loss))
        self.begin()

    def bare_median(self) -> Seconds:
        return median_seconds(counted(self.bare_seconds))

    def overhead(self) -> Seconds:
        """Median over pairs of neighbouring steps of trainer / bare loop - 1, in wall and in CPU time."""
        pairs = zip(counted(self.seconds), counted(self.bare_seconds), strict=True)
        ratios = [Seconds(ours.wall / bare.wall - 1, ours.cpu / bare.cpu - 1) for ours, bare in pairs]
        return median_seconds(ratios)


def bare_loop(model: nn.Module, config: Config, samples: RandomTokens) -> Iterator[float]:
    """One optimizer step per `next`, on the batches that the trainer takes; yields the loss (nats per token)."""
    device, training = torch.device(device_type()), config.training
    model.to(device)
    optimizer = build_optimizer(model, training)
    order = SampleOrder(len(samples), config.main.seed)
    batches = [
        samples.tokens[order.ids(step * training.batch_size, training.batch_size)].to(device)
        for step in range(training.max_steps or 0)
    ]
    for batch in batches:
        inputs, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            loss = token_loss_sum(model, inputs, labels) / labels.numel()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), training.grad_clip or 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.item()


def run_beside(shape: Shape, steps: int) -> Beside:
    """Trainer and bare loop, one step each in turn."""
    steps += UNCOUNTED_STEPS
    with tempfile.TemporaryDirectory() as folder:
        config, samples = configure(shape, folder, steps), RandomTokens(shape, steps * shape.batch_size)
        model = make_model(config)
        beside = Beside(bare_loop(copy.deepcopy(model), config, samples))
        train(config, model, samples, beside)
    allowed = MAX_LOSS_DIFFERENCE[device_type()]
    for step, (ours, bare) in enumerate(beside.losses, 1):
        if abs(ours - bare) > allowed * abs(bare):
            raise SystemExit(f"not the same work: at step {step} the trainer's loss is {ours}, the bare loop's {bare}")
    return beside


def measure_overhead(shape: Shape, steps: int, repetitions: int) -> list[Claim]:
    runs = interleave({"both": lambda: run_beside(shape, steps)}, repetitions)["both"]
    rows, claims = [], []
    for kind in KINDS[device_type()]:
        bare_ms = Spread.of([1e3 * getattr(run.bare_median(), kind) for run in runs])
        trainer_ms = Spread.of([1e3 * getattr(run.median(), kind) for run in runs])
        overhead = Spread.of([100 * getattr(run.overhead(), kind) for run in runs])
        rows.append([f"bare loop, ms of {kind} time per step", *cells(bare_ms, 1)])
        rows.append([f"DistributedTrainer, ms of {kind} time per step", *cells(trainer_ms, 1)])
        rows.append([f"overhead, % of {kind} time", *cells(overhead, 2)])
        claims.append(Claim(f"bare loop, {kind} time per step", bare_ms.median, "ms", ">= 100"))
        claims.append(Claim(f"trainer, {kind} time over the bare loop", overhead.median, "%", "<= 2"))
    print_table([f"overhead: {steps} steps x {repetitions}, in turn step by step", *SPREAD], rows)
    return claims


def measure_fixed_cost(repetitions: int, steps: int = 100) -> list[Claim]:
    """What the trainer adds whatever the model: beside a model that takes no time, little else is left to measure."""
    runs = [run_beside(NEXT_TO_NOTHING, steps) for _ in range(repetitions)]
    cost_ms = Spread.of([1e3 * (run.median().cpu - run.bare_median().cpu) for run in runs])
    title = f"a model of next to nothing, {steps} steps x {repetitions}"
    print_table([title, *SPREAD], [["added CPU time per step, ms", *cells(cost_ms, 2)]])
    return [Claim("trainer, CPU time added to any step", cost_ms.median, "ms", "<= 2")]


def cells(spread: Spread, digits: int) -> list[str]:
    return [f"{value:,.{digits}f}" for value in (spread.median, spread.low, spread.high)]


def hub_model_folder(shape: Shape, folder: str) -> str:
    """A folder with the configuration of that GPT-2, without dropout (the trajectory must not depend on ranks)."""
    from transformers import GPT2Config

    GPT2Config(
        vocab_size=shape.vocab_size,
        n_positions=shape.seq_length,
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    ).save_pretrained(folder)
    return folder


def run_flextrain(shape: Shape, steps: int, name: str, compiled: bool) -> Seconds:
    """Per step, of DistributedTrainer."""
    steps += UNCOUNTED_STEPS
    with tempfile.TemporaryDirectory() as folder:
        config = configure(shape, folder, steps, name=name, compiled=compiled)
        clock = StepClock()
        train(config, make_model(config), RandomTokens(shape, steps * shape.batch_size), clock)
    return clock.median()


def run_transformers(shape: Shape, steps: int, name: str) -> Seconds:
    """Per step, of transformers' Trainer at its defaults (bf16 on CUDA), on the model `name`."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    clock = StepClock()
    steps += UNCOUNTED_STEPS

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            clock.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.after_step()

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        cuda = device_type() == "cuda"
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=shape.batch_size,
            max_steps=steps,
            bf16=cuda,
            use_cpu=not cuda,
            dataloader_pin_memory=cuda,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        model = make_model(configure(shape, folder, steps, name=name))
        samples = ForTransformers(shape, steps * shape.batch_size)
        Trainer(model, arguments, train_dataset=samples, callbacks=[Clock()]).train()
    return clock.median()


def measure_throughput(shape: Shape, steps: int, repetitions: int) -> list[Claim]:
    with tempfile.TemporaryDirectory() as folder:
        hub = hub_model_folder(shape, folder)
        bodies: dict[str, Callable[[], Seconds]] = {
            OWN: lambda: run_flextrain(shape, steps, "gpt", False),
            HUB: lambda: run_flextrain(shape, steps, hub, False),
        }
        if device_type() == "cuda":
            bodies[COMPILED] = lambda: run_flextrain(shape, steps, "gpt", True)
        if importlib.util.find_spec("accelerate"):
            bodies[THEIRS] = lambda: run_transformers(shape, steps, hub)
        else:
            print(f"\nskipped: {THEIRS}: needs accelerate (pip install -c constraints.txt -e '.[benchmarks]')")
        results = interleave(bodies, repetitions)
    claims = []
    for kind in KINDS[device_type()]:
        rates = {
            name: Spread.of([shape.tokens_per_step / getattr(seconds, kind) for seconds in runs])
            for name, runs in results.items()
        }
        title = f"tokens per second of {kind} time: {steps} steps x {repetitions}, in turn"
        print_table([title, *SPREAD], [[name, *cells(rate, 0)] for name, rate in rates.items()])
        claims += [Claim(f"{name}, {kind} time", rate.median, "tokens/s") for name, rate in rates.items()]
        claims += compare(rates, kind)
    return claims


def compare(rates: dict[str, Spread], kind: str) -> Iterator[Claim]:
    """Each of ours against theirs, where theirs was run."""
    for name, goal in RATIO_GOALS.items():
        if name in rates and THEIRS in rates:
            ratio = rates[name].median / rates[THEIRS].median
            yield Claim(f"{name} / {THEIRS}, {kind} time", ratio, "x", goal)


def main(argv: list[str] | None = None) -> int:
    parser = benchmark_parser(__doc__ or "")
    parser.add_argument("--steps", type=int, default=16, metavar="N", help="counted steps per repetition (default 16)")
    parser.add_argument("--batch-size", type=int, metavar="N", help="sequences per step (default 4, on CUDA 64)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    os.environ.setdefault("FLEXTRAIN_LOG", "WARNING")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # transformers' Trainer would spread over all there are
    shape = SHAPES[device_type()]
    throughput_shape = replace(shape, batch_size=args.batch_size or shape.batch_size)
    overhead_shape = replace(shape, batch_size=args.batch_size or OVERHEAD_BATCH_SIZE[device_type()])
    print(f"{describe_machine()}\noverhead with {overhead_shape}; tokens per second with {throughput_shape}")
    claims = [
        *measure_overhead(overhead_shape, OVERHEAD_STEPS * args.steps, args.repetitions),
        *measure_fixed_cost(args.repetitions),
        *measure_throughput(throughput_shape, args.steps, args.repetitions),
    ]
    report(claims, args.json)
    return 0


def describe_machine() -> str:
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} cores, one thread used"
    busy = f"load {os.getloadavg()[0]:.1f} at the start"
    return f"torch {torch.__version__}, {where}, {busy}"


if __name__ == "__main__":
    sys.exit(main())
