"""The static report of compiled kernels: its parsers, its limits, and a short real run."""

import importlib
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

KERNELS = Path(__file__).parent.parent / "kernels" / "static"
sys.path.append(str(KERNELS))  # the report is a script beside its modules, and no package
disassembly = importlib.import_module("disassembly")
compiled = importlib.import_module("compiled")
limits = importlib.import_module("limits")
static_report = importlib.import_module("report")

# As cuobjdump prints it: a masked loop, then the same work without a mask and with a spin inside.
SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;                   /* 0x00000a00ff017b82 */
                                                                            /* 0x000fe20000000800 */
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR20], R24, gsb0 ;
        /*0020*/                   FSEL R4, R4, RZ, P0 ;
        /*0030*/                   MUFU.EX2 R5, R4 ;
        /*0040*/                   SHFL.BFLY PT, R6, R5, 0x1, 0x1f ;
        /*0050*/               @P1 BRA 0x10 ;
        /*0060*/                   STL [R1+0x4], R8 ;
        /*0070*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR20], R24, gsb0 ;
        /*0080*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR4], R9 ;
        /*0090*/              @!P2 BRA 0x80 ;
        /*00a0*/                   MUFU.RCP R5, R4 ;
        /*00b0*/              @!P1 BRA 0x70 ;
        /*00c0*/                   REDUX.SUM UR6, R7 ;
        /*00d0*/                   RED.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR8][R2.64], R5 ;
        /*00e0*/                   EXIT ;
        /*00f0*/                   BRA 0xf0 ;
"""
AMDGCN = """
_forward:                               ; @_forward
	s_load_dwordx2 s[0:1], s[4:5], 0x0
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
	v_mfma_f32_32x32x8_bf16 v[0:15], v[16:17], v[18:19], v[0:15]
	v_exp_f32_e32 v1, v1
	v_rsq_f32_e32 v2, v2                ; ds_read in a comment
	ds_read_u16 v3, v4
	s_barrier
	s_cbranch_scc1 .LBB0_1
	scratch_store_dword off, v5, s32
	s_endpgm
    .vgpr_count:     161
