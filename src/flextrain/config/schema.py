"""Every key of a configuration: its type, default, unit and meaning. docs/config.md is generated from this file.

Canonical names only; a key that users also know under another name lists it in `alias_of`, and both loading a file and
making a section in Python translate it.
"""

from datetime import date
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from flextrain.config.presets import MODEL_PRESETS
from flextrain.config.section import (
    Fraction,
    NoBool,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)


class MainConfig(Section):
    """What the run is called and where it writes."""

    experiment_name: str = Field(
        "default",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description=("names the checkpoints, events and reports of a line of runs; letters, digits, `.`, `_`, `-`"),
    )
    output_dir: str = Field(
        "runs",
        min_length=1,
        description=("local folder for events, indexes and (unless checkpoint.storage says otherwise) checkpoints"),
    )
    seed: Annotated[int, Field(ge=0, lt=2**63), NoBool] = Field(
        0, description="of the initial weights, the sample order and dropout"
    )


class DataConfig(Section):
    """Where text comes from and how it becomes tokens."""

    sources: list[str] = Field(
        ["stdlib"],
        min_length=1,
        description=(
            "`stdlib` (this interpreter's own library sources), files, folders or globs of .txt .jsonl .parquet, "
            "`s3://…`, or `hf:NAME[/CONFIG]`"
        ),
    )
    text_key: str = Field("text", min_length=1, description="column or JSON key that holds a record's text")
    tokenizer: str = Field(
        "train:4096",
        min_length=1,
        description=(
            "`train:VOCAB` trains a byte-level BPE of that size on the sources; else a `transformers` name or a "
            "local path"
        ),
    )
    seq_length: PositiveInt = Field(256, description="tokens per training sequence")
    heldout_fraction: Annotated[float, Field(gt=0, lt=1), NoBool] = Field(
        0.03, description="share of documents, chosen by hash, kept out of training for evaluation"
    )
    index: str | None = Field(
        None,
        description=("path or URL of a ready token index; None builds one from `sources` below main.output_dir, once"),
    )
    shard_tokens: Annotated[int, Field(ge=1024), NoBool] = Field(
        100_000_000, description="tokens per shard file of an index"
    )


