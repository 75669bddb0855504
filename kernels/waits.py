"""What the compiled loops wait for: their copies, products, waits, barriers and fences, in order.

    python kernels/waits.py                             # every loop with products, of sm_90
    python kernels/waits.py --check                     # exits with 1 where a rule is broken

kernels/README.md says of each wait why it is enough. Two rules are checked. No instruction names a
register of a product between it and the wait for it. And, which not every release of Triton keeps:
a product reads shared memory through the async proxy, so what was written
there by `cp.async` or `st.shared`, which are of the generic proxy, needs a `fence.proxy.async` on
the way from the write to the product. Copies by descriptors (`cp.async.bulk`) need none, and
numbers by row, copied by 4 or 8 bytes, are no operands of a product.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
for folder in (HERE.parent, HERE.parent / "tests", HERE / "static", HERE):
    sys.path.insert(0, str(folder))

# The delayed loop by pointers (with weights in 32 bits; packed), and by descriptors.
CASES = ["sigmoid bf16 64", "ssmax bf16 64", "sigmoid bf16 128", "ssmax bf16 128"]
CASES += ["sigmoid bf16 128 expanded"]
EVENTS = {
    "copy": r"cp\.async\.c[ag]\.[^;]*\b(0x10|16)\b",
    "copy of numbers by row": r"cp\.async\.c[ag]\.[^;]*\b(0x)?[48]\b",
    "bulk copy": r"cp\.async\.bulk\.",
    "commit copies": r"cp\.async\.commit_group",
    "wait for copies": r"cp\.async\.wait_(group|all)",
    "expect": r"mbarrier\.arrive\.expect_tx",
    "wait on mbarrier": r"mbarrier\.try_wait",
    "store": r"st\.shared|stmatrix",
    "load": r"ld\.shared|ldmatrix",
    "fence proxy": r"fence\.proxy\.async",
    "barrier": r"bar\.sync|barrier\.sync",
    "fence registers": r"wgmma\.fence",
    "product": r"wgmma\.mma_async",
    "commit products": r"wgmma\.commit_group",
    "wait for products": r"wgmma\.wait_group",
    "exponentials": r"ex2\.approx|tanh\.approx",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=CASES, help="calls of static/cases.py")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    missing = named = 0
    for case in options.cases:
        for name, ptx in compiled(case).items():
            for line, lines in loops(ptx):
                events = events_of(lines)
                bad, early = unfenced(events), touched(lines)
                missing, named = missing + bad, named + len(early)
                print(f"\n{case} {name}, line {line}{': A FENCE IS MISSING' * bad}")
                print("    " + ", ".join(runs(events)))
                print(*(f"    IN FLIGHT: {text}" for text in early), sep="\n", end="")
    print(f"\n{missing} loops lack a fence, {named} instructions name a register in flight")
    return int(options.check and missing + named > 0)


def compiled(case: str) -> dict[str, str]:
    """PTX by kernel of what a call launches on sm_90."""
    import stub_cuda
    import triton

    stub_cuda.compile_only(90)
    found = {}

    def listen(*, src, metadata_group, **more):
        (path,) = (path for name, path in metadata_group.items() if name.endswith(".ptx"))
        found[src.name] = Path(path).read_text(encoding="utf-8")

    triton.knobs.compilation.listener = listen
    import cases

    cases.call(case)
    return found


def loops(ptx: str) -> Iterator[tuple[int, list[str]]]:
    """The innermost loops that have asynchronous products: number of the first line, and lines."""
    lines = [text.split("//")[0] for text in ptx.splitlines()]
    labels = {m[1]: i for i, text in enumerate(lines) if (m := re.match(r"(\$\w+):", text))}
    jumps = [(labels.get(m[1], i), i) for i, text in enumerate(lines)
             if (m := re.search(r"\bbra(?:\.uni)?\s+(\$\w+)", text))]  # fmt: skip
    spans = [(start, stop) for start, stop in jumps if start < stop]
    for start, stop in spans:
        inner = any(start <= a and b <= stop for a, b in spans if (a, b) != (start, stop))
        if not inner and "product" in events_of(lines[start:stop]):
            yield start + 1, lines[start:stop]


def events_of(lines: list[str]) -> list[str]:
    return [name for text in lines for name, pattern in EVENTS.items() if re.search(pattern, text)]


def touched(lines: list[str]) -> list[str]:
    """Instructions that name a register of a product in flight: PTX leaves open what they do."""
    flying, found = set(), []
    for text in lines * 2:  # the loop comes round
        registers = set(re.findall(r"%\w+", text))
        if re.search(EVENTS["product"], text):
            flying |= {r for group in re.findall(r"\{([^{}]*)\}", text)
                       for r in re.findall(r"%\w+", group)}  # fmt: skip
        elif re.search(EVENTS["wait for products"] + r"\S*\s+0;", text):
            flying = set()
        elif registers & flying and not text.strip().startswith("."):
            found.append(text.strip())
    return found


def unfenced(events: list[str]) -> bool:
    """Does a product read what came through the generic proxy since the last fence?"""
    writes = {"store"}
    if "copy" in events:
        writes.add("wait for copies")
    dirty = False
    for event in events * 2:  # the loop comes round
        if event in writes:
            dirty = True
        elif event == "fence proxy":
            dirty = False
        elif event == "product" and dirty:
            return True
    return False


def runs(events: list[str]) -> Iterator[str]:
    """Events with neighbours that are equal counted."""
    before, count = None, 0
    for event in [*events, None]:
        if event != before and before is not None:
            yield f"{before} ×{count}" if count > 1 else before
            count = 0
        before, count = event, count + 1


if __name__ == "__main__":
    sys.exit(main())