"""
TTIR = """
    %0 = tt.dot %a, %b, %c : tensor<512x512xbf16> * tensor<512x512xbf16> -> tensor<512x512xf32>
    %1 = scf.for %h = %c0 to %c8 step %c1 iter_args(%x = %y) -> (tensor<64x32xf32>)  : i32 {
      %2 = scf.for %i = %c0 to %n step %c1 iter_args(%x = %y) -> (tensor<64x32xf32>)  : i32 {
        %s = tt.dot %q, %k, %c : tensor<64x16xbf16> * tensor<16x32xbf16> -> tensor<64x32xf32>
        %o = tt.dot %p, %v, %x : tensor<64x32xbf16> * tensor<32x8xbf16> -> tensor<64x8xf32>
      } loc(#l)
    } loc(#l)
"""


def positive(counts: Counter) -> dict:
    return {kind: n for kind, n in counts.items() if n}


def test_sass_is_counted_and_the_unmasked_loop_is_hot():
    instructions = disassembly.parse_sass(SASS)
    loops = disassembly.find_loops(instructions)
    assert list(loops) == [(1, 5), (7, 11), (8, 9)]
    assert positive(loops[1, 5]) == {
        "instructions": 5, "mma": 1, "flops": 2 * 64 * 64 * 16 // 4, "mufu": 1, "MUFU.EX2": 1,
        "shfl": 1,
    }  # fmt: skip
    total = disassembly.count(instructions)
    assert (total["local"], total["atom"], total["instructions"]) == (1, 1, 16)
    # Equal in length, so make the masked one longer; the spin on a barrier hides neither.
    loops[1, 6] = loops.pop((1, 5))
    assert disassembly.hot_loop(loops) == (7, 11)


def test_amdgcn_is_counted_without_its_comments():
    instructions = disassembly.parse_amdgcn(AMDGCN)
    assert len(instructions) == 9
    loops = disassembly.find_loops(instructions)
    assert list(loops) == [(1, 6)] and disassembly.hot_loop(loops) == (1, 6)
    assert positive(loops[1, 6]) == {
        "instructions": 6, "mma": 1, "flops": 2 * 32 * 32 * 8, "mufu": 2, "MUFU.EX2": 1,
        "MUFU.RSQ": 1, "lds": 1, "bar": 1,
    }  # fmt: skip
    assert disassembly.count(instructions)["local"] == 1


def test_hot_loop_is_the_one_with_special_functions_where_matrix_work_stands_apart():
    loops = {
        (0, 9): Counter(instructions=10, mma=4),
        (20, 49): Counter(instructions=30, mufu=8),
        (60, 69): Counter(instructions=10, mufu=2),
    }
    assert disassembly.hot_loop(loops) == (20, 49)
    assert disassembly.hot_loop({(0, 9): Counter(instructions=10)}) is None


PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR20], R24"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, "


@pytest.mark.parametrize(
    ("body", "share"),
    [
        pytest.param([PRODUCT + ", gsb0", WAIT + "0x0", "MUFU.EX2", "MUFU.EX2"], 0.0, id="in_turn"),
        pytest.param([PRODUCT + ", gsb0", "MUFU.EX2", WAIT + "0x0", "MUFU.EX2"], 0.5, id="half"),
        pytest.param(["MUFU.EX2", WAIT + "0x0", PRODUCT + ", gsb0"], 1.0, id="over_the_back_edge"),
        pytest.param(
            [PRODUCT + ", gsb0", PRODUCT + ", gsb0", WAIT + "0x1", "MUFU.EX2", WAIT + "0x0"],
            1.0,
            id="one_of_two_groups_left",
        ),
        pytest.param([PRODUCT, "MUFU.EX2", PRODUCT + ", gsb0", WAIT + "0x0"], 1.0, id="open_group"),
        pytest.param([PRODUCT + ", gsb0", WAIT + "0x0"], None, id="no_special_function"),
    ],
)
def test_overlap_is_what_is_issued_under_an_asynchronous_product(body, share):
    assert disassembly.overlap([disassembly.Instruction(text) for text in body]) == share


def test_needed_flops_are_those_of_the_busiest_loop():
    assert disassembly.needed_flops(TTIR) == 2 * 64 * 16 * 32 + 2 * 64 * 32 * 8


def row(target="sm_90", kernel="forward", case="sigmoid bf16 64", form="pair", **changes):
    """A row at its limits; 128 lanes over 64×64 scores, so 32 instructions are one per score."""
    mufu = 1.5 if form == "pair" else 2.0
    loop = {"instructions": 7.8 * 32, "mufu": mufu * 32, **changes.pop("loop", {})}
    good = compiled.Row(
        target, kernel, case, form=form, tile=(64, 64), warps=4, registers=200, overlap=0.5,
        shared_bytes=limits.SHARED_KB[target] * 1024, lanes_per_score=1 / 32,
    )  # fmt: skip
    return replace(good, loop=Counter(loop), **changes)


@pytest.mark.parametrize(
    ("broken", "changes"),
    [
        (set(), {}),
        ({"shared kB"}, {"shared_bytes": 227 * 1024 + 1}),
        ({"shared kB"}, {"case": "ssmax fp32 64 terms", "shared_bytes": 1 << 20, "spill_bytes": 8}),
        ({"spilled bytes"}, {"spill_bytes": 4}),
        ({"spilled bytes"}, {"spill_bytes": 4, "case": "ssmax fp16 128 decode", "overlap": 0.0}),
        ({"local"}, {"total": Counter(local=1)}),
        ({"serialized"}, {"serialized": 1}),
        ({"shfl"}, {"loop": {"shfl": 1}}),
        ({"fmnmx"}, {"loop": {"fmnmx": 1}}),
        ({"mufu/score"}, {"loop": {"mufu": 49}}),
        ({"mufu/score", "instructions/score"}, {"form": "tanh"}),
        ({"mufu/score"}, {"form": "halley"}),
        ({"instructions/score"}, {"loop": {"instructions": 250}}),
        (set(), {"loop": {"instructions": 350, "mma": 64, "lds": 40}}),
        ({"instructions/score"}, {"case": "sigmoid bf16 128", "loop": {"instructions": 250}}),
        (set(), {"case": "sigmoid fp16 128", "loop": {"instructions": 8.2 * 32}}),
        ({"instructions/score"}, {"case": "sigmoid fp16 128", "loop": {"instructions": 8.3 * 32}}),
        (set(), {"case": "sigmoid bf16 128 expanded", "loop": {"instructions": 350}}),
        ({"overlap"}, {"overlap": 0.49}),
        ({"overlap"}, {"overlap": None, "kernel": "backward_dq", "loop": {"shfl": 1}}),
        ({"atomics"}, {"kernel": "backward_dkdv", "total": Counter(atom=1)}),
        (set(), {"case": "ssmax bf16 64", "loop": {"shfl": 8, "fmnmx": 36, "instructions": 900}}),
        (set(), {"target": "gfx942", "form": "rsqrt", "overlap": None}),
        ({"mufu/score"}, {"target": "gfx942", "form": "rsqrt", "loop": {"mufu": 63}}),
        ({"mufu/score"}, {"target": "gfx942", "case": "ssmax bf16 64", "loop": {"mufu": 31}}),
        ({"known form"}, {"case": "ssmax bf16 64", "form": "quad"}),
        (set(), {"form": "pair_variant", "loop": {"mufu": 48}}),
        ({"error"}, {"error": "does not compile"}),
    ],
)
def test_each_limit_can_be_broken_alone(broken, changes):
    found = limits.broken(row(**changes))
    assert found.keys() == broken
    for figure, sentence in found.items():
        assert figure == "error" or f": {figure} is " in sentence
        assert sentence.startswith(str(row(**changes)))
    assert ("BROKEN" in static_report.line(row(**changes))) == bool(broken)


@pytest.mark.parametrize(
    ("changes", "figure"),
    [
        ({}, None),
        ({"registers": 208}, None),
        ({"registers": 209}, "registers"),  # handed out eight at a time: 216
        ({"spill_bytes": 1}, "spill_bytes"),
        ({"loop": {"instructions": 7.8 * 32 * 1.06}}, "instructions"),
        ({"loop": {"mufu": 51}}, "mufu"),
        ({"registers": 100, "loop": {"mufu": 10, "instructions": 100}}, None),
    ],
)
def test_ratchet_allows_five_per_cent(changes, figure):
    baseline = {str(row()): limits.ratchet(row())}
    grown = limits.grown(row(**changes), baseline)
    assert [sentence.split(": ")[1].split()[0] for sentence in grown] == [figure] * bool(figure)
    assert limits.grown(row(**changes), {}) == []


def test_registers_that_cost_nothing_are_no_growth():
    """18 and 20 of a small kernel are both 24 on the chip."""
    baseline = {str(row()): limits.ratchet(row(registers=18))}
    assert limits.grown(row(registers=20), baseline) == []
    assert limits.grown(row(registers=25), baseline)


def test_a_kernel_whose_loop_is_not_found_does_not_pass():
    lost = replace(row("gfx942"), loop=Counter())
    assert {"hot loop", "mufu/score"} <= limits.broken(lost).keys()


def test_a_baseline_is_of_one_triton_version(monkeypatch, tmp_path):
    monkeypatch.setattr(limits, "BASELINE", tmp_path / "baseline.json")
    assert limits.read_baselines() == ({}, {})
    limits.BASELINE.write_text('{"0.1": {"name": {"mufu": 1.0}}}')
    assert limits.read_baselines()[1] == {}
    monkeypatch.setattr(limits.triton, "__version__", "0.1")
    assert limits.read_baselines()[1] == {"name": {"mufu": 1.0}}


def test_interpreted_kernels_are_refused_in_one_line(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(sys, "argv", ["report.py", "--quick"])
    with pytest.raises(SystemExit, match="2"):
        static_report.main()
    assert capsys.readouterr().err.count("\n") == 1


def test_kernels_compile_for_gpus_that_are_not_here():
    """In a process of its own because interpreted kernels cannot be compiled."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, KERNELS / "report.py", "--quick"]
    if limits.read_baselines()[1]:  # the limits are those of one Triton version's code
        command.append("--check")
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if " is " not in line]
    for target in ("sm_80", "sm_90", "gfx942"):
        for kernel in ("forward", "backward"):
            assert any(line.startswith(f"{target:6} {kernel}") for line in rows), done.stdout
    assert "error" not in done.stdout and "shared kB" not in done.stdout, done.stdout


def test_a_baseline_holds_for_every_row_of_one_name(monkeypatch, tmp_path):
    """A call lists the tiles of a mask once a kernel, each with another size."""
    monkeypatch.setattr(limits, "BASELINE", tmp_path / "baseline.json")
    rows = [row(registers=64), row(registers=96), row(registers=40)]
    limits.write_baseline(rows)
    baseline = limits.read_baselines()[1]
    assert [found for each in rows for found in limits.grown(each, baseline)] == []