class ModelConfig(Section):
    """The network. `preset` fills every shape that is not given."""

    preset: Literal["tiny", "gpt2-124m", "llama-7b"] = Field(
        "tiny", frozen=True, description="shapes to start from; other keys of this section override it"
    )
    name: str = Field(
        "gpt",
        min_length=1,
        description=(
            "`gpt` is the built-in decoder with the shapes below; anything else is a `transformers` name or local path"
        ),
    )
    weights: Literal["random", "pretrained"] = Field(
        "random", description="for `transformers` models: load the published weights, or only the configuration"
    )
    vocab_size: PositiveInt | None = Field(None, description="tokens; None takes the tokenizer's")
    d_model: PositiveInt = Field(128, description="width of the residual stream")
    num_layers: PositiveInt = Field(4, description="decoder blocks")
    num_heads: PositiveInt = Field(4, description="attention heads; divides d_model")
    d_ff: PositiveInt = Field(512, description="width inside the feed-forward layer")
    positions: Literal["rotary", "learned"] = Field(
        "rotary", description="position encoding; learned positions limit the context to data.seq_length"
    )
    norm: Literal["rmsnorm", "layernorm"] = Field("rmsnorm", description="normalisation before each half of a block")
    activation: Literal["gelu", "swiglu"] = Field(
        "gelu", description="feed-forward non-linearity; swiglu adds a gate of width d_ff"
    )
    tie_head: bool = Field(True, description="share the output head's weight with the embedding")
    dtype: Literal["fp32", "fp64"] = Field(
        "fp32", description="type of the master weights; fp64 tells rounding from mistakes"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {**MODEL_PRESETS.get(values.get("preset", "tiny"), {}), **values}

    @model_validator(mode="after")
    def _heads_divide_width(self) -> "ModelConfig":
        if self.d_model % self.num_heads:
            raise ValueError(f"num_heads {self.num_heads} does not divide d_model {self.d_model}")
        if self.positions == "rotary" and self.d_model // self.num_heads % 2:
            width = self.d_model // self.num_heads
            raise ValueError(f"rotary positions need an even head width, not {width} (d_model / num_heads)")
        return self


class TrainingConfig(Section):
    """One optimizer step and how many of them."""

    batch_size: PositiveInt = Field(16, description="sequences per rank in one forward pass (the micro-batch)")
    global_batch_size: PositiveInt | None = Field(
        None,
        description=(
            "sequences per optimizer step over all ranks, whatever their number; None fixes batch_size × ranks at"
            " the first start, and a resumed run keeps that"
        ),
    )
    learning_rate: PositiveFloat = Field(
        3e-3, description="peak of the schedule", json_schema_extra={"alias_of": ["lr"]}
    )
    min_learning_rate_ratio: Fraction = Field(0.1, description="end of the cosine, as a share of the peak")
    warmup_steps: NonNegativeInt = Field(20, description="steps of linear warm-up from 0")
    max_steps: PositiveInt | None = Field(150, description="optimizer steps; None trains for `epochs`")
    epochs: Annotated[float, Field(gt=0, le=1e6), NoBool] | None = Field(
        None, description="passes over the training split; wins over max_steps where both are given"
    )
    weight_decay: Annotated[float, Field(ge=0), NoBool] = Field(0.1, description="AdamW's, on matrices only")
    beta1: Annotated[float, Field(ge=0, lt=1), NoBool] = Field(0.9, description="AdamW's first moment decay")
    beta2: Annotated[float, Field(ge=0, lt=1), NoBool] = Field(0.95, description="AdamW's second moment decay")
    grad_clip: PositiveFloat | None = Field(1.0, description="largest global gradient norm; None does not clip")
    compile: bool = Field(False, description="torch.compile each block")

    @model_validator(mode="after")
    def _has_an_end(self) -> "TrainingConfig":
        if self.max_steps is None and self.epochs is None:
            raise ValueError("one of max_steps and epochs must be given: training needs an end")
        return self


def _precision(value: Any) -> Any:
    return {True: "bf16", False: "no"}.get(value, value) if isinstance(value, bool) else value


class DistributedConfig(Section):
    """How ranks share the work."""

    strategy: Literal["auto", "ddp", "fsdp", "hsdp", "zero2", "zero3"] = Field(
        "auto",
        description=(
            "`ddp` replicates; `fsdp` (alias zero3) shards weights, gradients and optimizer; `zero2` keeps "
            "gathered weights until backward; `hsdp` shards inside a node and replicates across; `auto` is ddp "
            "below 100M parameters, else fsdp"
        ),
    )
    mixed_precision: Annotated[Literal["auto", "bf16", "no"], BeforeValidator(_precision)] = Field(
        "auto", description="compute type over fp32 weights; true means bf16; auto is bf16 on CUDA and no on CPU"
    )
    backend: Literal["auto", "gloo", "nccl"] = Field(
        "auto", description="collectives; auto is NCCL on CUDA and gloo on CPU"
    )
    ranks_per_node: PositiveInt | None = Field(
        None, description="processes per node; None is one per GPU, or one without GPUs"
    )
    communication_pattern: Literal["auto", "ring", "tree"] = Field(
        "auto", description="NCCL's algorithm (NCCL_ALGO); only auto on gloo"
    )
    timeout_s: Annotated[float, Field(gt=0, le=1e6), NoBool] = Field(
        300.0, description="seconds a collective may take before the gang is declared broken"
    )


class CheckpointConfig(Section):
    """How often state becomes durable, where, and how long it is kept."""

    interval: PositiveInt = Field(
        50,
        description="optimizer steps between checkpoints; the last step is always saved",
        json_schema_extra={"alias_of": ["checkpoint_interval"]},
    )
    keep_last_n: PositiveInt = Field(
        3,
        description="newest committed checkpoints kept; older ones are deleted unless a key below speaks for them",
        json_schema_extra={"alias_of": ["keep_last"]},
    )
    keep_every: PositiveInt | None = Field(
        None, description="optimizer steps: checkpoints of its multiples are kept for good; None keeps none for that"
    )
    keep_best_n: NonNegativeInt = Field(
        0, description="checkpoints kept because they are the best by `keep_best_metric`, however old"
    )
    keep_best_metric: str = Field(
        "loss",
        min_length=1,
        description="what `keep_best_n` compares: a number that checkpoints record: `loss` (nats per token), …",
    )
    keep_best_mode: Literal["min", "max"] = Field("min", description="whether small or large metrics are the best")
    memory_snapshot_interval: PositiveInt | None = Field(
        None,
        description=(
            "optimizer steps between snapshots that stay in host memory, for `train()` called again after an error to "
            "go on from; None takes none besides those of checkpoints"
        ),
    )
    nvme_path: str | None = Field(
        None,
        min_length=1,
        description=(
            "folder on a fast disk of every node: checkpoints land there first, are uploaded from there in the "
            "background, and are loaded from there where they still are; None writes straight to storage"
        ),
    )
    upload_limit_mb_per_s: PositiveFloat | None = Field(
        None, description="MB per second that each rank may upload to an object store; None is all it can"
    )
    storage: str | None = Field(
        None,
        min_length=1,
        description=(
            "URL or folder; a bare bucket name under its alias means s3://NAME; None is the flow's S3 datastore, "
            "else main.output_dir"
        ),
        json_schema_extra={"alias_of": ["s3_bucket"]},
    )
    async_save: bool = Field(
        True,
        description=(
            "train on while a checkpoint is written: a step waits for the copy to host memory alone; "
            "needs twice the state's size there"
        ),
    )
    auto_resume: bool = Field(
        True,
        description=(
            "`flextrain train` and Python start from the newest sound checkpoint of this experiment, if there is one; "
            "a flow is asked for that by --checkpoint-resume, and its retries always do"
        ),
    )


class EvaluationConfig(Section):
    """What is measured on held-out text after training."""

    max_tokens: PositiveInt = Field(262_144, description="held-out tokens to score at most")
    batch_size: PositiveInt = Field(16, description="sequences per forward pass")
    prompts: list[str] = Field(
        ["def ", "import ", '"""Return '], description="texts that sample generations start from"
    )
    sample_tokens: NonNegativeInt = Field(64, description="tokens generated per prompt; 0 generates none")
    temperature: Annotated[float, Field(ge=0), NoBool] = Field(0.8, description="0 always takes the likeliest token")
    top_k: PositiveInt | None = Field(50, description="sample among this many likeliest tokens; None among all")


class Price(Section):
    """What one node costs, since when, and who says so."""

    instance_type: str = Field(min_length=1, description="the node type it is for")
    on_demand_usd_per_h: PositiveFloat = Field(description="dollars per node-hour without interruptions")
    spot_usd_per_h: PositiveFloat = Field(description="dollars per node-hour of interruptible capacity")
    as_of: date = Field(description="day of the quote, YYYY-MM-DD")
    source: str = Field(min_length=1, description="where the quote is from")


def _shipped_prices() -> list[Price]:
    source = "EC2 list price us-east-1 (on-demand); spot assumed 70 % below: set your own quotes"
    table = {"m5.large": 0.096, "g4dn.xlarge": 0.526, "g5.xlarge": 1.006, "p3.2xlarge": 3.06}
    return [
        Price(
            instance_type=name,
            on_demand_usd_per_h=usd,
            spot_usd_per_h=round(0.3 * usd, 6),
            as_of=date(2024, 12, 1),
            source=source,
        )
        for name, usd in table.items()
    ]


class CostConfig(Section):
    """What nodes are priced at in the cost report."""

    instance_type: str = Field(
        "m5.large", min_length=1, description="node type of the training step; a row of `prices`"
    )
    capacity: Literal["spot", "on_demand"] = Field(
        "on_demand", description="which price is paid; on Kubernetes also which nodes are asked for"
    )
    prices: list[Price] = Field(default_factory=_shipped_prices, min_length=1, description="dated price table")


class TrackingConfig(Section):
    """What is recorded while training, besides the events every run writes."""

    log_interval: PositiveInt = Field(
        10,
        description=(
            "optimizer steps between progress lines and card refreshes; every step's metrics are recorded all the same"
        ),
    )
    wandb: Literal["off", "offline", "online"] = Field("off", description="also log to Weights & Biases")
    wandb_project: str = Field("flextrain", min_length=1, description="Weights & Biases project")

    @model_validator(mode="before")
    @classmethod
    def _yaml_off_is_false(cls, values: Any) -> Any:
        return {**values, "wandb": "off"} if isinstance(values, dict) and values.get("wandb") is False else values


class FlowConfig(Section):
    """The Metaflow run: gang size, retries, and what Kubernetes is asked for."""

    num_nodes: PositiveInt = Field(2, description="nodes of the train step; `run --num-nodes` overrides it")
    retries: NonNegativeInt = Field(
        3,
        description=(
            "attempts after the first before the train step gives up; each resumes from the newest checkpoint"
        ),
    )
    kubernetes: bool = Field(False, description="run the steps on Kubernetes (add `image` and resources below)")
    image: str | None = Field(None, description="container image of the steps; None is Metaflow's default")
    gpus: NonNegativeInt = Field(0, description="GPUs per train node")
    cpus: PositiveInt = Field(2, description="CPU cores per node")
    memory_mb: PositiveInt = Field(8192, description="memory per node, MB")
    spot_node_selector: dict[str, str] = Field(
        {"karpenter.sh/capacity-type": "spot"},
        description="labels of spot nodes, asked for where cost.capacity is spot",
    )


class Config(Section):
    """A whole run. `Config()` trains a small model on this machine's own Python sources."""

    main: MainConfig = Field(default_factory=MainConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    distributed: DistributedConfig = Field(default_factory=DistributedConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    cost: CostConfig = Field(default_factory=CostConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    flow: FlowConfig = Field(default_factory=FlowConfig)

    @model_validator(mode="after")
    def _instance_type_has_a_price(self) -> "Config":
        known = [price.instance_type for price in self.cost.prices]
        if self.cost.instance_type not in known:
            raise ValueError(
                f"cost.instance_type {self.cost.instance_type!r} has no row in cost.prices; rows are {', '.join(known)}"
            )
        return self
