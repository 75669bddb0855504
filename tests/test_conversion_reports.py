"""What a conversion reports, reads and uploads, and the RoPE that it changes beside ssmax."""

import hashlib
import importlib.metadata
import importlib.util
import json
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_models
import torch
from huggingface_hub import metadata_load
from huggingface_hub.errors import LocalTokenNotFoundError
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import hf_sigmoid
from hf_sigmoid import text
from hf_sigmoid.command_line import main
from hf_sigmoid.conversions import card as cards
from hf_sigmoid.conversions import convert, hub, pictures, revert, token_windows
from hf_sigmoid.conversions.evaluation import default_lengths
from hf_sigmoid.evals.probe import needle_prompts, score
from hf_sigmoid.rope import Change, change_rope, restore_rope
from hf_sigmoid.text import sources

SMALL = {"window": 32, "windows": 4, "progress": False}
POSITIONS, LENGTH = 460, 420


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> str:
    """A random llama that reads bytes."""
    folder = tmp_path_factory.mktemp("models") / "source"
    tokenizer = tiny_models.byte_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.2,  # so that attention looks somewhere
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("converted") / "out"
    convert(source, folder, "sigmoid", init="calibrated-query", layers="0,2", lengths=[16, 64],
            seed=7, **SMALL)  # fmt: skip
    return folder


def logits(path, ids):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path).eval()(ids).logits


def perplexity_by_hand(path, ids) -> float:
    losses = -logits(path, ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])
    return math.exp(losses.mean().item())


# Reports


