"""The tools that users drive models with, unchanged: Trainer, TRL, PEFT, lm_eval, accelerate."""

import json
import subprocess
import sys
import warnings

import pytest
import tiny_models
import torch
from accelerate import Accelerator, init_empty_weights
from accelerate.utils import ParallelismConfig
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

import hf_sigmoid
from hf_sigmoid.parameters import holders

FUNCTIONS = ("sigmoid", "ssmax")

every_function = pytest.mark.parametrize("function", FUNCTIONS)


@pytest.fixture
def folder(function, tmp_path):
    """A converted checkpoint."""
    path = tmp_path / "converted"
    tiny_models.converted("llama", function).save_pretrained(path)
    return path


def logits(model) -> torch.Tensor:
    return tiny_models.output(model.eval(), input_ids=tiny_models.tokens())


def numbers(model) -> dict[str, torch.Tensor]:
    """Every per-query term, by its name."""
    return {
        name: p.detach().clone() for name, p in model.named_parameters() if "log_length" in name
    }


# Trainers


@every_function
def test_trainer_runs_unchanged(function, folder, tmp_path):
    """Three steps in bfloat16 autocast, packed, with gradient checkpointing; saved and loaded."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    before = numbers(model)
    rows = [tiny_models.tokens(1, length, seed=length)[0].tolist() for length in range(5, 17)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "run"), per_device_train_batch_size=4, max_steps=3, report_to=[],
        use_cpu=True, bf16=True, save_strategy="no", disable_tqdm=True, learning_rate=1e-2,
        gradient_checkpointing=True,
    )  # fmt: skip
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        data_collator=DataCollatorWithFlattening(return_flash_attn_kwargs=True),
    )
    loss = trainer.train().training_loss
    assert 0 < loss < 20
    after = numbers(model)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    trainer.save_model(str(tmp_path / "trained"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert again.config._attn_implementation == function
    assert all(torch.equal(numbers(again)[name], after[name]) for name in after)
    assert torch.isfinite(logits(again)).all()


@every_function
@pytest.mark.parametrize("packing", [False, True])
def test_trls_sft_trainer_runs_unchanged(function, folder, packing, tmp_path):
    from trl import SFTConfig, SFTTrainer

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=64,
        )
    )  # fmt: skip
    hf_sigmoid.configure(model, function, learn=True)
    before = numbers(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                output_dir=str(tmp_path / "run"), max_steps=3, per_device_train_batch_size=2,
                max_length=32, packing=packing, report_to=[], use_cpu=True, bf16=False,
                save_strategy="no", disable_tqdm=True, learning_rate=1e-2,
            ),
            train_dataset=Dataset.from_dict({"text": ["a tiny text", "another, longer one"] * 8}),
            processing_class=tiny_models.byte_tokenizer(),
        )  # fmt: skip
        assert 0 < trainer.train().training_loss < 20
    after = numbers(model)
    assert all(not torch.equal(before[name], after[name]) for name in before)


# PEFT


LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["log_length"])


def adapted(folder):
    """A converted model with LoRA and trained per-query terms."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), LORA)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model


@every_function
def test_an_adapter_with_row_numbers_saves_reloads_and_merges(function, folder, tmp_path):
    model = adapted(folder)
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert any("log_length" in name for name in trainable)
    wanted = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter"
    )
    torch.testing.assert_close(logits(again), wanted)
    merged = again.merge_and_unload()
    torch.testing.assert_close(logits(merged), wanted, atol=1e-5, rtol=1e-5)
    assert len(list(holders(merged))) == 2
    merged.save_pretrained(tmp_path / "merged")
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(alone), wanted, atol=1e-5, rtol=1e-5)


