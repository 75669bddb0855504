"""`hf-sigmoid distil` as a script: a softmax model's attention into its conversion.

    accelerate launch recipes/distil_attention.py --config recipes/sigmoid/distil.yaml \
        model=CONVERTED output_dir=runs/distilled KEY=VALUE …
"""

from hf_sigmoid.training import distil, script

if __name__ == "__main__":
    script.run(distil.main)