def test_perplexity_is_reported_by_length_before_and_after(source, converted):
    report = json.loads((converted / "report.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(source)
    # 16 tokens are the beginning of the windows of 32, 64 are windows of their own.
    ids = {16: token_windows(tokenizer, text.held_out(), 32, 4)[:, :16]}
    ids[64] = token_windows(tokenizer, text.held_out(), 64, 4)
    assert [row["tokens"] for row in report["lengths"]] == [16, 64]
    for row in report["lengths"]:
        by_hand = [perplexity_by_hand(path, ids[row["tokens"]]) for path in (source, converted)]
        assert [row["before"], row["after"]] == pytest.approx(by_hand, rel=1e-4)
    assert default_lengths(512) == [128, 256, 512] and default_lengths(100) == [100]
    assert default_lengths(600) == [128, 256, 512, 600]


def test_the_report_says_by_module_what_calibration_gained(converted):
    report = json.loads((converted / "report.json").read_text())
    assert list(report["modules"]) == [f"model.layers.{i}.self_attn" for i in (0, 2)]
    for row in report["modules"].values():
        assert 0 < row["relative"] < row["relative_before"]
        assert row.keys() >= {"row_sum", "saturated", "r_squared", "residual_nats"}
    shown = (converted / "report.md").read_text()
    row = report["modules"]["model.layers.2.self_attn"]
    start = f"| model.layers.2.self_attn | {row['relative_before']:.3f} | {row['relative']:.3f} |"
    assert start in shown and "layers.1." not in shown


def test_the_report_says_what_was_read_and_spent_and_asked_for(converted):
    report = json.loads((converted / "report.json").read_text())
    digest = hashlib.sha256(text.train().encode()).hexdigest()
    assert report["calibration_text_sha256"] == digest
    with safe_open(converted / "stats.safetensors", "pt") as file:
        assert file.metadata()["text_sha256"] == digest
    stages = {row["stage"]: row for row in report["stages"]}
    assert stages["calibration"]["tokens"] == report["calibration_tokens"] == 4 * 32
    assert stages["evaluation before"]["tokens"] == 4 * (16 + 32 + 64)
    assert sum(row["seconds"] for row in stages.values()) <= report["seconds"] + 0.1 * len(stages)
    changed = {"init", "layers", "lengths", "seed", "window", "windows"}
    assert report["options"].keys() == changed and report["options"]["seed"] == 7
    shown = (converted / "report.md").read_text()
    assert "| option `seed` | 7 |" in shown and "| calibration |" in shown


def test_needles_are_looked_for_before_and_after(source, tmp_path):
    report = convert(source, tmp_path / "out", "ssmax", init="paper", needle=2,
                     lengths=[16, LENGTH, POSITIONS], **SMALL)  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(source)
    samples = needle_prompts(text.held_out(), tokenizer, [LENGTH], samples=2)[0][LENGTH]
    (row,) = report["needle"]
    assert row["tokens"] == LENGTH and row["samples"] == 6
    for path, when in ((source, "before"), (tmp_path / "out", "after")):
        model = AutoModelForCausalLM.from_pretrained(path).eval()
        by_hand = [logprob for _, logprob in score(model, samples)]
        assert row[f"logprob_{when}"] == pytest.approx(sum(by_hand) / 6, rel=1e-4)
        assert row[f"accuracy_{when}"] == 0  # of a random model
    assert "the fixed parts of single take" in report["without_needle"]["16"]
    assert "with its answer" in report["without_needle"][str(POSITIONS)]
    assert "No needles in 16 tokens" in (tmp_path / "out" / "report.md").read_text()
    with pytest.raises(ValueError, match="no needle can be hidden: the fixed parts of single take"):
        convert(source, tmp_path / "none", "ssmax", needle=2, **SMALL)
    assert not (tmp_path / "none").exists()


# Pictures


def test_pictures_are_drawn_and_shown_in_the_report(converted, source, tmp_path):
    report = json.loads((converted / "report.json").read_text())
    assert report["pictures"] == [pictures.ERRORS, pictures.BIASES]
    shown = (converted / "report.md").read_text()
    for name in report["pictures"]:
        assert (converted / name).read_bytes().startswith(b"\x89PNG") and f"]({name})" in shown
    convert(source, tmp_path / "out", "ssmax", **SMALL)  # nothing to see: all heads are alike
    assert not list((tmp_path / "out").glob("*.png"))


def test_without_matplotlib_the_report_says_so(source, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: None if n == "matplotlib" else find(n)
    )
    convert(source, tmp_path / "out", "sigmoid", init="minus-log-n", **SMALL)
    assert not list((tmp_path / "out").glob("*.png"))
    assert "pip install 'hf-sigmoid[eval]'" in (tmp_path / "out" / "report.md").read_text()


def test_modules_of_unlike_heads_and_extreme_numbers_can_be_drawn(tmp_path):
    numbers = {
        f"encoder.{layer}.{kind}": {"offset": torch.zeros(heads), "slope": -torch.ones(heads)}
        for layer in range(30)
        for kind, heads in (("self", 4), ("cross", 2))
    }
    numbers["encoder.3.self"]["offset"][1] = 1e6
    pictures.draw_rows(tmp_path / "rows.png", numbers)
    modules = {name: {"relative_before": 1e9, "relative": 1e-9} for name in numbers}
    pictures.draw_errors(tmp_path / "errors.png", modules)
    assert all(path.stat().st_size > 1000 for path in tmp_path.iterdir())


# Model card


def test_the_card_loads_the_model_as_it_says(converted, monkeypatch):
    card = (converted / "README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(converted.parent)
    names: dict = {}
    exec(code, names)
    assert names["model"].config._attn_implementation == "sigmoid"
    assert "hf-sigmoid revert out BACK" in card and "windows chosen with seed 7" in card
    assert str(converted.parent) not in card  # no path of the machine it was made on
    digest = json.loads((converted / "report.json").read_text())["calibration_text_sha256"]
    assert digest in card


def test_the_front_matter_is_the_hubs(source, tmp_path, monkeypatch):
    licensed = tmp_path / "licensed"
    shutil.copytree(source, licensed)
    (licensed / "README.md").write_text(
        "---\nlicense: other\nlicense_name: own\nlanguage: [en]\ntags: [theirs]\n---\nText.\n"
    )
    convert(licensed, tmp_path / "out", "ssmax", **SMALL)
    front = metadata_load(tmp_path / "out" / "README.md")
    assert front == {
        "license": "other", "license_name": "own", "language": ["en"],
        "library_name": "transformers", "pipeline_tag": "text-generation",
        "tags": ["hf-sigmoid", "ssmax-attention"],
    }  # fmt: skip

    monkeypatch.setattr(cards, "hf_hub_download", lambda *_, **__: licensed / "README.md")
    base = cards.base_model("org/model", "org/model", SimpleNamespace(_commit_hash="abc"))
    assert base["model"] == "org/model" and base["revision"] == "abc"
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    plan = SimpleNamespace(function="ssmax", init="identity")
    (tmp_path / "card.md").write_text(cards.card({**report, "base": base}, plan, "me/new"))
    front = metadata_load(tmp_path / "card.md")
    assert front["base_model"] == "org/model" and front["base_model_relation"] == "finetune"
    assert front["license"] == "other"
    card = (tmp_path / "card.md").read_text()
    assert "revision `abc`" in card
    assert "hf download me/new --local-dir new && hf-sigmoid revert new BACK" in card


def test_a_card_says_what_installs_it_and_what_other_programs_do(converted):
    card = (converted / "README.md").read_text()
    address = "hf-sigmoid @ git+"
    urls = importlib.metadata.metadata("hf-sigmoid").get_all("Project-URL")
    (repository,) = [url.removeprefix("Repository, ") for url in urls]
    assert f'pip install "{address}{repository}"' in card
    assert "(vLLM, SGLang, TGI) stop" in card and "may run it as the softmax model" in card
    # One place knows the address.
    root = Path(__file__).parents[1]
    files = [*root.glob("*.toml"), *root.glob("*.md"), *root.glob("docs/**/*.md")]
    for folder in ("hf_sigmoid", "conversions", "recipes", "kernels"):
        files += [*(root / folder).rglob("*.py"), *(root / folder).rglob("*.md")]
    knowing = [file.name for file in files if repository in file.read_text("utf-8")]
    assert knowing == ["pyproject.toml"]


# The hub


class FakeHub:
    """HfApi without a network; `calls` is what was asked of it."""

    def __init__(self, account=None, failure=None):
        self.account, self.failure, self.calls = account, failure, []

    def __call__(self):
        return self

    def whoami(self):
        self.calls.append("whoami")
        if self.account is None:
            raise LocalTokenNotFoundError("Token is required, but no token found.")
        return self.account

    def create_repo(self, repo_id, **options):
        self.calls.append(("create", repo_id, options))

    def upload_folder(self, *, repo_id, folder_path, **_):
        self.calls.append(("upload", repo_id, sorted(p.name for p in Path(folder_path).iterdir())))
        if self.failure:
            raise self.failure
        return SimpleNamespace(repo_url=f"https://huggingface.co/{repo_id}")


ME = {"name": "me", "orgs": [{"name": "us"}]}


def test_a_finished_folder_is_uploaded_if_asked_for(source, tmp_path, monkeypatch, capsys):
    api = FakeHub(ME)
    monkeypatch.setattr(hub, "HfApi", api)
    convert(source, tmp_path / "quiet", "ssmax", **SMALL)
    assert api.calls == []
    command = ["convert", source, str(tmp_path / "out"), "--to", "ssmax", "--window", "16"]
    assert main([*command, "--windows", "2", "--push-to-hub", "us/new", "--private"]) == 0
    assert "uploaded as us/new" in capsys.readouterr().out
    who, create, upload = api.calls
    assert who == "whoami" and create == ("create", "us/new", {"private": True, "exist_ok": True})
    assert upload[1] == "us/new"
    assert upload[2] == sorted(path.name for path in (tmp_path / "out").iterdir())
    assert 'from_pretrained("us/new")' in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("repo", "account", "message"),
    [
        ("new", ME, "--push-to-hub must be USER/NAME, got 'new'"),
        ("me/ne w", ME, "--push-to-hub must be USER/NAME, got 'me/ne w'"),
        ("me/new", None, "the hub does not know who you are .*Token is required"),
        ("them/new", ME, "must be of me or us, who is logged in, got 'them/new'"),
    ],
)
def test_a_hub_that_cannot_be_written_to_is_said_before_the_work(
    source, tmp_path, monkeypatch, repo, account, message
):
    api = FakeHub(account)
    monkeypatch.setattr(hub, "HfApi", api)
    with pytest.raises(ValueError, match=message):  # before it is seen that there is no such model
        convert(tmp_path / "nowhere", tmp_path / "out", "ssmax", push_to_hub=repo, **SMALL)
    assert api.calls in ([], ["whoami"])
    with pytest.raises(ValueError, match="--private goes with --push-to-hub"):
        convert(source, tmp_path / "out", "ssmax", private=True, **SMALL)
    assert not (tmp_path / "out").exists()


def test_a_failed_upload_leaves_the_finished_folder(source, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "HfApi", FakeHub(ME, OSError("connection lost")))
    out = tmp_path / "out"
    with pytest.raises(OSError, match=f"connection lost. Upload it by: hf upload me/new {out}$"):
        convert(source, out, "ssmax", push_to_hub="me/new", **SMALL)
    assert AutoModelForCausalLM.from_pretrained(out).config._attn_implementation == "ssmax"


# Texts


@pytest.fixture
def documents(tmp_path) -> Path:
    """A local data set of 50 documents of 40 to 41 bytes."""
    file = tmp_path / "documents.jsonl"
    rows = [{"text": f"Document {i} has some words, {i} of all.     ", "n": i} for i in range(50)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read(given, tokens=100, seed=None):
    return sources.read(given, text.train, "calibration", tiny_models.byte_tokenizer(), tokens,
                      seed=seed)  # fmt: skip


def test_a_data_set_is_read_as_far_as_needed(documents, tmp_path):
    first = read(f"dataset:{documents}")
    assert first.content.count("Document") == 3 and first.content.startswith("Document 0 ")
    assert first.name == "dataset:documents.jsonl"
    (tmp_path / "folder").mkdir()
    shutil.copy(documents, tmp_path / "folder" / "train.jsonl")
    assert read(f"dataset:{tmp_path / 'folder'}:default:train:text").content == first.content
    shuffled = read(f"dataset:{documents}", seed=1)
    assert shuffled.content == read(f"dataset:{documents}", seed=1).content != first.content
    everything = read(f"dataset:{documents}", tokens=10**6)
    assert everything.content.count("Document") == 50


def test_several_files_are_one_text(tmp_path, documents):
    for name in "ab":
        (tmp_path / name).write_text(name * 3)
    both = read([tmp_path / "a", str(tmp_path / "b")])
    assert both == sources.Text("a, b", "aaa\n\nbbb")
    assert both.sha256 == hashlib.sha256(b"aaa\n\nbbb").hexdigest()
    assert read([tmp_path / "a", f"dataset:{documents}"]).content.startswith("aaa\n\nDocument 0")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("dataset:", r"expected dataset:NAME\[:CONFIG"),
        ("dataset:a:b:c:d:e", r"expected dataset:NAME\[:CONFIG"),
        ("dataset:{}:::body", "has no key 'body'; its keys are n, text"),
        ("dataset:{}:::n", "'n' is not text but int"),
        ("dataset:{}::validation", "Bad split: validation"),
        ("dataset:{}.gone", "there is no file or folder .*gone"),
        ("dataset:bad name!", "the calibration text: cannot read dataset:bad name!: "),
        ([], "must be a file, a folder or a data set, got none"),
    ],
)
def test_a_data_set_that_cannot_be_read_is_named(documents, given, message):
    given = given.format(documents) if isinstance(given, str) else given
    with pytest.raises(ValueError, match=message):
        read(given)


def test_a_data_set_needs_its_package(documents, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs the package datasets: pip install"):
        read(f"dataset:{documents}")


def test_bytes_that_are_not_text_are_named(tmp_path):
    (tmp_path / "picture").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"text: .*picture is not UTF-8 text"):
        read(tmp_path / "picture")


def test_a_text_shorter_than_a_window_is_refused(source, tmp_path):
    (tmp_path / "short.txt").write_text("only this")
    with pytest.raises(ValueError, match="must have at least 32 tokens, got 9"):
        convert(source, tmp_path / "out", "sigmoid", calibration=tmp_path / "short.txt", **SMALL)
    assert not (tmp_path / "out").exists()


def test_the_same_seed_gives_the_same_statistics_bit_for_bit(source, converted, tmp_path):
    options = {"init": "calibrated", **SMALL}
    for name, seed in (("same", 7), ("other", 8), ("evenly", None)):
        convert(source, tmp_path / name, "sigmoid", seed=seed, **options)
    first = load_file(converted / "stats.safetensors")
    found = {
        name: load_file(tmp_path / name / "stats.safetensors")
        for name in ("same", "other", "evenly")
    }
    equal = {
        name: all(torch.equal(first[key], tensors[key]) for key in first)
        for name, tensors in found.items()
    }
    assert equal == {"same": True, "other": False, "evenly": False}


# RoPE


@pytest.mark.parametrize(
    ("given", "parameters"),
    [
        ("theta:4", {"rope_type": "default", "rope_theta": 40000.0}),
        ("ntk:4", {"rope_type": "default", "rope_theta": 10000.0 * 4 ** (8 / 6)}),
        (
            "yarn:4",
            {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "attention_factor": 1.0,
             "original_max_position_embeddings": POSITIONS},
        ),
    ],
)  # fmt: skip
def test_a_changed_rope_is_written_and_taken_back_out(source, tmp_path, given, parameters):
    report = convert(source, tmp_path / "out", "ssmax", rope=given, lengths=[32, 2 * POSITIONS],
                     **SMALL)  # fmt: skip
    assert max(report["largest_logit_difference"].values()) < 1e-5  # compared before the change
    assert report["perplexity_after"] != report["perplexity_before"]
    assert "**This is not an identity**" in (tmp_path / "out" / "report.md").read_text()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_parameters"] == parameters
    assert config["max_position_embeddings"] == 4 * POSITIONS
    # What was measured is what is loaded.
    ids = token_windows(AutoTokenizer.from_pretrained(source), text.held_out(), 32, 4)
    by_hand = perplexity_by_hand(tmp_path / "out", ids)
    assert report["perplexity_after"] == pytest.approx(by_hand, rel=1e-4)

    assert main(["revert", str(tmp_path / "out"), str(tmp_path / "back")]) == 0
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(tmp_path / "resaved")
    back, original = (tmp_path / name / "config.json" for name in ("back", "resaved"))
    assert back.read_text() == original.read_text()
    assert torch.equal(logits(tmp_path / "back", ids), logits(source, ids))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_rope_changed_in_memory_is_that_of_the_loaded_model(family, tmp_path):
    model = tiny_models.build(family).eval()
    ids = torch.randint(3, 90, (1, 40))
    with torch.no_grad():
        before = model(ids).logits
        hf_sigmoid.configure(model, "ssmax")
        for given in ("theta:2", "ntk:2.5", "yarn:2"):
            change_rope(model, given)
            with pytest.raises(ValueError, match="was changed already"):
                change_rope(model, given)
            changed = model(ids).logits
            assert not torch.allclose(changed, before)
            model.save_pretrained(tmp_path / given)
            torch.testing.assert_close(logits(tmp_path / given, ids), changed)
            assert restore_rope(model) and not restore_rope(model)
        change_rope(model, "yarn:2")
        assert torch.equal(revert(model)(ids).logits, before)


def test_yarn_leaves_the_size_of_logits_to_ssmax():
    model = tiny_models.build("llama")
    change_rope(model, "yarn:4")
    assert model.model.rotary_emb.attention_scaling == 1.0
    lowest = model.model.rotary_emb.inv_freq[-1] * 4
    torch.testing.assert_close(lowest, model.model.rotary_emb.inv_freq.new_tensor(10000**-0.75))


@pytest.mark.parametrize("given", ["yarn", "yarn:1", "linear:4", "theta:x", "ntk:inf"])
def test_a_rope_change_is_a_kind_and_a_factor(given):
    with pytest.raises(ValueError, match="--rope must be theta:F, ntk:F, yarn:F with a factor F"):
        Change.parse(given)


def test_a_rope_that_is_not_plain_is_refused(source, tmp_path, capsys):
    with pytest.raises(ValueError, match="--rope goes with ssmax, got sigmoid"):
        convert(source, tmp_path / "out", "sigmoid", rope="yarn:4", **SMALL)
    with pytest.raises(ValueError, match="must have RoPE, gpt2 has none"):
        change_rope(tiny_models.build("gpt2"), "yarn:4")
    with pytest.raises(ValueError, match=r"one for each of .*sliding_attention"):
        change_rope(tiny_models.build("gemma3"), "yarn:4")
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=9,
            rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        )
    )  # fmt: skip
    with pytest.raises(ValueError, match="llama's already has the type 'linear'"):
        change_rope(model, "yarn:4")
    with pytest.raises(ValueError, match="at least 4 tokens and at most the model's 920 positions"):
        convert(source, tmp_path / "out", "ssmax", rope="ntk:2", lengths=[921], **SMALL)
    assert not (tmp_path / "out").exists()
    dry = ["convert", source, "--to", "ssmax", "--rope", "yarn:2", "--dry-run"]
    assert main(dry) == 0 and "its RoPE by yarn:2; nothing was written" in capsys.readouterr().out


# Interrupted


@pytest.mark.parametrize(
    "where", ["pictures.draw", "card.next_step", "report.table", "starts.Calibration.save"]
)
def test_interrupted_while_it_writes_it_leaves_nothing(source, tmp_path, monkeypatch, where):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    before = {path: path.stat().st_mtime_ns for path in Path(source).rglob("*")}
    monkeypatch.setattr(f"hf_sigmoid.conversions.{where}", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", "sigmoid", init="calibrated", **SMALL)
    assert not list(tmp_path.iterdir())
    assert before == {path: path.stat().st_mtime_ns for path in Path(source).rglob("*")}
