"""Continue pretraining a causal language model on packed documents: `hf-sigmoid train` as a script.

    accelerate launch recipes/continue_pretrain.py --config recipes/ssmax/continue.yaml \
        model=MODEL output_dir=runs/ssmax KEY=VALUE …
"""

from hf_sigmoid.training import script  # before all that takes long: Ctrl-C is one line from here

# isort: split
from hf_sigmoid.training.train import main

if __name__ == "__main__":
    script.run(main)
