"""Every key of a run, its type, its default and its bounds. `run_config.py` reads them."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Data:
    """What is trained on: files, a data set of the hub, or a weighted mixture of such sources."""

    path: str | list[str] | None = None  # files, folders or patterns: hf_sigmoid/text/formats.py,
    # or "builtin", the novel's training chapters, which is what null means without the next keys
    dataset: str | None = None  # a data set's name on the hub, or its folder
    subset: str | None = None  # its configuration
    split: str = "train"
    revision: str | None = None
    field: str = "text"  # the key of the text in a row
    bad_text: str = "refuse"  # or "replace" what is not Unicode by U+FFFD
    streaming: bool = False  # read `dataset` while training instead of before it
    mixture: list[dict[str, Any]] | None = None  # sources with the keys above and a `weight`
    append_eos: bool = True  # end every document with the tokenizer's end-of-text token
    streams: int | None = None  # parts of the corpus that are packed alone; null: one a process


@dataclass
class Train:
    steps: int | None = None  # null: 100, or as many as `epochs` takes
    epochs: float | None = None  # of the corpus, which is counted at every start for that
    block_size: int = 512  # tokens a row
    batch_size: int = 1  # rows of one micro-batch on one process
    grad_accumulation: int = 1  # micro-batches of one step
    precision: str = "fp32"  # fp32, or bf16 autocast over fp32 weights
    gradient_checkpointing: bool = False
    parameters: str | None = None  # "all", "attention", "log_length" (the row numbers alone) or
    # "lora"; null: "lora" with lora.rank, else "all"
    max_skipped: int = 3  # steps in a row whose loss or gradient is not finite before the run ends


@dataclass
class Lora:
    """Low-rank changes of projections (PEFT); row numbers are trained in full beside them."""

    rank: int | None = None  # null: no adapters
    alpha: float | None = None  # null: twice the rank
    dropout: float = 0.0
    targets: str = "attention"  # q, k, v and o, or "all-linear"


@dataclass
class Optim:
    optimizer: str = "adamw"  # or "muon" (torch.optim.Muon) for the decayed matrices
    lr: float = 1e-4
    log_length_lr: float = 1e-3  # the attention row numbers (`log_length` offset, slope, query)
    qk_lr_scale: float = 1.0  # of the rate of W_Q and W_K, a group of their own
    schedule: str = "cosine"  # after warmup; or "constant", "linear"
    min_lr_ratio: float = 0.1  # where the schedule ends, as a part of the peak
    warmup_steps: int | None = None  # null: a tenth of the steps, at most 100
    weight_decay: float = 0.1
    decay_embeddings: bool = False
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip: float = 1.0  # of the global gradient norm; 0 measures it only
    qk_tau: float | None = None  # logit control (`hf_sigmoid.optim`): τ; null: none
    qk_rule: str = "quack"  # or "constant": τ times the rate for all of W_Q and W_K
    qk_clip: float | None = None  # QK-clip: the largest logit that a step may leave; null: none


@dataclass
class Checkpoint:
    every: int = 50  # steps; 0 saves when asked to stop only
    keep: int = 2


@dataclass
class TrainCheckpoint(Checkpoint):
    state: str = "full"  # or "sharded": every process of FSDP or TP writes what it holds


@dataclass
class Watch:
    """What is measured while training, beside the loss."""

    path: str | list[str] | None = None  # held-out files, "builtin" (the novel's last chapters)
    every: int = 50  # steps between evaluations; there is one at the end
    windows: int = 8  # of train.block_size tokens, spread over each file
    needle: list[int] | None = None  # prompt lengths, in tokens, of a small needle probe
    needle_samples: int = 2  # prompts at each of three depths and each length
    health_every: int = 0  # steps between looks at the attention of a fixed batch; 0: none


@dataclass
class Log:
    """Where values go beside `log.jsonl`."""

    trackers: list[str] | None = None  # of accelerate: tensorboard, wandb, trackio
    project: str = "hf-sigmoid"  # the trackers' name for the project


@dataclass
class Run:
    """`continue_pretrain.py`."""

    model: str = ""  # a folder, a hub id, or "smollm2"
    output_dir: str = ""
    # attn_implementation; null: the checkpoint's own, the only one that a converted one takes.
    attn: str | None = None
    seed: int = 0
    resume: str = "auto"  # "auto": go on from the last complete checkpoint; "none": a fresh folder
    data: Data = field(default_factory=Data)
    train: Train = field(default_factory=Train)
    lora: Lora = field(default_factory=Lora)
    optim: Optim = field(default_factory=Optim)
    evaluate: Watch = field(default_factory=Watch)
    log: Log = field(default_factory=Log)
    checkpoint: TrainCheckpoint = field(default_factory=TrainCheckpoint)

    def __post_init__(self) -> None:
        self.counted: int | None = None  # the steps of train.epochs, once the corpus is counted

    @property
    def steps(self) -> int:
        return self.counted or self.train.steps or 100

    @property
    def warmup_steps(self) -> int:
        asked = self.optim.warmup_steps
        return min(100, self.steps // 10) if asked is None else asked

    @property
    def parameters(self) -> str:
        return self.train.parameters or ("all" if self.lora.rank is None else "lora")


@dataclass
class Layerwise:
    """Every converted attention module alone, on what it gets in the softmax model."""

    steps: int = 120
    train: str = "numbers"  # row numbers, gains, temperatures; "projections": and q, k, v, o;
    # "lora": and low-rank changes of q, k, v, o
    lr: float = 1e-4  # of the projections
    numbers_lr: float = 5e-3  # of row numbers (`log_length`), gains and temperatures


@dataclass
class EndToEnd:
    """The whole model on the softmax model's next-token distributions."""

    steps: int = 0
    train: str = "numbers"  # "numbers", "projections", "lora" as above, or "all" weights
    lr: float = 1e-4  # of everything but the numbers
    # Of the numbers: w·q sums over the head dim, and what one layer changes all later ones see.
    numbers_lr: float = 5e-4
    kl: float = 1.0  # weight of KL(softmax model ‖ this one); the rest is the text's cross entropy
    blend: float = 0.0  # the part of the steps over which softmax fades out; 0: sigmoid at once


