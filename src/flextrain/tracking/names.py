"""Every key of a metric and every name of an event: written here once, so that writers and readers cannot disagree."""

from enum import StrEnum

# Metrics of one optimizer step, over the global batch of all ranks. Any rank may record them: readers take the lowest.
STEP = "train/step"  # the axis of the others in trackers that have none; an event line has its own field
ATTEMPT = "train/attempt"  # beside it, since a replayed step comes twice
LOSS = "train/loss"  # nats per counted token
LEARNING_RATE = "train/lr"
GRAD_NORM = "train/grad_norm"  # before clipping
TOKENS = "train/tokens"  # counted tokens of this step
STEP_SECONDS = "train/step_seconds"
TOKENS_PER_SECOND = "train/tokens_per_second"
HELDOUT_LOSS = "eval/loss"
HELDOUT_PERPLEXITY = "eval/perplexity"
HELDOUT_BITS_PER_BYTE = "eval/bits_per_byte"
HELDOUT_ACCURACY = "eval/accuracy"

# Events, and the fields they carry.
STATE = "state"  # state=State: from now on this node is in that state
BEAT = "beat"  # still alive; about once a second
CHECKPOINT = "checkpoint"  # step, url, size_bytes, seconds: committed
PLAN = "plan"  # begins, last_step: the steps done, and to be done; global_batch, num_samples, first: what they take
SAMPLES = "samples"  # step, ids: the samples that this rank took at that step, in order
RESUME = "resume"  # step, url: training goes on from that checkpoint
FAILURE = "failure"  # reason: a rank or node failed


class State(StrEnum):
    """What a node's paid time goes to; in the order reports list them."""

    USEFUL = "useful"  # steps done for the first time
    CHECKPOINT = "checkpoint"  # training stands still while its state is saved
    RESTART = "restart"  # starting up: processes, process group, model, loading state
    REPLAY = "replay"  # steps done again because their result was lost
    IDLE = "idle"  # paid, but waiting
    INDEX = "index"  # turning text into tokens
    EVAL = "eval"  # measuring the trained model


class Status(StrEnum):
    """How a tracker was closed. The record of a killed process has no close line."""

    FINISHED = "finished"
    FAILED = "failed"
