"""What the import costs and brings, and the names that must not collide."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import releases

ROOT = Path(__file__).parent.parent


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_costs_milliseconds_and_brings_neither_torch_nor_triton():
    code = (
        "import json, sys, time, transformers; before = set(sys.modules)\n"
        "start = time.perf_counter(); import hf_sigmoid; took = time.perf_counter() - start\n"
        "names = ('torch', 'triton', 'datasets', 'peft')\n"
        "print(json.dumps([took, [m for m in names if m in sys.modules and m not in before]]))"
    )
    took, modules = min(json.loads(run(code)) for _ in range(3))
    assert modules == [] and took < 0.05


def test_registering_costs_little_beside_transformers_model_classes():
    code = (
        "import json, time\n"
        "start = time.process_time(); import transformers.modeling_utils\n"
        "loaded = time.process_time(); import hf_sigmoid\n"
        "print(json.dumps([loaded - start, time.process_time() - loaded]))"
    )
    runs = [json.loads(run(code)) for _ in range(3)]
    # 35 ms beside 2 s on an idle machine; a ratio does not depend on what else runs.
    assert min(ours / theirs for theirs, ours in runs) <= 0.05


def test_help_and_version_load_nothing_heavy():
    code = (
        "import sys\nfrom hf_sigmoid.command_line import main\n"
        "for words in (['--help'], ['--version'], ['convert', '--help'], ['eval', '--help']):\n"
        "    try: main(words)\n    except SystemExit as end: assert end.code == 0\n"
        "print([name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])"
    )
    printed = run(code)
    assert printed.splitlines()[-1] == "[]" and "hf-sigmoid 0.1.0" in printed


def test_a_reader_that_goes_away_is_no_traceback():
    read, write = os.pipe()
    os.close(read)
    code = "from hf_sigmoid.command_line import main; raise SystemExit(main(['train', '--keys']))"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(write)
    assert run.returncode == 0 and run.stderr == ""


def test_registration_follows_the_model_classes_in_any_order_and_only_once():
    check = (
        "from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel\n"
        "assert {'sigmoid', 'ssmax'} <= set(AttentionInterface._global_mapping)\n"
        "assert {'sigmoid', 'ssmax'} <= set(AttentionMaskInterface._global_mapping)\n"
        "from hf_sigmoid.registration import register\n"
        "wrapped = PreTrainedModel.post_init\nregister()\n"
        "assert PreTrainedModel.post_init is wrapped\n"
    )
    run("import hf_sigmoid\n" + check)
    run("import transformers.modeling_utils\nimport hf_sigmoid\n" + check)
    run("import hf_sigmoid, importlib\nimportlib.reload(hf_sigmoid)\n" + check)


def test_looking_for_the_model_classes_or_failing_to_load_them_loses_nothing():
    run(
        "import hf_sigmoid, importlib.util\n"
        "importlib.util.find_spec('transformers.modeling_utils')\n"
        "from transformers import AttentionInterface, PreTrainedModel\n"
        "assert 'sigmoid' in AttentionInterface._global_mapping\n"
    )
    run(
        "import hf_sigmoid, sys\n"
        "sys.modules['torch'] = None\n"
        "try:\n    import transformers.modeling_utils\n"
        "except ImportError: del sys.modules['torch']\n"
        "for name in [m for m in sys.modules if 'transformers' in m]: del sys.modules[name]\n"
        "from transformers import AttentionInterface, PreTrainedModel\n"
        "assert 'sigmoid' in AttentionInterface._global_mapping\n"
    )
    run(
        "import hf_sigmoid, sys\n"
        "sys.modules['peft'] = sys.modules['accelerate'] = None\n"
        "from transformers import AttentionInterface, PreTrainedModel\n"
        "assert 'sigmoid' in AttentionInterface._global_mapping\n"
    )


def test_every_module_can_be_imported_first():
    names = [f"hf_sigmoid.{path.stem}" for path in (ROOT / "hf_sigmoid").glob("[!_]*.py")]
    # A process for each, which begins with what takes long and is not ours.
    run(
        "import os, sys, torch, torch._dynamo, torch.distributed, transformers\n"
        f"for name in {names}:\n"
        "    if not (child := os.fork()):\n"
        "        __import__(name)\n"
        "        from transformers import AttentionInterface\n"
        "        AttentionInterface()['ssmax']\n"
        "        os._exit(0)\n"
        "    if os.waitpid(child, 0)[1]: sys.exit(name)\n"
    )


def test_registering_adds_no_module_that_a_model_needs_not():
    code = (
        "import sys\nfrom transformers import PreTrainedModel\n"
        "before = set(sys.modules)\nimport hf_sigmoid\nnames = ('triton', 'datasets', 'peft')\n"
        "print([m for m in set(sys.modules) - before if m.split('.')[0] in names])"
    )
    assert run(code).strip() == "[]"


def test_the_plugin_and_conversions_need_no_extra():
    """`pip install hf-sigmoid` alone: none of the extras' packages is there."""
    run(
        "import sys\n"
        "for name in ('datasets', 'peft', 'evaluate', 'matplotlib', 'accelerate', 'gguf'):\n"
        "    sys.modules[name] = None\n"
        "import hf_sigmoid, torch\n"
        "import hf_sigmoid.conversions\n"
        "from transformers import AutoModelForCausalLM, LlamaConfig\n"
        "sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=9)\n"
        "config = LlamaConfig(**sizes)\n"
        "model = AutoModelForCausalLM.from_config(config, attn_implementation='sigmoid')\n"
        "model(torch.ones(1, 4, dtype=torch.long))\n"
    )


