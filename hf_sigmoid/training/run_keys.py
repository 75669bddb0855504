"""Every key of a run: its type, its default, its bounds and what it is for."""

from typing import Any, Literal

from pydantic import Field, PrivateAttr, field_serializer, model_validator

from hf_sigmoid.training.kinds import Bool, Float, Int, Keys, Lengths, Paths, Text, Trackers, key

_RATES = "its default with train.parameters=log_length, which has optim.log_length_lr alone"


class Source(Keys):
    """Files, or a data set of the hub."""

    path: Paths | None = key(None, "files, folders, patterns; builtin: the novel's first chapters")
    dataset: Text | None = key(None, "a data set's name on the hub, or its folder")
    subset: Text | None = key(None, "its configuration")
    split: Text = "train"
    revision: Text | None = None
    field: Text = key("text", "the key of the text in a row")
    bad_text: Literal["refuse", "replace"] = key("refuse", "or replace by U+FFFD")
    streaming: Bool = key(False, "read the dataset while training instead of before it")

    @model_validator(mode="after")
    def _is_one(self) -> "Source":
        if self.dataset is None:
            for name in ("subset", "split", "revision"):
                if (given := getattr(self, name)) != type(self).model_fields[name].default:
                    raise ValueError(f"{name}: expected it with dataset only, got {given!r}")
            if self.streaming and self.path in (None, "builtin"):
                raise ValueError("streaming: expected false for the built-in text, got true")
        elif self.path is not None:
            raise ValueError("path and dataset: expected one source, got path and dataset")
        return self


class Member(Source):
    """A source of a mixture."""

    weight: Float = Field(gt=0)

    @model_validator(mode="after")
    def _is_given(self) -> "Member":
        if self.path is None and self.dataset is None:
            raise ValueError("expected a path or a dataset, got neither")
        return self


class Data(Source):
    """The text to train on: one source, or a weighted mixture."""

    mixture: list[Member] | None = key(None, "sources, each with a weight", min_length=1)
    append_eos: Bool = key(True, "end every document with the tokenizer's end-of-text token")
    streams: Int | None = key(None, "parts that are packed alone; null: one a process", ge=1)

    @model_validator(mode="after")
    def _is_one_or_a_mixture(self) -> "Data":
        for name, known in Source.model_fields.items() if self.mixture else ():
            if (given := getattr(self, name)) != known.default:
                raise ValueError(
                    f"{name}: expected it in the sources of mixture, got both mixture and "
                    f"{name} = {given!r}"
                )
        return self

    @field_serializer("mixture")
    def _as_given(self, mixture: list[Member] | None) -> list[dict[str, Any]] | None:
        return mixture and [member.model_dump(exclude_unset=True) for member in mixture]


class Batch(Keys):
    """The rows of a step."""

    block_size: Int = key(512, "tokens a row: one to read and one to predict at least", ge=2)
    batch_size: Int = key(1, "rows of one micro-batch on one process", ge=1)
    grad_accumulation: Int = key(1, "micro-batches of one step", ge=1)
    precision: Literal["fp32", "bf16"] = key("fp32", "or bf16 autocast over fp32 weights")


class Train(Batch):
    """The length of a run, and the parameters that it trains."""

    steps: Int | None = key(None, "null: 100, or as many as train.epochs takes", ge=1)
    epochs: Float | None = key(None, "of the corpus, which is counted at every start", gt=0)
    gradient_checkpointing: Bool = False
    parameters: Literal["all", "attention", "log_length", "lora"] | None = key(
        None, "log_length: the per-query terms alone; null: lora with lora.rank, else all"
    )
    max_skipped: Int = key(3, "steps in a row that are not finite before the run ends", ge=1)


class Lora(Keys):
    """Low-rank changes of projections (PEFT); per-query terms are trained in full beside them."""

    rank: Int | None = key(None, "null: no adapters", ge=1)
    alpha: Float | None = key(None, "null: twice the rank", gt=0)
    dropout: Float = key(0.0, ge=0, lt=1)
    targets: Literal["attention", "all-linear"] = key("attention", "q, k, v and o, or all-linear")


class Adam(Keys):
    """Adam's constants and the clipping of gradients."""

    min_lr_ratio: Float = key(0.1, "where the schedule ends, as a part of the peak", ge=0)
    beta1: Float = key(0.9, ge=0, lt=1)
    beta2: Float = key(0.95, ge=0, lt=1)
    eps: Float = key(1e-8, ge=0)
    clip: Float = key(1.0, "of the gradient norm; 0 measures it only", ge=0)


