"""Imports go one way: kernels and core ← evals ← conversions ← training ← recipes."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Each layer may import those before it. The command line stands above all and imports late.
LAYERS = {"kernels": 0, "hf_sigmoid": 0, "hf_sigmoid/evals": 1, "conversions": 2}
LAYERS |= {"hf_sigmoid/training": 3, "recipes": 4}
ABOVE = {"hf_sigmoid/command_line.py"}


def layer_of(file: Path, root: Path) -> str:
    name = file.relative_to(root).as_posix()
    return max((layer for layer in LAYERS if name.startswith(f"{layer}/")), key=len)


def imported(file: Path) -> list[str]:
    """The layers that a module's imports, late ones too, belong to."""
    places = {
        "hf_sigmoid.conversions": "conversions",
        "hf_sigmoid.evals": "hf_sigmoid/evals",
        "hf_sigmoid.kernels": "kernels",
        "hf_sigmoid.training": "hf_sigmoid/training",
        "hf_sigmoid": "hf_sigmoid",
    }
    recipes = {path.stem for path in (ROOT / "recipes").glob("*.py")} - {"kernels"}
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            if name in recipes:
                found.append("recipes")
            found += [
                place
                for package, place in places.items()
                if name == package or name.startswith(f"{package}.")
            ]
    return found


def breaches(files: list[Path], root: Path = ROOT) -> list[str]:
    return [
        f"{file.relative_to(root)} imports {layer}"
        for file in files
        if file.relative_to(root).as_posix() not in ABOVE
        for layer in sorted(set(imported(file)))
        if LAYERS[layer] > LAYERS[layer_of(file, root)]
    ]


def test_no_module_imports_a_layer_above_its_own():
    files = [file for layer in LAYERS if "/" not in layer for file in (ROOT / layer).rglob("*.py")]
    assert len(files) > 100
    assert not breaches(files)


def test_a_planted_breach_is_found(tmp_path):
    for name, code in (
        ("hf_sigmoid/core.py", "def late():\n    from hf_sigmoid.conversions import models\n"),
        ("hf_sigmoid/evals/run.py", "import hf_sigmoid.conversions.plan\n"),
        ("conversions/plan.py", "from hf_sigmoid import evals\n"),
        ("hf_sigmoid/other.py", "from hf_sigmoid import evals\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(code)
    found = breaches(sorted(tmp_path.rglob("*.py")), tmp_path)
    assert found == [
        "hf_sigmoid/core.py imports conversions",
        "hf_sigmoid/evals/run.py imports conversions",
        "hf_sigmoid/other.py imports hf_sigmoid/evals",
    ]