def test_every_text_file_is_opened_as_utf8():
    """Under a locale that is not UTF-8 Python would take its encoding, and fail after the work."""
    files = [
        file
        for folder in ("hf_sigmoid", "kernels", "conversions", "recipes")
        for file in (ROOT / folder).rglob("*.py")
    ]
    assert len(files) > 100
    bare = []
    for file in files:
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and _opens_text_without_encoding(call):
                bare.append(f"{file.relative_to(ROOT)} line {call.lineno}")
    assert not bare


def _opens_text_without_encoding(call: ast.Call) -> bool:
    is_method = isinstance(call.func, ast.Attribute)
    name = call.func.attr if is_method else getattr(call.func, "id", "")
    if any(keyword.arg == "encoding" for keyword in call.keywords):
        return False
    if is_method and name in ("read_text", "write_text"):
        ours = isinstance(call.func.value, ast.Name) and call.func.value.id == "checkpointing"
        return not ours and len(call.args) <= (name == "write_text")
    if name not in ("open", "fdopen", "NamedTemporaryFile", "TemporaryFile"):
        return False
    words = [*call.args, *(keyword.value for keyword in call.keywords)]
    texts = [word.value for word in words if isinstance(word, ast.Constant)]
    modes = [text for text in texts if isinstance(text, str) and set(text) <= set("rwaxbt+")]
    if name in ("NamedTemporaryFile", "TemporaryFile"):
        return bool(modes) and "b" not in modes[0]
    of_path = is_method and getattr(call.func.value, "id", "") in ("os", "gzip", "zstandard")
    return not of_path and not any("b" in mode for mode in modes)


def test_the_folder_kernels_never_shadows_hugging_faces_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    spec = importlib.util.find_spec("kernels")
    assert spec is None or spec.origin is None or ROOT not in Path(spec.origin).parents


def test_a_checkout_works_without_being_installed():
    code = (
        "import os, sys\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import hf_sigmoid.conversions, hf_sigmoid.kernels.flash, hf_sigmoid.training.train\n"
        "print(hf_sigmoid.conversions.__file__, hf_sigmoid.kernels.flash.__file__)"
    )
    files = [ROOT / "conversions/__init__.py", ROOT / "kernels/flash/__init__.py"]
    assert run(code).split() == [str(file) for file in files]


def test_an_unknown_attribute_is_an_attribute_error():
    run(
        "import hf_sigmoid\nassert not hasattr(hf_sigmoid, 'softmax_attention')\n"
        "hf_sigmoid.configure"
    )


@pytest.mark.parametrize(
    "package",
    [pytest.param("transformers", marks=releases.needs("5.24", "what we wrap in 99.0")), "torch"],
)
def test_an_untested_release_gets_one_warning(package):
    code = (
        f"import warnings, torch, transformers.modeling_utils as mu, transformers\n"
        f"{package}.__version__ = '99.0'\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always'); import hf_sigmoid\n"
        "print(len(caught), caught[0].message)"
    )
    printed = run(code)
    assert printed.startswith(f"1 hf_sigmoid is tested with {package}"), printed
    assert "this is 99.0" in printed


def test_a_changed_method_is_an_error():
    code = (
        "import transformers.modeling_utils as mu\n"
        "mu.PreTrainedModel.get_correct_attn_implementation = lambda self, other: None\n"
        "try: import hf_sigmoid\nexcept ImportError as error: print(error)"
    )
    assert (
        "wraps transformers' PreTrainedModel.get_correct_attn_implementation('self', 'req"
        in run(code)
    )
