"""`hf-sigmoid train` as a script: continue pretraining a causal language model.

    accelerate launch recipes/continue_pretrain.py --config recipes/ssmax/continue.yaml \
        model=MODEL output_dir=runs/ssmax KEY=VALUE …
"""

from hf_sigmoid.training import script, train

if __name__ == "__main__":
    script.run(train.main)