class Optim(Adam):
    """The optimiser, its rates and logit control (`hf_sigmoid.optim`)."""

    optimizer: Literal["adamw", "muon"] = key("adamw", "muon takes the decayed matrices")
    lr: Float = key(1e-4, ge=0)
    log_length_lr: Float = key(1e-3, "of the per-query terms (log_length)", ge=0)
    qk_lr_scale: Float = key(1.0, "of the rate of W_Q and W_K, a group of their own", ge=0)
    schedule: Literal["cosine", "linear", "constant"] = key("cosine", "after warmup")
    warmup_steps: Int | None = key(None, "null: a tenth of the steps, at most 100", ge=0)
    weight_decay: Float = key(0.1, ge=0)
    decay_embeddings: Bool = False
    qk_tau: Float | None = key(None, "logit control: tau; null: none", gt=0)
    qk_rule: Literal["quack", "constant"] = key("quack", "constant: tau times the rate")
    qk_clip: Float | None = key(None, "the largest logit that a step may leave; null: any", gt=0)


class Saving(Keys):
    """When the run is saved."""

    every: Int = key(50, "steps; 0 saves when asked to stop only", ge=0)
    keep: Int = key(2, ge=1)


class TrainSaving(Saving):
    state: Literal["full", "sharded"] = key("full", "sharded: each writes what it holds")


class Evaluate(Keys):
    """Held-out text, in the log beside the losses."""

    path: Paths | None = key(None, "held-out files; builtin: the novel's last chapters")
    every: Int = key(50, "steps between evaluations; there is one at the end", ge=1)
    windows: Int = key(8, "of train.block_size tokens, spread over each file", ge=1)


class Watch(Evaluate):
    """And what else is measured while training."""

    needle: Lengths | None = key(None, "prompt lengths, in tokens, of a small needle probe")
    needle_samples: Int = key(2, "prompts at each of three depths and each length", ge=1)
    health_every: Int = key(0, "steps between looks at the attention; 0: none", ge=0)


class Log(Keys):
    """Where values go beside `log.jsonl`."""

    trackers: Trackers | None = key(None, "of accelerate")
    project: Text = key("hf-sigmoid", "the trackers' name for the project")


class Common(Keys):
    """The keys of every run: where it is, where it writes, and what it begins with."""

    model: Text = Field(min_length=1, description="a folder, a hub id, or smollm2")
    output_dir: Text = Field(min_length=1)
    seed: Int = key(0, ge=0, le=2**32 - 1)
    resume: Literal["auto", "none"] = key("auto", "from the last checkpoint; none: a fresh folder")
    data: Data = Data()


