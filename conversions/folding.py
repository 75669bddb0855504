"""A gain and a temperature for every head, folded into the projections that a model has anyway.

    o_h = g_h · Σ_n σ(t_h · τ q·k_n + b) v_n

The gain g_h multiplies the columns of the output projection that read head h, the temperature t_h
the rows of the query projection that write it: the model needs no parameter for either. Which rows
and columns these are is not read off names but found by running each attention module (fused,
grouped and latent projections differ), and tried before it is used: where a norm after the
projection would undo the scaling, the module has no such place.

Numbers are rounded when weights are multiplied, so undoing it by division is not exact. `fold`
returns the tensors that it replaced; `save` keeps them beside the checkpoint, `restore` puts them
back bit for bit.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_sigmoid import fingerprints, parameters
from hf_sigmoid.checkpoint_files import FLOATING, weights_of
from hf_sigmoid.logit_control.heads import Place, RecordedCall, averages, one_call, written_by

FILE = "folded.safetensors"  # beside a checkpoint
RECORD = "hf_sigmoid_folded"  # true in the config of a model that has something folded in
KINDS = ("gain", "temperature")


@dataclass
class Places:
    """The places of one attention module; None: it has no such place."""

    gain: Place | None = None
    temperature: Place | None = None


@dataclass
class Folded:
    """The factors that were folded into a model, and the tensors as they were."""

    factors: dict[str, Tensor] = field(default_factory=dict)  # "gain/MODULE" -> [H]
    originals: dict[str, Tensor] = field(default_factory=dict)  # parameter's name -> tensor
    written: dict[str, str] = field(default_factory=dict)  # its name -> SHA-256 as folded

    def save(self, folder: Path, model: PreTrainedModel, source: str | Path) -> None:
        """Write `folded.safetensors` into the folder that a model is saved in.

        Tensors as they were have the dtype of the source's files, if that loses nothing.
        """
        places = weights_of(source)
        for name, tensor in self.originals.items():
            kind = FLOATING.get(places[name][1], tensor.dtype) if name in places else tensor.dtype
            if kind.itemsize < tensor.dtype.itemsize and torch.equal(
                tensor.to(kind).to(tensor.dtype), tensor
            ):
                self.originals[name] = tensor.to(kind)
        written = {
            name: fingerprints.of_tensor(model.get_parameter(name)) for name in self.originals
        }
        tensors = {f"factor/{name}": t for name, t in self.factors.items()}
        tensors |= {f"original/{name}": t for name, t in self.originals.items()}
        tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        save_file(tensors, folder / FILE, {"format": "pt", "written": json.dumps(written)})

    def untouched(self, model: PreTrainedModel) -> bool:
        """Are the tensors that something was folded into as they were saved then?"""
        current = dict(model.named_parameters())
        return all(
            name in current and fingerprints.of_tensor(current[name]) == self.written.get(name)
            for name in self.originals
        )

    def and_then(self, later: "Folded", *, keep_originals: bool) -> "Folded":
        """Both as one: the factors of both, and the tensors as they were before the first."""
        factors = dict(self.factors)
        for name, factor in later.factors.items():
            factors[name] = factors[name] * factor if name in factors else factor
        kept = {**later.originals, **self.originals} if keep_originals else {}
        return Folded(factors, kept)

    @classmethod
    def load(cls, folder: str | Path) -> "Folded | None":
        """Read the factors that were folded into a checkpoint; None if there are none.

        Raises:
            ValueError: a file that cannot be read.
        """
        path = Path(folder) / FILE
        if not path.is_file():
            return None
        folded = cls()
        try:
            with safe_open(path, "pt") as file:
                folded.written = json.loads((file.metadata() or {}).get("written", "{}"))
                for key in file.keys():  # noqa: SIM118 (a safetensors file is not iterable)
                    kind, _, name = key.partition("/")
                    into = folded.factors if kind == "factor" else folded.originals
                    into[name] = file.get_tensor(key)
        except SafetensorError as error:
            raise ValueError(f"{path}: cannot be read: {error}") from error
        return folded


@torch.no_grad()
def fold(
    model: PreTrainedModel,
    places: dict[str, Places],
    factors: dict[str, Tensor],
    *,
    keep_originals: bool = True,
) -> Folded:
    """Multiply factors into a model's projections, in place.

    Args:
        places: of `find_places`.
        factors: "gain/MODULE" and "temperature/MODULE" -> [H], MODULE an attention module's name.
            All ones change nothing.
        keep_originals: also return the tensors as they were.

    Raises:
        ValueError: a module without such a place, factors that are 0 or not finite.
    """
    folded = Folded()
    for key, factor in factors.items():
        kind, _, name = key.partition("/")
        if bool((factor == 1).all()):
            continue
        place = getattr(places[name], kind)
        if place is None:
            raise ValueError(f"{name} has no projection that a {kind} per head could go into")
        if not bool((factor.isfinite() & (factor != 0)).all()):
            raise ValueError(f"{name}: a {kind} per head must be finite and not 0, got {factor}")
        folded.factors[key] = factor.detach().clone().float()
        for parameter_name, parameter, dimension in _scaled(model, place, kind):
            if keep_originals:
                folded.originals[parameter_name] = parameter.detach().clone()
            _scale(parameter, dimension, place, factor)
    return folded


@torch.no_grad()
def unfold(model: PreTrainedModel, places: dict[str, Places], folded: Folded) -> None:
    """Divide the factors out of projections that were trained since: near, not exact.

    Raises:
        ValueError: a module without such a place.
    """
    for key, factor in folded.factors.items():
        kind, _, name = key.partition("/")
        place = getattr(places.get(name, Places()), kind)
        if place is None:
            raise ValueError(f"{name} has no projection that a {kind} per head was folded into")
        for _, parameter, dimension in _scaled(model, place, kind):
            _scale(parameter, dimension, place, 1 / factor)


@torch.no_grad()
def restore(model: PreTrainedModel, folded: Folded) -> None:
    """Put the tensors back that `fold` replaced, as new parameters: others may share the old.

    Raises:
        ValueError: tensors of another model.
    """
    held = dict(model.named_parameters())
    for name, original in folded.originals.items():
        current = held.get(name)
        if current is None or current.shape != original.shape:
            raise ValueError(f"{FILE} is of another model: it has {name} of {original.shape}")
        owner, _, last = name.rpartition(".")
        put = nn.Parameter(original.to(current.device, current.dtype), current.requires_grad)
        setattr(model.get_submodule(owner), last, put)


def find_places(model: PreTrainedModel, ids: Tensor) -> dict[str, Places]:
    """Where gains and temperatures of each attention module can go, tried on some token ids.

    Args:
        ids: `[B, T]`, a few tokens.
    """
    places = {}
    for name, _ in parameters.attention_modules(model):
        places[name] = Places()
        if (call := one_call(model, name, ids)) is not None:  # else text does not reach it
            places[name] = Places(_output_place(call), _query_place(call))
    return places


def _query_place(call: RecordedCall) -> Place | None:
    """The projection that each head's query has output features of its own in, if scaling works."""
    place, inputs = written_by(call, 0)
    if place is None or not _query_scales(call, place, inputs):
        return None
    return place


