"""Which model types there are, and the class that each is tried as."""

import functools
import importlib

from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

# The first mapping that has the type gives its class: models that generate before those that fill
# in masks, the bare model after the heads that attend themselves, and what has no bare model last.
MAPPINGS = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_SPEECH_SEQ_2_SEQ", "MODEL_FOR_CAUSAL_LM",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT", "MODEL_FOR_MULTIMODAL_LM", "MODEL_FOR_MASKED_LM",
    "MODEL_FOR_CTC", "MODEL_FOR_IMAGE_CLASSIFICATION", "MODEL_FOR_OBJECT_DETECTION",
    "MODEL_FOR_TEXT_RECOGNITION", "MODEL",
    "MODEL_FOR_RNNT", "MODEL_FOR_TDT", "MODEL_FOR_MASK_GENERATION", "MODEL_FOR_TEXT_TO_WAVEFORM",
    "MODEL_FOR_UNIVERSAL_SEGMENTATION", "MODEL_FOR_KEYPOINT_DETECTION",
    "MODEL_FOR_KEYPOINT_MATCHING", "MODEL_FOR_DEPTH_ESTIMATION", "MODEL_FOR_POSE_ESTIMATION",
    "MODEL_FOR_TABLE_RECOGNITION", "MODEL_FOR_RETRIEVAL",
    "MODEL_FOR_SEMANTIC_SEGMENTATION", "MODEL_FOR_IMAGE_MATTING", "MODEL_FOR_BACKBONE",
    "MODEL_FOR_PRETRAINING", "MODEL_FOR_TEXT_ENCODING", "MODEL_FOR_VISUAL_QUESTION_ANSWERING",
)  # fmt: skip
# What has no forward of its own is tried as one of its parts.
PARTS = {"bark": "BarkSemanticModel"}


@functools.cache
def model_types() -> dict[str, str]:
    """Model type to the name of the class that it is tried as, in alphabetical order."""
    found: dict[str, str] = dict(PARTS)
    for mapping in MAPPINGS:  # an older release lacks some
        for model_type, name in getattr(modeling_auto, f"{mapping}_MAPPING_NAMES", {}).items():
            found.setdefault(model_type, name if isinstance(name, str) else name[0])
    return dict(
        sorted((kind, name) for kind, name in found.items() if kind in CONFIG_MAPPING_NAMES)
    )


def config_class(model_type: str):
    return CONFIG_MAPPING[model_type]


def model_class(model_type: str):
    import transformers

    name = model_types()[model_type]
    if hasattr(transformers, name):
        return getattr(transformers, name)
    module = config_class(model_type).__module__.replace(".configuration_", ".modeling_")
    return getattr(importlib.import_module(module), name)