class Run(Common):
    """Continued pretraining: `hf-sigmoid train`."""

    attn: Text | None = key(None, "attn_implementation; null: the checkpoint's own")
    train: Train = Train()
    lora: Lora = Lora()
    optim: Optim = Optim()
    evaluate: Watch = Watch()
    log: Log = Log()
    checkpoint: TrainSaving = TrainSaving()
    _counted: int | None = PrivateAttr(None)

    def with_steps(self, steps: int) -> "Run":
        """The run with the steps of `train.epochs`, once the corpus is counted."""
        counted = self.model_copy()
        counted._counted = steps
        return counted

    @property
    def steps(self) -> int:
        return self._counted or self.train.steps or 100

    @property
    def warmup_steps(self) -> int:
        asked = self.optim.warmup_steps
        return min(100, self.steps // 10) if asked is None else asked

    @property
    def parameters(self) -> str:
        return self.train.parameters or ("all" if self.lora.rank is None else "lora")

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "Run":
        train, optim, lora, watch = self.train, self.optim, self.lora, self.evaluate
        mixture, rank = self.data.mixture or [], lora.rank is not None
        streams = self.data.streaming or any(source.streaming for source in mixture)
        # A key that says what nothing would do is a mistake somewhere else.
        for name, needed, given in (
            ("lora.alpha", "lora.rank", rank), ("lora.dropout", "lora.rank", rank),
            ("lora.targets", "lora.rank", rank),
            ("optim.qk_rule", "optim.qk_tau", optim.qk_tau is not None),
            ("optim.min_lr_ratio", "a schedule that falls", optim.schedule != "constant"),
            ("evaluate.windows", "evaluate.path", watch.path is not None),
            ("evaluate.every", "evaluate.path or needle", watch.path or watch.needle),
            ("evaluate.needle_samples", "evaluate.needle", watch.needle is not None),
            ("log.project", "log.trackers", self.log.trackers),
            ("optim.optimizer", _RATES, self.parameters != "log_length"),
            ("optim.qk_lr_scale", _RATES, self.parameters != "log_length"),
        ):  # fmt: skip
            group, _, field = name.partition(".")
            keys = getattr(self, group)
            value = getattr(keys, field)
            if not given and value != type(keys).model_fields[field].default:
                end = "" if needed is _RATES else " beside it, got none"
                raise ValueError(f"{name} {value}: expected {needed}{end}")
        control = [name for name in ("qk_tau", "qk_clip") if getattr(optim, name) is not None]
        epochs, warmup = train.epochs is not None, optim.warmup_steps
        for said, met in {
            f"train.steps and train.epochs: expected one of them, got {train.steps} and "
            f"{train.epochs}": epochs and train.steps is not None,
            "train.epochs: expected train.steps with data.streaming, which has no known "
            "length": epochs and streams,
            "train.epochs: expected train.steps with data.mixture, whose sources end at different "
            "steps": epochs and mixture,
            f"optim.warmup_steps: expected at most train.steps = {self.steps}, got "
            f"{warmup}": not epochs and (warmup or 0) > self.steps,
            "train.parameters: expected lora (or null) with lora.rank, got "
            f"{train.parameters}": rank and self.parameters != "lora",
            "lora.rank: expected a number with train.parameters=lora, got null": self.parameters
            == "lora"
            and not rank,
            f"optim.{'/'.join(control)}: expected train.parameters all or attention, got "
            f"{self.parameters}: it controls W_Q and W_K, which do not "
            "train": self.parameters in ("lora", "log_length") and control,
        }.items():
            if met:
                raise ValueError(said)
        return self


class Layerwise(Keys):
    """Every converted attention module alone, on what it gets in the softmax model."""

    steps: Int = key(120, ge=0)
    train: Literal["numbers", "projections", "lora"] = key(
        "numbers", "numbers: per-query terms, gains, temperatures; projections: and q, k, v, o; "
        "lora: and low-rank changes of q, k, v, o",
    )  # fmt: skip
    lr: Float = key(1e-4, "of the projections", ge=0)
    numbers_lr: Float = key(
        1e-2, "of per-query terms (log_length), gains and temperatures; of weights of a query or "
        "an input, divided by the root of their number", ge=0,
    )  # fmt: skip


class EndToEnd(Keys):
    """The whole model on the softmax model's next-token distributions."""

    steps: Int = key(0, ge=0)
    train: Literal["numbers", "projections", "lora", "all"] = key("numbers", "or all")
    lr: Float = key(1e-4, "of everything but the numbers", ge=0)
    numbers_lr: Float = key(2e-3, "of the numbers; what a layer changes all later ones see", ge=0)
    kl: Float = key(1.0, "weight of KL(softmax model ‖ this); the rest is the text's", ge=0, le=1)
    blend: Float = key(0.0, "part of the steps over which softmax fades out", ge=0, le=1)


class Lookups(Keys):
    """Blocks that hide facts in the text and ask for them, so that looking up is learnt too."""

    share: Float = key(0.0, "of the blocks", ge=0, lt=1)
    weight: Float = key(10.0, "of each token of an answer; all others have 1", gt=0)


class DistilOptim(Adam):
    """Adam's constants: gradients are clipped for each module alone, then for the model."""

    warmup: Float = key(0.1, "the part of a stage's steps that warms up", ge=0, le=1)
    lora_rank: Int = key(16, ge=1)


class Distil(Common):
    """Distillation of attention: `hf-sigmoid distil`."""

    teacher: Text | None = key(None, "softmax checkpoint; null: what model was converted from")
    train: Batch = Batch()
    lookups: Lookups = Lookups()
    layerwise: Layerwise = Layerwise()
    end_to_end: EndToEnd = EndToEnd()
    optim: DistilOptim = DistilOptim()
    evaluate: Evaluate = Evaluate()
    checkpoint: Saving = Saving()

    @property
    def steps(self) -> int:
        return self.layerwise.steps + self.end_to_end.steps

    @property
    def stages(self) -> dict[str, Layerwise | EndToEnd]:
        """The stages that have steps, by their names."""
        both = {"layerwise": self.layerwise, "end_to_end": self.end_to_end}
        return {name: stage for name, stage in both.items() if stage.steps}

    @model_validator(mode="after")
    def _does_something(self) -> "Distil":
        if self.steps < 1:
            raise ValueError("layerwise.steps and end_to_end.steps: expected at least 1, got 0")
        return self
