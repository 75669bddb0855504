"""The house: which way imports go in the package as it is installed, and rules with a reason."""

import ast
import graphlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("hf_sigmoid", "kernels", "conversions", "recipes")

# From below: a module imports its own layer and those before it, so that each can be understood,
# and changed, without those after it. What is in none of the packages is the core.
LAYERS = ("core", "hf_sigmoid.evals", "hf_sigmoid.conversions", "hf_sigmoid.training", "above")
# They parse the command line, and import late.
ABOVE = ("hf_sigmoid.command_line", "hf_sigmoid.conversions.__main__")

LONGEST = 400  # lines: what can be read at a sitting

GRAPH = """
import grimp, json
graph = grimp.build_graph("hf_sigmoid", cache_dir=None)
print(json.dumps({m: sorted(graph.find_modules_directly_imported_by(m)) for m in graph.modules}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The folder that a wheel is unpacked into, of sources without what older builds left."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / "source" / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source" / name)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "-w", folder, folder / "source"], check=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def imports(site: Path) -> dict[str, list[str]]:
    """The modules that each module of a folder's package imports, late imports too."""
    # With -S and the path in front, so that no other copy of the package is read.
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(site)!r})\n{GRAPH}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(run.stdout)


def layer(module: str) -> int:
    if module in ABOVE:
        return LAYERS.index("above")
    inside = (each for each in LAYERS if f"{module}.".startswith(f"{each}."))
    return LAYERS.index(next(inside, "core"))


def wrong_ways(graph: dict[str, list[str]]) -> list[str]:
    """Imports of a layer above, and modules that import each other in a circle."""
    found = [
        f"{module} imports {other}"
        for module, others in sorted(graph.items())
        for other in others
        if layer(other) > layer(module)
    ]
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        found.append("circle: " + " → ".join(error.args[1]))
    return found


def test_imports_of_the_installed_package_go_one_way(installed):
    graph = imports(installed)
    assert len(graph) > 100 and "hf_sigmoid.training.train" in graph
    assert not wrong_ways(graph)


@pytest.mark.parametrize(
    ("module", "code", "found"),
    [
        ("loading", "def late():\n    from hf_sigmoid.conversions import plan\n",
         "hf_sigmoid.loading imports hf_sigmoid.conversions.plan"),
        ("evals/run", "import hf_sigmoid.training.packing\n",
         "hf_sigmoid.evals.run imports hf_sigmoid.training.packing"),
        ("conversions/plan", "from hf_sigmoid.training import packing\n",
         "hf_sigmoid.conversions.plan imports hf_sigmoid.training.packing"),
        ("masks", "from hf_sigmoid import attention\n", "circle: "),
    ],
    ids=["core", "evals", "conversions", "a circle"],
)  # fmt: skip
def test_a_planted_import_is_found(installed, tmp_path, module, code, found):
    shutil.copytree(installed, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "hf_sigmoid" / f"{module}.py"
    file.write_text(file.read_text(encoding="utf-8") + code, encoding="utf-8")
    assert any(each.startswith(found) for each in wrong_ways(imports(tmp_path)))


def sources() -> dict[str, str]:
    """Every file of Python code by its path, tests left out."""
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    return {f.relative_to(ROOT).as_posix(): f.read_text(encoding="utf-8") for f in files}


def breaches(code: dict[str, str]) -> list[str]:
    """The rules that do not show in the graph of imports."""
    found, homes = [], {}
    siblings = {Path(path).stem for path in code if path.startswith("recipes/")}
    for path, text in code.items():
        if text.count("\n") > LONGEST:
            found.append(f"{path} is longer than {LONGEST} lines")
        tree = ast.parse(text)
        for node in tree.body:
            # One name, one thing: a reader who looks a class up finds one.
            if isinstance(node, ast.ClassDef) and node.name[0] != "_":
                if node.name in homes:
                    found.append(f"{path} and {homes[node.name]} have a class {node.name}")
                homes[node.name] = path
        modules = {}  # names of our modules in this one
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_sigmoid"):
                modules |= {each.asname or each.name: each.name for each in node.names}
                # A name with an underscore may change without a look at others.
                private = [each.name for each in node.names if each.name[0] == "_"]
                found += [f"{path} imports the private {name}" for name in private]
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name, owner = node.attr, node.value.id
                if owner in modules and name[0] == "_" and name[:2] != "__":
                    found.append(f"{path} uses the private {owner}.{name}")
                # A reader of half a file is prevented in one place.
                moves = (owner, name) in {("os", "replace"), ("os", "rename"), ("shutil", "move")}
                if moves and path != "hf_sigmoid/files.py":
                    found.append(f"{path} renames into place")
        # A model is given another function for a while, and gets its own back, in one place.
        if "_attn_implementation_internal = " in text and path != "hf_sigmoid/replace_attention.py":
            found.append(f"{path} assigns _attn_implementation_internal")
        # A recipe is a script: who installed the package gets everything else without it.
        if path.startswith("hf_sigmoid/"):
            names = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
            names |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
            found += [f"{path} imports the recipe {name}" for name in names & siblings]
    return found


def test_the_rules_hold():
    assert not breaches(sources())


@pytest.mark.parametrize(
    ("path", "code", "found"),
    [
        ("hf_sigmoid/long.py", "x = 1\n" * 401, "is longer than 400 lines"),
        ("conversions/twice.py", "class Plan: ...\nclass Plan: ...\n", "have a class Plan"),
        ("hf_sigmoid/a.py", "from hf_sigmoid.masks import _b\n", "imports the private _b"),
        ("recipes/a.py", "from hf_sigmoid import masks\nmasks._b()\n", "the private masks._b"),
        ("kernels/a.py", "import os\nos.replace('a', 'b')\n", "renames into place"),
        ("hf_sigmoid/a.py", "c._attn_implementation_internal = 'eager'\n", "assigns _attn_impl"),
        ("hf_sigmoid/a.py", "import continue_pretrain\n", "imports the recipe continue_pretrain"),
    ],
)  # fmt: skip
def test_a_planted_breach_is_found(path, code, found):
    recipe = {"recipes/continue_pretrain.py": ""}
    assert any(found in each for each in breaches({path: code, **recipe}))
