"""Run any Python program with the two functions registered, without an import in it.

    python -m hf_sigmoid -m lm_eval --model hf \\
        --model_args pretrained=DIR,attn_implementation=sigmoid --tasks …
    python -m hf_sigmoid train.py --config run.yaml
    accelerate launch -m hf_sigmoid -m lm_eval …

This process imports hf_sigmoid, then becomes the script or module, as `python` itself would run it.
Python processes that it starts (accelerate's launcher, TRL's command line, workers) import it too.
"""

import os
import runpy
import sys
from pathlib import Path

import hf_sigmoid  # noqa: F401

USAGE = "usage: python -m hf_sigmoid (SCRIPT | -m MODULE) [ARGUMENTS …]"


def main() -> None:
    given = sys.argv[1:]
    if given[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return
    if not given or given == ["-m"] or (given[0].startswith("-") and given[0] != "-m"):
        sys.exit(f"{USAGE}\ngot {' '.join(given) or 'nothing'}")
    children = str(Path(__file__).resolve().parent / "child_processes")
    paths = [children, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    if given[0] == "-m":
        sys.argv = given[1:]  # sys.path[0] is the working directory already
        runpy.run_module(given[1], run_name="__main__", alter_sys=True)
        return
    script = Path(given[0])
    if not script.is_file():
        sys.exit(f"{USAGE}\nno such script: {script}")
    sys.argv = given
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
