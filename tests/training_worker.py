"""Run by test_training_parallel.py in some gloo processes: several layouts, one after the other.

    training_worker.py JOBS      [[environment, argv, resume], …] as JSON

`resume` runs the same once more from its last checkpoint, after putting the first `final/` and log
aside as `finished/` and `finished.jsonl`.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

from hf_sigmoid.training import checkpointing, prepare, run_config


def main() -> None:
    torch.set_num_threads(1)
    for environment, argv, resume in json.loads(sys.argv[1]):
        os.environ.update(environment)
        run = run_config.load(None, argv)
        # Not `main`, which ends the group of the processes.
        assert prepare.train(run) is not None
        if resume:
            out = Path(run.output_dir)
            if os.environ["RANK"] == "0":
                (out / "final").rename(out / "finished")
                shutil.copy(out / "log.jsonl", out / "finished.jsonl")
            torch.distributed.barrier()
            taken = checkpointing.latest(out / "checkpoints")
            assert taken.step == resume, taken
            assert prepare.train(run) is not None
        for name in environment:
            del os.environ[name]
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
