"""Set before anything is imported: one BLAS thread for the interpreter, no hub, no GPU."""

import json
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch

# Read when a kernel is defined, so before the kernels are imported. With a GPU too: there
# `TRITON_INTERPRET=0 pytest -m gpu` runs the kernels themselves.
os.environ.setdefault("TRITON_INTERPRET", "1")
# numpy's matrix products, the interpreter's, are 10 times slower with more threads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "project",
    deadline=None,  # the first example imports and compiles
    # The same examples on every machine; HYPOTHESIS_PROFILE=explore draws new ones.
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile(
    "explore", parent=settings.get_profile("project"), derandomize=False, max_examples=500
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "project"))


def pytest_addoption(parser):
    parser.addoption(
        "--cases", type=int, default=300, help="random cases of the kernels against float64"
    )


def pytest_configure(config):
    if "HF_DATASETS_CACHE" not in os.environ:  # what runs put there goes with the tests
        cache = tempfile.TemporaryDirectory()
        os.environ["HF_DATASETS_CACHE"] = cache.name
        config.add_cleanup(cache.cleanup)
    settings.register_profile(
        "kernels",
        settings.default,
        max_examples=config.getoption("--cases"),
        # To shrink or explain a case would run interpreted kernels for minutes.
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
    )


def pytest_collection_modifyitems(items):
    real = [item for item in items if item.get_closest_marker("real")]
    if real:
        import releases

        for item in real:
            item.add_marker(releases.needs("5.6", "the tokenizer of the SmolLM2 file"))


def pytest_ignore_collect(collection_path, config):
    """`-m gpu` reads the files that have such tests only: others import what may not be there."""
    if config.getoption("markexpr") == "gpu" and collection_path.name.startswith("test_"):
        return "pytest.mark.gpu" not in collection_path.read_text() or None


@pytest.fixture(autouse=True)
def _fresh():
    """The same random numbers, and none of the graphs that torch counts for each function."""
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> str:
    """A folder with a random llama and a tokenizer whose tokens are bytes."""
    import tiny_models
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = tiny_models.byte_tokenizer()
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        attention_dropout=0.1,  # so that a resumed run must also get its random numbers right
        initializer_range=0.2,  # attention that looks somewhere
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def damaged(tiny, tmp_path) -> Path:
    """The tiny model with its weights cut short."""
    folder = tmp_path / "damaged"
    shutil.copytree(tiny, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return folder


@pytest.fixture
def pickled(tiny, tmp_path) -> Path:
    """The tiny model with its weights as a pickle."""
    folder = tmp_path / "pickled"
    shutil.copytree(tiny, folder)
    from safetensors.torch import load_file

    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()
    return folder


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory) -> str:
    """Forty documents of 1 to 150 bytes, so that blocks hold several and cut some."""
    from hf_sigmoid import text

    rng = random.Random(0)
    file = tmp_path_factory.mktemp("corpus") / "documents.jsonl"
    documents = [text.austen()[i : i + rng.randrange(1, 150)] for i in range(0, 40_000, 1000)]
    file.write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
    return str(file)