@every_function
@pytest.mark.parametrize("recorded", [True, False])
def test_an_adapter_on_an_unconverted_base_raises_and_changes_nothing(
    function, recorded, folder, tmp_path
):
    """Also one without the record beside it, of another tool or time."""
    adapted(folder).save_pretrained(tmp_path / "adapter")
    if not recorded:
        (tmp_path / "adapter" / "hf_sigmoid.json").unlink()
    base = tiny_models.build("llama")
    before = logits(base)
    message = "runs softmax" if recorded else r"log_length.*LlamaForCausalLM has none"
    with pytest.raises(hf_sigmoid.Unsupported, match=message):
        PeftModel.from_pretrained(base, tmp_path / "adapter")
    for name in ("log_length", "self_attn.log_length"):
        with pytest.raises(hf_sigmoid.Unsupported, match="log_length"):
            get_peft_model(base, LoraConfig(target_modules=["q_proj"], modules_to_save=[name]))
    assert not any("lora" in name for name, _ in base.named_parameters())
    assert torch.equal(logits(base), before)


@every_function
def test_an_adapter_without_row_numbers_knows_its_base_too(function, folder, tmp_path):
    """LoRA alone, trained on a converted model: nothing in its weights would tell."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "a")
    with pytest.raises(hf_sigmoid.Unsupported, match="runs softmax"):
        PeftModel.from_pretrained(tiny_models.build("llama"), tmp_path / "a")
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "a")


@pytest.mark.parametrize(
    "other",
    [{"function": "ssmax"}, {"layers": [0]}, {"query": False}],
    ids=["function", "layers", "query"],
)
def test_an_adapter_of_another_conversion_is_refused(other, tmp_path):
    options = {"function": "sigmoid", "learn": True, "query": True}

    def converted(**given):
        model = tiny_models.build("llama")
        hf_sigmoid.configure(model, given.pop("function"), **given)
        return model

    get_peft_model(converted(**options), LORA).save_pretrained(tmp_path / "adapter")
    changed = {**options, **other}
    if changed["function"] == "ssmax":
        changed["query"] = False
    with pytest.raises(hf_sigmoid.Unsupported, match="was trained on a model converted to"):
        PeftModel.from_pretrained(converted(**changed), tmp_path / "adapter")


@every_function
def test_a_second_adapter_is_as_good_as_the_first(function, folder, tmp_path):
    model = adapted(folder)
    wanted = logits(model)
    model.save_pretrained(tmp_path / "first")
    model.add_adapter("second", LORA)
    model.load_adapter(tmp_path / "first", "third")
    model.set_adapter("third")
    torch.testing.assert_close(logits(model), wanted)


@every_function
def test_configure_under_an_adapter_is_refused(function, folder):
    """Its copies of the per-query terms would win without a word."""
    model = adapted(folder)
    for arguments in ({"function": "sigmoid", "offset": -4.0}, {"function": "softmax"}):
        with pytest.raises(ValueError, match="belongs to a PEFT adapter"):
            hf_sigmoid.configure(model.get_base_model(), **arguments)


# Where parameters live


@every_function
def test_device_map_with_offload_to_disk(function, folder, tmp_path):
    """Per-query terms are read by calling their holder, which accelerate fills from the disk."""
    wanted = logits(AutoModelForCausalLM.from_pretrained(folder))
    auto = AutoModelForCausalLM.from_pretrained(folder, device_map="auto")
    assert torch.equal(logits(auto), wanted)
    places = {
        "model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu",
        "model.layers.0": "cpu", "model.layers.1": "disk", "lm_head": "cpu",
    }  # fmt: skip
    offloaded = AutoModelForCausalLM.from_pretrained(
        folder, device_map=places, offload_folder=str(tmp_path / "offload")
    )
    assert offloaded.model.layers[1].self_attn.log_length.offset.device.type == "meta"
    assert torch.equal(logits(offloaded), wanted)


@every_function
def test_a_model_made_without_memory_gets_its_numbers(function, folder):
    """On the meta device; then with weights."""
    config = AutoModelForCausalLM.from_pretrained(folder).config
    with init_empty_weights():
        empty = AutoModelForCausalLM.from_config(config)
    assert all(p.is_meta for p in numbers(empty).values()) and numbers(empty)
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in numbers(half).values()} == {torch.float32}
    assert half.lm_head.weight.dtype == torch.bfloat16


@every_function
def test_tied_weights_stay_tied(function, tmp_path):
    config = LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    hf_sigmoid.configure(model, function, learn=True)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    torch.testing.assert_close(logits(again), logits(model))


@every_function
@pytest.mark.parametrize("sizes", [{"cp_size": 2}, {"sp_size": 2}])
def test_parallelism_along_the_sequence_is_refused(function, sizes, monkeypatch):
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(
        type(accelerator), "parallelism_config", property(lambda self: ParallelismConfig(**sizes))
    )
    model = tiny_models.converted("llama", function)
    with pytest.raises(
        hf_sigmoid.Unsupported, match=rf"{function} attention.*{next(iter(sizes))}=2"
    ):
        accelerator.prepare(model)


# Programs that do not import hf_sigmoid


@every_function
def test_lm_eval_runs_a_local_task(function, folder, tmp_path):
    """The documented way: python -m hf_sigmoid -m lm_eval."""
    tokenizer = tiny_models.byte_tokenizer()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=64,
        )
    )  # fmt: skip
    model.save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "plain")
    rows = [{"question": f"{n} and {n} is", "answer": f" {2 * n}"} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "sums.yaml").write_text(
        "task: sums\ndataset_path: json\n"
        f"dataset_kwargs:\n  data_files: {{test: {tmp_path / 'rows.jsonl'}}}\n"
        "test_split: test\noutput_type: loglikelihood\n"
        "doc_to_text: '{{question}}'\ndoc_to_target: '{{answer}}'\n"
        "metric_list:\n  - metric: perplexity\n"
    )
    command = [
        sys.executable, "-m", "hf_sigmoid", "-m", "lm_eval", "run", "--model", "hf", "--model_args",
        f"pretrained={tmp_path / 'plain'},attn_implementation={function},dtype=float32",
        "--tasks", "sums", "--include_path", tmp_path, "--device", "cpu", "--batch_size", "2",
        "--output_path", tmp_path / "results",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = (tmp_path / "results").rglob("results_*.json")
    measured = json.loads(results.read_text())["results"]["sums"]["perplexity,none"]
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", attn_implementation=function
    ).eval()
    scores = []
    for row in rows:
        start = tokenizer(row["question"])["input_ids"]
        ids = tokenizer(row["question"] + row["answer"], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            log_probabilities = model(ids).logits.log_softmax(-1)
        own = ids[0, len(start) :]
        scores.append(log_probabilities[0, len(start) - 1 : -1].gather(1, own[:, None]).sum())
    expected = torch.stack(scores).mean().neg().exp()
    assert measured == pytest.approx(float(expected), rel=1e-3)


@pytest.mark.parametrize("as_module", [False, True])
def test_any_program_runs_with_the_names_registered(as_module, tmp_path):
    """And sees its own arguments, name and folder."""
    (tmp_path / "beside.py").write_text("")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "statistics.py").write_text("raise SystemExit('shadows the standard library')")
    (tmp_path / "program.py").write_text(
        "import sys, beside, statistics\n"
        "from transformers import AttentionInterface\n"
        "import transformers.modeling_utils\n"
        "assert 'hf_sigmoid' in sys.modules and __name__ == '__main__'\n"
        "print('sigmoid' in AttentionInterface._global_mapping, sys.argv[1:])\n"
    )
    target = ["-m", "program"] if as_module else [tmp_path / "program.py"]
    command = [sys.executable, "-m", "hf_sigmoid", *target, "--steps", "3"]
    cwd = tmp_path if as_module else elsewhere
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    assert done.stdout == "True ['--steps', '3']\n", done.stderr


@pytest.mark.parametrize(
    ("given", "named"),
    [([], "nothing"), (["-m"], "-m"), (["gone.py"], "gone.py"), (["--x"], "--x")],
)
def test_a_program_that_cannot_be_run_is_named(given, named):
    done = subprocess.run(
        [sys.executable, "-m", "hf_sigmoid", *given], capture_output=True, text=True
    )
    assert done.returncode != 0 and named in done.stderr and "Traceback" not in done.stderr
