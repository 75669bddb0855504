"""The files that go with a model: processors, chat templates, generation settings, pooling.

A command that writes a model knows its weights, its config and its tokenizer. What else lies in the
source's folder and says how the model is used is copied as it is; what is of the weights alone, of
a training run or of an earlier report is not.
"""

import json
import shutil
from pathlib import Path

from huggingface_hub import snapshot_download
from transformers.utils import CONFIG_NAME
from transformers.utils.hub import cached_file

SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".vocab", ".bpe", ".spm")
LICENCES = ("LICENSE", "LICENCE", "NOTICE", "COPYING", "USE_POLICY")  # beginnings of names
LEFT = {
    "config.json", "report.json", "adapter_config.json", "trainer_state.json", "all_results.json",
    "train_results.json", "eval_results.json", "run.json", "manifest.json", "requirements.txt",
    "training.json", "hf_sigmoid.json",
}  # fmt: skip
LARGEST_BYTES = 1 << 28  # a larger text or JSON beside a model is somebody's data
TEMPLATES = "additional_chat_templates"
MODULES = "modules.json"  # of sentence-transformers: names the folders of its other modules


def copy_companions(source: str | Path, folder: Path) -> None:
    """Copy the files of a checkpoint that `folder` lacks: processors, templates and the like.

    Args:
        source: the folder of a checkpoint, or a hub id.
        folder: where model and tokenizer have been written already.
    """
    origin = _folder_of(source)
    wanted = [file for file in origin.iterdir() if file.is_file() and _goes_with(file)]
    for name in (TEMPLATES, *_modules(origin)):
        # A module's weights go with it whatever their format: they are copied, not loaded.
        wanted += [
            file
            for file in (origin / name).rglob("*")
            if file.is_file() and file.suffix != ".py" and file.name[0] != "."
        ]
        if (origin / name).is_dir():
            (folder / name).mkdir(parents=True, exist_ok=True)
    for file in wanted:
        target = folder / file.relative_to(origin)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)


def _goes_with(file: Path) -> bool:
    name = file.name
    if name in LEFT or name.endswith(".index.json") or name[0] == ".":
        return False
    known = name.endswith(SUFFIXES) or name.upper().startswith(LICENCES)
    return known and file.stat().st_size <= LARGEST_BYTES


def _modules(origin: Path) -> list[str]:
    """The folders, as 1_Pooling, of sentence-transformers' modules beside the model itself."""
    file = origin / MODULES
    if not file.is_file():
        return []
    modules = json.loads(file.read_text(encoding="utf-8"))
    names = [str(module.get("path", "")) for module in modules]
    return [name for name in names if name and ".." not in Path(name).parts]


def _folder_of(source: str | Path) -> Path:
    """A folder, of a hub id with what can be fetched of it."""
    if Path(source).is_dir():
        return Path(source)
    patterns = [f"*{suffix}" for suffix in SUFFIXES] + [f"{name}*" for name in LICENCES]
    try:
        return Path(snapshot_download(str(source), allow_patterns=[*patterns, "*_*/*"]))
    except Exception:  # no network: what was fetched for the model is in the cache
        return Path(cached_file(str(source), CONFIG_NAME)).parent
