"""`make heal`: its texts, its stages, and that the committed table is what its figures say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "recipes"))

import heal  # noqa: E402
import heal_smollm2  # noqa: E402
from stages import Steps  # noqa: E402

from hf_sigmoid import text  # noqa: E402
from hf_sigmoid.errors import BadInput  # noqa: E402

RESULTS = ROOT / "conversions" / "results"


def test_nothing_that_is_held_out_is_trained_or_calibrated_on(tmp_path, monkeypatch):
    leads = [f"Article {number}\n\nIts lead.\n\n" for number in range(90)]
    monkeypatch.setattr(heal_smollm2, "_leads", lambda: leads)
    names = heal_smollm2.make_texts(tmp_path / "a")
    held_out = (tmp_path / "a" / "wikipedia.txt").read_text()
    documents = [json.loads(x)["text"] for x in Path(names["wikipedia"]).read_text().splitlines()]
    for number, lead in enumerate(leads):
        assert (lead in held_out) == (number % 20 == 0)
        assert sum(lead in document for document in documents) == (number % 20 != 0)
    chapters = [json.loads(x)["text"] for x in Path(names["austen"]).read_text().splitlines()]
    assert "".join(chapters) == text.train()
    assert (tmp_path / "a" / "austen.txt").read_text() == text.held_out()
    calibration = Path(names["calibration"]).read_text()
    assert text.train() in calibration and not any(lead in calibration for lead in leads[::20])
    again = heal_smollm2.make_texts(tmp_path / "b")
    for one, two in zip(names.values(), again.values(), strict=True):
        assert Path(one).read_text() == Path(two).read_text()


def test_a_stage_that_is_there_is_kept_and_an_interrupted_one_adds_its_time(tmp_path):
    write = (
        "import pathlib, time; p = pathlib.Path('OUT'); p.mkdir(); time.sleep(0.3); "
        "(p / 'config.json').touch()"
    )
    (tmp_path / "perplexities.json").write_text("{}")  # of what is made anew
    stages = Steps(tmp_path, measured=("perplexities",))
    stages.seconds["one"] = 100.0  # of an earlier attempt
    stages.run("one", "python", "-c", write)
    assert (tmp_path / "one" / "config.json").exists() and 100.2 < stages.seconds["one"] < 160
    assert not (tmp_path / "perplexities.json").exists()
    again = Steps(tmp_path)
    again.run("one", "python", "-c", write)  # not run: the folder is there
    assert again.seconds == stages.seconds
    with pytest.raises(SystemExit, match="was made by"):
        again.run("one", "python", "-c", "pass")
    with pytest.raises(subprocess.CalledProcessError):
        again.run("two", "python", "-c", "raise ValueError")


def test_the_committed_table_is_what_the_figures_say(tmp_path):
    results = json.loads((RESULTS / "smollm2.json").read_text())
    table = heal_smollm2.markdown(results)
    assert (RESULTS / "smollm2.md").read_text() == table
    assert table.strip() in (ROOT / "conversions" / "README.md").read_text()
    heal_smollm2.picture(results, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_a_stage_removes_no_file_but_those_measured_after_it(tmp_path):
    for name in ("mine.json", "needles.json"):
        (tmp_path / name).write_text("{}")
    Steps(tmp_path, measured=("needles",)).run("one", "python", "-c", "pass")
    assert {file.name for file in tmp_path.iterdir()} == {"mine.json", "stages.json"}


def test_a_model_is_healed_by_one_command_that_goes_on(tmp_path, capfd):
    """Convert, distil twice, evaluate; the second time nothing is left to do."""
    source = tmp_path / "source"
    model = tiny_models.byte_llama(source)
    model.config.max_position_embeddings = 1024
    model.save_pretrained(source)
    (tmp_path / "text.txt").write_text(text.train()[:60_000])
    (tmp_path / "held.txt").write_text(text.held_out()[:9_000])
    given = [
        str(source), str(tmp_path / "out"), "--text", str(tmp_path / "text.txt"),
        "--held-out", str(tmp_path / "held.txt"), "--window", "64", "--windows", "4",
        "--lengths", "512", "--set", "train.block_size=512", "--set", "end_to_end.steps=2",
        "--set", "numbers.layerwise.steps=2", "--set", "evaluate.windows=1",
    ]  # fmt: skip
    heal.main(given)
    out = tmp_path / "out"
    assert {"converted", "numbers", "healed", "evaluated", "stages.json"} == {
        each.name for each in out.iterdir()
    }
    card = (out / "healed/final/README.md").read_text()
    assert "sigmoid" in card and "distil" in card.lower()
    report = json.loads((out / "healed/final/report.json").read_text())
    assert [each["lookups.share"] for each in report["distillations"]] == [0.5, 0.5]
    assert [each["step"] for each in report["distillations"]] == [4, 2]
    capfd.readouterr()
    heal.main(given)
    assert "[" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("key", "said"),
    [("train.block=3", "train.block"), ("healed.model=x", "does not give itself"),
     ("numbers.lookups.share=2", "lookups.share")],
)  # fmt: skip
def test_a_key_that_heal_cannot_pass_on_is_refused_before_any_step(tmp_path, key, said):
    with pytest.raises(BadInput, match=said):
        heal.main(["smollm2", str(tmp_path / "out"), "--set", key])
    assert not (tmp_path / "out").exists()
