"""The row number that makes sigmoid attention nearest to a softmax checkpoint's, fitted per head.

    softmax_n = exp(z_n − L_m),  L_m = log Σ_n exp(z_n)          sigmoid σ(z_n + b_m) ≈ exp(z_n +
    b_m)

So b_m should be −L_m, and what a head can hold is affine in log n_m, plus linear in its query:

    L_m ≈ β_h + γ_h log n_m (+ w_h·q_m)      least squares over the rows of a calibration text

Only the normal equations are kept, (2 + D)² numbers a head; no attention matrix, any length of
text.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface, PreTrainedModel

from hf_sigmoid import functional, masks

_RECORDER = "hf_sigmoid_recorder"  # the attention function's name while a model is being calibrated


@dataclass
class Fit:
    """What was fitted for the heads of one attention module; all float64 on the CPU."""

    offset: Tensor  # [H], of b = −L
    slope: Tensor  # [H]
    query: Tensor | None  # [H, D]
    residual: Tensor  # [H], standard deviation of L that the fit leaves, in nats
    rows: int


@torch.no_grad()
def calibrate(
    model: PreTrainedModel, batches: Iterable[Tensor], *, query: bool = False, progress: bool = True
) -> dict[str, Fit]:
    """Fit b_m = offset_h + slope_h log n_m (+ query_h·q_m) to −log-sum-exp of a model's rows.

    Args:
        model: a model that runs softmax; it is left as it was found.
        batches: token ids `[B, T]`, without padding.
        query: also fit the part that is linear in the query.

    Returns:
        One `Fit` for each attention module, by its name in the model.
    """
    names = {module: name for name, module in model.named_modules()}
    sums: dict[str, _NormalEquations] = {}

    def recorder(module: nn.Module, q, key, value, attention_mask, *, scaling=None, softcap=None,
                 is_causal=None, **kwargs):  # fmt: skip
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        visible, is_causal, logit_bias, count = masks.visible_keys(
            attention_mask, q.shape[2], key.shape[2], is_causal, q.device
        )
        output, log_sum_exp = functional.ssmax_attention(
            q, key, value, scaling=scaling, visible=visible, is_causal=is_causal, softcap=softcap,
            logit_bias=logit_bias, return_log_sum_exp=True,
        )  # fmt: skip
        equations = sums.setdefault(names[module], _NormalEquations(query))
        equations.add(q, torch.log(count), log_sum_exp)
        return output.transpose(1, 2).contiguous(), None

    before, training = model.config._attn_implementation, model.training
    AttentionInterface.register(_RECORDER, recorder)
    AttentionMaskInterface.register(_RECORDER, masks.interval_mask)
    try:
        model.set_attn_implementation(_RECORDER)
        model.eval()
        for batch in tqdm(list(batches), desc="calibrating", disable=not progress):
            model(batch.to(model.device), use_cache=False)
    finally:
        model.set_attn_implementation(before)
        model.train(training)
        AttentionInterface._global_mapping.pop(_RECORDER)
        AttentionMaskInterface._global_mapping.pop(_RECORDER)
    return {name: equations.solve() for name, equations in sums.items()}


class _NormalEquations:
    """Σ f fᵀ, Σ f L and Σ L² over rows, per head, with features f = [1, log n (, q)]."""

    def __init__(self, with_query: bool):
        self.with_query = with_query
        self.gram = self.moment = self.square = 0.0
        self.rows = 0

    def add(self, q: Tensor, log_n: Tensor, log_sum_exp: Tensor) -> None:
        B, H, M, _ = q.shape
        log_n = log_n.expand(B, H, M).double()
        features = torch.stack([torch.ones_like(log_n), log_n], -1)
        if self.with_query:
            features = torch.cat([features, q.double()], -1)
        features = features.transpose(0, 1).reshape(H, B * M, -1)
        target = log_sum_exp.double().transpose(0, 1).reshape(H, B * M, 1)
        self.gram = self.gram + (features.transpose(1, 2) @ features).cpu()
        self.moment = self.moment + (features.transpose(1, 2) @ target).cpu()
        self.square = self.square + target.square().sum((1, 2)).cpu()
        self.rows += B * M

    def solve(self) -> Fit:
        # The pseudo-inverse: a feature that never varied (all rows of one length) gets no weight.
        solution = torch.linalg.pinv(self.gram, hermitian=True, rtol=1e-10) @ self.moment
        error = self.square - (solution * self.moment).sum((1, 2))
        solution = solution.squeeze(-1)
        return Fit(
            offset=-solution[:, 0],
            slope=-solution[:, 1],
            query=-solution[:, 2:] if self.with_query else None,
            residual=(error / self.rows).clamp(min=0).sqrt(),
            rows=self.rows,
        )
