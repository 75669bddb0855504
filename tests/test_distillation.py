"""The distillation recipe, on a two-layer llama that reads bytes."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import tiny_models
import torch
from peft import LoraConfig, get_peft_model
from training_runs import (
    in_two_parts,
    killed,
    launch,
    lines,
    refused,
    same_weights,
    signal_after,
    tensors,
)  # fmt: skip
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    LlamaForCausalLM,
)  # fmt: skip

import hf_sigmoid
from hf_sigmoid import parameters, text
from hf_sigmoid.conversions import convert as convert_source
from hf_sigmoid.conversions import folding, perplexity, token_windows
from hf_sigmoid.conversions.merging import merge_adapter
from hf_sigmoid.conversions.revert import revert_checkpoint
from hf_sigmoid.training import checkpointing, distil, distillation, distilling

BLOCK = 32


def convert(source, target, function="sigmoid", *, init="calibrated-query", **options) -> str:
    """A conversion on a little text."""
    options = {"window": 32, "windows": 8, "progress": False, **options}
    convert_source(source, target, function, init=init, **options)
    return str(target)


def reverts_to(source, folder, target) -> None:
    """A distilled folder gives the source back, bit for bit."""
    assert revert_checkpoint(folder, target) is True
    assert same_weights(source, target)


@pytest.fixture(scope="module")
def softmax(tmp_path_factory) -> str:
    """A llama trained for a moment, so that its heads look somewhere."""
    folder = tmp_path_factory.mktemp("softmax")
    model = tiny_models.byte_llama(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor(tokenizer(text.train()[: 300 * BLOCK * 8])["input_ids"])[: 300 * BLOCK * 8]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in ids.view(300, 8, BLOCK):
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def converted(softmax, tmp_path_factory) -> str:
    return convert(softmax, tmp_path_factory.mktemp("converted") / "sigmoid")


@pytest.fixture(scope="module")
def corpus_file(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("corpus") / "texts.jsonl"
    pieces = text.train().split("\n\n")[:60]
    file.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    return str(file)


def arguments(converted, corpus_file, out, **keys) -> list[str]:
    values = {
        "model": converted, "output_dir": out, "data.path": corpus_file, "train.block_size": BLOCK,
        "train.batch_size": 2, "train.grad_accumulation": 2, "layerwise.steps": 8,
        "layerwise.numbers_lr": 2e-2, "end_to_end.numbers_lr": 2e-2, "checkpoint.every": 3, **keys,
    }  # fmt: skip
    return [f"{key}={value}" for key, value in values.items()]


@pytest.fixture(scope="module")
def uninterrupted(converted, corpus_file, tmp_path_factory) -> Path:
    """Both stages on numbers alone."""
    out = tmp_path_factory.mktemp("run") / "out"
    distil.main(arguments(converted, corpus_file, out, **{"end_to_end.steps": 6}))
    return out


def ids(count: int = 40) -> torch.Tensor:
    return torch.randint(0, 256, (2, count), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(folder) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder).eval()(ids()).logits


def test_both_stages_bring_the_student_nearer_to_its_teacher(softmax, converted, uninterrupted):
    log = lines(uninterrupted)
    layers = [line["layers"] for line in log if line["stage"] == "layerwise"]
    assert len(layers) == 8 and all(
        after < before for before, after in zip(layers[0], layers[-1], strict=True)
    )
    held_out = token_windows(AutoTokenizer.from_pretrained(softmax), text.held_out(), BLOCK, 16)
    with torch.no_grad():
        teacher, before, after = (
            AutoModelForCausalLM.from_pretrained(folder)(held_out).logits.log_softmax(-1)
            for folder in (softmax, converted, uninterrupted / "final")
        )
    divergence = [
        (teacher.exp() * (teacher - student)).sum(-1).mean() for student in (before, after)
    ]
    assert divergence[1] < 0.8 * divergence[0]


def test_the_result_is_a_plain_checkpoint_that_reverts_bit_for_bit(
    softmax, converted, uninterrupted, tmp_path
):
    final = uninterrupted / "final"
    assert tensors(final).keys() == tensors(converted).keys()
    configs = [json.loads((Path(f) / "config.json").read_text()) for f in (converted, final)]
    assert configs[0] | {folding.RECORD: True} == configs[1]
    folded = folding.Folded.load(final)
    assert len(folded.factors) == 4
    report = json.loads((final / "report.json").read_text())
    assert report["distillations"][0]["tokens"] == 14 * 4 * BLOCK
    assert set(report["distillations"][0]["output_errors"]) == set(report["modules"])
    for name in ("report.md", "README.md"):
        assert "distilled from the softmax model on 1,792 tokens" in (final / name).read_text()
    assert "nothing was trained" not in (final / "README.md").read_text()
    assert set(report["pictures"]) == {path.name for path in final.glob("*.png")} != set()
    reverts_to(softmax, final, tmp_path / "back")
    assert torch.equal(logits(softmax), logits(tmp_path / "back"))


def test_a_bfloat16_checkpoint_stays_one_and_reverts_bit_for_bit(softmax, corpus_file, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(softmax, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    AutoTokenizer.from_pretrained(softmax).save_pretrained(tmp_path / "half")
    made = convert(tmp_path / "half", tmp_path / "sigmoid")
    final = distil.main(arguments(made, corpus_file, tmp_path / "out"))
    for name, tensor in tensors(final).items():
        assert tensor.dtype == (torch.float32 if "log_length" in name else torch.bfloat16)
    reverts_to(tmp_path / "half", final, tmp_path / "back")


def test_a_distilled_model_can_be_distilled_again_and_still_reverts(
    softmax, uninterrupted, corpus_file, tmp_path
):
    again = tmp_path / "again"
    distil.main(arguments(uninterrupted / "final", corpus_file, again))
    # It begins where the last run ended: its teacher is the source, not what was folded into it.
    first = lines(again)[0]
    last = [line for line in lines(uninterrupted) if line["stage"] == "layerwise"][-1]
    assert first["loss"] < 1.3 * last["loss"]
    report = json.loads((again / "final" / "report.json").read_text())
    assert len(report["distillations"]) == 2
    reverts_to(softmax, again / "final", tmp_path / "back")


@pytest.mark.parametrize("trains", ["projections", "lora"])
def test_projections_train_too_and_then_softmax_comes_back_only_when_asked_for(
    softmax, converted, corpus_file, uninterrupted, tmp_path, trains
):
    keys = {"layerwise.train": trains, "layerwise.lr": 3e-3, "layerwise.steps": 12}
    out = tmp_path / "out"
    distil.main(arguments(converted, corpus_file, out, **keys))
    after, before = tensors(out / "final"), tensors(converted)
    assert after.keys() == before.keys()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    projections = {f"{p}_proj" for p in "qkvo"}
    assert {name.split(".")[4] for name in changed} == projections | {"log_length"}
    only_numbers = [x for x in lines(uninterrupted) if x["stage"] == "layerwise"][-1]
    assert lines(out)[-1]["loss"] < only_numbers["loss"]
    with pytest.raises(ValueError, match="--approximate"):
        revert_checkpoint(out / "final", tmp_path / "back")
    assert revert_checkpoint(out / "final", tmp_path / "back", approximate=True) is False
    # Its gains and temperatures are divided out: folded in again they give what was trained.
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    factors = folding.Folded.load(out / "final").factors
    assert any((factor != 1).any() for factor in factors.values())
    folding.fold(back, folding.find_places(back, ids()), factors)
    trained = {name: after[name] for name in changed if "log_length" not in name}
    for name, tensor in trained.items():
        torch.testing.assert_close(back.state_dict()[name], tensor)


def test_all_weights_train_end_to_end_on_a_teacher_of_its_own(
    softmax, converted, corpus_file, tmp_path
):
    keys = {"layerwise.steps": 0, "end_to_end.steps": 10, "end_to_end.train": "all",
            "end_to_end.lr": 1e-3, "teacher": softmax}  # fmt: skip
    distil.main(arguments(converted, corpus_file, tmp_path / "out", **keys))
    losses = [line["loss"] for line in lines(tmp_path / "out")]
    assert losses[-1] < 0.8 * losses[0]
    after, before = tensors(tmp_path / "out" / "final"), tensors(converted)
    assert not any(torch.equal(after[name], before[name]) for name in after)


def test_end_to_end_loss_is_the_divergence_from_the_softmax_model(softmax, converted):
    made, batch = _made(converted)
    kl = made.end_to_end(batch, kl=1.0, ignored=-100)
    cross = made.end_to_end(batch, kl=0.0, ignored=-100)
    mixed = made.end_to_end(batch, kl=0.25, ignored=-100)
    both = [AutoModelForCausalLM.from_pretrained(f).eval() for f in (softmax, converted)]
    with torch.no_grad():
        teacher, student = (m(batch["input_ids"]).logits.double().log_softmax(-1) for m in both)
    expected = (teacher.exp() * (teacher - student)).sum()
    torch.testing.assert_close(kl.double(), expected, rtol=1e-4, atol=1e-4)
    by_hand = -student.gather(-1, batch["labels"][..., None]).sum()
    torch.testing.assert_close(cross.double(), by_hand, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(mixed, 0.25 * kl + 0.75 * cross, rtol=1e-5, atol=1e-4)

    batch["weights"][0, 3] = 5.0
    weighted = made.end_to_end(batch, kl=1.0, ignored=-100)
    more = 4 * (teacher[0, 3].exp() * (teacher[0, 3] - student[0, 3])).sum()
    torch.testing.assert_close(weighted.double(), expected + more, rtol=1e-4, atol=1e-4)


def test_layer_errors_are_those_on_the_softmax_models_own_inputs(softmax, converted):
    """By hand: the modules of both checkpoints, run on the softmax model's hidden states."""
    made, batch = _made(converted)
    found = made.layerwise(batch, scale=1.0)
    calls = {}
    teacher, student = (
        AutoModelForCausalLM.from_pretrained(f).eval() for f in (softmax, converted)
    )
    for name in found:
        teacher.get_submodule(name).register_forward_hook(
            lambda module, args, kwargs, output, name=name: calls.update(
                {name: (kwargs, output[0])}
            ),
            with_kwargs=True,
        )
    with torch.no_grad():
        teacher(batch["input_ids"], use_cache=False)
        for name, (kwargs, target) in calls.items():
            mask = torch.ones(BLOCK, BLOCK, dtype=torch.bool).tril()[None, None]
            output, _ = student.get_submodule(name)(**{**kwargs, "attention_mask": mask})
            error = (output - target).square().sum((1, 2)) / target.square().sum((1, 2))
            assert found[name] == pytest.approx(error.mean().item(), rel=1e-4)
    # And gradients reach the numbers of every module from its own error alone.
    assert all(p.grad is not None for p in made.select("numbers").values())


