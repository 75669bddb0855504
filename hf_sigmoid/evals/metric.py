"""The place of the metric `needle_score`, for `evaluate.load`."""

from pathlib import Path


def metric_path() -> str:
    """The folder of the metric: `evaluate.load(metric_path())` needs no network."""
    return str(Path(__file__).parent / "needle_score")
