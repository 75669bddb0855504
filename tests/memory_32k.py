"""What scoring one prompt of 32k tokens takes in memory, on a model of SmolLM2-135M's shape.

    python tests/memory_32k.py --attn ssmax        # minutes on two cores; --layers 2 for fewer

Prints the largest tensor that any operation made, and the process's peak. All logits would be
32,768 × 49,152 elements, one head's map 32,768 × 32,768. `test_eval_scoring.py` does the same with
fewer layers, heads and words.
"""

import argparse
import resource
import time
from dataclasses import replace

import torch
from largest import Largest
from tiny_models import byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import hf_sigmoid  # noqa: F401 (registers the attention functions)
from hf_sigmoid import text
from hf_sigmoid.evals import PromptBuilder
from hf_sigmoid.evals.attention import Observer
from hf_sigmoid.evals.scoring import Scorer

LENGTH, WORDS = 32768, 49152


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--attn", default="ssmax")
    parser.add_argument("--layers", type=int, default=30)
    args = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=576, intermediate_size=1536,
        num_hidden_layers=args.layers, num_attention_heads=9, num_key_value_heads=3,
        max_position_embeddings=LENGTH + 64, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.set_attn_implementation(args.attn)
    tokenizer = byte_tokenizer()
    builder = PromptBuilder(tokenizer, text.held_out())
    sample = builder.build("single", length=1000, depth=0.5)
    noise = torch.randint(WORDS, (LENGTH - 1000,)).tolist()
    sample = replace(sample, prompt=noise + sample.prompt, decoys=sample.decoys[:1])
    start = time.perf_counter()
    with Largest() as seen:
        Scorer(model, tokenizer).score([sample], observer=Observer(model))
    weights = sum(each.numel() for each in model.parameters())
    cache = 2 * args.layers * LENGTH * config.num_key_value_heads * 64
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"{args.attn}, {args.layers} layers, {LENGTH:,} tokens, {time.perf_counter() - start:.0f} "
        f"s: largest tensor {seen.elements:,} elements ({seen.elements / LENGTH:.0f} a token), "
        f"peak {peak:.2f} GB, of which weights {4 * weights / 1e9:.2f}, keys and values "
        f"{4 * cache / 1e9:.2f}"
    )


if __name__ == "__main__":
    main()