def test_what_does_not_train_is_shared_not_copied(converted):
    made, _ = _made(converted, trains={"numbers"})
    teacher = dict(made.teacher.named_parameters())
    for name, parameter in made.student.named_parameters():
        if parameters.HOLDER not in name and distillation.SCALES not in name:
            assert parameter.data_ptr() == teacher[name].data_ptr()
    made, _ = _made(converted, trains={"projections"})
    teacher = dict(made.teacher.named_parameters())
    for name, parameter in teacher.items():
        shared = parameter.data_ptr() == made.student.get_parameter(name).data_ptr()
        assert shared == (".self_attn." not in name)


def test_a_blend_goes_from_softmax_to_the_function_and_leaves_no_trace(
    softmax, converted, corpus_file, tmp_path, monkeypatch
):
    made, batch = _made(converted)
    with torch.no_grad():
        made.blend(0.0)
        torch.testing.assert_close(
            made.student(batch["input_ids"]).logits,
            made.teacher(batch["input_ids"]).logits,
            atol=1e-4, rtol=1e-4,
        )  # fmt: skip
    shares = []
    blend = distillation.Distillation.blend
    monkeypatch.setattr(
        distillation.Distillation,
        "blend",
        lambda self, share: (shares.append(share), blend(self, share)),
    )
    keys = {"layerwise.steps": 0, "end_to_end.steps": 8, "end_to_end.blend": 0.5}
    distil.main(arguments(converted, corpus_file, tmp_path / "out", **keys))
    assert shares == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert "blend" not in (tmp_path / "out" / "final" / "config.json").read_text()
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "final")
    assert trained.config._attn_implementation == "sigmoid"


