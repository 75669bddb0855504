"""The curves of a run, while it goes or afterwards: python recipes/training_plots.py runs/ssmax"""

from hf_sigmoid.training import script, training_plots

if __name__ == "__main__":
    script.run(training_plots.main)