def _query_scales(call: RecordedCall, place: Place, inputs: tuple[Tensor, ...]) -> bool:
    """Does scaling these features scale the heads' queries, and neither keys nor values?"""
    query, key, value = inputs
    factors = 1 + torch.rand(call.heads, device=query.device)
    scaled: list[Tensor] = []

    def scale(module, args, output):
        output = output.clone()
        for factor, features in zip(factors, place.features, strict=True):
            output[..., features] *= factor
        return output

    def note(*inputs):
        scaled.extend(inputs)
        return averages(*inputs)

    hook = call.projections[place.module].register_forward_hook(scale)
    try:
        with torch.no_grad():
            call.run(note)
    finally:
        hook.remove()
    expected = (query * factors.view(1, -1, 1, 1), key, value)
    return all(map(_near, scaled, expected))


@torch.no_grad()
def _output_place(call: RecordedCall) -> Place | None:
    """The projection whose input features are the heads' outputs, one head after another."""
    factors: list[Tensor] = []
    width = 0

    def scaled_heads(query, key, value):
        nonlocal width
        output = averages(query, key, value)
        width = output.shape[-1]
        factors.append(1 + torch.rand(call.heads, device=query.device).to(query.dtype))
        return output * factors[-1].view(1, 1, -1, 1)

    expected = call.run(scaled_heads)
    for name, part in reversed(call.projections.items()):
        if _sizes(part)[0] != call.heads * width:
            continue

        def scale(module, args):
            return (args[0] * factors[0].repeat_interleave(width), *args[1:])

        hook = part.register_forward_pre_hook(scale)
        try:
            found = call.run(averages)
        finally:
            hook.remove()
        if _near(found, expected):
            features = torch.arange(call.heads * width).view(call.heads, width)
            return Place(name, list(features))
    return None


def _near(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-4 * b.abs().max())


def _sizes(module: nn.Module) -> tuple[int, int]:
    """Input and output features."""
    shape = module.weight.shape
    return (shape[0], shape[1]) if isinstance(module, Conv1D) else (shape[1], shape[0])


def _scaled(
    model: PreTrainedModel, place: Place, kind: str
) -> Iterator[tuple[str, nn.Parameter, int]]:
    """Name, parameter and dimension of the features, for each tensor that a factor goes into."""
    module = model.get_submodule(place.module)
    transposed = isinstance(module, Conv1D)
    rows = kind == "temperature"
    yield f"{place.module}.weight", module.weight, int(rows == transposed)
    if rows and module.bias is not None:
        yield f"{place.module}.bias", module.bias, 0


def _scale(parameter: nn.Parameter, dimension: int, place: Place, factor: Tensor) -> None:
    vector = torch.ones(parameter.shape[dimension], dtype=torch.float64)
    for number, features in zip(factor.tolist(), place.features, strict=True):
        vector[features.cpu()] = number
    shape = [1] * parameter.dim()
    shape[dimension] = -1
    product = parameter.detach().double().cpu() * vector.view(shape)
    parameter.copy_(product.to(parameter.dtype))