def test_layers_that_stay_softmax_are_not_touched(softmax, corpus_file, tmp_path):
    made = convert(softmax, tmp_path / "one", layers=[1])
    after = tensors(distil.main(arguments(made, corpus_file, tmp_path / "out")))
    kept = {name: tensor for name, tensor in tensors(softmax).items() if ".layers.0." in name}
    assert kept and all(torch.equal(after[name], tensor) for name, tensor in kept.items())
    assert len(lines(tmp_path / "out")[0]["layers"]) == 1


def test_ssmax_is_distilled_as_well(softmax, corpus_file, tmp_path):
    made = convert(softmax, tmp_path / "ssmax", "ssmax", init="paper")
    distil.main(arguments(made, corpus_file, tmp_path / "out"))
    log = lines(tmp_path / "out")
    assert log[-1]["loss"] < log[0]["loss"]


def test_held_out_text_is_measured_on_the_way(converted, corpus_file, tmp_path):
    held_out = tmp_path / "chapters.txt"
    held_out.write_text(text.held_out())
    keys = {"evaluate.path": held_out, "evaluate.every": 3, "evaluate.windows": 4}
    distil.main(arguments(converted, corpus_file, tmp_path / "out", **keys))
    found = {x["step"]: x["perplexity"] for x in lines(tmp_path / "out") if "perplexity" in x}
    assert list(found) == [3, 6, 8]
    final = tmp_path / "out" / "final"
    windows = token_windows(AutoTokenizer.from_pretrained(final), text.held_out(), BLOCK, 4)
    # The student with its gains beside it, and with them folded into the projections.
    expected = perplexity(AutoModelForCausalLM.from_pretrained(final), windows, progress=False)
    assert found[8]["chapters"] == pytest.approx(expected, rel=1e-4)


