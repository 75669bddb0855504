"""The keys of a run: what is read, what is refused, and what an error says."""

import shutil
import subprocess
import sys
import zipfile

import pytest
from training_runs import RECIPES, arguments

from hf_sigmoid import command_line
from hf_sigmoid.errors import BadInput
from hf_sigmoid.training import recipe_files, run_config, run_keys


@pytest.mark.parametrize("file", sorted(RECIPES.glob("s*/*.yaml")), ids=lambda f: f.parent.name)
def test_every_yaml_is_a_valid_run(file):
    kind = run_keys.Run if file.stem == "continue" else run_keys.Distil
    run = run_config.load(file, ["model=m", "output_dir=o"], kind)
    assert run.steps > 0 and getattr(run, "attn", file.parent.name) == file.parent.name


def test_a_dumped_run_loads_as_itself(tmp_path):
    run = run_config.load(None, ["model=m", "output_dir=7", "optim.lr=1e-4", "data.path=[a, b]"])
    (tmp_path / "run.yaml").write_text(run_config.dump(run))
    assert run_config.load(tmp_path / "run.yaml", []) == run
    assert run.optim.lr == 1e-4 and run.output_dir == "7" and run.data.path == ["a", "b"]


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        (["evaluate.needle=[256,", "512]"], "evaluate.needle", [256, 512]),
        (["evaluate.needle=256,512"], "evaluate.needle", [256, 512]),
        (["evaluate.needle=256"], "evaluate.needle", [256]),
        (["log.trackers=tensorboard"], "log.trackers", ["tensorboard"]),
        (["log.trackers=[tensorboard,", "wandb]"], "log.trackers", ["tensorboard", "wandb"]),
        (["data.path=[a.txt,", "b.txt]"], "data.path", ["a.txt", "b.txt"]),
        (["data.path=a,b.txt"], "data.path", "a,b.txt"),
    ],
)
def test_a_list_may_be_pasted_as_the_docs_have_it(given, key, value):
    run = run_config.load(None, ["model=m", "output_dir=o", *given, "seed=3"])
    assert run_config.flat(run)[key] == value and run.seed == 3


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.learning_rate=1", "unknown key 'optim.learning_rate'"),
        ("train.stpes=3", "'train.steps'"),
        ("train.steps=many", "expected int or null, got 'many'"),
        ("train.steps=1.5", "expected int or null, got 1.5"),
        ("train.steps=0", "at least 1, got 0"),
        ("optim.lr=fast", "expected float, got 'fast'"),
        ("optim.lr=.nan", "optim.lr: expected a finite number, got nan"),
        ("optim.lr=.inf", "optim.lr: expected a finite number, got inf"),
        ("optim.clip=1e999", "optim.clip: expected a finite number, got inf"),
        (f"optim.eps={10**400}", "optim.eps: expected float"),
        ("optim.beta1=1.5", "optim.beta1: expected a number below 1, got 1.5"),
        ("optim.beta2=1", "optim.beta2: expected a number below 1, got 1.0"),
        ("optim.beta2=-0.1", "at least 0, got -0.1"),
        ("train.gradient_checkpointing=2", "expected bool, got 2"),
        ("data.path=[1, 2]", "data.path: expected"),
        ("resume=maybe", "one of auto, none, got 'maybe'"),
        ("train.precision=fp16", "one of fp32, bf16, got 'fp16'"),
        ("optim.warmup_steps=101", "at most train.steps = 100, got 101"),
        ("model=", "model is missing"),
        ("steps", "expected KEY=VALUE"),
        ("seed=4294967296", "seed: expected at most 4294967295, got 4294967296"),
        ("lora.alpha=0", "lora.alpha: expected a positive number or null, got 0"),
        ("lora.dropout=0.1", "lora.dropout 0.1: expected lora.rank beside it, got none"),
        ("optim.qk_rule=constant", "optim.qk_rule constant: expected optim.qk_tau beside it"),
        ("evaluate.windows=3", "evaluate.windows 3: expected evaluate.path beside it"),
        ("log.project=mine", "log.project mine: expected log.trackers beside it"),
        (
            "log.trackers=[mlflow]",
            "log.trackers[0]: expected one of tensorboard, wandb, trackio, got 'mlflow'",
        ),
        (
            "log.trackers=wandb,b",
            "log.trackers[1]: expected one of tensorboard, wandb, trackio, got 'b'",
        ),
        ("log.trackers=''", "log.trackers[0]: expected one of tensorboard, wandb, trackio, got ''"),
        ("evaluate.needle=0", "evaluate.needle[0]: expected at least 1, got 0"),
        ("evaluate.needle=512,0", "evaluate.needle[1]: expected at least 1, got 0"),
        ("train.parameters=lora", "lora.rank: expected a number with train.parameters=lora"),
        ("data.mixture=[a]", "data.mixture[0]: expected keys and values, got 'a'"),
    ],
)
def test_a_wrong_key_or_value_is_named(override, words):
    with pytest.raises(BadInput) as error:
        run_config.load(None, ["model=m", "output_dir=o", override])
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.steps=9", "train.epochs=1"], "expected one of them, got 9 and 1.0"),
        (["train.epochs=1", "data.dataset=d", "data.streaming=true"], "has no known length"),
        (["train.epochs=1", "data.mixture=[{path: a, weight: 1}]"], "end at different steps"),
        (
            ["lora.rank=4", "train.parameters=all"],
            "expected lora (or null) with lora.rank, got all",
        ),
        (["lora.rank=4", "optim.qk_tau=1"], "optim.qk_tau: expected train.parameters all or att"),
        (["data.path=a", "data.dataset=b"], "expected one source, got path and dataset"),
        (["optim.schedule=constant", "optim.min_lr_ratio=0.5"], "a schedule that falls beside it"),
        (
            ["train.parameters=log_length", "optim.optimizer=muon"],
            "optim.optimizer muon: expected its default with train.parameters=log_length",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused(overrides, words):
    with pytest.raises(BadInput) as error:
        run_config.load(None, ["model=m", "output_dir=o", *overrides])
    assert words in str(error.value)


def test_a_group_without_keys_is_no_key(tmp_path):
    (tmp_path / "run.yaml").write_text("train:\noptim:\n  lr: 1\n")
    assert run_config.load(tmp_path / "run.yaml", ["model=m", "output_dir=o"]).optim.lr == 1


@pytest.mark.parametrize("command", ["train", "distil"])
def test_the_command_prints_every_key_and_loads_no_torch(command):
    code = "import sys; sys.modules['torch'] = None; from hf_sigmoid import command_line as c; "
    run = subprocess.run(
        [sys.executable, "-c", f"{code}sys.exit(c.main([{command!r}, '--keys']))"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    kind = {"train": run_keys.Run, "distil": run_keys.Distil}[command]
    assert [line.partition("=")[0] for line in run.stdout.splitlines()] == [
        name for name, _ in run_config.keys(kind)
    ]
    assert "\ntrain.block_size=512  # int, at least 2; tokens a row" in run.stdout
    assert "\ntrain.precision=fp32  # one of fp32, bf16; or bf16" in run.stdout


def test_a_recipe_is_copied_and_begins_a_run(tiny, corpus_file, tmp_path, capsys):
    assert command_line.main(["recipes"]) == 0
    assert "ssmax/continue    " in capsys.readouterr().out
    config, out = tmp_path / "my.yaml", tmp_path / "out"
    copy = ["recipes", "--copy", "ssmax/continue", str(config)]
    assert command_line.main(copy) == 0
    for words, argv in (
        ("which exists", copy),
        ("the nearest is 'ssmax/continue'", ["recipes", "--copy", "ssmax/continu"]),
        ("model is missing", ["train", str(config)]),
        ("no such configuration file", ["train", "absent.yaml", "model=m"]),
    ):
        with pytest.raises(SystemExit) as ended:
            command_line.main(argv)
        assert ended.value.code == 2 and words in capsys.readouterr().err
    argv = arguments(tiny, corpus_file, out, **{"train.steps": 1})
    assert command_line.main(["train", str(config), *argv]) == 0
    assert (out / "final" / "config.json").exists()
    assert run_config.load(out / "config.yaml", []).attn == "ssmax"


def test_a_wheel_holds_the_recipes(tmp_path):
    root, source = RECIPES.parent, tmp_path / "source"
    for name in ("hf_sigmoid", "conversions", "kernels", "recipes"):
        shutil.copytree(root / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source)
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    run = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (wheel,) = tmp_path.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if "hf_sigmoid/recipes" in name}
    assert held == {f"hf_sigmoid/recipes/{name}.yaml" for name in recipe_files.files()}


@pytest.mark.parametrize("command", ["train", "distil"])
def test_a_package_that_the_work_needs_is_named(command):
    code = (
        "import sys; sys.modules['psutil'] = None\n"
        "from hf_sigmoid.command_line import main\n"
        f"sys.exit(main(['{command}', 'model=m', 'output_dir=o']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    said = f"hf-sigmoid {command} needs the package psutil: pip install 'hf-sigmoid[recipes]'"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, said)


def test_ctrl_c_while_a_command_loads_is_one_line():
    code = (
        "import os, signal, sys\n"
        "from hf_sigmoid.command_line import main\n"
        "class Finder:\n"
        "    def find_spec(self, name, *given):\n"
        "        if name == 'hf_sigmoid.training.run_keys': os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.exit(main(['train', 'model=m', 'output_dir=o']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    said = "hf-sigmoid train: stopped, nothing was written"
    assert (done.returncode, done.stderr.strip()) == (130, said)
