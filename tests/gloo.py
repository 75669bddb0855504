"""Workers in two gloo processes, which print a JSON line a case."""

import json
import os
import subprocess
import sys
from pathlib import Path


def rows_of(worker: Path, *arguments: str | Path) -> dict[str, dict]:
    """What rank 0 printed, by its key `way`."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
         "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", worker, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {row["way"]: row for row in rows}
