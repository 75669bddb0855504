"""Distil a softmax model's attention into its sigmoid (or ssmax) conversion: `hf-sigmoid distil`.

    accelerate launch recipes/distil_attention.py --config recipes/sigmoid/distil.yaml \
        model=CONVERTED output_dir=runs/distilled KEY=VALUE …
"""

from hf_sigmoid.training import script  # before all that takes long: Ctrl-C is one line from here

# isort: split
from hf_sigmoid.training.distil import main

if __name__ == "__main__":
    script.run(main)
