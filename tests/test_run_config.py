"""The keys of a run: what is read, what is refused, and what an error says."""

import pytest
from training_runs import RECIPES

import run_config  # isort: skip
import run_keys  # isort: skip
from errors import BadInput  # isort: skip


@pytest.mark.parametrize("file", sorted(RECIPES.glob("*/*.yaml")), ids=lambda f: f.parent.name)
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
    ],
)
def test_a_wrong_key_or_value_is_named(override, words):
    with pytest.raises(BadInput) as error:
        run_config.load(None, ["model=m", "output_dir=o", override])
    assert words in str(error.value)
