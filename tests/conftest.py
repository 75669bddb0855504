"""Set before anything is imported: one BLAS thread for the interpreter, no hub, no GPU."""

import os

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
    settings.register_profile(
        "kernels",
        settings.default,
        max_examples=config.getoption("--cases"),
        # To shrink or explain a case would run interpreted kernels for minutes.
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
    )


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
