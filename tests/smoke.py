"""The plugin on whatever is installed, in a minute: python tests/smoke.py

Import, two models under each function, save, load, generate, and the kernels in Triton's
interpreter against the reference in float64. What it prints is what it ran on.
"""

import os
import tempfile
from copy import deepcopy

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

import hf_sigmoid
from hf_sigmoid import functional

SIZES = {"vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3}
CONFIGS = (
    LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, **SIZES,
    ),
    GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **SIZES),
)  # fmt: skip


def main() -> None:
    torch.manual_seed(0)
    for config in CONFIGS:
        for function in ("sigmoid", "ssmax"):
            check_model(config, function)
    print(f"models: transformers {transformers.__version__}, torch {torch.__version__}")
    import triton

    for function in ("sigmoid", "ssmax"):
        check_kernels(function)
    print(f"kernels: Triton {triton.__version__}")


def check_model(config, function: str) -> None:
    """Another output than softmax's, or for ssmax the same; the same once loaded and cached."""
    softmax, model = (AutoModelForCausalLM.from_config(deepcopy(config)).eval() for _ in range(2))
    model.load_state_dict(softmax.state_dict())
    hf_sigmoid.configure(model, function, learn=True)
    ids = torch.randint(5, 99, (2, 12))
    padding = torch.ones_like(ids)
    padding[0, :3] = 0
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert loaded.config._attn_implementation == function
    with torch.no_grad():
        own, again, other = (
            m(ids, attention_mask=padding).logits for m in (model, loaded, softmax)
        )
    assert torch.equal(own, again)
    assert torch.allclose(own[1], other[1], atol=1e-5) == (function == "ssmax")
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    found = loaded.generate(ids[1:], use_cache=True, **options)
    assert torch.equal(found, loaded.generate(ids[1:], use_cache=False, **options))
    model.train()(ids, labels=ids).loss.backward()
    terms = [p.grad for name, p in model.named_parameters() if "log_length" in name]
    assert terms and all(grad is not None and torch.isfinite(grad).all() for grad in terms)


def check_kernels(function: str) -> None:
    import interpreter

    interpreter.install()
    verb = getattr(functional, f"{function}_attention")
    term = "bias" if function == "sigmoid" else "multiplier"
    given = [torch.randn(1, heads, 40, 16, dtype=torch.float64) for heads in (4, 2, 2)]
    given.append(torch.randn(1, 4, 40, dtype=torch.float64))
    gradients = {}
    for backend, dtype in (("reference", torch.float64), ("triton", torch.float32)):
        q, k, v, row = (each.to(dtype).requires_grad_() for each in given)
        out = verb(q, k, v, **{term: row}, is_causal=True, backend=backend)
        gradients[backend] = (out, *torch.autograd.grad(out.square().sum(), (q, k, v, row)))
    for wanted, found in zip(gradients["reference"], gradients["triton"], strict=True):
        error = (found.double() - wanted).abs().max() / wanted.abs().max()
        assert error < 1e-5, f"{function}: off by {error:.1e} of the largest"


if __name__ == "__main__":
    main()
