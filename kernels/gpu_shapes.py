"""The benchmark's main rows, in the order in which `make gpu` times them."""

MINE = ["sigmoid", "ssmax", "softmax", "sdpa", "sdpa-cudnn"]


def shapes() -> dict[str, dict]:
    """{name: a shape of the benchmark, with the contenders and the rounds of its rows}."""
    found = {}
    for N in (4096, 16384):
        for D in (128, 64):
            for step in ("forward", "backward"):
                shape = {"B": 1, "H": 16, "G": 16, "M": N, "N": N, "D": D, "is_causal": True}
                found[f"{step} {N} D {D}"] = {**shape, "pass": step, "contenders": MINE}
    for D in (128, 64):
        shape = {"B": 1, "H": 16, "G": 4, "M": 1, "N": 32768, "D": D, "is_causal": False}
        contenders = [*MINE, "copy", "gather"]
        found[f"decode 32768 D {D}"] = {**shape, "pass": "forward", "contenders": contenders}
    for D in (128, 64):
        shape = {"B": 1, "H": 16, "G": 16, "M": 4096, "N": 4096, "D": D, "is_causal": False}
        found[f"forward 4096 D {D} full"] = {**shape, "pass": "forward", "contenders": MINE}
    # flex is compiled, which takes its time: last.
    for D in (128, 64):
        shape = {"B": 1, "H": 16, "G": 16, "M": 8192, "N": 8192, "D": D, "is_causal": True}
        contenders = [*MINE, "flex"]
        found[f"forward 8192 D {D}, flex"] = {**shape, "pass": "forward", "contenders": contenders}
    return {name: {"dtype": "bf16", **shape, "rounds": 20} for name, shape in found.items()}
