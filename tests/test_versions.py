"""What depends on the releases that are installed, and on what is not."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# What a machine that is lent for a run on its GPU may lack.
ABSENT = ("accelerate", "datasets", "gguf", "lm_eval", "matplotlib", "pandas", "peft", "scipy")


def test_gpu_tests_are_collected_without_what_they_do_not_use():
    code = f"""
import sys
sys.modules.update(dict.fromkeys({ABSENT}))
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider"]))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert "tests/test_gpu.py::" in run.stdout


def test_a_release_that_is_too_old_gets_one_line():
    """Also one in which the classes that we import are not there."""
    for code in (
        "import hf_sigmoid, transformers.configuration_utils",
        "import hf_sigmoid, transformers.modeling_utils",
        "import transformers.configuration_utils as c; del c.PreTrainedConfig; import hf_sigmoid",
    ):
        code = (
            "import transformers\ntransformers.__version__ = '5.3.9'\n"
            f"try: {code}\nexcept ImportError as error: print(error)"
        )
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
        assert run.stdout == (
            "hf_sigmoid needs transformers 5.4 or newer, this is 5.3.9: "
            "pip install -U transformers\n"
        ), run.stderr