@dataclass
class Evaluate:
    """Perplexity of the student on held-out text, in the log beside the losses."""

    path: str | list[str] | None = None  # held-out files; null: none
    every: int = 50  # steps; and at the end
    windows: int = 8  # of train.block_size tokens, spread over each file


@dataclass
class Batch:
    block_size: int = 512  # tokens a row
    batch_size: int = 1  # rows of one micro-batch on one process
    grad_accumulation: int = 1  # micro-batches of one step
    precision: str = "fp32"  # fp32, or bf16 autocast over fp32 weights


@dataclass
class DistilOptim:
    min_lr_ratio: float = 0.1  # where the cosine of each stage ends, as a part of its peak
    warmup: float = 0.1  # the part of a stage's steps that warms up
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip: float = 1.0  # of the gradient norm: of each module alone, then of the model; 0: none
    lora_rank: int = 16


@dataclass
class Distil:
    """`distil_attention.py`."""

    model: str = ""  # a converted checkpoint's folder
    teacher: str | None = None  # softmax checkpoint; null: what `model` was converted from
    output_dir: str = ""
    seed: int = 0
    resume: str = "auto"  # "auto": go on from the last complete checkpoint; "none": a fresh folder
    data: Data = field(default_factory=Data)
    train: Batch = field(default_factory=Batch)
    layerwise: Layerwise = field(default_factory=Layerwise)
    end_to_end: EndToEnd = field(default_factory=EndToEnd)
    optim: DistilOptim = field(default_factory=DistilOptim)
    evaluate: Evaluate = field(default_factory=Evaluate)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)

    @property
    def steps(self) -> int:
        return self.layerwise.steps + self.end_to_end.steps


TRAINED = ("numbers", "projections", "lora")
CHOICES = {
    "resume": ("auto", "none"),
    "data.bad_text": ("refuse", "replace"),
    "train.precision": ("fp32", "bf16"),
    "train.parameters": ("all", "attention", "log_length", "lora"),
    "lora.targets": ("attention", "all-linear"),
    "optim.optimizer": ("adamw", "muon"),
    "optim.schedule": ("cosine", "linear", "constant"),
    "optim.qk_rule": ("quack", "constant"),
    "checkpoint.state": ("full", "sharded"),
    "layerwise.train": TRAINED,
    "end_to_end.train": (*TRAINED, "all"),
}
LEAST = {  # inclusive
    **{
        f"{stage}.{k}": 0
        for stage in ("layerwise", "end_to_end")
        for k in ("steps", "lr", "numbers_lr")
    },
    **{f"end_to_end.{k}": 0 for k in ("kl", "blend")},
    "optim.warmup": 0,
    "optim.lora_rank": 1,
    "lora.rank": 1,
    "lora.dropout": 0,
    "data.streams": 1,
    "evaluate.every": 1,
    "evaluate.windows": 1,
    "evaluate.needle_samples": 1,
    "evaluate.health_every": 0,
    **{f"train.{k}": 1 for k in ("steps", "batch_size", "grad_accumulation", "max_skipped")},
    "train.block_size": 2,  # one token to read and one to predict
    **{f"optim.{k}": 0 for k in ("lr", "log_length_lr", "min_lr_ratio", "warmup_steps")},
    **{f"optim.{k}": 0 for k in ("weight_decay", "beta1", "beta2", "eps", "clip", "qk_lr_scale")},
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
    "seed": 0,
}
POSITIVE = ("optim.qk_tau", "optim.qk_clip", "train.epochs", "lora.alpha")
BELOW = {"optim.beta1": 1, "optim.beta2": 1, "lora.dropout": 1}
MOST = {"seed": 2**32 - 1, "end_to_end.kl": 1, "end_to_end.blend": 1, "optim.warmup": 1}
