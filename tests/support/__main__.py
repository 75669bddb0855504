"""Build every model type of transformers, tiny and random, and check both functions on it.

python -m support                      # every type: writes docs/support.md and .json
python -m support --resume             # goes on where an interrupted run stopped
python -m support --only llama,bert    # these: printed, and put in their place in both files
"""

import argparse
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

DOCS = Path(__file__).parents[2] / "docs"
CHUNK = 100  # model types before the worker processes start afresh, for their memory
PARTIAL = DOCS / ".support.jsonl"  # rows of a run that has not ended


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m support", description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="model types, with commas between them")
    parser.add_argument("--resume", action="store_true", help="keep an interrupted run's rows")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    options = parser.parse_args()

    from tqdm import tqdm

    from support import catalogue, report, worker

    known = catalogue.model_types()
    only = [name for name in options.only.split(",") if name]
    if unknown := [name for name in only if name not in known]:
        parser.error(f"no model type of this transformers: {', '.join(unknown)}")
    rows: list[dict] = []
    DOCS.mkdir(exist_ok=True)
    if not only:
        if options.resume and PARTIAL.exists():
            rows = [json.loads(line) for line in PARTIAL.read_text().splitlines()]
        else:
            PARTIAL.write_text("")
    known_rows = {row["model_type"] for row in rows}
    wanted = [name for name in only or known if name not in known_rows]

    spawn = multiprocessing.get_context("spawn")
    bar = tqdm(total=len(wanted), disable=len(wanted) == 1)
    for start in range(0, len(wanted), CHUNK):
        with ProcessPoolExecutor(options.jobs, spawn) as pool:
            started = [pool.submit(worker.examine, name) for name in wanted[start : start + CHUNK]]
            for done in as_completed(started):
                pair = done.result()
                rows += pair
                bar.update()
                for row in pair:
                    if only or row["status"] == "wrong":
                        tqdm.write(report.line(row))
                if not only:
                    with PARTIAL.open("a") as file:
                        file.writelines(json.dumps(row) + "\n" for row in pair)
    bar.close()
    print(report.totals(rows))
    table = DOCS / "support.json"
    if only and table.exists():  # these rows in the place of their older ones
        rows += [row for row in json.loads(table.read_text()) if row["model_type"] not in only]
    rows.sort(key=lambda row: (row["model_type"], row["backend"]))
    report.write(rows, DOCS)
    if not only:
        PARTIAL.unlink()
    sys.exit(any(row["status"] == "wrong" for row in rows))


if __name__ == "__main__":
    main()