KILLED = """
import json, os, signal, sys
import torch
step, threads, *argv = json.loads(sys.argv[1])
torch.set_num_threads(threads)
from hf_sigmoid.training import distil, run_log
write = run_log.RunLog.write
def write_then_die(self, **values):
    write(self, **values)
    if values["step"] == step: os.kill(os.getpid(), signal.SIGKILL)
run_log.RunLog.write = write_then_die
distil.main(argv)
"""


def test_low_rank_changes_resume_and_go_on_end_to_end(
    converted, corpus_file, tmp_path, monkeypatch
):
    keys = {"layerwise.train": "lora", "layerwise.steps": 4, "end_to_end.train": "lora",
            "end_to_end.steps": 4, "checkpoint.every": 0}  # fmt: skip
    whole = distil.main(arguments(converted, corpus_file, tmp_path / "whole", **keys))
    argv = arguments(converted, corpus_file, tmp_path / "parts", **keys)
    assert same_weights(whole, in_two_parts(monkeypatch, distil.main, argv, 5))
    assert not any("lora" in name for name in tensors(whole))


@pytest.mark.parametrize("step", [5, 8, 11])  # in a stage, at its end, in the next
def test_a_killed_run_resumes_to_the_last_bit(
    converted, corpus_file, uninterrupted, tmp_path, step
):
    out = tmp_path / "out"
    argv = arguments(converted, corpus_file, out, **{"end_to_end.steps": 6})
    killed(KILLED, step, torch.get_num_threads(), *argv)
    assert checkpointing.latest(out / "checkpoints").step == step // 3 * 3
    distil.main(argv)
    assert [line["loss"] for line in lines(out)] == [line["loss"] for line in lines(uninterrupted)]
    assert same_weights(out / "final", uninterrupted / "final")
    ours, theirs = (
        json.loads((folder / "final" / "report.json").read_text())["distillations"][0]
        for folder in (out, uninterrupted)
    )
    assert ours["output_errors"] == theirs["output_errors"]
    assert ours["output_errors_before"] == theirs["output_errors_before"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_run_goes_on(
    converted, corpus_file, uninterrupted, tmp_path, monkeypatch, number
):
    keys = {"end_to_end.steps": 6, "checkpoint.every": 0}
    argv = arguments(converted, corpus_file, tmp_path, **keys)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    signal_after(monkeypatch, 3, number)
    if number == signal.SIGINT:
        with pytest.raises(KeyboardInterrupt, match="step 4 is saved: the same command goes on"):
            distil.main(argv)
    else:
        assert distil.main(argv) is None
    signal.signal(signal.SIGINT, before)
    assert checkpointing.latest(tmp_path / "checkpoints").step == 4
    monkeypatch.undo()
    assert distil.main(argv) == tmp_path / "final"
    assert [x["loss"] for x in lines(tmp_path)] == [x["loss"] for x in lines(uninterrupted)]


def test_a_step_does_not_depend_on_how_its_rows_are_divided(converted, corpus_file, tmp_path):
    found = []
    for name, batch, accumulation in (("a", 4, 1), ("b", 1, 4)):
        keys = {"train.batch_size": batch, "train.grad_accumulation": accumulation,
                "end_to_end.steps": 4}  # fmt: skip
        distil.main(arguments(converted, corpus_file, tmp_path / name, **keys))
        found.append(_figures(tmp_path / name))
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def _figures(out: Path) -> list[float]:
    """Losses and, since Adam does not mind a factor, the gradients' norms."""
    return [line[key] for line in lines(out) for key in ("loss", "grad_norm")]


def test_two_processes_take_the_steps_of_one(converted, corpus_file, tmp_path):
    held_out = tmp_path / "held_out.txt"
    held_out.write_text(text.held_out())
    keys = {"train.grad_accumulation": 1, "end_to_end.steps": 3, "layerwise.steps": 3,
            "data.streams": 2, "evaluate.path": held_out, "evaluate.windows": 2}  # fmt: skip
    alone = {**keys, "train.batch_size": 4}
    distil.main(arguments(converted, corpus_file, tmp_path / "one", **alone))
    launch(
        arguments(converted, corpus_file, tmp_path / "two", **keys), recipe="distil_attention.py"
    )
    assert _figures(tmp_path / "one") == pytest.approx(_figures(tmp_path / "two"), rel=1e-3)
    reports = [
        json.loads((tmp_path / each / "final" / "report.json").read_text())["distillations"][0]
        for each in ("one", "two")
    ]
    assert reports[0]["tokens"] == reports[1]["tokens"] == 6 * 4 * BLOCK
    one, two = (each["perplexity"]["held_out"] for each in reports)
    assert one == pytest.approx(two, rel=1e-3)


@pytest.mark.parametrize(
    "keys, words",
    [
        ({"model": "SOFTMAX"}, "expected a converted checkpoint"),
        ({"teacher": "CONVERTED"}, "expected a softmax model"),
        ({"teacher": "WIDER"}, "expected hidden_size 32, got 64"),
        ({"model": "ROTATED"}, "whose RoPE was changed"),
        ({"layerwise.train": "everything"}, "layerwise.train: expected one of"),
        ({"layerwise.steps": 0}, "expected at least 1, got 0"),
        ({"end_to_end.blend": 1.5}, "expected at most 1"),
        ({"end_to_end.kl": -1}, "expected at least 0"),
        ({"evaluate.path": "nowhere.txt"}, "evaluate.path: no such file"),
        ({"evaluate.path": "SHORT"}, "must have at least 32 tokens, got 9"),
        ({"train.block_size": 65}, "at most the model's 64 positions"),
        ({"layerwise.step": 3}, "unknown key 'layerwise.step'"),
    ],
)
def test_bad_input_is_named_and_writes_nothing(
    softmax, converted, corpus_file, tmp_path, keys, words
):
    (tmp_path / "short.txt").write_text("too short")
    places = {"SOFTMAX": softmax, "CONVERTED": converted, "SHORT": str(tmp_path / "short.txt")}
    if "WIDER" in keys.values():
        config = AutoConfig.from_pretrained(softmax)
        config.hidden_size = 64
        LlamaForCausalLM(config).save_pretrained(tmp_path / "wider")
        places["WIDER"] = str(tmp_path / "wider")
    if "ROTATED" in keys.values():
        places["ROTATED"] = convert(softmax, tmp_path / "r", "ssmax", init=None, rope="ntk:2")
    keys = {key: places.get(value, value) for key, value in keys.items()}
    refused(distil.main, arguments(converted, corpus_file, tmp_path / "out", **keys), words)
    assert not (tmp_path / "out").exists()


def test_a_resumed_run_is_of_the_same_weights(converted, corpus_file, tmp_path, monkeypatch):
    shutil.copytree(converted, tmp_path / "model")
    argv = arguments(tmp_path / "model", corpus_file, tmp_path / "out")
    signal_after(monkeypatch, 3, signal.SIGTERM)
    assert distil.main(argv) is None
    monkeypatch.undo()
    model = AutoModelForCausalLM.from_pretrained(converted)
    with torch.no_grad():
        model.model.layers[0].self_attn.log_length.offset += 0.1
    model.save_pretrained(tmp_path / "model")
    refused(distil.main, argv, "model or teacher is not what ")


def test_a_folded_model_never_loses_its_gains_in_silence(softmax, converted, corpus_file, tmp_path):
    keys = {"layerwise.train": "projections"}
    distil.main(arguments(converted, corpus_file, tmp_path / "out", **keys))
    final = tmp_path / "out" / "final"
    assert "BACK --approximate`" in (final / "README.md").read_text()
    (final / "report.json").unlink()  # as of a model whose teacher was given
    assert revert_checkpoint(final, tmp_path / "near", approximate=True) is False
    folded = folding.Folded.load(final)
    ours, theirs = tensors(final), tensors(tmp_path / "near")
    name = "model.layers.0.self_attn"
    gain = folded.factors[f"gain/{name}"].repeat_interleave(8)
    torch.testing.assert_close(
        theirs[f"{name}.o_proj.weight"], ours[f"{name}.o_proj.weight"] / gain
    )
    config = json.loads((tmp_path / "near" / "config.json").read_text())
    assert folding.RECORD not in config
    (final / folding.FILE).unlink()
    with pytest.raises(ValueError, match="says which, folded"):
        revert_checkpoint(final, tmp_path / "no", approximate=True)


def test_an_adapter_on_a_distilled_base_takes_along_what_was_folded(
    uninterrupted, corpus_file, tmp_path
):
    base = uninterrupted / "final"
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, target_modules=["q_proj"])
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    model.save_pretrained(tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", base, tmp_path / "merged")
    with pytest.raises(ValueError, match="--approximate"):
        revert_checkpoint(tmp_path / "merged", tmp_path / "back")
    assert revert_checkpoint(tmp_path / "merged", tmp_path / "back", approximate=True) is False
    argv = arguments(tmp_path / "merged", corpus_file, tmp_path / "out")
    refused(distil.main, argv, "were trained since it was distilled")


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "gemma3"])
def test_other_attentions_are_distilled_and_revert(corpus_file, tmp_path, family):
    """Normed queries, a fused and transposed projection, sliding layers; tied heads."""
    tokenizer = tiny_models.byte_tokenizer()
    config = tiny_models.config(family)
    config.vocab_size, config.tie_word_embeddings = len(tokenizer), True
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    made = convert(tmp_path / "source", tmp_path / "sigmoid")
    argv = arguments(made, corpus_file, tmp_path / "out", **{"end_to_end.steps": 3})
    final = distil.main(argv)
    kinds = {key.partition("/")[0] for key in folding.Folded.load(final).factors}
    assert kinds == ({"gain", "temperature"} if family == "gpt2" else {"gain"})
    reverts_to(tmp_path / "source", final, tmp_path / "back")


