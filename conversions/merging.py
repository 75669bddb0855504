"""A PEFT adapter and its base as one model, and the check that it computes what the two did."""

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_sigmoid.checkpoint_files import dtypes_of
from hf_sigmoid.conversions import folding
from hf_sigmoid.conversions.companions import copy_companions
from hf_sigmoid.conversions.models import check_disk, load, save, widest
from hf_sigmoid.conversions.reading import feed, outputs
from hf_sigmoid.conversions.revert import REPORT
from hf_sigmoid.embedded import checkpoint
from hf_sigmoid.files import check_new_folder, new_folder
from hf_sigmoid.loading import check_source, load_tokenizer

if TYPE_CHECKING:  # an extra's package, which only adapters need
    from peft import PeftModel

PROBE_TOKENS = 32
# Of the largest logit: products are summed in another order, and in 16 bits the merged weight is
# rounded, where the adapter's share was not.
ALLOWED = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}


def merge_adapter(adapter: str | Path, base: str | Path, target: str | Path) -> None:
    """Write base and PEFT adapter as one checkpoint, trained per-query terms included.

    Before the folder gets its name it is loaded, and must compute what base and adapter do.

    Raises:
        ValueError: an adapter that does not fit the base (`Unsupported`: per-query terms on a base
            without), a merged model of other logits, a target that is not empty; nothing has been
            written then.
    """
    target = Path(target).resolve()
    check_new_folder(target)
    base = checkpoint(base)
    model = with_adapter(base, adapter)
    check_disk(target, model.get_base_model())
    tokenizer = load_tokenizer(base)
    probe = Probe(model)
    model = merge(model)
    with new_folder(target) as folder:
        save(model, folder, base, cast=True)
        tokenizer.save_pretrained(folder)
        copy_companions(base, folder)
        for name in (REPORT, folding.FILE):  # what `revert` needs of a converted base
            if (Path(base) / name).is_file():
                shutil.copy2(Path(base) / name, folder / name)
        probe.check(folder)


def with_adapter(base: str, adapter: str | Path) -> "PeftModel":
    """The base with the adapter on it; of mixed dtypes in the widest, so that none is rounded.

    Raises:
        ValueError: a folder without an adapter, or an adapter of a model of other shapes.
    """
    from peft import PeftModel

    check_source(str(adapter), what="adapter")
    found = dtypes_of(base)
    model = load(base, dtype=widest(found) if found else None)
    try:
        return PeftModel.from_pretrained(model, str(adapter)).eval()
    except RuntimeError as error:
        raise ValueError(_misfit(str(error), adapter, base, model)) from error


def merge(model: "PeftModel") -> PreTrainedModel:
    """The base with the adapter in its weights, in place.

    Weights that the base ties are merged apart: an adapter of the input embeddings is none of the
    output's. Where they differ then, the model is not tied any more and its config says so.
    """
    base = model.get_base_model()
    apart = _untie(base)
    merged = model.merge_and_unload()
    if not apart:
        return merged
    are_tied = _still_equal(merged, apart)
    for config in (merged.config, merged.config.get_text_config()):
        config.tie_word_embeddings = are_tied
    if are_tied:
        merged.tie_weights()
    else:
        merged.all_tied_weights_keys = {}
    return merged


class Probe:
    """The logits of a model on a few tokens, to compare with those of a folder it is written to."""

    @torch.no_grad()
    def __init__(self, model: nn.Module):
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        was_training = model.training
        model.eval()
        size = inner.get_input_embeddings().weight.shape[0]
        self.ids = torch.randint(
            size, (1, PROBE_TOKENS), generator=torch.Generator().manual_seed(0)
        )
        self.logits = self._run(inner)
        model.train(was_training)

    def check(self, folder: str | Path) -> None:
        """Raise ValueError if the model in a folder computes other logits."""
        model = load(str(folder))
        allowed = max(ALLOWED[dtype] for dtype in (model.dtype, *dtypes_of(folder)))
        with torch.no_grad():
            found = self._run(model)
        largest = self.logits.abs().max().item()
        error = (found - self.logits).abs().max().item()
        if not error <= allowed * largest:
            raise ValueError(
                f"the merged model must compute what base and adapter do, got logits up to "
                f"{error:.2g} away where the largest is {largest:.2g}: nothing was written"
            )

    def _run(self, model: PreTrainedModel) -> Tensor:
        return outputs(model(**feed(model, self.ids))).float().cpu()


def _untie(model: PreTrainedModel) -> dict[str, str]:
    """Give every tied weight storage of its own; the names that were tied, and to what."""
    tied = dict(model.all_tied_weights_keys or {})
    held = dict(model.named_parameters(remove_duplicate=False))
    names = {_plain(name): name for name in held}
    found = {}
    for target, source in tied.items():
        if target in names and source in names:
            owner, _, last = names[target].rpartition(".")
            copy = nn.Parameter(held[names[target]].detach().clone(), requires_grad=False)
            setattr(model.get_submodule(owner), last, copy)
            found[target] = source
    return found


def _still_equal(model: PreTrainedModel, tied: dict[str, str]) -> bool:
    held = dict(model.named_parameters(remove_duplicate=False))
    return all(torch.equal(held[target], held[source]) for target, source in tied.items())


def _plain(name: str) -> str:
    """A parameter's name without what PEFT puts around its module."""
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def _misfit(message: str, adapter: str | Path, base: str, model: PreTrainedModel) -> str:
    """The remedy for an adapter whose tensors have other shapes than the base's."""
    found = re.search(r"size mismatch for (\S+?): .*?\[(\d+)[^\]]*\].*?\[(\d+)", message, re.S)
    if found is None:
        return f"{adapter} does not fit {base}: {message.strip().splitlines()[0]}"
    name, given, expected = found[1], int(found[2]), int(found[3])
    text = f"{adapter} does not fit {base}: {name} has {given} rows, expected {expected}"
    if expected == model.get_input_embeddings().weight.shape[0]:
        text += (
            f". The adapter was trained with a vocabulary of {given} tokens: resize the base first "
            f"(model.resize_token_embeddings({given})), save it with the adapter's tokenizer, and "
            "name that folder as --base"
        )
    return text
