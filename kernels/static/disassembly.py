"""Instructions, loops and counts of a compiled kernel, from its assembly text.

NVIDIA's and AMD's instruction sets become one list, so that loops and counts have one definition.
"""

import functools
import re
from collections import Counter
from typing import NamedTuple


class Instruction(NamedTuple):
    text: str  # opcode and operands, without predicate
    target: int | None = None  # index of the instruction that it jumps to


KINDS = {
    "mma": r"[HQIO]G?MMA\b|UTC\w?MMA|v_s?mfma",
    "mufu": r"MUFU|v_(exp|log|rcp|rsq|sqrt|sin|cos)_",
    "shfl": r"SHFL|ds_bpermute|ds_swizzle|v_\w+_dpp",
    "fmnmx": r"FMNMX|v_(pk_)?(max|min)3?_f",
    "lds": r"LDSM?\b|ds_read|ds_load",
    "sts": r"STSM?\b|ds_write|ds_store",
    "bar": r"BAR\b|s_barrier",
    "local": r"LDL\b|STL\b|scratch_",
    "atom": r"ATOMG?\b|REDG?\b|UTMAREDG|\w+_atomic",
}
MUFU_NAMES = {"exp": "EX2", "log": "LG2", "rcp": "RCP", "rsq": "RSQ"}
SASS = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*?)\s*;")


def parse_sass(text: str) -> list[Instruction]:
    """The instructions that `cuobjdump -sass` prints."""
    lines = SASS.findall(text)
    index = {int(address, 16): i for i, (address, _) in enumerate(lines)}
    jumps = (re.match(r"(?:BRA|JMP)\b.*0x([0-9a-f]+)$", line) for _, line in lines)
    targets = (jump and index.get(int(jump[1], 16)) for jump in jumps)
    return [Instruction(line, target) for (_, line), target in zip(lines, targets, strict=True)]


def parse_amdgcn(text: str) -> list[Instruction]:
    """The instructions of LLVM's assembly text."""
    labels, lines = {}, []
    for line in text.splitlines():
        line = line.split(";")[0].strip()
        if label := re.match(r"(\.LBB\w+):", line):
            labels[label[1]] = len(lines)
        elif re.match(r"(v|s|ds|buffer|global|flat|scratch)_\w+", line):
            lines.append(line)
    jumps = (re.match(r"s_c?branch\w*\s+(\S+)", line) for line in lines)
    targets = (jump and labels.get(jump[1]) for jump in jumps)
    return [Instruction(line, target) for line, target in zip(lines, targets, strict=True)]


@functools.cache
def count_one(opcode: str) -> dict[str, int]:
    """The figures that one instruction adds to `count`."""
    counts = {kind: 1 for kind, pattern in KINDS.items() if re.match(pattern, opcode)}
    if size := re.match(r"[HQI]GMMA\.(\d+)x(\d+)x(\d+)", opcode):
        counts["flops"] = 2 * int(size[1]) * int(size[2]) * int(size[3]) // 4  # four warps share it
    elif size := re.match(r"HMMA\.(16)(8)(8|16)\b|v_mfma_f32_(\d+)x(\d+)x(\d+)", opcode):
        m, n, k = (int(x) for x in size.groups() if x)
        counts["flops"] = 2 * m * n * k
    elif name := re.match(r"MUFU\.(\w+)|v_(exp|log|rcp|rsq)_", opcode):
        counts["MUFU." + (name[1] or MUFU_NAMES[name[2]])] = 1
    return counts


def count(body: list[Instruction]) -> Counter:
    """Instructions in all and of each kind, matrix FLOPs of a warp, special functions by name."""
    counts = Counter(instructions=len(body))
    for text, _ in body:
        for kind, number in count_one(text.split()[0]).items():
            counts[kind] += number
    return counts


def find_loops(instructions: list[Instruction]) -> dict[tuple[int, int], Counter]:
    """Counts of every loop by its first and last instruction; jumps back to one place are one."""
    last = {}
    for i, (_, target) in enumerate(instructions):
        if target is not None and target < i:
            last[target] = i
    return {(a, b): count(instructions[a : b + 1]) for a, b in sorted(last.items())}


def hot_loop(loops: dict[tuple[int, int], Counter]) -> tuple[int, int] | None:
    """The innermost loop with the most matrix work, and of equals the shortest.

    Loops without matrix work (a spin on a barrier) do not count as inner. A kernel without matrix
    instructions, or whose matrix loop does nothing else, has its special functions' loop.
    """
    for kind in ("mma", "mufu"):
        busy = [span for span, counts in loops.items() if counts[kind]]
        outer = {(a, b) for a, b in busy for c, d in busy if (a, b) != (c, d) and a <= c and d <= b}
        hot = max(
            (span for span in busy if span not in outer),
            key=lambda span: (loops[span]["flops"] or loops[span][kind], span[0] - span[1]),
            default=None,
        )
        if hot and loops[hot]["mufu"]:
            return hot
    return None


def overlap(body: list[Instruction]) -> float | None:
    """Share of the special functions issued while a warp-group product is in flight.

    A group of products is closed by gsb0, and `DEPBAR.LE gsb0, n` waits until n groups are left.
    The loop is walked twice: the second pass starts with what the first has left in flight.
    """
    groups, is_open, busy = 0, False, []
    for text, _ in body * 2:
        if re.match(r"[HQI]GMMA", text):
            is_open = "gsb0" not in text
            groups += not is_open
        elif wait := re.match(r"WARPGROUP\.DEPBAR\S* gsb0, 0x(\w+)", text):
            groups = min(groups, int(wait[1], 16))
        elif text.startswith("MUFU"):
            busy.append(groups > 0 or is_open)
    busy = busy[len(busy) // 2 :]
    return sum(busy) / len(busy) if busy else None


def needed_flops(ttir: str) -> int:
    """Matrix FLOPs of one pass of the busiest loop, before the work is shared out to warps."""
    loops, most = [], 0
    sizes = re.compile(r"tt\.dot.*tensor<(\d+)x(\d+)x\w+> \* tensor<\d+x(\d+)x")
    for line in ttir.splitlines():
        text = line.lstrip()
        indent = len(line) - len(text)
        if re.search(r"\bscf\.(for|while)\b", line):
            loops.append([indent, 0])
        elif loops and text.startswith("}") and indent == loops[-1][0]:
            most = max(most, loops.pop()[1])
        elif loops and (dot := sizes.search(line)):
            loops[-1][1] += 2 * int(dot[1]) * int(dot[2]) * int(dot[3])
    return most