def test_other_models_than_causal_ones_are_refused(softmax, corpus_file, tmp_path):
    source = tmp_path / "bert"
    tokenizer = AutoTokenizer.from_pretrained(softmax)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    model = BertForMaskedLM(config)
    hf_sigmoid.configure(model, "sigmoid", learn=True)
    model.save_pretrained(source)
    tokenizer.save_pretrained(source)
    argv = arguments(source, corpus_file, tmp_path / "out")
    refused(distil.main, argv, "causal language model, got a BertForMaskedLM")


def test_a_model_that_was_trained_since_needs_a_teacher(softmax, converted, corpus_file, tmp_path):
    shutil.copytree(converted, tmp_path / "trained")
    model = AutoModelForCausalLM.from_pretrained(converted)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight += 0.01
    model.save_pretrained(tmp_path / "trained")
    argv = arguments(tmp_path / "trained", corpus_file, tmp_path / "out")
    refused(distil.main, argv, "give teacher=")
    distil.main([*argv, f"teacher={softmax}"])
    assert (tmp_path / "out" / "final" / "config.json").is_file()


def _made(converted, trains=frozenset({"numbers"})):
    student = AutoModelForCausalLM.from_pretrained(converted).eval()
    teacher = distillation.softmax_inside(student, None, set(trains))
    made = distillation.Distillation(student, teacher, lora_rank=None, probe=ids(6)[:1])
    made.select("numbers")
    tokens = torch.randint(0, 256, (2, BLOCK), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(BLOCK).expand(2, BLOCK)
    labels = tokens.roll(-1, 1)
    weights = torch.ones(2, BLOCK)
    return made, {
        "input_ids": tokens, "position_ids": positions, "labels": labels, "weights": weights
    }  # fmt: skip


def test_a_signal_in_an_evaluation_saves_that_step(converted, corpus_file, tmp_path, monkeypatch):
    (tmp_path / "held.txt").write_text(text.held_out())
    keys = {"evaluate.path": tmp_path / "held.txt", "evaluate.every": 2, "checkpoint.every": 0}
    measure = distilling.perplexity

    def ask_and_measure(*given, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return measure(*given, **options)

    monkeypatch.setattr(distilling, "perplexity", ask_and_measure)
    out = tmp_path / "out"
    assert distil.main(arguments(converted, corpus_file, out, **keys)) is None
    assert checkpointing.latest(out / "checkpoints").step == len(lines(out)) == 2


def test_a_run_begins_by_saying_what_it_is(converted, corpus_file, tmp_path, capsys):
    keys = {"end_to_end.steps": 2, "end_to_end.train": "all"}
    distil.main(arguments(converted, corpus_file, tmp_path / "out", **keys))
    said = capsys.readouterr().out.splitlines()
    assert said[0] == (
        f"model {converted}: LlamaForCausalLM, attention sigmoid, one process on cpu, float32"
    )
    # Row numbers, gains and temperatures of two layers of four heads.
    assert said[1] == "layerwise, 8 steps, numbers: 96 of 35,136 parameters train (0.27%)"
    assert said[2] == "end_to_end, 2 steps, all: 35,136 of 35,136 parameters train (100.00%)"
    assert said[3].startswith("text texts.jsonl: 60 documents, ")


@pytest.mark.parametrize("step", [3, 9])  # in a stage, and at the end of one
def test_a_signal_at_a_step_that_is_evaluated_and_saved_leaves_a_run_that_goes_on(
    converted, corpus_file, tmp_path, monkeypatch, step
):
    keys = {"layerwise.steps": 9, "end_to_end.steps": 3, "evaluate.path": "builtin",
            "evaluate.every": 3, "evaluate.windows": 2}  # fmt: skip
    whole = distil.main(arguments(converted, corpus_file, tmp_path / "whole", **keys))
    argv = arguments(converted, corpus_file, tmp_path / "parts", **keys)
    take = distilling.Distilling.step

    def ask_and_take(self, number):
        if number == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return take(self, number)

    monkeypatch.setattr(distilling.Distilling, "step", ask_and_take)
    assert distil.main(argv) is None
    monkeypatch.undo()
    assert same_weights(whole, distil.main(argv))
    ours, theirs = lines(tmp_path / "parts"), lines(tmp_path / "whole")
    for key in ("step", "loss", "perplexity"):
        assert [line.get(key) for line in ours] == [line.get(key) for line in theirs]
